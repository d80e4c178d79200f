"""A part of the page that somebody else has made: the reproduction of the paper hands its tables over as such."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True)
class Section:
    """Stands at the top of the page, before the runs."""

    title: str
    body: Markup
    """HTML, escaped by its owner."""
