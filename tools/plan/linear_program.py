"""Linear programs that are made row by row, solved by scipy's HiGHS."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping

import numpy as np

Linear = Mapping[int, float]
"""Variable -> its factor in a sum."""


def can_solve() -> bool:
    """Whether scipy is installed."""
    return importlib.util.find_spec("scipy") is not None


class LinearProgram:
    """A sum of non-negative variables to make as small as possible, under upper limits of sums."""

    def __init__(self) -> None:
        self._most: list[float] = []
        self._costs: list[float] = []
        self._rows: list[tuple[Linear, float, float]] = []

    def variable(self, most: float = math.inf, cost: float = 0.0) -> int:
        """Adds a variable between 0 and `most`, with its factor in the sum to minimise."""
        self._most.append(most)
        self._costs.append(cost)
        return len(self._most) - 1

    def at_most(self, sums: Linear, most: float, *, limits: float = 0.0) -> None:
        """Adds a row: a sum is at most `most`, plus `limits` times the limit of `least`."""
        self._rows.append((sums, most, limits))

    def at_least(self, sums: Linear, least: float) -> None:
        """Adds a row: a sum is at least `least`."""
        self.at_most({at: -factor for at, factor in sums.items()}, -least)

    def least(self, limit: float) -> float | None:
        """Returns the least sum for a limit, or None if no variables keep to it.

        Raises:
            RuntimeError: if scipy finds no answer.
        """
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        starts = np.cumsum([0, *(len(sums) for sums, *_ in self._rows)])
        factors = np.fromiter((v for sums, *_ in self._rows for v in sums.values()), dtype=float)
        columns = np.fromiter((at for sums, *_ in self._rows for at in sums), dtype=np.int64)
        shape = len(self._rows), len(self._most)
        found = linprog(
            self._costs,
            A_ub=csr_array((factors, columns, starts), shape=shape),
            b_ub=[most + (limits and limits * limit) for _, most, limits in self._rows],
            bounds=[(0.0, most) for most in self._most],
            method="highs",
        )
        if found.status == _INFEASIBLE:
            return None
        if found.status != 0:
            raise RuntimeError(f"the least time of a step was not found: {found.message}")
        return float(found.fun)


_INFEASIBLE = 2
