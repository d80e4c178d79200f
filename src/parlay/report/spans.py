"""For `gantt` alone, until it leaves."""

from parlay.report.charts import hue as hue
from parlay.report.charts import patch as patch
