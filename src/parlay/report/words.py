"""For `reproduction` alone, until it leaves."""

from parlay.report.tables import DASH as DASH
from parlay.report.tables import Cell as Cell
from parlay.report.tables import Column as Column
