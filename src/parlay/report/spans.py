"""For `gantt` alone, until it leaves."""

from parlay.report.charts import HUES
from parlay.report.charts import patch as patch


def hue(name: str) -> int:
    return HUES.get(name, 0)
