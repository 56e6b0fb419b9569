"""Collectives by copy engines: operators, the routes behind them, and how a group of ranks chooses
one."""

from zpasses.sdma import (
    ops as _ops,
)  # registers the operators, which code from a warm compile cache may call
from zpasses.sdma.lifecycle import Choice, chosen, init, report, shutdown

__all__ = ["Choice", "chosen", "init", "report", "shutdown"]

del _ops
