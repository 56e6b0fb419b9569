"""Heartbeats: a thread on every rank tells the others that its process lives, and what it does.

A rank that waits too long for another rank asks for that rank's heartbeat. The answer tells a rank
that is slow or somewhere else from one whose process is gone or stopped. The last that the thread
of a process does is to tell the others why the process ends, as far as Python can see that: an
exception or an interrupt, but not a signal that ends the process at once. It also tells that the
program has called `destroy_process_group`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from zpasses import compat

INTERVAL_S = 1.0
"""Seconds between two heartbeats of a rank."""

_MISSED = 3
"""Intervals without a heartbeat after which a process counts as gone or stopped."""

_activity = "starting"


def set_activity(activity: str) -> None:
    """Say what this rank does from now on."""
    global _activity
    _activity = activity
    if _hearts:
        _hearts[0].publish(activity)


@contextlib.contextmanager
def activity(activity: str) -> Iterator[None]:
    """Say what this rank does inside.

    After an exception that is still what it did last: an interrupt, for example, or a store that is
    gone, ends a wait for ranks that did not come.
    """
    before = _activity
    set_activity(activity)
    yield
    set_activity(before)


class _HeartbeatThread(threading.Thread):
    """Counts beats in the store, and publishes what the main thread does, with its time."""

    def __init__(self, store: Any, rank: int, tell_end: TellEnd) -> None:
        super().__init__(name="zpasses-heartbeat", daemon=True)
        # A connection of its own: the main thread may wait in the other one.
        self._store, self._rank = store.clone(), rank
        self._main_store, self._tell_end = store, tell_end
        self._reason: str | None = None
        self.group = dist.group.WORLD
        self.votes: list[Any] = []
        """The votes of the job. Those of its groups would be gone with them."""
        self._stopped = threading.Event()
        self._beats = 0

    def run(self) -> None:
        with contextlib.suppress(Exception):  # the store ends with the job
            while not self._stopped.wait(0 if self._beats == 0 else INTERVAL_S):
                if self._has_left():
                    break
                self._beats += 1
                beat = {"beat": self._beats, "now": time.monotonic()}
                self._store.set(_key("beat", self._rank), json.dumps(beat))
            reason = self._reason
            if reason is None and self._has_left():
                reason = f"its part of the job (destroy_process_group); it was {_activity}"
            if reason is not None:
                self._tell_end(self._store, self.votes, self._rank, reason)

    def _has_left(self) -> bool:
        """Whether the program has called `destroy_process_group`. No more votes come from it."""
        return self.group is not dist.group.WORLD

    def publish(self, activity: str) -> None:
        """At once, in the main thread: a process may stop in what it does next."""
        value = json.dumps({"at": activity, "since": time.monotonic()})
        with contextlib.suppress(Exception):
            self._main_store.set(_key("activity", self._rank), value)

    def end(self, reason: str | None = None) -> None:
        """Stop beating. Waits for the beat under way, though not for a store that hangs.

        Args:
            reason: how the process ends, for the other ranks; None if it goes on.
        """
        self._reason = reason
        self._stopped.set()
        self.join(_MISSED * INTERVAL_S)


TellEnd = Callable[[Any, Sequence[Any], int, str], object]
"""Tells the others, through a store and in some votes, that a rank has ended, and how."""

_hearts: list[_HeartbeatThread] = []


def start(
    tell_end: TellEnd = lambda store, votes, rank, reason: None, votes: object | None = None
) -> None:
    """Start the heartbeat of this process, once for each job that it takes part in.

    Args:
        votes: of a group, in which to tell the end.
    """
    if _hearts and _hearts[0].group is dist.group.WORLD and _hearts[0].is_alive():
        if votes is not None and all(each is not votes for each in _hearts[0].votes):
            _hearts[0].votes.append(votes)
        return
    stop()
    heart = _HeartbeatThread(compat.default_store(), dist.get_rank(), tell_end)
    heart.votes += [] if votes is None else [votes]
    heart.start()
    _hearts.append(heart)
    heart.publish(_activity)
    Finalize(None, _end_with_process, exitpriority=0)  # atexit does not run in their children


def stop(reason: str | None = None) -> None:
    """End the heartbeat of this process; `reason` as above."""
    while _hearts:
        _hearts.pop().end(reason)


# Python ends daemon threads when the interpreter exits. One that is inside the store at that moment
# would abort the process: C++ does not let a thread end in the middle of such a call.
@atexit.register
def _end_with_process() -> None:
    if _hearts:
        ends_job = _hearts[0].group is dist.group.WORLD
        stop(_how_it_ends() if ends_job else None)


def _how_it_ends() -> str:
    """Returns how the process ends: "by RuntimeError: ...; it was running graph 0/0"."""
    error = sys.exc_info()[1] or (None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
    if isinstance(error, SystemExit):
        error = error.__context__  # torch.multiprocessing leaves so
    by = f"by {type(error).__name__}: {str(error)[:500]}" if error else "its program"
    return f"{by.rstrip(': ')}; it was {_activity}"


def describe(ranks: Sequence[int]) -> str:
    """What is known of ranks that did not come: one sentence per rank.

    Takes up to three intervals, because only the next heartbeat shows whether a process lives.
    """
    try:
        return _described(ranks)
    except STORE_ERRORS as error:
        return gone_store(error)


STORE_ERRORS = (dist.DistNetworkError, dist.DistStoreError)
"""What the store raises once the process that runs it has ended."""


def gone_store(error: BaseException) -> str:
    """Returns what an error of the store means, as a sentence."""
    return (
        "The store through which ranks talk is gone, because the process that runs it has ended: "
        f"rank 0, or torchrun ({type(error).__name__}: {str(error)[:200]})."
    )


def _described(ranks: Sequence[int]) -> str:
    store = compat.default_store()
    seen = {rank: _last_beat(store, rank) for rank in ranks}
    alive: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + _MISSED * INTERVAL_S
    while time.monotonic() < deadline and len(alive) < sum(
        beat is not None for beat in seen.values()
    ):
        time.sleep(INTERVAL_S / 2)
        for rank, beat in seen.items():
            now = _last_beat(store, rank) if rank not in alive else None
            if now is not None and beat is not None and now["beat"] != beat["beat"]:
                alive[rank] = now
    return " ".join(_sentence(rank, seen[rank], alive.get(rank)) for rank in ranks)


def _last_beat(store: Any, rank: int) -> dict[str, Any] | None:
    keys = [_key("beat", rank), _key("activity", rank)]
    if not store.check(keys):
        return None
    beat, activity = (json.loads(store.get(key)) for key in keys)
    return {**beat, **activity}


def _sentence(rank: int, last: dict[str, Any] | None, alive: dict[str, Any] | None) -> str:
    if last is None:
        return f"Rank {rank} has sent no heartbeat: it has not come to a vote in this job."
    if alive is not None:
        seconds = max(alive["now"] - alive["since"], 0)
        return f"Rank {rank} is alive; it has been {alive['at']} for {seconds:.0f} s."
    return (
        f"Rank {rank} is dead or stopped: it was {last['at']}, and has sent no heartbeat for more "
        f"than {_MISSED * INTERVAL_S:g} s."
    )


def _key(kind: str, rank: int) -> str:
    return f"zpasses/{kind}/{rank}"


def _after_fork() -> None:
    _hearts.clear()  # threads do not survive a fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
