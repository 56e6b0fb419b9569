"""Inside a window, ranks meet before each compiled graph that communicates.

At stage 3 every forward and backward of a window gathers. A rank that has left the window with an
exception comes to none of these gathers, so the others ask before they start one: one round through
the store for each graph, and none outside of windows."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.graph.nodes import Collective, collectives_by_group
from zpasses.ranks.vote import has_other_ranks, store_barrier
from zpasses.runtime.codegen import boxed

__all__ = ["barriers_enabled", "with_barrier"]

# Group name -> time limits of the windows that are open over it, in seconds. Windows belong to
# parameters, which several graphs read.
_limits: dict[str, list[float]] = {}


@contextlib.contextmanager
def barriers_enabled(groups: Sequence[str], timeout_s: float) -> Iterator[None]:
    """Inside, graphs that communicate over these groups meet the other ranks first.

    What the meeting cannot see, a rank that fails inside a graph, ends by time: collectives that
    start inside give up after `timeout_s`."""
    asked = [group for group in groups if has_other_ranks(group)]
    for group in asked:
        _limits.setdefault(group, []).append(timeout_s)
    try:
        with compat.limited_timeouts(asked, timeout_s):
            yield
    finally:
        for group in asked:
            _limits[group].remove(timeout_s)
            if not _limits[group]:
                del _limits[group]


def with_barrier(
    codegen: Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]],
    gm: fx.GraphModule,
    inputs: Sequence[Any],
) -> Callable[[list[Any]], Any]:
    """What `codegen` makes of a graph; where a window is open, it meets the other ranks before it
    runs.

    Raises:
        AgreementError: when the code is called and another rank has failed, is at something else,
            or does not come in time.
    """
    # Before code generation, which may take the graph to pieces.
    occasions = {group: _said(each) for group, each in collectives_by_group(gm.graph).items()}
    code = codegen(gm, inputs)

    def run(args: list[Any]) -> Any:
        if _limits:
            for group, occasion in occasions.items():
                if group in _limits:
                    store_barrier(group, occasion, max(_limits[group]))
        return code(args)

    return boxed(run) if occasions else code


def _said(sequence: Sequence[Collective]) -> str:
    """Kinds and counts, and no shapes: what ranks compiled for other batches may meet as well."""
    counts = Counter(each.op for each in sequence)
    return f"a graph with {', '.join(f'{count} {op}' for op, count in sorted(counts.items()))}"
