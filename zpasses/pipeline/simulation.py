"""The hook of `options={"verify": "simulate"}`: every pass's output runs against its input."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from torch import fx

__all__ = ["PassCheck", "load_simulation_check"]

PassCheck = Callable[[fx.Graph, str, bool], None]
"""(graph after the pass, name of the pass, whether sums may be reordered) -> raises PassError."""


def load_simulation_check(graph: fx.Graph) -> PassCheck:
    """Copy a graph before a pass. Returns the check to call after the pass."""
    # By name, because `testing` is a layer above this one. tests/test_imports.py lists this import.
    simulator = importlib.import_module("zpasses.testing.pass_simulation")
    return cast(PassCheck, simulator.start_simulation(graph))
