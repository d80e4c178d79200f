"""The reader of pickles runs nothing, whatever a pickle asks for."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from parlay.data.pickles import read_pickle
from parlay.errors import InputError


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_pickle(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


class Runs:
    """A pickle that runs a command when it is read in the usual way."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def array_pickle(dtype: bytes, state: bytes = b"") -> bytes:
    """A pickle of one array, as text, with the given type and state of the array."""
    return b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR" + (
        b"(I1\n(I2\nt" + dtype + b"I00\n" + (state or b"S'ab'\n") + b"tb"
    )


U1 = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR"


def in_a_dictionary(value: bytes) -> bytes:
    return b"(S'data'\n" + value + b"d."


def test_plain_data_and_arrays_are_read(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    content = {
        "rows": np.arange(6, dtype=">i4").reshape(2, 3),
        b"names": [b"cat", "dog"],
        "deep": {"a": (1, 2.5, None)},
    }
    path.write_bytes(pickle.dumps(content))
    found = read_pickle(path)
    assert found["rows"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["names"] == [b"cat", "dog"]
    assert found["deep"] == {"a": (1, 2.5, None)}


def test_a_pickle_that_calls_a_command_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    bomb = pickle.dumps({b"data": Runs(f"touch {trace}"), b"labels": [0]})
    assert f"{os.system.__module__}.system" in refusal(tmp_path / "bomb", bomb)
    assert not trace.exists()
    pickle.loads(bomb)  # the usual reader does run it: the test can fail
    assert trace.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("numpy", "load"),
        ("numpy.core.multiarray", "scalar"),
        ("_codecs", "lookup"),
        ("copyreg", "_reconstructor"),
    ],
)
@pytest.mark.parametrize("opcode", [b"c%s\n%s\n(S'x'\ntR.", b"(S'x'\ni%s\n%s\n."], ids=["reduce", "inst"])
def test_any_other_name_is_named_and_refused(tmp_path: Path, module: str, name: str, opcode: bytes) -> None:
    assert f"asks for '{module}.{name}'" in refusal(tmp_path / "bad", opcode % (module.encode(), name.encode()))


def test_a_dotted_name_does_not_reach_through_an_allowed_one(tmp_path: Path) -> None:
    path = b"\x80\x04\x8c\x05numpy\x8c\x11ndarray.__class__\x93."
    assert "asks for 'numpy.ndarray.__class__'" in refusal(tmp_path / "bad", path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (array_pickle(U1.replace(b"u1", b"O8")), "type 'O8'"),
        (array_pickle(U1.replace(b"u1", b"V8")), "type 'V8'"),
        (array_pickle(U1 + b"(I3\nS'|'\nN(S'f'\nt(S'f'\nI0\ndI8\nI1\nI0\ntb"), "fields"),
        (array_pickle(U1, b"(lS'a'\na"), "not of plain numbers"),
        (array_pickle(b"S'u1'\n"), "not of plain numbers"),
        (array_pickle(U1, b"S'abc'\n"), "cannot be read"),
        (array_pickle(U1).replace(b"(I2\nt", b"(I-2\nt"), "no shape"),
        (array_pickle(U1).replace(b"(I2\nt", b"(L%dL\nt" % 2**80), "cannot be read"),
        (b"cnumpy.core.multiarray\n_reconstruct\n(tR", "cannot be read"),
        (b"cnumpy\nndarray\n(I9\ntR", "unusual way"),
        (b"cnumpy\ndtype\n(dS'code'\nI1\nsb", "a change to a function"),
        (b"c_codecs\nencode\n(Vx\nS'rot13'\ntR", "another encoding"),
    ],
)
def test_allowed_names_cannot_be_abused(tmp_path: Path, content: bytes, says: str) -> None:
    assert says in refusal(tmp_path / "bad", in_a_dictionary(content))


@pytest.mark.parametrize("length", [0, 10, -1])
def test_a_truncated_pickle_is_refused(tmp_path: Path, length: int) -> None:
    whole = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]})
    assert "not a whole pickle" in refusal(tmp_path / "short", whole[:length])


def test_bytes_left_over_are_refused(tmp_path: Path) -> None:
    assert "left over" in refusal(tmp_path / "long", pickle.dumps({}) + b"x")


def test_control_characters_in_a_name_do_not_reach_the_terminal(tmp_path: Path) -> None:
    assert "\x1b" not in refusal(tmp_path / "bad", b"c\x1b[2Jos\nsystem\n.")
