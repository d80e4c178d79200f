"""What others put on the page: a section above the runs."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True)
class Section:
    title: str
    body: Markup
    """HTML whose foreign text its owner has escaped."""
