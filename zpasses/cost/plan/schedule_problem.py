"""What a scheduler of collectives has to know of a graph: durations, bytes, and what can move.

Copies to the host and back are launches of one member: one to the host is planned as a reduction,
and one from the host as a gather.

The nodes of a graph are divided into those that move with a collective and the rest, whose order is
kept. The rest is cut into segments. A collective starts, and is awaited, between two segments:
slot `s` is the place right before segment `s`. Figures of memory are equal on all ranks (see
`zpasses.cost.memory.collective_moves`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch import fx

from zpasses import compat
from zpasses.cost.memory.collective_memory import reinplaceable_all_reduces, scratch_bytes
from zpasses.cost.memory.collective_moves import (
    SchedulableCollective,
    equal_liveness,
    movable_collectives,
)
from zpasses.cost.plan.bucket_keys import BucketKey, bucket_key, member_packing_bytes
from zpasses.cost.time.clock import Channel, CollectiveTiming
from zpasses.cost.time.fused_kernels import FusedKernels, fuses
from zpasses.cost.time.roofline import (
    collective_on_route_us,
    compute_us,
    copy_engine_launch_us,
    copy_us,
    durations_us,
)
from zpasses.cost.time.route_figures import engine_obstacle, engine_routes, route_figures
from zpasses.cost.time.step_time import (
    GraphTimings,
    Transfer,
    collective_timing,
    host_copy_timing,
    latency_of,
    transfer_of,
)
from zpasses.cost.time.target import Target
from zpasses.graph.aliases import GETITEM, buffer_readers, is_view, memory_root, root_output
from zpasses.graph.dialect import AVERAGE_GRAD, TO_HOST
from zpasses.graph.host_copies import FROM_HOST, HostCopy, is_host_wait
from zpasses.graph.queries import (
    Collective,
    collective_of,
    is_dialect,
    is_wait,
    nbytes,
    started_by,
    value_of,
)
from zpasses.graph.reduction_groups import reducing_groups
from zpasses.graph.tags import is_resident


@dataclass(frozen=True)
class Average:
    """The average of a reduced gradient over replicas, which starts when the reduction is awaited,
    and is awaited at the end of the graph. No plan moves it.
    """

    group: str
    """Process group of the replicas. Averages that start together share a launch."""
    timing: CollectiveTiming
    latency_us: float
    """The part of its duration that does not depend on its bytes."""


@dataclass(frozen=True, eq=False)
class Job:
    """A collective of one tensor that may be moved and merged."""

    number: int
    """Index in `ScheduleProblem.jobs`."""
    is_gather: bool
    """Whether it is a gather; else a reduction."""
    key: BucketKey
    earliest: int
    """First slot where it can start."""
    latest: int
    """Last slot where it can start and be awaited: for a gather that of its first consumer, for a
    reduction the end of the graph."""
    timing: CollectiveTiming
    latency_us: float
    """The part of its duration that does not depend on its bytes."""
    full_bytes: int
    """Bytes of the full tensor: a gather's output, a reduction's input."""
    launch_bytes: int
    """Bytes that are allocated from its start until its wait besides the full tensor."""
    packed_bytes: int
    """Bytes that it adds to the buffer that a bucket is packed into; 0 if buckets are not packed.
    """
    held_from: int
    """For reductions: the first segment in which only the reduction needs its input."""
    result_bytes: int
    """For reductions: bytes of the result that live from its start to the end of the graph."""
    start_us: float
    """Duration of the kernels that prepare its input and move with its start."""
    wait_us: float
    """Duration of the kernels that complete its result and move with its wait."""
    packing_us: tuple[float, float]
    """Duration of the copies that it costs in a bucket, at its start and at its wait. At least that
    in the graph."""
    resident: bool = False
    """For gathers: the full tensor counts as live in the whole graph, because the parameter is
    cached between calls."""
    ranks: int = 1
    """Size of its process group."""
    on_routes: Mapping[str, Job] = field(default_factory=dict)
    """The same gather by each copy-engine route that can run it; empty in these jobs themselves."""
    reload_us: float = 0.0
    """Duration of the copy of its shard from the host, which ends before it starts."""
    average: Average | None = None
    """For reductions within a replica: what follows. Schedulers leave it out, as the pass that
    starts averages runs later; `evaluate` counts it if it is asked to."""
    to_host: CollectiveTiming | None = None
    """For reductions: the copy of the result to the host, which follows. It is left out and counted
    as an average is."""

    def numbered(self, number: int) -> Job:
        """Returns the job with another number."""
        others = {route: job.numbered(number) for route, job in self.on_routes.items()}
        return replace(self, number=number, on_routes=others)

    @cached_property
    def ahead_bytes(self) -> int:
        """For gathers: bytes that the full tensor adds from its start to its first consumer."""
        return 0 if self.resident else self.full_bytes

    @cached_property
    def per_launch_us(self) -> float:
        """What a launch costs besides its bytes."""
        return self.latency_us + self.timing.issue_us

    @cached_property
    def transfer_us(self) -> float:
        """The part of its duration that depends on its bytes."""
        return max(0.0, self.timing.duration_us - self.latency_us)

    @cached_property
    def latencies(self) -> float:
        """Time that it adds to a launch, by what the launch costs besides its bytes."""
        return self.transfer_us / max(self.per_launch_us, 1e-9)

    @cached_property
    def fastest(self) -> Job:
        """The job with the better figures of each route, for lower bounds."""
        if not self.on_routes:
            return self
        ways = [self, *self.on_routes.values()]
        latency = min(way.latency_us for way in ways)
        timing = replace(
            self.timing,
            duration_us=latency + min(way.transfer_us for way in ways),
            compute_slowdown=min(way.timing.compute_slowdown for way in ways),
            collective_slowdown=min(way.timing.collective_slowdown for way in ways),
        )
        return replace(self, timing=timing, latency_us=latency, on_routes={})

    @property
    def channel(self) -> Channel:
        return self.timing.channel

    @cached_property
    def launch_key(self) -> Hashable:
        """Equal for jobs that may share a launch."""
        alone = self.number if self.key.mode == "single" else None
        # Calls that find parameters cached leave out the launches that gather no others.
        return self.is_gather, self.resident, self.key.mode, self.key.compatibility, alone


@dataclass(frozen=True)
class FixedEvent:
    """The start or the wait of a collective that stays where it is."""

    slot: int
    number: int
    """Equal for the start and the wait of one collective; negative."""
    timing: CollectiveTiming | None
    """None for a wait."""


@dataclass(frozen=True, eq=False)
class ScheduleProblem:
    """A graph as a scheduler sees it."""

    nodes: tuple[fx.Node, ...]
    """Nodes that stay in order."""
    slots: tuple[int, ...]
    """Index in `nodes` of the first node of each segment. The last segment is the output."""
    work_us: tuple[float, ...]
    """Duration of the kernels of each segment."""
    live_bytes: np.ndarray
    """Largest live memory in each segment if every collective starts and is awaited where its
    result is first needed (gathers) or where its input is ready (reductions). int64."""
    jobs: tuple[Job, ...]
    """Gathers in the order of their first consumers, then reductions in the order in which their
    inputs are ready."""
    items: tuple[SchedulableCollective, ...]
    """The nodes of each job; empty if the problem is not that of a graph
    (`zpasses plan --repeat-layers`)."""
    fixed: tuple[FixedEvent, ...]
    """In graph order."""
    regrouped: tuple[str, ...] = ()
    """Process groups whose gradient reductions will run on a second group."""
    inside_kernels: frozenset[int] = frozenset()
    """Slots where no gather needs to start, because no kernel waits for one there. Inductor may
    make one kernel of those around, so that code would start it after them."""
    engine_us: Callable[[str, Sequence[int], int], float] | None = None
    """(copy-engine route, bytes of each full tensor, ranks) -> duration of one launch; None if the
    target has no route to plan with."""
    launch_costs: dict[tuple[tuple[int, ...], str], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Job numbers of a launch, and its route ("" for compute units) -> its `LaunchCost`. Most
    launches are part of many plans."""

    @property
    def end(self) -> int:
        """The slot before the graph's output."""
        return len(self.slots) - 1

    @cached_property
    def work_before_us(self) -> tuple[float, ...]:
        """Duration of the kernels before each slot, and of all kernels."""
        return tuple(itertools.accumulate(self.work_us, initial=0.0))

    @cached_property
    def held_bytes(self) -> np.ndarray:
        """Live memory in each segment with gradients until the end, but without full tensors that a
        plan gathers and results of reductions. int64.
        """
        changes = np.zeros(len(self.slots), dtype=np.int64)
        for job in self.jobs:
            if job.is_gather:
                changes[job.latest] -= job.ahead_bytes
            else:
                changes[job.held_from] += job.full_bytes
                changes[job.earliest] -= job.result_bytes
        return np.asarray(self.live_bytes + np.cumsum(changes))

    @cached_property
    def has_followers(self) -> bool:
        """Whether an average or a copy to the host follows one of the reductions."""
        return any(job.average is not None or job.to_host is not None for job in self.jobs)

    @cached_property
    def routes(self) -> tuple[str, ...]:
        """The copy-engine routes that can run one of the gathers."""
        return tuple(dict.fromkeys(route for job in self.jobs for route in job.on_routes))

    def without(self, gone: Collection[int]) -> ScheduleProblem:
        """Returns the graph without some of its collectives, given by their job numbers."""
        stays = [job.number for job in self.jobs if job.number not in gone]
        return replace(
            self,
            jobs=tuple(self.jobs[old].numbered(new) for new, old in enumerate(stays)),
            items=tuple(self.items[old] for old in stays) if self.items else (),
        )


_FEWEST_SEGMENTS = 4000
_SEGMENTS_PER_JOB = 12


def problem_of(
    graph: fx.Graph,
    target: Target,
    mode: Literal["auto", "coalesced", "flat"] = "auto",
    *,
    second_group: bool = False,
    copy_engines: bool = False,
    items: Sequence[SchedulableCollective] | None = None,
) -> ScheduleProblem:
    """Reads a graph whose parameter gathers, gradient reductions and host copies may all move.

    Args:
        graph: a graph with fake values, whose movable collectives have one tensor each.
        target: hardware that the graph runs on.
        mode: how collectives share a launch; see `zpasses.cost.plan.bucket_keys.bucket_key`.
        second_group: whether gradient reductions will run on a second process group.
        copy_engines: whether gathers may take the target's copy-engine routes.
        items: what may move; None for all.
    """
    if items is None:
        items = movable_collectives(graph)
    routes = engine_routes(target) if copy_engines else ()
    return _Reader(graph, items, mode, target, second_group, routes).read()


class _Reader:
    def __init__(
        self,
        graph: fx.Graph,
        items: Sequence[SchedulableCollective],
        mode: Literal["auto", "coalesced", "flat"],
        target: Target,
        second_group: bool,
        routes: Sequence[str],
    ) -> None:
        self._items, self._mode, self._target = items, mode, target
        figures = route_figures(target)
        self._engines = {route: figures[route] for route in routes}
        self._regrouped = reducing_groups(item.started for item in items) if second_group else ()
        self._timings = GraphTimings(graph, target, self._regrouped)
        self._kernels = FusedKernels()
        self._memory = equal_liveness(graph, self._kernels)
        self._index = {node: at for at, node in enumerate(self._memory.nodes)}
        self._in_place = reinplaceable_all_reduces(graph)
        self._moving: set[fx.Node] = set()
        for item in items:
            self._moving.update((*item.inputs, item.started, item.wait, *item.results))
        self._nodes = tuple(node for node in graph.nodes if node not in self._moving)
        self._kept = [self._index[node] for node in self._nodes]
        self._kept_array = np.array(self._kept, dtype=np.int64)

    def read(self) -> ScheduleProblem:
        first = next(
            (i for i, node in enumerate(self._nodes) if node.op not in ("placeholder", "get_attr")),
            len(self._nodes) - 1,
        )
        uses = {item: self._first_use(item) for item in self._items if item.is_gather}
        ready = {item: self._ready(item) for item in self._items if not item.is_gather}
        bounds = {first, len(self._nodes) - 1, *uses.values(), *ready.values()}
        fixed = self._fixed_events()
        bounds.update(at for at, _, _ in fixed)
        work = durations_us(self._nodes, self._target, self._kernels)
        slots = _segments(work, {max(first, each) for each in bounds}, first, len(self._items))
        slot_of = {at: slot for slot, at in enumerate(slots)}
        inside = self._inside_kernels() - {*uses.values(), *(at for at, _, _ in fixed)}
        gathers = sorted(uses, key=lambda item: (uses[item], self._index[item.started]))
        reductions = sorted(ready, key=lambda item: (ready[item], self._index[item.started]))
        ordered = (*gathers, *reductions)
        uses_and_ready = {**uses, **ready}
        places = [slot_of[max(first, uses_and_ready[item])] for item in ordered]
        return ScheduleProblem(
            self._nodes,
            tuple(slots),
            tuple(
                sum(work[start:end])
                for start, end in zip(slots, [*slots[1:], len(work)], strict=True)
            ),
            self._live_bytes(slots, uses, ready),
            self._jobs(ordered, places, slots),
            ordered,
            tuple(FixedEvent(slot_of[max(first, at)], key, timing) for at, key, timing in fixed),
            self._regrouped,
            frozenset(slot_of[at] for at in inside if at in slot_of),
            self._engine_us if self._engines else None,
        )

    def _first_use(self, item: SchedulableCollective) -> int:
        """Index in the kept nodes of a gather's first consumer."""
        readers = [self._index[user] for user in item.wait.users]
        return self._kept_at(min(readers, default=self._index[item.wait]))

    def _ready(self, item: SchedulableCollective) -> int:
        """Index of the first kept node after the input of a reduction."""
        return self._kept_at(self._index[item.source] + 1)

    def _inside_kernels(self) -> set[int]:
        """Indices of kept nodes with a kernel before them and one at or after them, and no operator
        between the two.
        """
        inside, after_kernel, since = set[int](), False, 0
        for at, node in enumerate(self._nodes):
            is_part = is_view(node) or node.target is GETITEM or self._kernels.is_inlined(node)
            if node.op != "output" and (node.op != "call_function" or is_part):
                continue
            is_kernel = fuses() and self._kernels.has_kernel(node)
            if after_kernel and is_kernel:
                inside.update(range(since + 1, at + 1))
            after_kernel, since = is_kernel, at
        return inside

    def _kept_at(self, index: int) -> int:
        """Index of the first kept node at or after a node of the graph."""
        return int(np.searchsorted(self._kept_array, index))

    def _fixed_events(self) -> list[tuple[int, int, CollectiveTiming | None]]:
        found: list[tuple[int, int, CollectiveTiming | None]] = []
        numbers: dict[fx.Node, int] = {}
        for at, node in enumerate(self._nodes):
            if is_wait(node) or is_host_wait(node):
                started = started_by(node)
                if started in numbers:
                    found.append((at, numbers[started], None))
            elif (transfer := transfer_of(node)) is not None and not is_dialect(node):
                numbers[node] = -1 - len(numbers)
                timing = self._timings.of(node, transfer)
                found.append((at, numbers[node], timing))
        return found

    def _jobs(
        self,
        ordered: Sequence[SchedulableCollective],
        places: Sequence[int],
        slots: Sequence[int],
    ) -> tuple[Job, ...]:
        end = len(slots) - 1
        jobs = []
        kept_bytes = self._bytes_until_end()
        for number, (item, at) in enumerate(zip(ordered, places, strict=True)):
            gather = item.is_gather
            transfer, key = transfer_of(item.started), bucket_key(item, self._mode)
            assert transfer is not None
            timing = self._timings.of(item.started, transfer)
            copies = [
                host_copy_timing(HostCopy("in", nbytes(value_of(node))), self._target)
                for node in item.inputs
                if node.target is FROM_HOST
            ]
            prepared = [node for node in item.inputs if node.target is not FROM_HOST]
            held = at
            if not gather:
                last = self._natural_last(item)
                while held < end and self._kept[slots[held]] <= last:
                    held += 1
            job = Job(
                number,
                gather,
                key,
                earliest=0 if gather else at,
                latest=at if gather else end,
                timing=timing,
                latency_us=latency_of(item.started, transfer, self._target),
                full_bytes=item.full_bytes,
                launch_bytes=item.prepared_bytes + self._result_bytes(item),
                packed_bytes=member_packing_bytes(item, key),
                held_from=held,
                result_bytes=0
                if gather
                else sum(kept_bytes.get(node, 0) for node in (item.started, *item.results)),
                start_us=sum(compute_us(node, self._target) for node in prepared)
                + sum(each.issue_us for each in copies),
                # Gradients go to the host on the side once the collectives have their places.
                wait_us=sum(
                    compute_us(node, self._target)
                    for node in item.results
                    if node.target is not TO_HOST
                ),
                packing_us=_packing_us(item, key, gather, self._target),
                resident=gather and is_resident(item.wait),
                ranks=_ranks_of(transfer),
                reload_us=sum(each.duration_us for each in copies),
                average=self._average(item),
                to_host=next(
                    (
                        host_copy_timing(HostCopy("out", nbytes(value_of(node))), self._target)
                        for node in item.results
                        if node.target is TO_HOST
                    ),
                    None,
                ),
            )
            jobs.append(replace(job, on_routes=self._on_routes(item, job)))
        return tuple(jobs)

    def _average(self, item: SchedulableCollective) -> Average | None:
        node = next((each for each in item.results if each.target is AVERAGE_GRAD), None)
        found = None if node is None else collective_of(node)
        if node is None or found is None or len(compat.group_ranks(found.group)) < 2:
            return None
        lowered = replace(found, op="all_reduce")
        latency = collective_timing(node, lowered, self._target, full_bytes=0).duration_us
        return Average(found.group, collective_timing(node, lowered, self._target), latency)

    def _on_routes(self, item: SchedulableCollective, job: Job) -> dict[str, Job]:
        """Returns a gather as each copy-engine route runs it that can."""
        collective = collective_of(item.started)
        if not self._engines or not job.is_gather or collective is None:
            return {}
        ranks = compat.group_ranks(collective.group)
        if engine_obstacle(ranks, self._target) or value_of(item.source).is_quantized:
            return {}
        return {route: self._on_route(route, item, job, collective) for route in self._engines}

    def _on_route(
        self, route: str, item: SchedulableCollective, job: Job, collective: Collective
    ) -> Job:
        # A launch of several tensors packs them, and copies them out of a flat one.
        packed = item.tag.nbytes + item.full_bytes if job.key.mode == "coalesced" else None
        timing = self._timings.of(item.started, collective, route=route)
        once, twice = (
            collective_on_route_us(self._engines[route], "gather", size, job.ranks, self._target)
            for size in (job.full_bytes, 2 * job.full_bytes)
        )
        return replace(
            job,
            timing=timing,
            # All but what grows with the bytes: each chunk and each copy starts anew.
            latency_us=timing.duration_us - (twice - once),
            launch_bytes=job.launch_bytes - scratch_bytes(item.started),
            packed_bytes=job.packed_bytes if packed is None else packed,
        )

    def _engine_us(self, route: str, full_bytes: Sequence[int], ranks: int) -> float:
        figures = self._engines[route]
        return copy_engine_launch_us(figures, "all_gather", full_bytes, ranks, self._target)

    def _result_bytes(self, item: SchedulableCollective) -> int:
        """Bytes of a reduction's result that are freed where its last steps have read it."""
        if item.is_gather or not item.results or item.started in self._in_place:
            return 0
        return nbytes(value_of(item.started))

    def _bytes_until_end(self) -> dict[fx.Node, int]:
        """Returns the bytes of what lives at the end of the graph, by the node that makes it."""
        found: dict[fx.Node, int] = {}
        for buffer in self._memory.buffers:
            if buffer.last == len(self._index) - 1:
                found[buffer.node] = found.get(buffer.node, 0) + buffer.nbytes
        return found

    def _natural_last(self, item: SchedulableCollective) -> int:
        """Index of the last node that needs a reduction's input for something else."""
        base = memory_root(item.source)
        if item.started in self._in_place and any(
            node.op == "output" for node in buffer_readers(item.wait)
        ):
            return len(self._index)  # the gradient itself is the result
        readers = [self._index[node] for node in buffer_readers(base) if node not in self._moving]
        return max([self._index[base], *readers])

    def _live_bytes(
        self,
        slots: Sequence[int],
        uses: dict[SchedulableCollective, int],
        ready: dict[SchedulableCollective, int],
    ) -> np.ndarray:
        size = len(self._index)
        changes = np.zeros(size + 1, dtype=np.int64)
        first_of: dict[fx.Node, int] = {}
        for item, at in uses.items():
            first_of.update(dict.fromkeys(item.inputs, size))
            first_of[item.started] = 0 if is_resident(item.wait) else self._kept[at]
        last_of: dict[tuple[fx.Node, int], int] = {}
        for item, at in ready.items():
            # Results exist beside the gradient, which is counted until the node before the slot.
            before = self._kept[max(0, at - 1)]
            first_of[item.started] = before
            first_of.update(dict.fromkeys(item.results, before))
            last_of[root_output(memory_root(item.source))] = self._natural_last(item)
        for buffer in self._memory.buffers:
            if buffer.scratch and buffer.node in self._moving:
                continue
            first = first_of.get(buffer.node, buffer.first)
            last = min(buffer.last, last_of.get((buffer.node, buffer.output), buffer.last))
            if first <= last:
                changes[first] += buffer.nbytes
                changes[last + 1] -= buffer.nbytes
        live = np.cumsum(changes[:-1])
        starts = [0, *(self._kept[at] for at in slots[1:])]
        return np.maximum.reduceat(live, starts) if size else live


def _ranks_of(transfer: Transfer) -> int:
    return len(compat.group_ranks(transfer.group)) if isinstance(transfer, Collective) else 1


def _segments(work: Sequence[float], bounds: set[int], first: int, jobs: int) -> list[int]:
    """Cuts the kept nodes into segments at `bounds`, and elsewhere where enough work is between."""
    most = max(_FEWEST_SEGMENTS, _SEGMENTS_PER_JOB * jobs)
    quantum = sum(work[first:]) / most
    slots = [first]
    since = 0.0
    for at in range(first + 1, len(work)):
        since += work[at - 1]
        if at in bounds or (since > quantum and work[at]):
            slots.append(at)
            since = 0.0
    return slots


def _packing_us(
    item: SchedulableCollective, key: BucketKey, gather: bool, target: Target
) -> tuple[float, float]:
    if key.mode != "flat":
        return 0.0, 0.0
    packed = item.tag.nbytes if gather else item.full_bytes
    # One copy makes the tensor flat, and the next one concatenates.
    return 2 * copy_us(packed, target), copy_us(item.full_bytes, target)
