"""Observers: functions that the backend calls with every graph after its passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from zpasses.pipeline.runner import PassRecord

__all__ = ["ObservedGraph", "has_observers", "notify_observers", "observe_graphs"]


@dataclass(frozen=True)
class ObservedGraph:
    """One graph that the backend compiled, as it is passed to observers."""

    name: str
    """Dynamo's compile id and the kind of graph: "0/0 joint", "0/0 forward", "0/0 backward"."""
    kind: str
    """"captured", "joint", "forward", "backward" or "inference"; "pack" for a graph that lays
    parameters into flat buffers."""
    graph: fx.Graph
    """The graph after the last pass of its level."""
    records: list[PassRecord] = field(default_factory=list)


_observers: list[Callable[[ObservedGraph], None]] = []


class observe_graphs:  # noqa: N801 - used as a context manager, like torch.no_grad
    """Context manager that calls `observer` with every graph that the backend compiles, after the
    passes of its level.
    """

    def __init__(self, observer: Callable[[ObservedGraph], None]) -> None:
        self._observer = observer

    def __enter__(self) -> None:
        _observers.append(self._observer)

    def __exit__(self, *_: object) -> None:
        _observers.remove(self._observer)


def has_observers() -> bool:
    """Whether `observe_graphs` is active."""
    return bool(_observers)


def notify_observers(graph: ObservedGraph) -> None:
    """Call every observer with a graph."""
    for observer in tuple(_observers):
        observer(graph)
