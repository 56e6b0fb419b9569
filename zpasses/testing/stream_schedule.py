"""What simulated streams were given, and runs of it in any order that a device may choose.

A `StreamSchedule` holds the tasks of all streams of all ranks. Each stream runs its tasks in order.
A task may also wait for tasks of other streams. Everything else is left to a seed: `run(seed)`
draws which stream runs next, so a seed repeats its run, and no time passes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zpasses.simulate.equality import bits
from zpasses.simulate.simulator import SimulationError

StreamKey = tuple[int, str]
"""(rank, name of the stream)."""


class Point(NamedTuple):
    """A point in the order of a stream: the end of its first `tasks` tasks."""

    stream: StreamKey
    tasks: int


@dataclass(eq=False)
class Task:
    """One piece of work on one stream."""

    stream: StreamKey
    order: int
    """How many tasks the host of this rank issued before."""
    label: str
    """What it is, for messages: the node of a graph, or the operator."""
    run: Callable[[], object]
    touches: tuple[Tensor, ...] = ()
    """The memory that it reads or writes."""
    after: tuple[Point, ...] = ()
    is_ready: Callable[[], bool] = lambda: True
    """Whether what other ranks send has arrived."""


@dataclass(frozen=True)
class Difference:
    """The first task that found other bytes in its memory than in program order."""

    rank: int
    label: str
    stream: str
    seed: int
    has_nan: bool
    """Whether it found a NaN instead of a value."""

    def __str__(self) -> str:
        what = "NaN" if self.has_nan else "other bytes"
        return (
            f"rank {self.rank}: with seed {self.seed}, {self.label} on stream {self.stream} finds "
            f"{what}, unlike in program order"
        )


@dataclass(frozen=True)
class ScheduledRun:
    """One run of a schedule."""

    outputs: list[tuple[Any, ...]]
    """Per rank, what the graph or function returned, as the caller reads it."""
    found: dict[Task, list[Tensor]] = field(repr=False)
    """The bytes that each task found in the memory that it touches."""

    @property
    def has_nan(self) -> bool:
        """Whether an output of a rank has a NaN."""
        return any(bool(each.isnan().any()) for each in self._tensors())

    def differs_from(self, other: ScheduledRun) -> bool:
        """Whether an output of a rank has other bits."""
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        return any(not torch.equal(bits(ours), bits(theirs)) for ours, theirs in pairs)

    def _tensors(self) -> list[Tensor]:
        return [each for row in self.outputs for each in row if isinstance(each, Tensor)]


class StreamSchedule:
    """The tasks of all streams, and the memory that they use. Made by `SimulatedDevice`."""

    def __init__(self) -> None:
        self.streams: dict[StreamKey, list[Task]] = {}
        self.results: dict[int, Callable[[], tuple[Any, ...]]] = {}
        """Rank -> what its last task has read."""
        self.mailboxes: dict[Any, dict[int, Any]] = {}
        """What ranks have sent to each other in the current run."""
        self._initial: list[tuple[Tensor, Tensor]] = []
        self._issued: dict[int, int] = {}
        self._reference: ScheduledRun | None = None

    def add_memory(self, raw: Tensor, content: Tensor) -> None:
        """Adds memory, uint8[bytes] each, and what it holds when a run starts."""
        self._initial.append((raw, content))

    def add(
        self,
        stream: StreamKey,
        label: str,
        run: Callable[[], object],
        touches: Sequence[Tensor] = (),
        after: Sequence[Point] = (),
        is_ready: Callable[[], bool] = lambda: True,
    ) -> Point:
        """Adds a task to a stream. Returns the point at which it has ended."""
        order = self._issued[stream[0]] = self._issued.get(stream[0], 0) + 1
        queue = self.streams.setdefault(stream, [])
        queue.append(Task(stream, order, label, run, tuple(touches), tuple(after), is_ready))
        return self.now(stream)

    def now(self, stream: StreamKey) -> Point:
        """The end of all that a stream was given so far."""
        return Point(stream, len(self.streams.get(stream, ())))

    def in_program_order(self) -> ScheduledRun:
        """Runs every task before the tasks that its rank issued later, as if nothing were
        asynchronous.
        """
        if self._reference is None:
            self._reference = self._run(_ProgramOrder())
        return self._reference

    def run(self, seed: int) -> ScheduledRun:
        """Runs the tasks in an order that a seed determines.

        Raises:
            SimulationError: if no stream can continue, or a task fails.
        """
        return self._run(_DrawnOrder(seed))

    def difference(self, seed: int) -> Difference | None:
        """Runs the tasks in an order that a seed determines, and compares all memory that they find
        with a run in program order. Returns the first difference; None if all bytes are equal.
        """
        expected = self.in_program_order().found
        try:
            found = self.run(seed).found
        except _TaskError as error:  # a poisoned index, for example
            rank, stream = error.task.stream
            return Difference(rank, error.task.label, stream, seed, has_nan=False)
        for task, contents in found.items():
            for content, wanted in zip(contents, expected[task], strict=True):
                if not torch.equal(bits(content), bits(wanted)):
                    rank, stream = task.stream
                    has_nan = bool((content.isnan() & ~wanted.isnan()).any())
                    return Difference(rank, task.label, stream, seed, has_nan)
        return None

    def first_difference(self, seeds: int) -> Difference | None:
        """Returns the difference of the first of `seeds` seeds that shows one; else None."""
        return next((each for each in map(self.difference, range(seeds)) if each), None)

    def _run(self, order: _ProgramOrder | _DrawnOrder) -> ScheduledRun:
        self.mailboxes.clear()
        for raw, content in self._initial:
            raw.copy_(content)
        done = dict.fromkeys(self.streams, 0)
        found: dict[Task, list[Tensor]] = {}
        left = sum(map(len, self.streams.values()))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            while len(found) < left:
                heads = [
                    queue[done[key]]
                    for key, queue in self.streams.items()
                    if done[key] < len(queue)
                ]
                ready = [
                    task
                    for task in heads
                    if task.is_ready()
                    and all(done.get(point.stream, 0) >= point.tasks for point in task.after)
                ]
                task = order.choose(heads, ready)
                found[task] = [each.clone() for each in task.touches]
                try:
                    task.run()
                except Exception as error:
                    raise _TaskError(task, error) from error
                done[task.stream] += 1
        return ScheduledRun([self.results[rank]() for rank in sorted(self.results)], found)


class _TaskError(SimulationError):
    def __init__(self, task: Task, error: Exception) -> None:
        rank, name = task.stream
        kind = type(error).__name__
        super().__init__(f"rank {rank}, {task.label} on stream {name!r}: {kind}: {error}")
        self.task = task


class _ProgramOrder:
    def choose(self, heads: Sequence[Task], ready: Sequence[Task]) -> Task:
        first: dict[int, Task] = {}
        for task in heads:
            rank = task.stream[0]
            if rank not in first or task.order < first[rank].order:
                first[rank] = task
        able = [task for task in first.values() if task in ready]
        return min(able, key=lambda task: task.order) if able else _raise_hang(heads)


class _DrawnOrder:
    """Runs the stream of the highest priority among those that can run. Priorities are drawn, and
    one of them is drawn again now and then, so that a stream may fall far behind the others.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._priorities: dict[StreamKey, float] = {}
        self._change_rate = self._random.choice((0.0, 0.1, 1.0))

    def choose(self, heads: Sequence[Task], ready: Sequence[Task]) -> Task:
        if not ready:
            _raise_hang(heads)
        for task in heads:
            self._priorities.setdefault(task.stream, self._random.random())
        if self._random.random() < self._change_rate:
            self._priorities[self._random.choice(heads).stream] = self._random.random()
        return max(ready, key=lambda task: self._priorities[task.stream])


def _raise_hang(heads: Sequence[Task]) -> Any:
    waiting = ", ".join(
        f"stream {task.stream[1]!r} of rank {task.stream[0]} at {task.label}" for task in heads
    )
    raise SimulationError(f"the device would hang: nothing can continue. Waiting: {waiting}.")
