"""Every collective of a graph: what it moves, how far its wait is away, and how much of it
computation hides."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from zpasses.dumps.format import Snapshot
from zpasses.inspect.schedule import Flight, Schedule, schedule

__all__ = ["Communication", "Row", "communication"]


@dataclass(frozen=True)
class Row:
    """One collective."""

    id: int
    """Of its node."""
    node: str
    kind: str
    group: str
    ranks: int
    params: tuple[str, ...]
    nbytes: int
    """What this rank puts in."""
    full_bytes: int
    """Of the full tensors."""
    wait: str
    """Name of the first node that awaits it; its own where it waits by itself."""
    distance: int
    """Nodes between start and wait."""
    compute_us: float
    """Of the nodes between start and wait."""
    time_us: float
    """Its own, by the target's model."""
    exposed_us: float
    """How long computation stands still for it."""
    bucket: int | None
    route: str
    verdict: str


@dataclass(frozen=True)
class Communication:
    """All collectives of a graph, in the order in which they start."""

    rows: tuple[Row, ...]
    schedule: Schedule

    @property
    def nbytes(self) -> int:
        """What this rank puts in, all together."""
        return sum(row.nbytes for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values: {"collectives": [...], "totals": {...}}."""
        plan = self.schedule
        totals = {
            "collectives": len(self.rows),
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
    return Communication(tuple(_row(flight) for flight in plan.flights), plan)


def _row(flight: Flight) -> Row:
    node, collective = flight.node, flight.node.collective
    assert collective is not None
    return Row(
        id=node.id,
        node=node.name,
        kind=collective.kind,
        group=collective.group,
        ranks=collective.ranks,
        params=node.params,
        nbytes=collective.nbytes,
        full_bytes=collective.full_bytes,
        wait=flight.wait.name,
        distance=flight.distance,
        compute_us=flight.compute_us,
        time_us=flight.time_us,
        exposed_us=flight.exposed_us,
        bucket=node.tag.bucket if node.tag is not None else None,
        route=collective.route,
        verdict=collective.verdict,
    )
