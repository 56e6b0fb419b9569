"""The runner: runs passes on a graph, verifies the graph after each, and records what changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import fx

from zpasses.errors import AgreementError, OptionError, PassError, raising_line
from zpasses.graph.queries import collectives, input_nbytes
from zpasses.graph.verifier import check, check_unchanged
from zpasses.graph.verifier.versions import PreviousGraph
from zpasses.pipeline.facts import Facts

log = logging.getLogger("zpasses")

Verify = Literal["off", "static", "simulate"]
"""How graphs are checked after each pass."""


class Rewrite(Protocol):
    """What the runner needs of a `zpasses.Pass`. Its `str` is its pipeline text."""

    @property
    def name(self) -> str: ...

    @property
    def facts(self) -> Facts: ...

    def rewrite(self, graph: fx.Graph) -> int: ...


@dataclass(frozen=True)
class PassRecord:
    """What one run of a pass did to one graph."""

    name: str
    text: str
    """The pass with its options, as pipeline text."""
    changes: int
    """The number of changes that the pass returned."""
    time_us: float
    """Time of the rewrite, in microseconds."""
    check_us: float
    """Time of the checks after it, in microseconds."""
    nodes_before: int
    nodes_after: int
    collectives_before: int
    collectives_after: int
    bytes_before: int
    """Bytes of the inputs of all collectives on this rank."""
    bytes_after: int


def run_passes(
    graph: fx.Graph,
    passes: Iterable[Rewrite],
    *,
    observe: Callable[[PassRecord, fx.Graph], None] | None = None,
    verify: Verify = "static",
) -> list[PassRecord]:
    """Run passes on a graph in place, and verify the graph after each.

    Args:
        observe: called after each pass with its record and the graph.
        verify: "simulate" also runs the graph before and after each pass on simulated ranks, and
            compares. "off" checks nothing.

    Raises:
        PassError: if a pass raises or leaves an invalid graph. The message names the pass, and the
            node that is invalid.
        AgreementError: if a vote of a pass fails.
        OptionError: if an option of a pass does not fit the graph.
    """
    records = []
    before = _Totals.of(graph)
    snapshot: PreviousGraph | None = None
    for each in passes:
        if verify != "off":
            snapshot = snapshot or PreviousGraph(graph)
        facts = each.facts
        changes_interface = facts.changes_inputs or facts.changes_outputs
        simulates = verify == "simulate" and facts.simulatable and not changes_interface
        simulation = None
        if simulates:
            from zpasses.simulate.pass_check import start_simulation

            simulation = start_simulation(graph, facts.changes_values)
        started = time.perf_counter()
        changes = _rewrite(each, graph)
        rewritten = time.perf_counter()
        if changes and snapshot is not None:
            check(
                graph,
                snapshot,
                each.name,
                changes_inputs=facts.changes_inputs,
                changes_outputs=facts.changes_outputs,
            )
            if simulation is not None:
                simulation(graph, each.name, facts.reorders_sums)
            snapshot = None
        elif snapshot is not None:
            check_unchanged(graph, snapshot, each.name)
        after = _Totals.of(graph) if changes else before
        records.append(
            PassRecord(
                name=each.name,
                text=str(each),
                changes=changes,
                time_us=(rewritten - started) * 1e6,
                check_us=(time.perf_counter() - rewritten) * 1e6,
                nodes_before=before.nodes,
                nodes_after=after.nodes,
                collectives_before=before.collectives,
                collectives_after=after.collectives,
                bytes_before=before.nbytes,
                bytes_after=after.nbytes,
            )
        )
        before = after
        if observe is not None:
            observe(records[-1], graph)
    return records


def _rewrite(each: Rewrite, graph: fx.Graph) -> int:
    try:
        changes = each.rewrite(graph)
    except (PassError, AgreementError, OptionError):
        raise
    except Exception as error:
        where = raising_line(error)
        raise PassError(
            f"pass {str(each)!r} failed: {type(error).__name__}: {error}"
            f"{where and f'; raised at {where}'}"
        ) from error
    if not isinstance(changes, int) or changes < 0:
        raise PassError(
            f"pass {each.name!r} returned {changes!r}; expected the number of changes that it made."
        )
    return changes


@dataclass(frozen=True)
class _Totals:
    nodes: int
    collectives: int
    nbytes: int

    @classmethod
    def of(cls, graph: fx.Graph) -> _Totals:
        found = [input_nbytes(node, each) for node, each in collectives(graph)]
        return cls(len(graph.nodes), len(found), sum(found))
