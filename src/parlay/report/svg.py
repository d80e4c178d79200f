"""The drawing kit of the charts: colours that follow the theme, figures in CSS pixels, and the way to inline SVG.

Matplotlib draws with stand-in colours, which become CSS variables afterwards: one picture serves light and dark pages.
"""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

COLOURS = 8
"""Hues of the page, --c1 to --c8; --c0 is the neutral one of serial runs."""

INK, MUTED, RULE, PAPER = "#010101", "#020202", "#030303", "#050505"
_HUES = tuple(f"#0400{n:02x}" for n in range(COLOURS + 1))
_VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"}
_VARIABLES |= {hue: f"--c{n}" for n, hue in enumerate(_HUES)}

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2), (9, 3), (2, 4))
"""Told apart by these once the hues are used up."""

STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: the page's own font, found by search, read aloud
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.family": "sans-serif",
    **dict.fromkeys(("font.size", "axes.labelsize"), 11.5),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), RULE),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), MUTED),
    "text.color": INK,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "grid.linewidth": 0.6,
    **dict.fromkeys(("xtick.minor.size", "ytick.minor.size", "ytick.major.size"), 0),
    "xtick.major.size": 3,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Look:
    """How a configuration is drawn wherever it appears on the page."""

    hue: int
    dash: int

    @property
    def colour(self) -> str:
        return _HUES[self.hue]

    @property
    def dashes(self) -> tuple[float, ...]:
        return DASHES[self.dash]


def new_figure(width: int, height: int, layout: Literal["constrained"] | None = "constrained") -> Figure:
    """In CSS pixels."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout=layout)
    FigureCanvasSVG(figure)
    return figure


def to_svg(figure: Figure, description: str, salt: str) -> Markup:
    """The picture as an element of the page: no ids that clash, no namespaces, theme colours, a description."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that matplotlib's font lacks: the page's font has them
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    width, height = (float(n) for n in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    body = svg[svg.index(">") + 1 :]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'(<g) id="[^"]*"', r"\1", body)
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r"<[^>]+>", lambda tag: re.sub(r"#0[0-9a-f]{5}\b", _variable, tag[0]), body)  # in tags, not in texts
    body = re.sub(r"\n\s*", "\n", body)
    head = Markup('<svg class="chart" role="img" aria-label="{}" width="{:g}" height="{:g}" viewBox="0 0 {:g} {:g}">')
    return head.format(escape(description), width, height, width, height) + Markup(body.strip())


def _variable(colour: re.Match[str]) -> str:
    return f"var({_VARIABLES[colour[0]]})" if colour[0] in _VARIABLES else colour[0]


def standalone(picture: Markup) -> str:
    """The picture as a file of its own, with the page's colours for light and dark screens and its paper behind it."""
    css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    colours = css[: css.index("* {")]
    style = f"<style>{colours}svg {{ background: var(--paper); }} text {{ font-family: sans-serif; }}</style>"
    head, body = picture.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{body}\n'
