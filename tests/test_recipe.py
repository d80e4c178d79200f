"""A recipe is read from TOML and flags, refused in one line where it is wrong, and runs again from its folder."""

import tomllib
from pathlib import Path

import pytest

from parlay import methods
from parlay.config.keys import RETIRED, flag, kind_of
from parlay.config.recipe import KEYS, Recipe, make_recipe, read_recipe
from parlay.errors import InputError
from runs import SMALL, answer, parlay, records, summary, train

CONTRACT = [
    *("--recipe", "--dataset", "--data-dir", "--model", "--method", "--stages", "--partition", "--downsample"),
    *("--schedule", "--beta", "--epochs", "--batch-size", "--lr", "--optimizer", "--weight-decay", "--seed"),
    *("--device", "--engine", "--out", "--resume", "--json", "--help", "--help-all"),
]
Capsys = pytest.CaptureFixture[str]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def help_of(words: str, capsys: Capsys) -> str:
    with pytest.raises(SystemExit) as end:
        parlay(*words.split())
    assert end.value.code == 0
    return capsys.readouterr().out


def test_the_short_help_has_the_contract_on_one_screen(capsys: Capsys) -> None:
    told = help_of("train --help", capsys)
    assert [name for name in CONTRACT if f" {name} " not in told] == []
    assert len(told.splitlines()) <= 40
    assert "--momentum" not in told


@pytest.mark.parametrize("command", ["train", "compare", "bench", "plan"])
def test_the_long_help_has_every_key_and_what_the_methods_say_of_theirs(command: str, capsys: Capsys) -> None:
    told = help_of(f"{command} --help-all", capsys)
    left_out = {"compare": ("method", "seed")}.get(command, ())
    names = [*(key.name for key in KEYS if key.name not in left_out), *methods.every_option()]
    assert [name for name in names if f"\n  --{flag(name)} " not in told] == []
    assert "its multiplier in full [al 0.25]" in " ".join(told.split())
    assert ("the fastest on this GPU" in told) == (command in ("train", "plan"))  # compare and bench refuse auto


def test_every_key_has_its_help_and_every_number_its_bounds() -> None:
    for key in (*KEYS, *(option for name in methods.names() for option in methods.options(name))):
        assert key.metadata["help"]
        if kind_of(key).startswith(("int", "float")) and not key.metadata["choices"]:
            assert key.metadata["most"] is not None, key.name
            assert (key.metadata["least"], key.metadata["above"]) != (None, None) or key.name == "stages"


def test_flags_win_over_the_recipe_file_and_mend_what_it_has_wrong(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", 'model = "resnet8"\nstages = 4\nbatch-size = 16\nlr = 1\nepochs = 0\n')
    made = make_recipe(read_recipe(path), {"stages": 2, "epochs": 3})
    assert made == Recipe(model="resnet8", stages=2, batch_size=16, lr=1, epochs=3)
    assert make_recipe(read_recipe(write(path, made.toml())), {}) == made


def test_a_recipe_file_trains_as_its_flags_do(tmp_path: Path) -> None:
    lines = 'model = "resnet8"\ndataset = "synthetic"\nsynthetic-shape = "1,8,8"\nsynthetic-samples = 96\n'
    path = write(tmp_path / "r.toml", lines + 'batch-size = 32\ndevice = "cpu"\nepochs = 9\nmethod = "penalty"\n')
    assert parlay("train", "--recipe", path, "--epochs", 2, "--out", tmp_path / "a") == 0
    assert train(tmp_path / "b", "--method", "penalty", "--epochs", 2) == 0
    assert records(tmp_path / "a") == records(tmp_path / "b")
    assert (tmp_path / "a" / "recipe.toml").read_text() == (tmp_path / "b" / "recipe.toml").read_text()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("batch_size = 3", "unknown key 'batch_size' in {path}: write 'batch-size'"),
        ("methods = ['al']", "unknown key 'methods' in {path}: write 'method'"),
        ("[train]\nlr = 1", "unknown key 'train' in {path}: write"),
        ("stages = true", "stages is True: write a whole number"),
        ('lr = "fast"', "lr is 'fast': write a number"),
        ("dataset = 3", "dataset is 3: write a text"),
        ("stages = ", "is not a TOML recipe"),
        ('method = "penality"', "unknown method 'penality': write one of serial, penalty, al, replay,"),
        ("downsample = 3", "unknown downsample '3': write one of 1, 2, 4"),
        ("reach = 0", "reach is 0: write a number greater than 0"),
        ("reach = 'far'", "reach is 'far': write a number"),
        ("shrink = 0.7", "shrink is 0.7: it gained nothing and is gone"),
        ("method = 'penalty'\norder = 'joint'", "order is joint: it belongs to the paper's formulas"),
    ],
)
def test_a_wrong_line_of_a_recipe_file_is_answered_in_one_line(
    line: str, told: str, tmp_path: Path, capsys: Capsys
) -> None:
    path = write(tmp_path / "r.toml", line + "\n")
    assert parlay("train", "--recipe", path, "--out", tmp_path / "run") == 2
    assert told.format(path=path) in answer(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--stagse 3", "unknown flag '--stagse': write --stages"),
        ("--batchsize=3", "unknown flag '--batchsize=3': write --batch-size"),
        ("--stages three", "stages is 'three': write a whole number, as in 3"),
        ("--stages", "--stages: expected one argument"),
        ("--lr fast", "lr is 'fast': write a number, as in 0.1"),
        ("--lr nan", "lr is nan: write a finite number"),
        ("--lr -1", "lr is -1.0: write a number greater than 0"),
        ("--momentum -1", "momentum is -1.0: write a number of at least 0"),
        ("--epochs 0", "epochs is 0: write a number of at least 1"),
        (f"--seed {2**63}", f"seed is {2**63}: write a number of at most {2**63 - 1}"),
        ("--dataset digit", "(nearest: digits)"),
        ("--schedule alternate:4", "write alternate:4:1"),
        ("--partition evn", "write even, cost, or the cuts, as in 4,7"),
        ("--partition 3 --stages 3", "1 cuts make 2 stages, not 3"),
        ("--synthetic-shape 8,8 --dataset synthetic", "write channels,height,width as in 3,32,32"),
        ("--augment twice", "write auto, none, random or a number of copies"),
        ("digits", "'digits' stands alone: give it to a flag"),
        ("--model resnt20", "write resnet20"),
        ("--model wrn-9994-999", "has billions of weights"),
        ("--beta 0", "beta is 0.0: write a number greater than 0"),
        ("--trust 2", "--trust: it belongs to the paper's formulas"),
        ("--method penalty --reach 1", "reach is not for method 'penalty': leave it out, or write method al"),
        ("--method serial --beta 3", "beta is not for method 'serial': leave it out"),
        ("--method replay --replicas 2 --engine distributed", "method replay takes no replicas"),
        ("--stages 99", "99 stages of a model with 11 blocks"),
        ("--stages 0", "0 stages of a model with 11 blocks"),
        ("--partition 3,99", "cuts (3, 99) do not lie inside a model of 11 blocks"),
    ],
)
def test_a_wrong_flag_or_combination_is_answered_in_one_line(
    words: str, told: str, tmp_path: Path, capsys: Capsys
) -> None:
    assert parlay("train", "--device", "cpu", "--out", tmp_path / "run", *words.split()) == 2
    assert told in answer(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["al", "penalty", "serial"])
def test_the_resolved_recipe_runs_again_and_gives_the_same_records(method: str, tmp_path: Path) -> None:
    """It holds the defaults of its method, a measured cut as its cuts, and not its run folder."""
    first, again = tmp_path / "first", tmp_path / "again"
    assert train(first, "--method", method, "--partition", "cost", "--epochs", 2, "--seed", 5) == 0
    kept = tomllib.loads((first / "recipe.toml").read_text())
    assert "out" not in kept
    own = {"al": {"beta": 3.0, "reach": 0.25}, "penalty": {"beta": 3.0}, "serial": {"stages": 1, "schedule": "serial"}}
    assert own[method].items() <= kept.items()
    assert ("reach" in kept, "beta" in kept) == (method == "al", method != "serial")
    assert kept["partition"] == (",".join(map(str, summary(first)["cuts"])) or "even")
    assert parlay("train", "--recipe", first / "recipe.toml", "--out", again) == 0
    assert records(again) == records(first)
    assert (again / "recipe.toml").read_text() == (first / "recipe.toml").read_text()


def test_the_run_folder_may_stand_in_a_recipe(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", f'out = "{tmp_path / "run"}"\nepochs = 1\n')
    assert parlay("train", *SMALL, "--recipe", path) == 0
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_retired_key_is_read_at_its_neutral_value_and_else_says_where_it_went(tmp_path: Path) -> None:
    for key, gone in RETIRED.items():
        method = f'method = "{gone.methods[0]}"\n' if gone.methods else ""
        text = f"'{gone.neutral}'" if isinstance(gone.neutral, str) else gone.neutral
        if gone.neutral is not None:
            path = write(tmp_path / "r.toml", f"{method}{key} = {text}\n")
            assert make_recipe(read_recipe(path, methods.every_option()), {}).options == {}
        path = write(tmp_path / "r.toml", f"{method}{key} = 0.5\n")
        with pytest.raises(InputError, match=rf"^{key} is 0\.5: .*leave it out"):
            read_recipe(path, methods.every_option())
