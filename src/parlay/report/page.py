"""The HTML page: what was loaded in, one self-contained text out. It asks no network for anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from parlay.report import charts, tables
from parlay.report.groups import Comparison
from parlay.report.load import Content, Inputs, Run
from parlay.report.section import Section

TIMELINES = 3  # of a comparison, one for each of so many configurations


def render(comparisons: Sequence[Comparison], given: Inputs, title: str, sections: Sequence[Section] = ()) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=title,
        sections=sections,
        comparisons=[_comparison(one) for one in comparisons],
        benches=[
            (tables.bench_title(one), one, tables.bench(one), _facts(one["environment"] or {})) for one in given.benches
        ],
    )


def _comparison(found: Comparison) -> dict[str, Any]:
    swatches = {label: charts.swatch(look) for label, look in charts.looks(found).items()}
    lines = [(swatches[one.label], one.label) for one in charts.drawn(found)]
    stored = [one for one in found.configurations if charts.interfaces(one)]
    timed = [(one, run) for one in found.configurations if (run := next((r for r in one.runs if r.timeline), None))]
    score = tables.score_name(found)
    curves = [(found.score, score, False), ("train_loss", "training loss, whole network", False)]
    curves += [(found.score, score, True)] if tables.honest(found) else []
    return {
        "task": f"{found.dataset} · {found.model}",
        "headline": tables.headline(found),
        "warnings": [run for run in found.runs if not run.finished or run.summary["message"]],
        "table": tables.comparison(found),
        "notes": tables.notes(found),
        "differences": tables.differences(found),
        "swatches": [swatches[one.label] for one in found.configurations],
        "legend": lines,
        "left_out": len(found.configurations) - len(lines),
        "curves": [charts.curves(found, *curve) for curve in curves] if lines else [],
        "violations": [(swatches[one.label], one.label, charts.violation(found, one)) for one in stored],
        "interfaces": [
            (charts.swatch(charts.interface_look(k)), f"interface {k + 1}")
            for k in range(max(map(charts.interfaces, stored), default=0))
        ],
        "timelines": [(one.label, *charts.timeline(run.timeline, one.label)) for one, run in timed[:TIMELINES]],
        "runs": [
            (swatches[one.label], one.label, run, _facts(_about(run)))
            for one in found.configurations
            for run in one.runs
        ],
    }


def _about(run: Run) -> dict[str, Any]:
    told = run.summary
    return {
        "seed": run.recipe.get("seed"),
        "epochs": len(run.epochs),
        "test accuracy, %": told["test_accuracy"] and tables.percent(told["test_accuracy"]),
        "test loss": told["test_loss"] and tables.loss(told["test_loss"]),
        **{f"{name}, s": value and tables.seconds(value) for name, value in told["seconds"].items()},
        "parameters": told["parameters"] and f"{told['parameters']:,.0f}",
        "cuts before blocks": [f"{cut:g}" for cut in told["cuts"] or ()],
        **told["environment"],
    }


def _facts(found: Content) -> list[tuple[str, str]]:
    """As text, what is known; lists with their repetitions counted: a device per stage reads cpu × 3."""
    facts = []
    for key, value in found.items():
        counts = Counter(map(str, value if isinstance(value, list) else [value]))
        text = ", ".join(name if count == 1 else f"{name} × {count}" for name, count in counts.items())
        facts += [(str(key), text)] if value is not None and text else []
    return facts
