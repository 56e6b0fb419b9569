"""The hook of `options={"verify": "simulate"}`: every pass's output runs against its input."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from torch import fx

__all__ = ["PassCheck", "load_simulation_check"]

PassCheck = Callable[[fx.Graph, str, bool], None]
"""(graph after the pass, name of the pass, whether sums may be reordered) -> raises PassError."""

_SIMULATOR = "zpasses.testing.pass_simulation"
"""Imported by name and on demand: `testing` is a room above this one."""


def load_simulation_check(graph: fx.Graph) -> PassCheck:
    """Copy a graph before a pass. Returns the check to call after the pass."""
    start = importlib.import_module(_SIMULATOR).start_simulation
    return cast(PassCheck, start(graph))
