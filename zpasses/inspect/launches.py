"""Finds runs of graphs, launches of collectives and waits in a trace.

Time on a CPU's thread is that of the events themselves. A collective over gloo lasts from its
launch until its messages have arrived ("gloo:..." in the trace), and its waits follow. A collective
of an accelerator is the kernels that its launch started.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from zpasses.inspect.traces import Trace, TraceEvent

Interval = tuple[float, float]
"""Start and end in microseconds."""

_GRAPH = re.compile(
    r"zpasses\.(graph|part):([^:]{0,80}):([a-z]{1,20}):([0-9a-f]{8})(?::((?:\d{1,6}(?:,\d{1,6})*)?))?"
)
_MARK = re.compile(r"zpasses\.(launch|wait):(\d{1,15})")
_COLLECTIVE = re.compile(r"(?:zpasses|_?c10d_functional|c10d|symm_mem)::(\w+)")
_NO_COLLECTIVE = re.compile(
    r"wait_tensor|(off|re)load_wait|_wrap_tensor_autograd|send|recv_?|recv_any_source_|monitored_barrier_"
)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_KINDS = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast")


@dataclass
class Launch:
    """One collective that ran."""

    name: str
    """The operator: "zpasses::gloo_all_gather"."""
    run: Run | None
    """None outside of graphs."""
    host: Interval
    """What the operator took on its thread."""
    number: int | None = None
    """Number of an exchange over gloo."""
    messages: list[Interval] = field(default_factory=list)
    """Transfers that the CPU's backend reports."""
    kernels: list[Interval] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """ "all_gather", "reduce_scatter", ...: the part of the name that routes share."""
        return kind_of(self.name)

    def busy(self) -> list[Interval]:
        """When it was under way."""
        if self.kernels:
            return union(self.kernels)
        ended = max((end for _, end in self.messages), default=self.host[1])
        return union([(self.host[0], max(ended, self.host[1])), *self.waits])

    def blocking(self) -> list[Interval]:
        """When the thread that computes ran it or waited for it, on a CPU."""
        return [] if self.kernels else union([self.host, *self.waits])


@dataclass
class Operator:
    """One call of another operator, directly in the code of a graph."""

    name: str
    """ "aten::mm"."""
    host: Interval
    kernels: list[Interval] = field(default_factory=list)

    @property
    def time_us(self) -> float:
        """Time of its kernels, or of the call if it has none."""
        return length(union(self.kernels)) if self.kernels else self.host[1] - self.host[0]


@dataclass
class Run:
    """One run of the code of a graph."""

    compile: str
    """Dynamo's compile id; empty for a graph outside of any compile."""
    kind: str
    """ "forward", "backward", "inference" or "flush"."""
    digest: str
    host: Interval
    thread: tuple[str, str]
    places: tuple[int, ...] | None = None
    """Places of its launches among the collectives of the graph; None for all of them."""
    is_part: bool = False
    """Whether only collectives of the graph run, before or after the rest of it."""
    parts: list[Interval] = field(default_factory=list)
    """When parts of other graphs ran inside of it."""
    launches: list[Launch] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    """Waits that no number ties to a launch."""


@dataclass
class Wait:
    """A wait for a collective."""

    run: Run | None
    host: Interval
    number: int | None = None
    """Number of the exchange over gloo that it waits for."""


@dataclass
class Work:
    """What a trace contains of the collectives and graphs of a program."""

    runs: list[Run] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    """All collectives, also those outside of graphs."""
    compute: list[Interval] = field(default_factory=list)
    """Kernels of an accelerator that belong to no collective, as a union."""


def kind_of(name: str) -> str:
    """The kind of a collective: "all_gather" for each of its operators and routes."""
    if "unshard" in name:
        return "all_gather"
    if "reduce_grad" in name:
        return "reduce_scatter"
    if "average_grad" in name:
        return "all_reduce"
    plain = name.replace("allgather", "all_gather").replace("allreduce", "all_reduce")
    plain = plain.replace("alltoall", "all_to_all")
    return next((kind for kind in _KINDS if kind in plain), name)


def find_work(trace: Trace) -> Work:
    """Runs, launches and waits of a trace."""
    walk = _Walk()
    for event in trace.events:
        if event.category not in _DEVICE and event.category != "gpu_user_annotation":
            walk.host_event(event)
    walk.assign_messages()
    walk.assign_waits()
    kernels = [event for event in trace.events if event.category in _DEVICE]
    walk.assign_kernels(kernels)
    return walk.work


@dataclass
class _Frame:
    """What contains an event, on its thread."""

    end_us: float
    run: Run | None = None
    launch: Launch | None = None
    wait: Wait | None = None
    operator: Operator | None = None


class _Walk:
    def __init__(self) -> None:
        self.work = Work()
        self._stacks: dict[tuple[str, str], list[_Frame]] = {}
        self._waits: list[Wait] = []
        self._by_number: dict[int, Launch] = {}
        self._messages: list[TraceEvent] = []
        """Messages that started on threads of the backend."""
        self._owners: dict[int, Launch | Operator | None] = {}
        """Correlation of a kernel -> what launched it."""

    def host_event(self, event: TraceEvent) -> None:
        stack = self._stacks.setdefault(event.thread, [])
        while stack and stack[-1].end_us <= event.start_us:
            stack.pop()
        outer = stack[-1] if stack else _Frame(0.0)
        if event.correlation is not None:
            self._owners[event.correlation] = outer.launch or outer.operator
        if event.name.startswith("gloo:"):
            # It outlasts what contains its start, so nothing is inside of it.
            if outer.launch is not None:
                outer.launch.messages.append((event.start_us, event.end_us))
            else:
                self._messages.append(event)
            return
        stack.append(self._frame(event, outer))

    def _frame(self, event: TraceEvent, outer: _Frame) -> _Frame:
        frame = _Frame(event.end_us, outer.run, outer.launch, outer.wait, outer.operator)
        host = (event.start_us, event.end_us)
        if mark := _MARK.fullmatch(event.name):
            if mark[1] == "launch" and outer.launch is not None:
                outer.launch.number = int(mark[2])
                self._by_number[int(mark[2])] = outer.launch
            elif mark[1] == "wait" and outer.wait is not None:
                outer.wait.number = int(mark[2])
            return frame
        graph = _GRAPH.fullmatch(event.name)
        if graph and (graph[1] == "part" or outer.run is None):
            places = (
                None if graph[5] is None else tuple(map(int, filter(None, graph[5].split(","))))
            )
            is_part = graph[1] == "part"
            frame.run = Run(graph[2], graph[3], graph[4], host, event.thread, places, is_part)
            # What a range of a profiler contains, such as operators, starts anew.
            frame.launch = frame.wait = frame.operator = None
            self.work.runs.append(frame.run)
            return frame
        if "::" not in event.name or outer.launch or outer.wait or outer.operator:
            return frame
        collective = _COLLECTIVE.fullmatch(event.name)
        if collective is not None and collective[1] == "wait_tensor":
            frame.wait = Wait(outer.run, host)
            self._waits.append(frame.wait)
        elif collective is not None and not _NO_COLLECTIVE.fullmatch(collective[1]):
            frame.launch = Launch(event.name, outer.run, host)
            self.work.launches.append(frame.launch)
            if outer.run is not None:
                outer.run.launches.append(frame.launch)
        elif outer.run is not None:
            frame.operator = Operator(event.name, host)
            outer.run.operators.append(frame.operator)
        return frame

    def assign_messages(self) -> None:
        """Messages on threads of gloo belong to the launches of their kind, in order."""
        waiting: dict[str, list[Launch]] = {}
        for launch in reversed(self.work.launches):
            if not launch.messages:
                waiting.setdefault(launch.kind, []).append(launch)
        for event in self._messages:
            launches = waiting.get(kind_of(event.name), [])
            if launches and launches[-1].host[0] <= event.start_us:
                launches.pop().messages.append((event.start_us, event.end_us))

    def assign_waits(self) -> None:
        for wait in self._waits:
            launch = self._by_number.get(wait.number) if wait.number is not None else None
            if launch is not None:
                launch.waits.append(wait.host)
            elif wait.run is not None:
                wait.run.waits.append(wait)

    def assign_kernels(self, kernels: Iterable[TraceEvent]) -> None:
        compute = []
        for event in kernels:
            owner = self._owners.get(event.correlation) if event.correlation is not None else None
            if owner is not None:
                owner.kernels.append((event.start_us, event.end_us))
            if not isinstance(owner, Launch):
                compute.append((event.start_us, event.end_us))
        self.work.compute = union(compute)


# --- intervals ------------------------------------------------------------------------------------
def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Time in disjoint intervals."""
    return sum(end - start for start, end in intervals)
