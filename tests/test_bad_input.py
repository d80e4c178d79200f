"""Flags and recipes that are wrong at any size: one line, exit code 2, at once, in bounded memory, without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runs import answer, parlay

LONG, DIGITS = "x" * 5000, "9" * 400
FLAGS = [
    *("--epochs 4294967296", f"--epochs {DIGITS}", f"--epochs {DIGITS * 20}", "--batch-size 99999999999", "--lr 1e308"),
    *(f"--lr {DIGITS}", "--lr 1e999", f"--seed {DIGITS}", f"--stages {DIGITS}", f"--partition {DIGITS}"),
    *("--momentum 9", "--weight-decay 1e300", "--warmup 1e300", "--clip 1e300", "--train-samples 99999999999999"),
    *(f"--schedule alternate:{DIGITS}:1", f"--schedule tail:1:{DIGITS}", "--schedule adaptive:1e999"),
    *(f"--lr-schedule hold:{DIGITS}", f"--augment {DIGITS}", "--augment 99999", "--timeline 99999999999"),
    *("--replicas 99999999 --engine distributed", "--judge-every 99999999999", "--checkpoint-every 99999999999"),
    *("--dataset synthetic --synthetic-shape 3,99999,99999", f"--dataset synthetic --synthetic-shape 1,1,{DIGITS}"),
    *("--dataset synthetic --synthetic-samples 99999999", "--synthetic-samples 99999999999"),
    *("--synthetic-classes 99999999", "--dataset synthetic --synthetic-shape 3,500,500 --synthetic-classes 9999"),
    *(f"--model resnet{DIGITS}", "--model wrn-40-99999", f"--model {LONG}", f"--dataset {LONG}", f"--method {LONG}"),
    *(
        f"--out {LONG}",
        f"--out a/{'x' * 300}",
        f"--data-dir {LONG}",
        "--data-dir a\0b",
        "--out a\nb",
        "--store \x1b[2J",
    ),
    *(f"--recipe {LONG}", "--recipe a\0b", "--recipe /dev/zero", "--recipe FIFO", f"--{LONG} 1", LONG),
    *(f"--max-restarts {DIGITS}", f"--port {DIGITS} --engine distributed", f"--port {DIGITS * 20}"),
]
RECIPES = [
    *(
        "epochs = 4294967296",
        f"epochs = {DIGITS}",
        f"epochs = {DIGITS * 20}",
        f"epochs = 0x{'f' * 20000}",
        "lr = 1e308",
    ),
    *("lr = nan", f"lr = {DIGITS}", "epochs = 1979-05-27", "epochs = []", "lr = {a = 1}", "lr = true", f"{LONG} = 1"),
    *("methods = ['al']", "out = 3", 'data-dir = "a\\u0000b"', f'data-dir = "{LONG}"', "stages = " + "[" * 20000),
    *(f"model = '{LONG}'", "# " + "x" * (1 << 20), "options = {beta = 1}", "shrink = 2.0", "a\0 = 1", "\ud800"),
    *('method = ["al"]', "[method]\nshrink = 1.0", "beta-final = 1\nbeta_final = 1"),
]
OTHERS = [
    *(LONG, f"plan --recipe {LONG}", f"report {LONG}", "report a\0b", f"report a -o {LONG}", f"data check {LONG}"),
    *(
        f"data list --data-dir {LONG}",
        "demo --epochs 4294967296",
        f"demo --out {LONG}",
        f"compare --seeds {DIGITS * 20}",
    ),
    *(f"compare --methods {LONG}", f"compare --methods al:stages={DIGITS * 20}", f"compare --methods al:{LONG}=1"),
    *(
        "compare --stages auto",
        f"bench --rounds {DIGITS}",
        "bench --steps 0",
        "bench --stages auto",
        f"bench --out {LONG}",
    ),
]
SCRIPT = """
import json, sys, time
from parlay.cli import main
for words in json.load(sys.stdin):
    began = time.monotonic()
    code = main(words)
    most = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(json.dumps([code, round(time.monotonic() - began, 3), int(most.split()[1]), "torch" in sys.modules]))
    print(file=sys.stderr)
"""


def cases(folder: Path) -> list[list[str]]:
    os.mkfifo(folder / "fifo")
    found = [["train", *words.replace("FIFO", str(folder / "fifo")).split(" ")] for words in FLAGS]
    for n, text in enumerate(RECIPES):
        path = folder / f"{n}.toml"
        path.write_bytes(text.encode(errors="surrogatepass"))
        found.append(["train", "--recipe", str(path)])
    return found + [words.split(" ") for words in OTHERS]


def test_wrong_input_of_any_size_is_answered_at_once_in_one_line_without_torch(tmp_path: Path) -> None:
    asked = cases(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    lines, said = done.stdout.splitlines(), done.stderr.split("\n\n")
    assert len(lines) == len(asked), done.stdout[-500:]
    wrong = []
    for words, line, text in zip(asked, lines, said, strict=False):
        code, seconds, kilobytes, torch = json.loads(line)
        one_line = text.startswith("parlay: ") and len(text.splitlines()) == 1 and len(text) < 400
        if code != 2 or not one_line or not text.isprintable() or seconds > 2 or kilobytes > 200_000 or torch:
            wrong.append((" ".join(words)[:100], code, seconds, kilobytes, torch, text[:300]))
    assert wrong == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words", ["--beta 1e300", "--beta nan", f"--reach {DIGITS}", f"--accumulate {DIGITS} --method replay"]
)
def test_a_wrong_number_of_a_method_is_answered_in_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parlay("train", "--model", "resnet8", "--device", "cpu", *words.split()) == 2
    assert ": write a" in answer(capsys)
