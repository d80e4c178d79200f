"""Streaming methods with a process per stage: the same weights, records and checkpoints as in one process."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from parlay import DNI, AuxNet, Delayed, Local, Replay, timeline
from parlay.data import CropAndFlip
from parlay.engines.stream import Way
from parlay.errors import InputError
from parlay.recipe import Recipe
from parlay.run import checkpoints
from problems import batch
from ranks import together
from runs import Heard, records, train
from test_distributed import ROUNDING, Case, Ran, Spoiler, assert_same, off, one_thread

EXACT = 1e-5  # nothing at all is seen without clipping, whose norm over all stages is summed in another order
AUGMENTED = {"augment": CropAndFlip(2)}
HYBRID = {"schedule": "alternate:2:1", **AUGMENTED}
ALL = Replay(
    beta=0.5, shrink=0.7, predict=0.5, compensate=0.5, accumulate=2, slow_start=2.0, detail=0.1
)  # whatever there is to make up for delays

TWO = {
    "replay": Case(method=Replay(), options=AUGMENTED),
    "replay, hybrid": Case(method=Replay(), epochs=5, options=HYBRID),
    "replay, everything": Case(method=ALL, epochs=4, options={**AUGMENTED, "downsample": 2, "clip": 0.3}),
    "delayed": Case(method=Delayed(), options=AUGMENTED),
    "delayed, hybrid": Case(method=Delayed(predict=0.5, accumulate=3), epochs=5, options={**HYBRID, "clip": 0.3}),
    "local, hybrid": Case(method=Local(), epochs=5, options=HYBRID),
    "dni, hybrid": Case(method=DNI(), epochs=5, options=HYBRID),
    "auxnet, hybrid": Case(method=AuxNet(), epochs=5, options=HYBRID),
    "replay, dropout": Case(method=Replay(), network="dropout"),
    "replay, dense, last batch of one": Case(method=Replay(), network="dense", samples=17),
    "replay, fewer batches than are on their way": Case(method=Replay(), samples=6, options=HYBRID),
    "replay, bfloat16": Case(method=Replay(), network="dense", options={"precision": "bfloat16"}),
}
THREE = {
    "replay, hybrid": Case(3, method=Replay(), epochs=5, options=HYBRID),
    "replay, everything": Case(3, network="no batch norm", method=ALL, options={"downsample": 2, "clip": 0.3}),
    "delayed": Case(3, method=Delayed(shrink=0.7), options=AUGMENTED),
    "local, downsampled": Case(3, method=Local(), options={**AUGMENTED, "downsample": 2}),
    "dni": Case(3, method=DNI(), samples=17, network="no batch norm", options=AUGMENTED),
    "auxnet, downsampled": Case(3, method=AuxNet(), options={**AUGMENTED, "downsample": 2}),
}
STOPPED = {
    "replay": Case(method=Replay(accumulate=2), samples=60, epochs=3, options=AUGMENTED),  # S P P, eight steps each
    "delayed": Case(method=Delayed(), samples=60, epochs=3, options=AUGMENTED),
    "dni": Case(method=DNI(), samples=60, epochs=3, options=AUGMENTED),
    "auxnet": Case(method=AuxNet(), samples=60, epochs=3, options=AUGMENTED),
}
AT = 10  # the loss of the last stage at which something happens, early in a parallel epoch: others learn of it later


# What the processes do


def of_two(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: case.run("distributed") for name, case in TWO.items()}
    found["timeline"] = TWO["replay"].run("distributed", timeline=3, out=folder / "t")
    for name, case in STOPPED.items():
        out = folder / f"stopped {name}"
        found[f"stopped {name}"] = case.run("distributed", out=out, loss=Spoiler(AT, "signal"))
        if os.environ["RANK"] == "0":
            for other in ("in process", "as three"):
                shutil.copytree(out, folder / f"stopped {name}, {other}")
        found[f"resumed {name}"] = case.run("distributed", out=out, resume=True)
        began_in_one = folder / f"begun in one process, {name}"
        found[f"begun in one process, {name}"] = case.run("distributed", out=began_in_one, resume=True)
    found["diverged"] = STOPPED["replay"].run("distributed", loss=Spoiler(AT, "nan"))
    return found


def of_three(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: case.run("distributed") for name, case in THREE.items()}
    heard = Heard()
    as_three = Case(3, method=Replay(accumulate=2), samples=60, epochs=3, options=AUGMENTED)
    found["as three"] = as_three.run(
        "distributed", out=folder / "stopped replay, as three", resume=True, progress=heard
    )
    found["said"] = heard.lines
    return found


def refused() -> list[str]:
    told = []
    adam = {"optimizer": lambda weights: torch.optim.Adam(weights)}
    for case in (Case(1, method=Replay(), options={"replicas": 2}), Case(method=Replay(predict=0.5), options=adam)):
        try:
            case.run("distributed")
        except InputError as error:
            told.append(str(error))
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed-streaming")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    for name, case in STOPPED.items():
        case.run(out=folder / f"begun in one process, {name}", loss=Spoiler(AT, "signal"))
    return together(2, of_two, folder, timeout=120)


@pytest.fixture(scope="module")
def three(two: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:  # noqa: ARG001
    return together(3, of_three, folder, timeout=120)


# The same as in one process


@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_as_one_does(name: str, two: list[dict[str, Ran]]) -> None:
    in_one = TWO[name].run()
    assert_same(two[0][name], in_one, EXACT, records=1e-5)
    assert two[0][name].summary["staleness"] == in_one.summary["staleness"]


@pytest.mark.parametrize("name", THREE)
def test_three_processes_train_as_one_does(name: str, three: list[dict[str, Ran]]) -> None:
    in_one = THREE[name].run()
    assert_same(three[0][name], in_one, EXACT, records=1e-5)
    assert three[0][name].summary["staleness"] == in_one.summary["staleness"]


def test_every_process_has_the_whole_model_and_the_records_in_the_end(two: list[dict[str, Ran]]) -> None:
    for name in TWO:
        assert off(two[0][name], two[1][name]) == 0, name
        assert two[0][name].records == two[1][name].records


def test_a_timeline_shows_both_passes_of_every_stage(two: list[dict[str, Ran]], folder: Path) -> None:
    assert two[0]["timeline"].status == "finished"
    spans = timeline.read(folder / "t" / timeline.FILE)
    for rank in (0, 1):
        assert {"forward", "backward", "update", "send", "wait"} <= {span.name for span in spans if span.rank == rank}


# Runs that end early


@pytest.mark.parametrize("name", STOPPED)
def test_a_run_stopped_with_batches_on_their_way_goes_on_in_either_engine(
    name: str, two: list[dict[str, Ran]], folder: Path
) -> None:
    stopped = [found[f"stopped {name}"] for found in two]
    assert [ran.status for ran in stopped] == ["interrupted"] * 2
    assert stopped[0].message == stopped[1].message
    assert not stopped[0].message.endswith("step 0")
    kept = checkpoints.newest(folder / f"stopped {name}, in process" / "checkpoints", pytest.fail)
    assert kept is not None
    assert {"station-0", "station-1"} <= set(kept.parts)
    undisturbed = STOPPED[name].run()
    for ran in (
        two[0][f"resumed {name}"],
        two[0][f"begun in one process, {name}"],
        STOPPED[name].run(resume=True, out=folder / f"stopped {name}, in process"),
    ):
        assert_same(ran, undisturbed, EXACT, records=1e-5)


def test_batches_on_their_way_are_left_out_at_another_number_of_stages_and_that_is_said_once(
    three: list[dict[str, Any]],
) -> None:
    assert three[0]["as three"].status == "finished"
    assert three[0]["as three"].summary["stages"] == 3
    assert sum("on their way" in line for line in three[0]["said"]) == 1
    assert three[1]["said"] == []  # the leader says it


def test_a_loss_that_is_not_a_number_stops_all_processes_and_is_named_with_its_batch(two: list[dict[str, Ran]]) -> None:
    runs = [found["diverged"] for found in two]
    assert [ran.status for ran in runs] == ["diverged"] * 2
    assert runs[0].message == runs[1].message
    assert "the loss of stage 1 of 2 is nan in epoch 2, step 2 (samples " in runs[0].message
    assert off(runs[0], STOPPED["replay"].run(loss=Spoiler(AT, "nan"))) < ROUNDING  # it makes no update of that step


def test_a_stage_killed_with_messages_on_their_way_is_restarted_and_the_run_is_as_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--method", "replay", "--stages", "2", "--epochs", "3", "--schedule", "parallel", "--augment", "random"]
    with one_thread():
        assert train(tmp_path / "whole", *words) == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PARLAY_FAULT", "stage0:step7:kill:exchange")
    apart = ["--engine", "distributed", "--serial-phase", "sequential", "--max-restarts", "1"]
    assert train(tmp_path / "killed", *words, *apart) == 0
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "whole"))
    assert one == other


# What is refused


def test_what_one_process_refuses_all_refuse_in_the_same_words() -> None:
    one, other = together(2, refused)
    assert one == other
    assert "Replay takes no replicas: write replicas 1" in one[0]
    assert "predict looks ahead along the momentum of SGD" in one[1]


@pytest.mark.parametrize("method", ["replay", "local"])
def test_a_recipe_takes_no_replicas_of_streaming_stages(method: str) -> None:
    with pytest.raises(InputError, match=f"method {method} takes no replicas: write replicas 1"):
        Recipe(method=method, engine="distributed", replicas=2)


# Which messages there are


@pytest.mark.parametrize("upwards", [False, True])
@pytest.mark.parametrize("lags", [[4, 2, 0], [0, 0, 0], [2, 2, 0], [1, 0]])
def test_what_a_stage_needs_is_known_a_step_ahead(lags: list[int], upwards: bool) -> None:
    """But for the batch that enters, which no message is about."""
    way = Way(lags, upwards)
    for number in range(5):
        coming = way.coming()
        stops = way.enter(batch(8 + number) if number < 3 else None)
        entry = way.entries.index(0)
        for k, (said, done) in enumerate(zip(coming, stops, strict=True)):
            assert said.back == done.back
            assert said.forth == (None if k == entry and number < 3 else done.forth)
