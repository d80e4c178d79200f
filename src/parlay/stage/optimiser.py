"""A stage's optimiser: its rate, the step, the look ahead along its momentum, and what a checkpoint keeps of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from parlay.errors import InputError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
NUMBERS = "optimizer-numbers"
"""What is no tensor, as JSON."""
RATE = ("lr", "initial_lr", "params")


def sgd(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The paper's optimiser: SGD, rate 0.1, momentum 0.9; weight decay as is usual for these networks."""
    kept = list(weights)
    return torch.optim.SGD(kept, lr=0.1, momentum=0.9, weight_decay=5e-4, fused=kept[0].is_cuda or None)


@final
class Optimiser:
    """Around torch's own; around nothing, for a stage without weights to train."""

    def __init__(self, make: MakeOptimizer, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self.parameters = parameters
        trained = [w for w in parameters.values() if w.requires_grad]
        self.inner = make(trained) if trained else None
        if isinstance(self.inner, torch.optim.LBFGS):
            raise InputError("LBFGS computes several passes a step, which stages cannot: write SGD, Adam or their kind")
        for group in self.groups:
            group["initial_lr"] = float(group["lr"])
            if device.type == "cuda" and group.get("fused"):  # a tensor can be changed under a captured step
                group["lr"] = torch.tensor(float(group["lr"]), device=device)
        self._began = [_numbers(group) for group in self.groups]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups if self.inner else []

    def set_rate(self, rate: Tensor | float) -> None:
        """The learning rate of the next steps, as a share of the initial one."""
        for group in self.groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(torch.as_tensor(group["initial_lr"] * rate))
            else:
                group["lr"] = group["initial_lr"] * float(rate)

    @property
    def rate(self) -> float | None:
        return float(self.groups[0]["lr"]) if self.groups else None

    @property
    def can_be_captured(self) -> bool:
        """Does a step take its learning rate from the device?"""
        return all(isinstance(group["lr"], Tensor) for group in self.groups)

    def hold_by(self, flag: Tensor) -> None:
        """While this number on the device is 1, steps of a fused optimiser change nothing."""
        if self.inner is not None:
            self.inner.found_inf = flag  # type: ignore[attr-defined]

    def step(self) -> None:
        if self.inner is not None:
            self.inner.step()
            self.inner.zero_grad(set_to_none=True)

    @property
    def has_momentum(self) -> bool:
        """Is there one to look ahead along? Without weights there is nothing to look ahead for."""
        return self.inner is None or (
            isinstance(self.inner, torch.optim.SGD) and all(group["momentum"] > 0 for group in self.groups)
        )

    @torch.no_grad()
    def ahead(self, steps: float) -> dict[str, Tensor]:
        """The weights so many steps on, if SGD went on along its momentum alone; without those that have none yet."""
        names = {id(weight): name for name, weight in self.parameters.items()}
        found: dict[str, Tensor] = {}
        for group in self.groups:
            moving = [w for w in group["params"] if isinstance(self._state(w).get("momentum_buffer"), Tensor)]
            if moving:
                momenta = [self._state(w)["momentum_buffer"] for w in moving]
                # copies lie in memory as the weights do: convolutions then round the same way after a resume
                ahead = [w.clone() for w in moving]
                torch._foreach_add_(ahead, torch._foreach_mul(momenta, -steps * group["lr"]))
                found |= dict(zip((names[id(w)] for w in moving), ahead, strict=True))
        return found

    def tensors(self) -> dict[str, Tensor]:
        """By the global names of the parameters, so that stages of other cuts can take their share."""
        kept: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        for group, began in zip(self.groups, self._began, strict=True):
            changed = {key: value for key, value in _numbers(group).items() if value != began.get(key)}
            for name, weight in self.parameters.items():
                if not any(weight is w for w in group["params"]):
                    continue
                state = self._state(weight)
                kept |= {f"optimizer/{name}/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
                own = {"state": _numbers(state), "group": changed}
                if any(own.values()):
                    numbers[name] = own
        if numbers:
            kept[f"{NUMBERS}/{next(iter(self.parameters))}"] = torch.frombuffer(
                bytearray(json.dumps(numbers).encode()), dtype=torch.uint8
            )
        return kept

    def load(self, kept: Mapping[str, Tensor]) -> None:
        """Take this stage's share of what stages of any cut have kept."""
        if self.inner is None:
            return
        numbers: dict[str, Any] = {}
        for key, value in kept.items():
            if key.startswith(f"{NUMBERS}/"):
                numbers |= json.loads(bytes(value.tolist()))
        names = {id(weight): name for name, weight in self.parameters.items()}
        own = self.inner.state_dict()
        own["state"], rates = {}, [group["lr"] for group in self.groups]
        states: dict[int, dict[str, Any]] = own["state"]
        trained = [w for group in self.groups for w in group["params"]]
        for index, weight in enumerate(trained):
            prefix = f"optimizer/{names[id(weight)]}/"
            state = {key[len(prefix) :]: value for key, value in kept.items() if key.startswith(prefix)}
            state |= numbers.get(names[id(weight)], {}).get("state", {})
            if state:
                states[index] = state
        self.inner.load_state_dict(own)
        for group, rate in zip(self.groups, rates, strict=True):
            group["lr"] = rate  # captured steps know this very tensor
            for weight in group["params"]:
                group |= numbers.get(names[id(weight)], {}).get("group", {})
        for index, weight in enumerate(trained):
            for key, value in self._state(weight).items():
                if not isinstance(value, Tensor):
                    continue
                exact = states[index][key]  # torch has rounded it to the type of the weight
                alike = value.shape == weight.shape and value.dim() > 0
                place = torch.empty_like(weight if alike else value, dtype=exact.dtype)
                self.inner.state[weight][key] = place.copy_(exact)

    def _state(self, weight: Tensor) -> Mapping[str, Any]:
        return self.inner.state.get(weight, {}) if self.inner else {}


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that JSON holds exactly; the rate is the schedule's."""
    plain = (bool, int, float, str, type(None))
    return {key: value for key, value in values.items() if key not in RATE and isinstance(value, plain)}
