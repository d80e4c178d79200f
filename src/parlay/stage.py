"""One stage: consecutive blocks of the network, their optimiser and their device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from parlay.errors import InputError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
CONVERTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # layers whose weights autocast takes in the low precision


class Stage:
    """The blocks of one stage. It knows nothing of its neighbours.

    In mixed precision its convolutions and linear layers work on copies of the weights in the low precision. All copies
    are made by one kernel, as are their gradients on the way back; autocast makes them one by one. The numbers are
    the same.
    """

    def __init__(
        self, module: nn.Sequential, make_optimizer: MakeOptimizer, device: torch.device, autocast: torch.dtype | None
    ) -> None:
        # channels last is the faster layout for convolutions on GPUs, and by 1.2 to 1.3 times on CPUs
        self.module = module.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device = device
        self.autocast = autocast
        self.parameters = dict(module.named_parameters())
        trained = [w for w in self.parameters.values() if w.requires_grad]
        self.optimizer = make_optimizer(trained) if trained else None
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise InputError("LBFGS computes several passes a step, which stages cannot: write SGD, Adam or their kind")
        self._copies = self._low_precision() if autocast and device.type == "cuda" else {}
        self._stale = True
        self._quick: nn.Module | None = None
        for group in self._groups():
            group["initial_lr"] = group["lr"]
            if device.type == "cuda" and group.get("fused"):  # a tensor can be changed under a recorded step
                group["lr"] = torch.tensor(float(group["lr"]), device=device)

    def speed_up(self, module: nn.Module) -> None:
        """From now on `forward(quick=True)` goes through this module: the same blocks, under the same names."""
        self._quick = module

    def lowered(self, state: Tensor) -> Tensor:
        """In the precision that the stage before puts out: a residual stream in float32 would be twice the bytes."""
        return state.to(self.autocast or state.dtype)

    def forward(self, x: Tensor, quick: bool = False, instead: Mapping[str, Tensor] | None = None) -> Tensor:
        """`quick`: through the compiled blocks, where there are any; the batch is one that they are made for.

        `instead`: other tensors in the place of weights and buffers, by their names.
        """
        x = x.to(self.device, non_blocking=True)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if x.is_leaf and x.requires_grad:  # a state, and the first block may work in place
            x = x.clone()
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            module: nn.Module = self._quick if quick and self._quick is not None else self.module
            if self._copies and (instead or torch.is_grad_enabled()):
                self._renew_copies()
                instead = {**self._copies, **(instead or {})}
            if not instead:
                return module(x)  # type: ignore[no-any-return]
            return functional_call(module, dict(instead), (x,))  # type: ignore[no-any-return]

    def gradients(self) -> list[Tensor]:
        self._collect()
        return [w.grad for w in self.parameters.values() if w.grad is not None]

    def take_gradients(self) -> dict[str, Tensor]:
        """By the names of their weights; the stage forgets them."""
        self._collect()
        taken = {name: w.grad for name, w in self.parameters.items() if w.grad is not None}
        self.forget_gradients()
        return taken

    @torch.no_grad()
    def ahead(self, steps: float) -> dict[str, Tensor]:
        """The weights so many steps on, if SGD went on along its momentum alone; without those that have none yet."""
        names = {id(weight): name for name, weight in self.parameters.items()}
        found: dict[str, Tensor] = {}
        for group in self._groups():
            moving = [w for w in group["params"] if "momentum_buffer" in self._optimizer_state(w)]
            if moving:
                momenta = [self._optimizer_state(w)["momentum_buffer"] for w in moving]
                # copies lie in memory as the weights do: convolutions then round the same way after a resume
                ahead = [w.clone() for w in moving]
                torch._foreach_add_(ahead, torch._foreach_mul(momenta, -steps * group["lr"]))
                found |= dict(zip((names[id(w)] for w in moving), ahead, strict=True))
        return found

    @property
    def has_momentum(self) -> bool:
        """Is there one to look ahead along? A stage without weights stays where it is."""
        optimizer = self.optimizer
        return optimizer is None or (
            isinstance(optimizer, torch.optim.SGD) and all(group["momentum"] > 0 for group in self._groups())
        )

    def set_rate(self, rate: Tensor | float) -> None:
        """The learning rate of the next steps, as a share of the initial one."""
        for group in self._groups():
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(torch.as_tensor(group["initial_lr"] * rate))
            else:
                group["lr"] = group["initial_lr"] * float(rate)

    @property
    def has_plain_momentum(self) -> bool:
        """Is it SGD's v ← m v + g, with neither dampening nor Nesterov's step?"""
        return self.has_momentum and not any(group["nesterov"] or group["dampening"] for group in self._groups())

    def apply(self, late: float = 0.0) -> None:
        """One step of the optimiser. `late`: so many updates too late, for which plain momentum is made to make up."""
        if self.optimizer is not None:
            self._collect()
            momenta = self._momenta() if late > 0 else {}
            self.optimizer.step()
            if late > 0:
                self._compensate(momenta, late)
            self.optimizer.zero_grad(set_to_none=True)
            self._stale = True

    def _momenta(self) -> dict[nn.Parameter, Tensor]:
        """Copies, of the weights that have one yet."""
        states = {weight: self._optimizer_state(weight) for weight in self.parameters.values()}
        return {w: state["momentum_buffer"].clone() for w, state in states.items() if "momentum_buffer" in state}

    @torch.no_grad()
    def _compensate(self, then: dict[nn.Parameter, Tensor], late: float) -> None:
        """Spike compensation (Kosson et al. 2021, arXiv 2003.11666): w ← w − lr (a v + b g), a = m^D, b = Σ_{i<D} m^i.

        A gradient that is D updates late does at once what it would have done in that time. SGD has gone −lr v with
        v = m v_then + g, any weight decay being part of g, so what is left is lr m b (v_then − v).
        """
        for group in self._groups():
            moving = [w for w in group["params"] if "momentum_buffer" in self._optimizer_state(w)]
            if not moving:
                continue
            m = group["momentum"]
            b = (1 - m**late) / (1 - m) if m != 1 else late
            change = [then[w] if w in then else torch.zeros_like(w) for w in moving]
            torch._foreach_sub_(change, [self._optimizer_state(w)["momentum_buffer"] for w in moving])
            torch._foreach_add_(moving, torch._foreach_mul(change, m * b * group["lr"]))

    def forget_gradients(self) -> None:
        for weight in (*self.parameters.values(), *self._copies.values()):
            weight.grad = None

    @property
    def learning_rate(self) -> float | None:
        groups = self._groups()
        return float(groups[0]["lr"]) if groups else None

    @property
    def can_be_recorded(self) -> bool:
        """Does a step of the optimiser take its learning rate from the device?"""
        return all(isinstance(group["lr"], Tensor) for group in self._groups())

    def hold_by(self, flag: Tensor) -> None:
        """While this number on the device is 1, steps of a fused optimiser change nothing."""
        if self.optimizer is not None:
            self.optimizer.found_inf = flag  # type: ignore[attr-defined]

    def tensors(self) -> dict[str, Tensor]:
        """Weights, buffers and optimiser state under the global names of the parameters: what a checkpoint keeps."""
        kept = {f"weights/{name}": value for name, value in self.module.state_dict().items()}
        for name, weight in self.parameters.items():
            for key, value in self._optimizer_state(weight).items():
                kept[f"optimizer/{name}/{key}"] = value
        return kept

    def load(self, kept: dict[str, Tensor]) -> None:
        """Take this stage's share of what stages of any cut have kept."""
        self._stale = True
        self.module.load_state_dict({name: kept[f"weights/{name}"] for name in self.module.state_dict()})
        if self.optimizer is None:
            return
        for name, weight in self.parameters.items():
            prefix = f"optimizer/{name}/"
            found = {key[len(prefix) :]: value for key, value in kept.items() if key.startswith(prefix)}
            if found:
                self.optimizer.state[weight] = {key: self._placed(value, weight) for key, value in found.items()}

    def _low_precision(self) -> dict[str, Tensor]:
        """Copies of the weights that autocast would convert; not of those that several layers share."""
        layers = {f"{name}." if name else "": layer for name, layer in self.module.named_modules()}
        converted = {
            f"{prefix}{name}": weight
            for prefix, layer in layers.items()
            if type(layer) in CONVERTED
            for name, weight in layer.named_parameters(recurse=False)
        }
        uses = Counter(id(weight) for _, weight in self.module.named_parameters(remove_duplicate=False))
        weights = {name: weight for name, weight in converted.items() if uses[id(weight)] == 1}
        return {name: w.detach().to(self.autocast).requires_grad_(w.requires_grad) for name, w in weights.items()}

    @torch.no_grad()
    def _renew_copies(self) -> None:
        """After the weights have changed; not between the micro-batches of a pipeline, which need them for backward."""
        if self._stale:
            torch._foreach_copy_(list(self._copies.values()), [self.parameters[name] for name in self._copies])
        self._stale = False

    def _collect(self) -> None:
        """The gradients of the copies become those of the weights."""
        found = {name: copy.grad for name, copy in self._copies.items() if copy.grad is not None}
        if not found:
            return
        weights = [self.parameters[name] for name in found]
        gradients = [torch.empty_like(weight) for weight in weights]
        torch._foreach_copy_(gradients, list(found.values()))
        for name, weight, gradient in zip(found, weights, gradients, strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient  # where several are added up
            self._copies[name].grad = None

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer else []

    def _optimizer_state(self, weight: nn.Parameter) -> dict[str, Tensor]:
        state = self.optimizer.state.get(weight, {}) if self.optimizer else {}
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def _placed(self, value: Tensor, weight: nn.Parameter) -> Tensor:
        """On the device and in the layout of its weight; counters stay where optimisers keep them, on the CPU."""
        if value.shape != weight.shape or value.dim() == 0:
            return value.clone()
        return torch.empty_like(weight).copy_(value)
