"""What a run leaves when it ends, however it ends: the summary, the weights, the timeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parlay import timeline
from parlay.data.feed import Feed
from parlay.engine.engine import Engine
from parlay.files import replace_whole
from parlay.run.checkpoint import packed, size
from parlay.run.options import RunOptions
from parlay.run.records import SUMMARY, Record, environment, summed_up, write_json


@dataclass
class Result:
    """What became of a run."""

    status: str
    """finished, diverged or interrupted."""
    model: nn.Sequential
    """The network, ordinary again, on the CPU."""
    records: list[Record]
    summary: dict[str, Any]
    message: str = ""


@dataclass(frozen=True)
class End:
    """What the summary cannot learn from options, engine and records."""

    status: str
    message: str
    total_seconds: float
    steps_per_epoch: int
    test: Feed | None


def leave(options: RunOptions, engine: Engine, rows: list[Record], end: End) -> Result:
    """Put the network together and write the files. All processes call it together; the leader writes."""
    model: nn.Sequential = options.partition.model
    model.to(device="cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    engine.assemble()
    summary = {**summary_of(options, engine, rows, end), "waited_seconds": engine.waits()}
    spans, out, finished = engine.spans(), options.out, end.status == "finished"
    if out is not None and engine.world.leads:
        if finished:
            save_model(model, out / "model.safetensors")
        write_json(out / SUMMARY, summary)
        if spans:
            timeline.write(out / timeline.FILE, spans, out.name)
    return Result(end.status, model.eval(), rows, summary, end.message)


def summary_of(options: RunOptions, engine: Engine, rows: list[Record], end: End) -> dict[str, Any]:
    """The summary of a run with these records."""
    model = options.partition.model
    return {
        "status": end.status,
        "message": end.message,
        "method": type(options.method).__name__,
        "model": type(model).__name__,
        "dataset": None,
        "stages": options.stages,
        "cuts": list(options.partition.cuts),
        "schedule": str(options.schedule),
        "downsample": options.downsample,
        "steps_per_epoch": end.steps_per_epoch,
        "seed": options.seed,
        "parameters": sum(w.numel() for w in model.parameters()),
        "test_samples": len(end.test) if end.test is not None else None,
        "auxiliary_bytes": engine.auxiliary_bytes,
        **summed_up(rows, end.total_seconds),
        **engine.facts(),
        "waited_seconds": [],
        "environment": environment([_name(options.device)] * options.stages),
        **options.about,
    }


def save_model(model: nn.Module, path: Path) -> None:
    """The weights under their ordinary names; plain PyTorch loads them into the plain network.

    Weights that several layers share stand there under each of their names, since the format holds no shared memory.
    """
    kept = model.state_dict()
    replace_whole(path, lambda file: file.writelines(packed(kept)), size({"model": kept}))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
