"""Run functions and tests on real gloo ranks."""

from zpasses.testing.ranks.outcome import Outcome, RanksError
from zpasses.testing.ranks.pool import close_pools, run_in_fresh_ranks, run_on_ranks

__all__ = [
    "Outcome",
    "RanksError",
    "close_pools",
    "run_in_fresh_ranks",
    "run_on_ranks",
]
