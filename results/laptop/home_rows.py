"""What is run: three problems, 19 rows of each, five seeds of each row.

In: names. Out: recipes. Everything that trains, times, compares or prints these runs reads this table.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEEDS = (0, 1, 2, 3, 4)
HYBRID = "alternate:4:1"


@dataclass(frozen=True)
class Problem:
    """A data set, a network and how long it is trained."""

    title: str
    dataset: str
    model: str
    epochs: int
    samples: int = 0
    """Of the training images the first ones; 0: all."""
    cost: float = 1.0
    """Seconds of one core that a run takes, about: the time left is estimated from it."""


@dataclass(frozen=True)
class Row:
    """A method at a number of stages."""

    title: str
    method: str
    stages: int = 1
    schedule: str = "parallel"
    downsample: int = 1

    @property
    def hybrid(self) -> bool:
        return self.schedule == HYBRID


PROBLEMS = {
    "digits-resnet20": Problem("digits, ResNet-20", "digits", "resnet20", 15, cost=5),
    "digits-resnet8": Problem("digits, ResNet-8", "digits", "resnet8", 15, cost=2.5),
    "mnist-resnet8": Problem("MNIST, first 3,000 images, ResNet-8", "mnist", "resnet8", 15, 3000, cost=27),
}
KINDS = {
    "penalty": Row("penalty", "penalty"),
    "al": Row("AL", "al"),
    "sph-p": Row("SPH-P", "penalty", schedule=HYBRID),
    "ds-sph-p": Row("DS-SPH-P", "penalty", schedule=HYBRID, downsample=2),
    "sph-al": Row("SPH-AL", "al", schedule=HYBRID),
    "ds-sph-al": Row("DS-SPH-AL", "al", schedule=HYBRID, downsample=2),
    "replay": Row("replay", "replay"),
    "delayed": Row("delayed", "delayed"),
    "local": Row("local", "local"),
}
ROWS = {"serial": Row("serial", "serial")} | {
    f"{name}-k{stages}": Row(f"{kind.title}, K = {stages}", kind.method, stages, kind.schedule, kind.downsample)
    for stages in (2, 3)
    for name, kind in KINDS.items()
}


@dataclass(frozen=True)
class Job:
    """One run: a row of a problem with a seed."""

    problem: str
    row: str
    seed: int
    epochs: int = 0
    """0: as many as the problem has."""

    @property
    def name(self) -> str:
        return f"{self.problem}-{self.row}-s{self.seed}"

    @property
    def cost(self) -> float:
        return PROBLEMS[self.problem].cost

    def keys(self, data_dir: Path) -> dict[str, Any]:
        """Of its recipe. It is judged once, after the last epoch, and leaves no checkpoint between."""
        problem, row = PROBLEMS[self.problem], ROWS[self.row]
        epochs = self.epochs or problem.epochs
        return {
            "dataset": problem.dataset,
            "data_dir": str(data_dir),
            "train_samples": problem.samples,
            "model": problem.model,
            "epochs": epochs,
            "method": row.method,
            "stages": row.stages,
            "schedule": row.schedule,
            "downsample": row.downsample,
            "seed": self.seed,
            "device": "cpu",
            "judge_every": epochs,
            "checkpoint_every": 0,
        }


def problems(digits: bool = False) -> list[str]:
    """All of them, or those of the digits alone."""
    return [name for name, problem in PROBLEMS.items() if problem.dataset == "digits" or not digits]


def jobs(digits: bool = False) -> list[Job]:
    """Seed by seed, so that every row has something early on."""
    return [Job(problem, row, seed) for seed in SEEDS for problem in problems(digits) for row in ROWS]
