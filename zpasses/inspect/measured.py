"""What a trace says about the graphs of a dump: the measured time of each collective and operator.

A run of a graph in the trace names its compile and a digest of its collectives. The n-th launch in
a run is the n-th collective of the graph. Collectives that run apart from their graph, before or
after it, name their places. An operator is a node if the run calls it as often as the
graph does. Whatever does not fit is counted, and not assigned.
"""

from __future__ import annotations

import bisect
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zpasses.dumps.nodes import Node, Snapshot
from zpasses.inspect.find import SelectedGraph, is_executed
from zpasses.inspect.launches import (
    Interval,
    Run,
    Work,
    find_work,
    kind_of,
    length,
    union,
)
from zpasses.inspect.node_spans import Schedule, schedule
from zpasses.inspect.traces import Trace


@dataclass(frozen=True)
class MeasuredCollective:
    """One collective of a graph, as the mean of its runs."""

    time_us: float
    """From its launch until its data have arrived and been put in place; the time of its kernels on
    an accelerator."""
    exposed_us: float
    """Time for which compute stands still for it."""


@dataclass(frozen=True)
class MeasuredGraph:
    """One graph of a dump, as the mean of its runs in a trace."""

    graph: SelectedGraph
    runs: int
    total_us: float
    """Duration of a run, on the thread that computes."""
    collectives: Mapping[int, MeasuredCollective]
    """Id of a node -> its measurement."""
    operators: Mapping[int, float]
    """Id of a node -> time of its operator in microseconds."""
    exposed_us: float
    """Time in which compute stands still for any collective. Overlaps count once."""
    unjoined_compute_us: float
    """Time of a run on a CPU that belongs to no collective and to no node: that of fused kernels,
    and of Python."""
    rise_bytes: int | None = None
    """The most that a run allocates above what is allocated when it starts; None if the trace has
    no memory events."""

    @property
    def snapshot(self) -> Snapshot:
        snapshot = self.graph.graph.last.snapshot
        assert snapshot is not None
        return snapshot

    @property
    def plan(self) -> Schedule:
        """The predicted schedule."""
        return schedule(self.snapshot)

    @property
    def collectives_us(self) -> float:
        return sum(each.time_us for each in self.collectives.values())

    @property
    def compute_us(self) -> float:
        """Time of the operators that are nodes."""
        return sum(self.operators.values())

    @property
    def predicted_compute_us(self) -> float:
        """Predicted time of the same nodes."""
        return sum(self.snapshot.by_id[key].cost_us for key in self.operators)

    @property
    def predicted_rise_bytes(self) -> int:
        """The same by the memory model."""
        live = self.snapshot.live_bytes
        return self.snapshot.peak_bytes - (live[0] if live else 0)


@dataclass(frozen=True)
class Measured:
    """What a trace says about a dump."""

    trace: Trace
    graphs: tuple[MeasuredGraph, ...]
    joined_us: float
    """Time of all collectives that are nodes of the dump, over the whole trace."""
    unjoined: Mapping[str, float] = field(default_factory=dict)
    """Operator -> time of its other collectives, over the whole trace."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Why runs of graphs are not assigned -> how many."""
    outside: Mapping[str, float] = field(default_factory=dict)
    """The part of `unjoined` that ran outside of graphs, which no node of a dump can be."""

    @property
    def unjoined_us(self) -> float:
        return sum(self.unjoined.values())

    @property
    def joined_share(self) -> float:
        """The share of the measured time of collectives, 0 to 1, that is assigned to nodes."""
        whole = self.joined_us + self.unjoined_us
        return self.joined_us / whole if whole else 1.0

    @property
    def joined_share_of_graphs(self) -> float:
        """The same share of the collectives that graphs ran."""
        whole = self.joined_us + self.unjoined_us - sum(self.outside.values())
        return self.joined_us / whole if whole > 0 else 1.0

    def of(self, graph: SelectedGraph) -> MeasuredGraph | None:
        """The measurement of a graph, or None if it is not in the trace."""
        for each in self.graphs:
            if each.graph.compile is graph.compile and each.graph.graph.name == graph.graph.name:
                return each
        return None


def measure(trace: Trace, graphs: Sequence[SelectedGraph]) -> Measured:
    """Join a trace to graphs of a dump.

    Args:
        graphs: all graphs of one rank.
    """
    return _Join(trace, find_work(trace), graphs).measured()


class _Collectives:
    """The collectives of a graph, and what else the join asks of it."""

    def __init__(self, graph: SelectedGraph, snapshot: Snapshot) -> None:
        self.graph, self.snapshot = graph, snapshot
        self.nodes = [node for node in snapshot.nodes if node.collective is not None]
        self.kinds = [kind_of(node.collective.kind) for node in self.nodes if node.collective]
        names = " ".join(node.name for node in self.nodes)
        self.digest = f"{zlib.crc32(names.encode()):08x}"
        self.calls: dict[str, list[Node]] = defaultdict(list)
        for node in snapshot.nodes:
            if node.op == "call_function" and node.collective is None:
                self.calls[_operator(node.target)].append(node)
        position = snapshot.position
        self.waits = [
            [position.get(wait, -1) for wait in (node.collective.waits if node.collective else ())]
            for node in self.nodes
        ]
        """Places of the waits of each collective in the graph."""


def _operator(target: str) -> str:
    """ "aten.mm.default" -> "aten::mm", as traces name it."""
    parts = target.split(".")
    return "::".join(parts[:2]) if len(parts) >= 2 else target


class _Sums:
    """Sums over the runs of one graph."""

    def __init__(self) -> None:
        self.runs = 0
        self.total = self.exposed = self.unjoined_compute = 0.0
        self.time: dict[int, float] = defaultdict(float)
        self.blocked: dict[int, float] = defaultdict(float)
        self.operators: dict[int, float] = defaultdict(float)
        self.called: Counter[int] = Counter()
        self.rise: int | None = None


class _Busy:
    """Answers how much of a time lies outside of some intervals."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._starts = [start for start, _ in intervals]
        self._ends = [end for _, end in intervals]
        self._before = [0.0]
        """Busy time before each interval."""
        for start, end in intervals:
            self._before.append(self._before[-1] + end - start)

    def outside(self, intervals: Iterable[Interval]) -> float:
        """Time of disjoint intervals that is not busy."""
        return sum(end - start - self._until(end) + self._until(start) for start, end in intervals)

    def _until(self, at: float) -> float:
        """Busy time before a moment."""
        place = bisect.bisect_right(self._starts, at)
        return self._before[place] - max(self._ends[place - 1] - at, 0.0) if place else 0.0


class _Join:
    def __init__(self, trace: Trace, work: Work, graphs: Sequence[SelectedGraph]) -> None:
        self._trace, self._work = trace, work
        self._known: dict[tuple[str, str, str], _Collectives] = {}
        """By kind, digest and compile id. Runs outside of any compile have no id."""
        for each in graphs:
            snapshot = each.graph.last.snapshot
            kind = each.graph.name.partition(".")[0]
            if snapshot is not None and is_executed(kind):
                found = _Collectives(each, snapshot)
                for name in (each.compile.name, ""):
                    self._known.setdefault((kind, found.digest, name), found)
        self._sums: dict[int, tuple[_Collectives, _Sums]] = {}
        self._joined: set[int] = set()
        """id() of the launches that are nodes."""
        self._reasons: Counter[str] = Counter()
        self._computing = _Busy(work.compute)
        device = max((each.device for each in trace.memory), default=0)
        memory = [each for each in trace.memory if each.device == device]
        self._memory_at = [each.at_us for each in memory]
        self._allocated = [each.allocated for each in memory]

    def measured(self) -> Measured:
        ended = -math.inf
        for run in sorted(self._work.runs, key=lambda each: each.is_part):
            self._run(run, alone=run.host[0] >= ended)
            ended = max(ended, run.host[1])
        joined, unjoined = 0.0, defaultdict[str, float](float)
        outside = defaultdict[str, float](float)
        for launch in self._work.launches:
            time = length(launch.busy())
            if id(launch) in self._joined:
                joined += time
            else:
                unjoined[launch.name] += time
                if launch.run is None:
                    outside[launch.name] += time
        for run in self._work.runs:
            for wait in run.waits:
                unjoined["wait_tensor"] += wait.host[1] - wait.host[0]
        graphs = tuple(_graph(known, sums) for known, sums in self._sums.values())
        rest = (_longest_first(unjoined), dict(self._reasons), _longest_first(outside))
        return Measured(self._trace, graphs, joined, *rest)

    def _run(self, run: Run, alone: bool) -> None:
        known = self._known.get((run.kind, run.digest, run.compile))
        if known is None:
            why = f"the dump has no {run.kind} graph {run.compile} of these collectives"
            self._reasons[why] += 1
            return
        places = range(len(known.nodes)) if run.places is None else run.places
        kinds = [known.kinds[place] if place < len(known.kinds) else "" for place in places]
        if [launch.kind for launch in run.launches] != kinds:
            given = f"{len(run.launches):,} collectives, and the graph {len(known.nodes):,}"
            self._reasons[f"a run of {known.graph.title} has {given}"] += 1
            return
        if run.places is None:
            self._assign_waits(run, known)
        if run.is_part and id(known) not in self._sums:
            self._reasons[f"collectives of {known.graph.title} ran apart, and not the graph"] += 1
            return
        _, sums = self._sums.setdefault(id(known), (known, _Sums()))
        if not run.is_part:
            sums.runs += 1
            sums.total += run.host[1] - run.host[0]
        blocked: list[Interval] = []
        for launch, place in zip(run.launches, places, strict=True):
            node = known.nodes[place]
            self._joined.add(id(launch))
            waited = launch.busy() if launch.kernels else launch.blocking()
            sums.time[node.id] += length(launch.busy())
            sums.blocked[node.id] += self._computing.outside(waited)
            blocked += waited
        sums.exposed += self._computing.outside(union(blocked))
        if run.is_part:
            return
        computed = self._operators(run, known, sums)
        blocking = [part for each in run.launches for part in each.blocking()]
        busy = length(union([*blocking, *run.parts]))
        sums.unjoined_compute += max(run.host[1] - run.host[0] - busy - computed, 0.0)
        rise = self._rise(run) if alone else None
        if rise is not None:
            sums.rise = max(rise, sums.rise or 0)

    def _assign_waits(self, run: Run, known: _Collectives) -> None:
        """Waits without a number belong to the collectives without one, in the graph's order."""
        left = [place for place, launch in enumerate(run.launches) if launch.number is None]
        if sum(len(known.waits[place]) for place in left) != len(run.waits):
            return
        order = sorted((at, place) for place in left for at in known.waits[place])
        for (_, place), wait in zip(order, run.waits, strict=True):
            run.launches[place].waits.append(wait.host)
        run.waits = []

    def _operators(self, run: Run, known: _Collectives, sums: _Sums) -> float:
        """Assigns operators that a run calls as often as the graph does. Returns their time on the
        thread.
        """
        called: dict[str, list[int]] = defaultdict(list)
        for place, operator in enumerate(run.operators):
            called[operator.name].append(place)
        time = 0.0
        for name, places in called.items():
            nodes = known.calls.get(name, [])
            if len(nodes) != len(places):
                continue
            for node, place in zip(nodes, places, strict=True):
                operator = run.operators[place]
                sums.operators[node.id] += operator.time_us
                sums.called[node.id] += 1
                time += operator.host[1] - operator.host[0]
        return time

    def _rise(self, run: Run) -> int | None:
        first = bisect.bisect_left(self._memory_at, run.host[0])
        last = bisect.bisect_right(self._memory_at, run.host[1])
        if not self._allocated:
            return None
        before = self._allocated[first - 1] if first else 0
        return max(max(self._allocated[first:last], default=before) - before, 0)


def _longest_first(times: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(times.items(), key=lambda each: -each[1]))


def _graph(known: _Collectives, sums: _Sums) -> MeasuredGraph:
    runs = sums.runs
    collectives = {
        node.id: MeasuredCollective(sums.time[node.id] / runs, sums.blocked[node.id] / runs)
        for node in known.nodes
    }
    operators = {key: value / sums.called[key] for key, value in sums.operators.items()}
    waited = (sums.exposed / runs, sums.unjoined_compute / runs, sums.rise)
    return MeasuredGraph(known.graph, runs, sums.total / runs, collectives, operators, *waited)
