"""The collectives of a graph: their sizes, the distance to their waits, and how much of their time
compute hides.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from zpasses.dumps.nodes import Snapshot
from zpasses.inspect.node_spans import CollectiveSpan, Schedule, schedule


@dataclass(frozen=True)
class CollectiveRow:
    """One collective."""

    id: int
    """Id of its node."""
    node: str
    """Name of its node."""
    kind: str
    group: str
    label: str
    """Mesh dimension of the group, or empty."""
    ranks: int
    params: tuple[str, ...]
    nbytes: int
    """Bytes of this rank's input."""
    full_bytes: int
    """Bytes of the full tensors: the output of a gather, the input of a reduction."""
    wait: str
    """Name of the first node that waits for it, or its own name if it includes its wait."""
    distance: int
    """Number of nodes between start and wait."""
    compute_us: float
    """Compute time between start and wait."""
    time_us: float
    """Time of the collective, by the target's model."""
    exposed_us: float
    """Time for which compute waits for it. It may exceed `time_us` by `queued_us`."""
    queued_us: float
    """The part of `exposed_us` before its transfer starts: it queues behind earlier collectives of
    its group."""
    bucket: int | None
    route: str
    """The implementation that a pass chose, or empty."""
    decision: str
    """The pass's reason to replace the collective or to keep it, or empty."""


@dataclass(frozen=True)
class Communication:
    """All collectives of a graph and its copies to and from the host, in the order in which they
    start."""

    rows: tuple[CollectiveRow, ...]
    schedule: Schedule

    @property
    def host_copies(self) -> int:
        """Number of the rows that are copies to or from the host."""
        return len(self.rows) - self.schedule.launches

    @property
    def nbytes(self) -> int:
        """Sum of the input bytes of this rank."""
        return sum(row.nbytes for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values: {"collectives": [...], "totals": {...}}."""
        plan = self.schedule
        totals = {
            "collectives": plan.launches,
            "host_copies": self.host_copies,
            "nbytes": self.nbytes,
            "full_bytes": sum(row.full_bytes for row in self.rows),
            "communication_us": plan.communication_us,
            "compute_us": plan.compute_us,
            "exposed_us": plan.exposed_us,
            "hidden": plan.hidden,
            "total_us": plan.total_us,
        }
        return {"collectives": [asdict(row) for row in self.rows], "totals": totals}


def communication(snapshot: Snapshot) -> Communication:
    """The collectives of a graph."""
    plan = schedule(snapshot)
    return Communication(tuple(_row(span) for span in plan.collectives), plan)


def _row(span: CollectiveSpan) -> CollectiveRow:
    node, collective = span.node, span.node.collective
    assert collective is not None
    return CollectiveRow(
        id=node.id,
        node=node.name,
        kind=collective.kind,
        group=collective.group,
        label=collective.label,
        ranks=collective.ranks,
        params=node.params,
        nbytes=collective.nbytes,
        full_bytes=collective.full_bytes,
        wait=span.wait.name,
        distance=span.distance,
        compute_us=span.compute_us,
        time_us=span.time_us,
        exposed_us=span.exposed_us,
        queued_us=span.queued_us,
        bucket=node.tag.bucket if node.tag is not None else None,
        route=collective.route,
        decision=collective.decision,
    )
