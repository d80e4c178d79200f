"""Which gaps between two configurations are more than chance: one rule for the headline, the tables and the console."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

ERRORS = 2
"""A gap of so many standard errors counts: one of pure chance is as large about once in twenty."""


def counts_from(ours: Sequence[float], theirs: Sequence[float], samples: int | None) -> float | None:
    """The smallest gap between the means of two configurations that counts as a difference; None: it is not known.

    It is two standard errors of the gap. The squared standard error of a mean over n runs is (p (1 - p) / N + s²) / n,
    with the binomial error of accuracy p on N test samples and the standard deviation s over the runs. One run has no
    s. A loss has no binomial error: `samples` is None, and each configuration needs several runs.

    >>> round(counts_from([98.33], [97.78], 360), 1)  # two of 360 digits are nothing
    2.1
    """
    variances = [_of_mean(values, samples) for values in (ours, theirs)]
    known = [variance for variance in variances if variance is not None]
    return ERRORS * math.sqrt(sum(known)) if len(known) == len(variances) else None


def _of_mean(values: Sequence[float], samples: int | None) -> float | None:
    """Accuracies are percentages."""
    if not values or (samples is None and len(values) == 1):
        return None
    mean = statistics.fmean(values)
    binomial = mean * (100 - mean) / samples if samples is not None else 0.0
    spread = statistics.variance(values) if len(values) > 1 else 0.0
    return (binomial + spread) / len(values)
