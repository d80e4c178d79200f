"""Fixtures for all tests. Parlay's own methods alone: the reproduction registers others in the same process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from parlay import methods


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in processes that are compared with this one: sums round by the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {name: entry for name, entry in methods._METHODS.items() if not entry.place.startswith("parlay_paper")}
    monkeypatch.setattr(methods, "_METHODS", own)
