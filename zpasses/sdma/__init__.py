"""Collectives by copy engines: the operators, the routes that implement them, and the vote by which
a group of ranks chooses a route.
"""

# Importing it registers operators, which code from a warm compile cache may call.
from zpasses.sdma import ops as _ops
from zpasses.sdma.lifecycle import RouteChoice, init, report, route_choice, shutdown

__all__ = ["RouteChoice", "init", "report", "route_choice", "shutdown"]

del _ops
