"""The paper's tables and figures: the rows of `tables.toml`, each with what makes its recipe. No torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

WITHOUT, RANDOM = "none", "random"
HYBRID = "hybrid"
KINDS = {
    HYBRID: "hybrids",
    "penalty": "penalty without serial epochs",
    "al": "AL without serial epochs",
    "serial": "serial training",
    "replay": "replay",
}
"""Of rows, in words: those of a kind may have keys of their own."""
NAME = re.compile(
    r"(ds-)?(?:sph-)?(serial|penalty|al|replay)(?:-k(\d+))?(?:-(\d+to\d+))?(?:-(no-da|da\d*))?(?:-(adaptive))?"
)
MISPRINTS = {9.12: 9.16, 1.44: 1.14, 0.57: 0.76}
"""Memory of table 1 as printed, and as its own formula has it: AL at K = 3, DS-P at K = 3, DS-AL at K = 2."""


@final
@dataclass(frozen=True)
class Quoted:
    """What the paper prints for a row; None where it prints nothing."""

    value: float | None = None
    """Test accuracy in per cent, or test loss."""
    speedup: float | None = None
    memory: float | None = None
    """In GiB."""


@final
@dataclass(frozen=True)
class Line:
    """One row."""

    name: str
    """Of its run folders, and for `--rows`."""
    method: str
    stages: int = 1
    downsample: int = 1
    ratio: str = ""
    """γ_H as the paper writes it, serial : parallel; empty where the method is not a hybrid."""
    augment: str = ""
    """Of serial training, and where copies of the images are trained on; a hybrid augments in its serial epochs."""
    schedule: str = ""
    """Where it follows neither from the method nor from the ratio."""
    quoted: Quoted = field(default=Quoted(), compare=False)

    @classmethod
    def read(cls, text: str) -> Line:
        """From a name and the numbers that are printed for it."""
        name, *numbers = text.split()
        found = NAME.fullmatch(name)
        assert found is not None, name
        downsampled, method, stages, ratio, seen, schedule = found.groups("")
        augment = {"no-da": WITHOUT, "da": RANDOM}.get(seen, seen.removeprefix("da"))
        quoted = Quoted(*(None if number == "-" else float(number) for number in numbers))
        factor = 2 if downsampled else 1
        return cls(name, method, int(stages or 1), factor, ratio.replace("to", ":"), augment, schedule, quoted)

    @property
    def ours(self) -> bool:
        """Not in the paper: Parlay's answer to it."""
        return self.method == "replay"

    @property
    def kind(self) -> str:
        """Its method, or that it is a hybrid."""
        return HYBRID if self.ratio else self.method

    @property
    def label(self) -> str:
        """As the paper writes it."""
        seen = {"": "", WITHOUT: " w/o DA", RANDOM: " with DA"}.get(self.augment, f", ρ = {self.augment}")
        if self.method == "serial":
            return f"Serial{seen}"
        short = self.downsample > 1 or bool(self.ratio)
        kind = {"penalty": "P" if short else "Penalty", "al": "AL"}.get(self.method, self.method.capitalize())
        text = f"{'DS-' * (self.downsample > 1)}{'SPH-' * bool(self.ratio)}{kind} (K={self.stages}){seen}"
        return ", ".join(part for part in (text, self.ratio, self.schedule) if part)

    def keys(self, workload: Workload) -> dict[str, Any]:
        """What is its own in a recipe."""
        if self.method == "serial":
            return {"method": "serial", "augment": self.augment or WITHOUT}
        keys: dict[str, Any] = {"method": self.method, "stages": self.stages, "downsample": self.downsample}
        if self.ours:  # it keeps nothing per sample, so it augments in every epoch; cut by cost, as one would
            return {**keys, "schedule": self.schedule or "parallel", "augment": "auto", "partition": "cost"}
        if not self.ratio:  # the first epoch, which is serial, shall not see augmented images either
            keys |= {"schedule": "parallel", "augment": self.augment or WITHOUT}
        else:
            serial, parallel = self.ratio.split(":")
            keys |= {"schedule": f"{workload.hybrid}:{parallel}:{serial}", "augment": "auto"}
        return {**keys, **workload.rates.get(self.kind, {})}


@final
@dataclass(frozen=True)
class Workload:
    """Network, data and how the paper trains them."""

    keys: Mapping[str, Any]
    epochs: int
    hybrid: str
    """The schedule of a hybrid: alternate or tail."""
    rates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Learning rates of a kind of rows, where the paper's does not serve them."""
    loss: bool = False
    """Is the test loss what counts?"""


@final
@dataclass(frozen=True)
class Experiment:
    """A table or a figure."""

    title: str
    workload: str
    lines: tuple[Line, ...]
    figures: tuple[str, ...] = ()
    """What is drawn of its runs: names of functions in figures.py."""

    @property
    def shows_speed(self) -> bool:
        """A table does, and a picture of accuracy against it; for other pictures nothing has to be timed."""
        return not self.figures or "tradeoff" in self.figures


def _experiments(content: Mapping[str, Mapping[str, Any]]) -> dict[str, Experiment]:
    found: dict[str, Experiment] = {}
    for name, keys in content.items():
        lines = [Line.read(text) for text in keys.get("rows", "").strip().splitlines()]
        lines += [line for table in keys.get("of", ()) for line in found[table].lines]
        shown = tuple(line for line in dict.fromkeys(lines) if line.name in keys.get("only", [line.name]))
        found[name] = Experiment(keys["title"], keys["workload"], shown, tuple(keys.get("figures", ())))
    return found


_CONTENT = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
WORKLOADS = {name: Workload(**keys) for name, keys in _CONTENT["workloads"].items()}
EXPERIMENTS = _experiments(_CONTENT["experiments"])
