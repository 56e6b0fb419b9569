"""The table of suites."""

from __future__ import annotations

from collections.abc import Mapping

from zpasses.tools.stress import caches, drawn_programs, faults, graphs
from zpasses.tools.stress.cases import Suite

__all__ = ["SUITES"]

SUITES: Mapping[str, Suite] = {
    "graphs": graphs.run,
    "faults": faults.run,
    "caches": caches.run,
    "programs": drawn_programs.run,
}
"""Name -> suite, in the order in which they run."""
