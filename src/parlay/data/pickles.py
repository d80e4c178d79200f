"""Pickles of plain data, read without running anything in them.

A pickle is a program: the usual reader calls any function it names. CIFAR comes as pickles of dictionaries, lists,
numbers, strings and numpy arrays, so here a few names of numpy stand for inert look-alikes that only remember what they
were given, and any other name is refused. Not even numpy's own functions are called, because a forged dtype can make
numpy read memory as pointers. Arrays are made at the end, from checked bytes.
"""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from parlay.errors import InputError


class _Refused(Exception):
    """What the pickle asks for is not plain data."""


class _DType:
    """Stands for numpy.dtype: integers of a few sizes, nothing that holds objects or fields."""

    __slots__ = ("code", "order")

    def __init__(self, code: object, *_: object) -> None:
        text = code.decode("latin1") if isinstance(code, bytes) else code
        if not isinstance(text, str) or not re.fullmatch(r"[iu][1248]", text):
            raise _Refused(f"an array of type {text!r}")
        self.code = text
        self.order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1].decode("latin1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "=", "|") or any(part is not None for part in state[2:5]):
            raise _Refused("an array with fields")
        self.order = order

    def real(self) -> "np.dtype[Any]":
        return np.dtype(self.order.replace("|", "=") + self.code)


class _Array:
    """Stands for a numpy array until its parts are known and checked."""

    __slots__ = ("dtype", "fortran", "raw", "shape")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.fortran, self.raw = state

    def real(self) -> "np.ndarray[Any, Any]":
        if not isinstance(self.dtype, _DType) or not isinstance(self.raw, bytes | bytearray):
            raise _Refused("an array that is not of plain numbers")
        if not isinstance(self.shape, tuple) or not all(isinstance(side, int) and side >= 0 for side in self.shape):
            raise _Refused("an array of no shape")
        flat = np.frombuffer(self.raw, self.dtype.real())
        return flat.reshape(self.shape, order="F" if self.fortran else "C")


class _Name:
    """Stands for an allowed name. It can be called if it was a function, and nothing can be set on it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: object) -> NoReturn:
        raise _Refused("a change to a function")


def _no_instance(*_: object) -> NoReturn:
    raise _Refused("an array made in an unusual way")


def _empty_array(*_: object) -> _Array:
    return _Array()  # the arguments are a class, a shape and a type, all of which its state sets again


def _from_buffer(raw: object, dtype: object, shape: object, order: object) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", raw))
    return array


def _latin1(text: object, encoding: object) -> bytes:
    """How Python 3 writes bytes into the old protocols; encoders of other names are not looked up."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise _Refused("a text in another encoding")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _no_instance,
    ("numpy", "dtype"): _DType,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,  # protocol 5
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _latin1,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="bytes")  # strings of Python 2 stay bytes

    def find_class(self, module: str, name: str) -> _Name:
        make = _ALLOWED.get((module, name))
        if make is None:
            raise _Refused(repr(f"{module}.{name}"[:100]))  # as repr: a forged name may hold control characters
        return _Name(make)


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle, its keys as text. Only plain data is read; all else is named and refused."""
    with path.open("rb") as file:
        try:
            content = _Unpickler(file).load()
        except _Refused as refused:
            raise InputError(
                f"{path}: asks for {refused}; refused, as only plain data and numpy arrays are read"
            ) from None
        except OSError:
            raise
        except Exception as error:  # a broken program can fail in any way
            raise InputError(f"{path}: not a whole pickle ({str(error)!r})") from None
        if file.read(1):
            raise InputError(f"{path}: bytes left over after the end of the pickle")
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}, not the dictionary of the published files")
    return {_text(key): _real(value, path) for key, value in content.items()}


def _text(key: object) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)


def _real(value: object, path: Path) -> object:
    if not isinstance(value, _Array):
        return value
    try:
        return value.real()
    except (_Refused, ValueError, OverflowError, AttributeError) as error:
        raise InputError(f"{path}: holds an array that cannot be read ({error})") from None
