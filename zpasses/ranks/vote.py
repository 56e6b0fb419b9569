"""Votes: the ranks of a process group exchange what they know, and every rank gets the same result.

A vote runs through the store, so no rank waits in a collective that another rank never starts. It
ends within 10 seconds of its time limit. The group's first rank collects the ballots and combines
them into one result.

A rank that cannot go on reports its failure instead of voting (`zpasses.ranks.failures`). The vote
then raises AgreementError on every other rank: within a second on a rank that waits, and within
three on a rank that comes later. Each failure starts a new epoch of votes, in which all ranks count
from zero. If the failed rank's program catches the error and continues, its next vote and the next
vote of the other ranks therefore meet again.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.ranks import heartbeat
from zpasses.ranks.compiled_graph import compiled_graph, graphs_differ
from zpasses.ranks.group_names import dimension_of, name_group
from zpasses.ranks.notes import found_conflict

DEFAULT_TIMEOUT_S = 300.0
"""Seconds to wait for other ranks where the user sets no limit."""

COMPILE_TIMEOUT = "options={'agreement_timeout_s': ...}"
WINDOW_TIMEOUT = "coalesce_grad_reduction(..., timeout_s=...)"
GROUP_TIMEOUT = "init_process_group(timeout=...)"
"""What the user sets to wait longer, for errors."""

NOT_ALONE = (
    "One rank cannot run a sharded model alone, for an evaluation or a log, or skip layers at "
    "random: with transformers, set the layerdrop values of the configuration to 0."
)
"""Advice of errors about ranks that do different things."""

_RESULT_SLACK_S = 5.0
"""How much longer the others wait than the first rank of the group, if that came to collect and
combine."""

_RECOVERY_S = 0.7
"""How long a rank that was waiting when another rank failed waits for that rank to continue."""
_LATE_RECOVERY_S = 3.0
"""The same for a rank that finds an earlier failure, perhaps of another graph."""

_FIRST_POLL_S, _LAST_POLL_S = 1e-4, 0.05

Ballot = dict[str, Any]
"""What one rank says, or what the first rank makes of all ballots: plain JSON values."""

Combine = Callable[[Sequence[Ballot]], Ballot]
"""Makes one result of the ballots of all ranks, in group order."""


@dataclass
class GroupState:
    """What the votes of one process group have settled so far.

    It is identical on all ranks of the group, because only votes in which every rank took part
    change it.
    """

    prefix: str
    epoch: int = 0
    votes: int = 0
    resumed: bool = True
    """Whether the other ranks can see that this rank continues in this epoch."""
    agreed: set[str] = field(default_factory=set)
    """Digests of collective sequences that all ranks were found to share."""
    answers: dict[str, list[Any]] = field(default_factory=dict)
    """Answers of all ranks to questions that are asked once."""
    successors: dict[tuple[str, ...], str] = field(default_factory=dict)
    """The last events of the group -> the event that followed; see `zpasses.ranks.run_order`."""
    events: tuple[str, ...] = ()
    """The last events of the group. Reset where ranks were found at different events."""
    last_vote: str | None = None
    """Key of the last vote in which every rank took part. Its ballots stay in the store until the
    next vote."""

    def key(self) -> str:
        return f"{self.prefix}/{self.epoch}/{self.votes}"

    def next_epoch(self, *, resumed: bool) -> None:
        """Start to count votes anew, after a failure that ended the vote at hand."""
        self.epoch += 1
        self.votes = 0
        self.resumed = resumed
        self.last_vote = None


# State belongs to a process group, which offers no place for it.
_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()

_timeout_s: contextvars.ContextVar[float] = contextvars.ContextVar(
    "zpasses.vote_timeout", default=DEFAULT_TIMEOUT_S
)


@contextlib.contextmanager
def vote_timeout(seconds: float) -> Iterator[None]:
    """Inside, votes without a time limit of their own wait this long for the other ranks."""
    token = _timeout_s.set(seconds)
    try:
        yield
    finally:
        _timeout_s.reset(token)


def current_timeout_s() -> float:
    """Seconds that a vote without a time limit of its own waits here."""
    return _timeout_s.get()


def has_other_ranks(group: str) -> bool:
    """Whether a group has ranks besides this one that can vote: those of a fake world cannot."""
    return compat.group_backend(group) != "fake" and compat.process_group(group).size() > 1


def group_state(name: str) -> GroupState:
    """The state of a process group that has other ranks."""
    group = compat.process_group(name)
    state = _states.get(group)
    if state is None:
        # A store outlives its groups: number the groups that had this name, so that old votes are
        # not read again.
        entered = compat.default_store().add(f"zpasses/{name}/entered", 1)
        state = _states[group] = GroupState(f"zpasses/{name}/{(entered - 1) // group.size()}")
    return state


def vote(
    name: str,
    occasion: str,
    ballot: Ballot,
    combine: Combine,
    timeout_s: float | None = None,
    *,
    missed: str | None = None,
    advice: str = "",
    timeout_option: str = COMPILE_TIMEOUT,
) -> Ballot:
    """Exchange what the ranks of a group know.

    Args:
        name: the process group.
        occasion: what the ranks are doing. Ranks that vote on different occasions get an error.
        ballot: this rank's part.
        combine: must not raise; it runs on the first rank only.
        timeout_s: seconds to wait for the other ranks; None takes the limit of the compile.
        missed: what a missing rank did not do, for the error; by default to reach the occasion.
        advice: how a program avoids that, for the error.
        timeout_option: what the user sets to wait longer, for the error.

    Returns:
        What `combine` makes of all ballots on the group's first rank; the same on every rank.

    Raises:
        AgreementError: when a rank failed, did not vote in time, or votes on another occasion.
    """
    if not has_other_ranks(name):
        return combine([ballot])
    limit = current_timeout_s() if timeout_s is None else timeout_s
    missed = missed or f"reach {occasion}"
    poll = _VoteRound(name, occasion, missed, advice, limit, timeout_option)
    return poll.run(ballot, combine)


def store_barrier(
    name: str,
    occasion: str,
    timeout_s: float | None = None,
    *,
    timeout_option: str = "timeout_s=...",
) -> None:
    """Wait until all ranks of a group are at the same point and none of them has failed.

    Raises as `vote` does.
    """
    vote(name, occasion, {}, lambda ballots: {}, timeout_s, timeout_option=timeout_option)


# --- one vote ------------------------------------------------------------------------------------
class _SupersededError(Exception):
    """The vote ended in a failure whose rank continues: vote again in the next epoch.

    The message is that failure.
    """


@dataclass
class _VoteRound:
    """One vote of this rank."""

    group: str
    occasion: str
    missed: str
    advice: str
    timeout_s: float
    timeout_option: str

    def run(self, ballot: Ballot, combine: Combine) -> Ballot:
        started = time.monotonic()
        before = ""
        while True:
            try:
                combined = self._once(ballot, combine, started)
            except _SupersededError as failure:
                before = f" Before that, {failure}."
                continue
            except AgreementError as error:
                if before:
                    raise AgreementError(f"{error}{before}") from error
                raise
            if before and combined.get("error"):
                combined = {**combined, "error": f"{combined['error']}{before}"}
            return combined

    def _about(self) -> str:
        """Which group votes, and on what: " (group '0', to come to graph 0/0 forward)"."""
        group = "" if dimension_of(self.group) else f"group {self.group!r}"
        plain = self.missed == f"reach {self.occasion}"
        parts = [group, "" if plain else f"to {self.missed}"]
        text = ", ".join(part for part in parts if part)
        return f" ({text})" if text else ""

    def _once(self, ballot: Ballot, combine: Combine, started: float) -> Ballot:
        process_group, store = compat.process_group(self.group), compat.default_store()
        state, rank = group_state(self.group), process_group.rank()
        heartbeat.start()
        rejoin_after_failure([self.group])
        key = state.key()
        state.votes += 1
        sent = {"occasion": self.occasion, "ballot": ballot, "compiles": compiled_graph()}
        store.set(f"{key}/{rank}", pack(sent))
        where = f" of {name_group(self.group)}" if dimension_of(self.group) else ""
        with heartbeat.activity(
            f"waiting for other ranks{where} at {self.occasion}{self._about()}"
        ):
            if rank == 0:
                result = self._collect(store, key, combine, started)
                if "superseded" not in result:
                    store.set(f"{key}/result", pack(result))
            else:
                result = self._await_result(store, key, started)
        if "superseded" in result:
            state.next_epoch(resumed=True)
            raise _SupersededError(result["superseded"])
        if result["error"]:
            state.next_epoch(resumed=True)
            if result.get("diverged"):
                state.events = ()
            heartbeat.set_activity(
                f"in an error after waiting for other ranks{where} to {self.missed}"
            )
            error = AgreementError(str(result["error"]))
            error._zpasses_group = self.group  # type: ignore[attr-defined]
            raise error
        if state.last_vote is not None:  # all ranks came to a later vote, so all have read it
            store.delete_key(f"{state.last_vote}/{rank}")
            if rank == 0:
                store.delete_key(f"{state.last_vote}/result")
        state.last_vote = key
        combined: Ballot = result["combined"]
        return combined

    def _collect(self, store: Any, key: str, combine: Combine, started: float) -> dict[str, Any]:
        ranks = compat.group_ranks(self.group)
        keys = [f"{key}/{rank}" for rank in range(len(ranks))]
        deadline = started + self.timeout_s
        if (failed := self._wait(store, key, keys, deadline)) is not None:
            return failed
        if not store.check(keys):
            return {"error": self._missing_error(store, key), "diverged": True}
        ballots = [unpack(data) for data in _read(store, keys)]
        for rank, ballot in zip(ranks, ballots, strict=True):
            if ballot["occasion"] != self.occasion:
                where = f"on {name_group(self.group)}, rank"
                error = _mismatch_error(where, ranks[0], self.occasion, rank, ballot["occasion"])
                error += graphs_differ(ranks[0], compiled_graph(), rank, ballot.get("compiles"))
                return {"error": error, "diverged": True}
        return {"error": None, "combined": combine([ballot["ballot"] for ballot in ballots])}

    def _await_result(self, store: Any, key: str, started: float) -> dict[str, Any]:
        deadline = started + self.timeout_s
        for limit in (deadline, deadline + _RESULT_SLACK_S):
            if (failed := self._wait(store, key, [f"{key}/result"], limit)) is not None:
                return failed
            if store.check([f"{key}/result"]):
                return unpack(store.get(f"{key}/result"))
            if not store.check([f"{key}/0"]):
                break  # nobody collects
        error = self._missing_error(store, key)
        failure = {"rank": dist.get_rank(), "reason": error, "diverged": True}
        failure["recoverable"] = False
        store.set(f"{key}/failed", pack(failure))
        return {"error": error, "diverged": True}

    def _wait(
        self, store: Any, key: str, wanted: list[str], deadline: float
    ) -> dict[str, Any] | None:
        """Wait for keys; None when they are there or too late, else how a failure ended it."""
        pause = _FIRST_POLL_S
        patience_s = _LATE_RECOVERY_S
        while True:
            if store.check([f"{key}/failed"]):
                return self._after_failure(store, key, patience_s)
            patience_s = _RECOVERY_S
            if store.check(wanted):
                return None
            late = time.monotonic() > deadline
            if late or pause >= _LAST_POLL_S:
                conflict = found_conflict()
                if conflict is not None:
                    return {"error": conflict, "diverged": True}
            if late:
                return None
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_POLL_S)

    def _after_failure(self, store: Any, key: str, patience_s: float) -> dict[str, Any]:
        failure = unpack(store.get(f"{key}/failed"))
        reason = _with_dimension(str(failure["reason"]), self.group)
        error = {"error": reason, "diverged": failure.get("diverged", False)}
        if not failure["recoverable"]:
            return error
        state = group_state(self.group)
        resumed = [f"{state.prefix}/{state.epoch + 1}/resumed/{failure['rank']}"]
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if store.check(resumed):
                return {"superseded": str(failure["reason"])}
            time.sleep(_LAST_POLL_S)
        return error

    def _missing_error(self, store: Any, key: str) -> str:
        ranks = compat.group_ranks(self.group)
        missing = [rank for i, rank in enumerate(ranks) if not store.check([f"{key}/{i}"])]
        missing = missing or ranks[:1]
        seen = heartbeat.describe(missing[:4])
        return (
            f"rank {', '.join(map(str, missing))} of {name_group(self.group)} did not "
            f"{self.missed} within {self.timeout_s:g} s, but the others did. {seen} "
            f"{self.advice or NOT_ALONE} Look at its log; {self.timeout_option} waits longer."
        )


def _with_dimension(reason: str, group: str) -> str:
    """Why another rank fails, and on a mesh of several dimensions in which of its groups."""
    if "mesh dimension" in reason or not dimension_of(group):
        return reason
    return f"{reason}; it ended a vote of {name_group(group)}"


def _mismatch_error(where: str, rank: int, occasion: str, other_rank: int, other: str) -> str:
    return (
        f"{where} {rank} is at {occasion}, but rank {other_rank} at {other}: every rank must do "
        "the same things in the same order. Compile the same graphs, run the same backwards and "
        f"optimizer steps, and leave windows at the same point on every rank. {NOT_ALONE}"
    )


def rejoin_after_failure(groups: Sequence[str]) -> None:
    """Show the other ranks that this rank continues after a failure that it reported."""
    for name in groups:
        if not has_other_ranks(name):
            continue
        state = group_state(name)
        if not state.resumed:
            state.resumed = True
            key = f"{state.prefix}/{state.epoch}/resumed/{dist.get_rank()}"
            compat.default_store().set(key, "1")


# --- the store -----------------------------------------------------------------------------------
def _read(store: Any, keys: list[str]) -> list[bytes]:
    """The values of keys that are all there: in one round where the store can."""
    found: list[bytes] = (
        store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    )
    return found


def pack(value: dict[str, Any]) -> str:
    """Returns a value as text for the store."""
    # Stores take text; a graph of thousands of similar collectives compresses to a few KiB.
    return zlib.compress(json.dumps(value).encode()).hex()


def unpack(data: bytes) -> dict[str, Any]:
    """Returns a value that was stored by `pack`."""
    loaded = json.loads(zlib.decompress(bytes.fromhex(data.decode())))
    assert isinstance(loaded, dict)
    return loaded
