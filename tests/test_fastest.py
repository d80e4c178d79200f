"""`--stages auto`: a few numbers of stages are timed, and the fastest becomes that of the recipe."""

from dataclasses import replace
from pathlib import Path

import pytest

from parlay.bench import fastest
from parlay.config.recipe import Recipe
from parlay.errors import InputError
from runs import parlay

SMALL = Recipe(dataset="digits", model="resnet8", stages=2, batch_size=8, device="cpu")


def test_the_numbers_that_the_network_allows_are_timed_and_the_fastest_is_taken_with_its_cuts() -> None:
    rows = fastest.tried(SMALL, str, rounds=1, steps=1)
    assert [row.stages for row in rows] == [2, 3]  # of 2, 3, 6 and 9: there are 5 blocks
    assert all(len(row.extra["cuts"]) == row.stages - 1 for row in rows)
    rows = [replace(row, seconds=(ms / 1000,)) for row, ms in zip(rows, (5.0, 4.0), strict=True)]
    recipe = fastest.chosen(SMALL, rows)
    assert recipe.stages == 3
    assert recipe.cuts() == rows[1].extra["cuts"]
    assert fastest.line(rows) == "stages auto: K = 2 5.00 ms, K = 3 4.00 ms a step"
    assert fastest.told(rows)[0] == {"stages": 2, "step_ms": 5.0, "cuts": rows[0].extra["cuts"]}


@pytest.mark.parametrize("command", ["train", "plan"])
def test_without_a_gpu_a_number_is_asked_for(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parlay(command, "--stages", "auto", "--device", "cpu", "--out", tmp_path / "run") == 2
    assert "--stages 3" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_in_a_recipe_it_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text('stages = "auto"\ndevice = "cpu"\n')
    assert parlay("plan", "--recipe", tmp_path / "recipe.toml") == 2
    assert "write a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "word"),
    [({"method": "serial"}, "serial"), ({"partition": "2"}, "cuts"), ({"engine": "distributed"}, "GPU")],
)
def test_where_there_is_nothing_to_choose_it_says_so(wrong: dict[str, str], word: str) -> None:
    with pytest.raises(InputError, match=word):
        fastest.check(replace(SMALL, **wrong))
