"""A run stopped and resumed equals the same run uninterrupted, bit for bit: weights, optimiser, records."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from parlay.batch import Batch
from parlay.engine.engine import Engine
from runs import SMALL, STEPS, answer, flip_a_byte, kept, last_line, listen, records, resume, summary, train

Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

HYBRID = "--epochs 5 --schedule alternate:2:1"  # S P S P P: enters a parallel phase twice
SHORT = "--epochs 3"  # S P P

KINDS = {
    "al": f"--method al {HYBRID}",
    "al, bfloat16 in a file": f"--method al --store file --store-dtype bfloat16 {SHORT}",
    "al, adam, on the host": f"--method al --store host --optimizer adam --lr 0.01 {SHORT}",
    "al, downsampled, growing": f"--method al --downsample 2 --beta-final 30 --clip 1 {SHORT}",
    "penalty": f"--method penalty {HYBRID}",
    "serial, adam": "--method serial --augment random --optimizer adam --lr 0.01 --epochs 3",
    "hybrid with augmentation": f"--method al --augment random {HYBRID}",
    "tail": "--method al --schedule tail:1:1 --epochs 4",
}
"""Streamed methods are resumed in engine/test_resumed.py."""

CASES = [
    # in an epoch, at its end, before and after a change of phase
    *(("al", step) for step in (1, 3, 4, 6, 9, 14)),
    *(("penalty", step) for step in (4, 9, 10)),
    *(("hybrid with augmentation", step) for step in (3, 7)),
    *((kind, 5) for kind in KINDS if kind not in ("al", "penalty", "hybrid with augmentation")),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of that kind that nobody stopped; each is made once."""
    made: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("undisturbed")
            assert train(made[kind], *KINDS[kind].split()) == 0
        return made[kind]

    return run


def assert_same_run(a: Path, b: Path, *left_out: str) -> None:
    assert records(a, *left_out) == records(b, *left_out)
    one, other = kept(a), kept(b)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


def stop(out: Path, kind: str, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        listen(patch, stop_after=step)
        assert train(out, *KINDS[kind].split()) == 1
    assert summary(out)["status"] == "interrupted"
    assert not (out / "model.safetensors").exists()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in the middle of its second parallel phase."""
    out = tmp_path_factory.mktemp("stopped")
    stop(out, "al", 3 * STEPS + 1)
    assert summary(out)["message"] == f"interrupted in epoch 4 of 5, after 1 of {STEPS} steps"
    assert [row["epoch"] for row in records(out)] == [0, 1, 2]
    return out


@pytest.mark.parametrize(("kind", "step"), CASES)
def test_a_run_stopped_after_any_step_and_resumed_equals_one_that_was_not(
    kind: str, step: int, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    stop(tmp_path, kind, step)
    assert resume(tmp_path) == 0
    # How far the network moved from old states is not known where they were not kept: between two parallel phases.
    phases = [row["phase"] for row in records(undisturbed(kind))]
    epoch, done = divmod(step, STEPS)
    between = phases[epoch] == "serial" or (done == 0 and phases[epoch - 1] == "serial")
    assert_same_run(tmp_path, undisturbed(kind), *(["violation_at_entry"] if between else []))
    assert summary(tmp_path)["status"] == "finished"


def test_states_that_only_a_record_needs_are_not_kept_and_that_record_says_null(
    undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    step = 2 * STEPS + 1
    stop(tmp_path, "al", step)  # in the serial epoch between two parallel phases
    assert not list((tmp_path / "checkpoints" / f"{step:010}").glob("interface-*"))
    assert resume(tmp_path) == 0
    whole, parts = ([row["violation_at_entry"] for row in records(out)] for out in (undisturbed("al"), tmp_path))
    assert [moved is None for moved in whole] == [True, True, True, False, True]
    assert parts == [None] * 5


def test_a_checkpoint_without_states_is_that_of_serial_training_and_states_are_set_anew(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        listen(patch, stop_after=STEPS + 1)
        assert train(tmp_path, "--method", "al", "--epochs", 3, "--checkpoint-states", "off") == 1
    parts = sorted(path.name for path in (tmp_path / "checkpoints" / f"{STEPS + 1:010}").iterdir())
    assert parts == ["manifest.json", *(f"stage-{k}.safetensors" for k in range(3))]
    heard = listen(monkeypatch)
    assert resume(tmp_path) == 0
    assert heard.lines[0] == "the checkpoint was made without states: they are set anew"
    assert summary(tmp_path)["status"] == "finished"


@pytest.mark.parametrize("method", ["al", "penalty", "replay"])
def test_states_of_another_cut_are_not_taken_where_their_shapes_are_the_same(
    method: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Resumed at another cut, a run ends as if its checkpoint had no states, or no batches on their way."""
    words = f"--model resnet14 --method {method} --schedule parallel --epochs 3 --stages 2"
    outs = tmp_path / "with", tmp_path / "without"
    for out, states in zip(outs, ("on", "off"), strict=True):
        with pytest.MonkeyPatch.context() as patch:
            listen(patch, stop_after=2 * STEPS + 1)
            assert train(out, *words.split(), "--partition", "2", "--checkpoint-states", states) == 1
    heard = listen(monkeypatch)
    for out in outs:
        assert resume(out, "--partition", "3") == 0
        assert "the checkpoint was cut at [2]: the states are set anew" in heard.lines
    one, other = kept(outs[0]), kept(outs[1])
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_hybrids_that_differ_in_their_tail_can_share_what_comes_before_it(tmp_path: Path) -> None:
    """A copy of the longer parallel phase, without states, goes on as serial training: bit for bit the shorter one."""
    whole, longer, short = tmp_path / "whole", tmp_path / "longer", tmp_path / "short"
    assert train(whole, "--method", "al", "--epochs", "5", "--schedule", "tail:2:3") == 0
    words = ["--method", "al", "--epochs", "5", "--checkpoint-states", "off"]
    with pytest.MonkeyPatch.context() as patch:
        listen(patch, stop_after=2 * STEPS)
        assert train(longer, *words, "--schedule", "tail:4:1") == 1
    shutil.copytree(longer, short)
    assert resume(short, "--schedule", "tail:2:3") == 0
    assert_same_run(short, whole)
    assert resume(longer) == 0
    assert [row["phase"][0] for row in records(longer)] == list("sppps")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["al", "penalty"])
def test_a_run_stopped_at_every_step_equals_one_that_was_not(
    kind: str, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    stop(tmp_path, kind, 1)
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(5 * STEPS - 2):
            listen(patch, stop_after=1)
            assert resume(tmp_path) == 1
    assert resume(tmp_path) == 0
    assert_same_run(tmp_path, undisturbed(kind), "violation_at_entry")


@pytest.mark.parametrize("entry", [1, 2])
def test_a_run_stopped_while_its_states_are_set_equals_one_that_was_not(
    entry: int, undisturbed: Callable[[str], Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    refresh, entries = Engine.refresh, 0

    def interrupted(self: Engine, batches: Iterable[Batch], stop: Callable[[], bool]) -> list[float] | None:
        nonlocal entries
        entries += 1

        def until_the_second() -> Iterator[Batch]:
            for batch in batches:
                yield batch
                if entries == entry:
                    signal.raise_signal(signal.SIGINT)

        return refresh(self, until_the_second(), stop)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "refresh", interrupted)
        assert train(tmp_path, *KINDS["al"].split()) == 1
    assert len(records(tmp_path)) == (1 if entry == 1 else 3)
    assert resume(tmp_path) == 0
    assert_same_run(tmp_path, undisturbed("al"), "violation_at_entry")


def test_a_run_stopped_after_its_last_step_is_finished(undisturbed: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        listen(patch, stop_after=5 * STEPS)
        assert train(tmp_path, *KINDS["al"].split()) == 0
    assert_same_run(tmp_path, undisturbed("al"))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_the_process_leaves_a_checkpoint_and_the_run_goes_on_from_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    words = ["train", *SMALL, "--out", str(tmp_path), "--epochs", "100000", "--checkpoint-every", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "parlay.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    path, began = tmp_path / "records.jsonl", time.monotonic()
    while not (path.exists() and len(path.read_text().splitlines()) > 1) and time.monotonic() < began + 60:
        time.sleep(0.02)
    process.send_signal(number)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert told.splitlines()[-1].endswith(f"go on with: parlay train --resume --out {tmp_path}")
    assert "Traceback" not in told
    assert summary(tmp_path)["status"] == "interrupted"
    done = len(records(tmp_path))
    assert resume(tmp_path, "--epochs", done + 1) == 0
    assert [row["epoch"] for row in records(tmp_path)] == list(range(done + 1))


CUT = "the checkpoint was cut at [2, 3]: the states are set anew"
FILTER = "the checkpoint's states are of another filter, type or method: they are set anew"


@pytest.mark.parametrize(
    ("change", "told", "stages"),
    [
        ("--stages 1", CUT, 1),
        ("--stages 4", CUT, 4),
        ("--downsample 2", FILTER, 3),
        ("--store-dtype bfloat16", FILTER, 3),
    ],
)
def test_a_run_goes_on_otherwise_with_states_set_anew_and_says_so(
    change: str, told: str, stages: int, stopped: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    shutil.copytree(stopped, out := tmp_path / "run")
    heard = listen(monkeypatch)
    assert resume(out, *change.split()) == 0
    assert heard.lines == [told]
    assert summary(out)["stages"] == stages
    rows = records(out)
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3, 4]
    # how the phase was entered stays known of the same stages alone
    assert (len(rows[3]["losses"]), rows[3]["violation_at_entry"] is not None) == (stages, stages == 3)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("--batch-size 16", "made with batch-size 32, not 16: write --batch-size 32"),
        ("--seed 7", "made with seed 0, not 7: write --seed 0"),
        ("--model resnet14", "made with model resnet8, not resnet14: write --model resnet8"),
        ("--dataset digits", "made with dataset synthetic, not digits: write --dataset synthetic"),
        ("--optimizer adam", "made with optimizer sgd, not adam: write --optimizer sgd"),
        ("--synthetic-samples 64", "made with training samples 96, not 64: write the data set of that run"),
        ("--epochs 1", "the checkpoint is in epoch 4, past 1: write --epochs 4 or more"),
    ],
)
def test_a_resume_that_would_not_be_the_same_run_is_refused_and_changes_nothing(
    change: str, told: str, stopped: Path, capsys: Capsys
) -> None:
    before = contents(stopped)
    capsys.readouterr()
    assert resume(stopped, *change.split()) == 2
    assert told in answer(capsys)
    assert contents(stopped) == before


def contents(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    undisturbed: Callable[[str], Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    stop(tmp_path, "al", 5)
    newest = tmp_path / "checkpoints" / "0000000005"
    flip_a_byte(newest / "stage-1.safetensors")
    heard = listen(monkeypatch)
    assert resume(tmp_path) == 0
    assert len(heard.lines) == 1
    assert f"checkpoint {newest} is damaged: stage-1.safetensors" in heard.lines[0]
    assert heard.lines[0].endswith("0000000003 is taken instead")
    assert_same_run(tmp_path, undisturbed("al"))


@pytest.mark.parametrize("every", [1, 0])
def test_a_finished_run_is_not_trained_again_and_it_says_so(every: int, tmp_path: Path, capsys: Capsys) -> None:
    assert train(tmp_path, *SHORT.split(), "--checkpoint-every", every) == 0
    rows, model = records(tmp_path), (tmp_path / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert resume(tmp_path) == 0
    assert last_line(capsys) == "all 3 epochs are done: nothing is trained"
    assert (records(tmp_path), (tmp_path / "model.safetensors").read_bytes()) == (rows, model)
    assert summary(tmp_path)["status"] == "finished"


def test_more_epochs_go_on_from_a_finished_run_and_the_seconds_are_those_of_both_parts(tmp_path: Path) -> None:
    assert train(tmp_path, *SHORT.split()) == 0
    before, first = records(tmp_path), summary(tmp_path)["seconds"]["total"]
    assert resume(tmp_path, "--epochs", 5) == 0
    after = records(tmp_path)
    assert after[:3] == before
    assert [row["epoch"] for row in after] == [0, 1, 2, 3, 4]
    assert summary(tmp_path)["epochs"] == 5
    assert summary(tmp_path)["seconds"]["total"] > first
