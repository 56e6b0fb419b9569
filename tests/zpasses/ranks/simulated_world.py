"""A world of simulated ranks that talk through a simulated store, on a clock of its own.

Ranks are threads of which one runs at a time. A rank that sleeps hands over to the rank that wakes
up first, so runs are deterministic, and a wait of minutes takes no time. The store counts what each
rank asks: calls, of which each is one round trip, and bytes.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from zpasses.ranks import heartbeat

GROUP = "0"


@dataclass
class Traffic:
    """What one rank asked of the store."""

    calls: Counter[str] = field(default_factory=Counter)
    """Method of the store -> round trips."""
    sent_bytes: int = 0
    received_bytes: int = 0
    most_keys: int = 0
    """Of one call."""
    seconds: float = 0.0
    """Processor time of the rank's thread."""

    @property
    def round_trips(self) -> int:
        return self.calls.total()

    @property
    def total_bytes(self) -> int:
        return self.sent_bytes + self.received_bytes


@dataclass
class Measured:
    """What the ranks of a world returned or raised, and what they asked of the store."""

    outcomes: list[Any]
    traffic: list[Traffic]
    elapsed_s: float
    """Simulated seconds until the last rank was done."""
    keys: int
    """Keys that are in the store afterwards."""

    @property
    def total_bytes(self) -> int:
        return sum(each.total_bytes for each in self.traffic)

    @property
    def total_round_trips(self) -> int:
        return sum(each.round_trips for each in self.traffic)

    @property
    def most_round_trips(self) -> int:
        return max(each.round_trips for each in self.traffic)

    @property
    def most_bytes(self) -> int:
        return max(each.total_bytes for each in self.traffic)


class _Group:
    """The part of a process group that votes ask for, as one rank sees it."""

    group_name = GROUP

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


class _Store:
    """The store as one rank sees it: the methods of torch's stores that zpasses calls."""

    def __init__(self, world: SimulatedWorld, traffic: Traffic) -> None:
        self._data, self._world, self._traffic = world.data, world, traffic

    def _count(self, call: str, keys: Sequence[str], sent: int = 0, received: int = 0) -> None:
        self._traffic.calls[call] += 1
        self._traffic.most_keys = max(self._traffic.most_keys, len(keys))
        self._traffic.sent_bytes += sum(map(len, keys)) + sent
        self._traffic.received_bytes += received

    def has_extended_api(self) -> bool:
        return self._world.extended

    def set(self, key: str, value: str) -> None:
        self._count("set", [key], len(value))
        self._data[key] = value.encode()

    def get(self, key: str) -> bytes:
        assert key in self._data, f"a rank would wait in get({key!r}), without its time limit"
        self._count("get", [key], received=len(self._data[key]))
        return self._data[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        assert self._world.extended
        found = [self._data[key] for key in keys]
        self._count("multi_get", keys, received=sum(map(len, found)))
        return found

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys)
        return all(key in self._data for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._count("add", [key], received=8)
        total = int(self._data.get(key, b"0")) + amount
        self._data[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._data.get(key, b"").decode() == expected:
            self._data[key] = desired.encode()
        self._count("compare_set", [key], len(desired), len(self._data[key]))
        return self._data[key]

    def delete_key(self, key: str) -> bool:
        self._count("delete_key", [key])
        return self._data.pop(key, None) is not None


class SimulatedWorld:
    """Ranks of one process group, which run a function at the same simulated time.

    Args:
        ranks: number of ranks.
        extended: whether the store can read several keys at once. A FileStore cannot.
        store: rank -> a store of torch that it takes instead; what ranks ask of it is not counted.
    """

    def __init__(
        self, ranks: int, *, extended: bool = True, store: Callable[[int], Any] | None = None
    ) -> None:
        self.ranks, self.extended, self._store = ranks, extended, store
        self.data: dict[str, bytes] = {}
        self._groups = [_Group(rank, ranks) for rank in range(ranks)]
        self._now = 0.0
        self._sleepers: list[tuple[float, int, threading.Event]] = []
        self._turns = 0
        self._here = threading.local()

    def run(
        self,
        program: Callable[[int], Any],
        *,
        absent: Sequence[int] = (),
        late_s: Callable[[int], float] = lambda rank: 0.0,
    ) -> Measured:
        """Run a program on all ranks.

        Args:
            program: called with the rank. Exceptions are outcomes, too.
            absent: ranks that do not run it.
            late_s: rank -> simulated seconds after which it starts.
        """
        traffic = [Traffic() for _ in range(self.ranks)]
        outcomes: list[Any] = [None] * self.ranks
        done, began, last = threading.Semaphore(0), self._now, [self._now]

        def start(rank: int, turn: threading.Event) -> None:
            turn.wait()
            self._here.group = self._groups[rank]
            make = self._store or (lambda rank: _Store(self, traffic[rank]))
            self._here.store = make(rank)
            started = time.thread_time()
            try:
                outcomes[rank] = program(rank)
            except Exception as error:
                outcomes[rank] = error
            traffic[rank].seconds = time.thread_time() - started
            last[0] = self._now
            done.release()
            self._hand_over()

        running = [rank for rank in range(self.ranks) if rank not in absent]
        threading.stack_size(256 << 10)
        try:
            for rank in running:
                turn = threading.Event()
                self._wake_at(began + late_s(rank), turn)
                threading.Thread(target=start, args=(rank, turn), daemon=True).start()
        finally:
            threading.stack_size(0)
        with self._patched():
            self._hand_over()
            for _ in running:
                done.acquire()
        return Measured(outcomes, traffic, last[0] - began, len(self.data))

    # --- the clock --------------------------------------------------------------------------------
    def _wake_at(self, at: float, turn: threading.Event) -> None:
        self._turns += 1
        heapq.heappush(self._sleepers, (at, self._turns, turn))

    def _hand_over(self) -> None:
        if self._sleepers:
            self._now, _, turn = heapq.heappop(self._sleepers)
            turn.set()

    def _sleep(self, seconds: float) -> None:
        turn = threading.Event()
        self._wake_at(self._now + seconds, turn)
        self._hand_over()
        turn.wait()

    # --- what ranks see ---------------------------------------------------------------------------
    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        def group(*_: Any) -> _Group:
            found: _Group = self._here.group
            return found

        def set_activity(activity: str) -> None:
            self._here.store.set(heartbeat._key("activity", group().rank()), _beat(activity))

        class World:
            WORLD = property(group)

        clock = SimpleNamespace(monotonic=lambda: self._now, sleep=self._sleep)
        dist = SimpleNamespace(
            is_initialized=lambda: True, get_rank=lambda: group().rank(), group=World()
        )
        compat = {
            "process_group": group,
            "default_store": lambda: self._here.store,
            "group_ranks": lambda name: list(range(self.ranks)),
            "group_backend": lambda name: "gloo",
            "group_name": lambda group: GROUP,
            "mesh_dimension": lambda name: "",
            "is_fake_world": lambda: False,
            "global_rank": lambda: group().rank(),
        }
        with contextlib.ExitStack() as stack:
            for name, value in compat.items():
                stack.enter_context(mock.patch(f"zpasses.compat.{name}", value))
            for module in ("vote", "notes", "heartbeat"):
                stack.enter_context(mock.patch(f"zpasses.ranks.{module}.time", clock))
            for module in ("vote", "notes", "failures", "mesh_comparison"):
                stack.enter_context(mock.patch(f"zpasses.ranks.{module}.dist", dist))
            stack.enter_context(mock.patch.object(heartbeat, "start"))
            stack.enter_context(mock.patch.object(heartbeat, "set_activity", set_activity))
            yield


def _beat(activity: str) -> str:
    return json.dumps({"at": activity, "since": 0.0})
