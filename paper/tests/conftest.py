"""The tests know the methods of this package, and leave Parlay's own register as it was."""

from __future__ import annotations

import pytest

from parlay import methods
from parlay_paper import methods as own


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    own.register()
