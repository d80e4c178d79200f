"""The house stands as docs/architecture.md draws it: who imports whom, and how large it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def _house() -> Any:
    spec = importlib.util.spec_from_file_location("house", ROOT / "docs" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_nobody_imports_upwards_or_in_a_circle_and_no_module_is_too_large() -> None:
    assert _house().broken() == []


def test_an_import_against_the_order_is_found_wherever_it_hides(tmp_path: Path) -> None:
    house = _house()
    for text in (
        "from parlay.run import loop",
        "def f():\n    import parlay.run.loop",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from parlay.run.loop import Run",
        "from importlib import import_module\nimport_module('parlay.run.loop')",
    ):
        path = tmp_path / "clock.py"
        path.write_text(text)
        known = house.modules()
        found = house._imported(path, known)
        assert "run.loop" in found, text
        assert house._is_above("engine.clock", "run.loop")
    assert house.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c", "a"]]


def test_its_drawing_is_of_today() -> None:
    assert (ROOT / "docs" / "house.svg").read_text() == _house().drawing(), "run docs/house.py --draw"
