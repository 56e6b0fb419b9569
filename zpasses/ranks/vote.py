"""Votes: the ranks of a process group exchange what they know, and every rank gets the same result.

A vote runs through the store, so no rank waits in a collective that another rank never starts. It
ends within 10 seconds of its time limit. The ballots go up a tree of ranks (`zpasses.ranks.tally`),
and the group's first rank combines them into one result. Each rank writes a text or two and waits
for the end of the vote, which is one key: whoever writes it first, with the result or with an
error, decides for all ranks. Long ballots that differ take a second vote, in which one rank for
each of them casts it in full.

A rank that cannot go on reports its failure instead of voting (`zpasses.ranks.failures`). The vote
then raises AgreementError on every other rank: within a second on a rank that waits, and within
three on a rank that comes later. Each failure starts a new epoch of votes, in which all ranks count
from zero. If the failed rank's program catches the error and continues, its next vote and the next
vote of the other ranks therefore meet again.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import json
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.ranks import heartbeat
from zpasses.ranks.current_compile import (
    ComparedOptions,
    compared_differ,
    compiled_graph,
    graphs_differ,
    same_graph_differs,
)
from zpasses.ranks.group_texts import dimension_of, list_ranks, name_group
from zpasses.ranks.notes import found_conflict
from zpasses.ranks.tally import Count, Tally, add_to, ranks_below, text_of

DEFAULT_TIMEOUT_S = 300.0
"""Seconds to wait for other ranks where the user sets no limit."""

COMPILE_TIMEOUT = "options={'agreement_timeout_s': ...}"
WINDOW_TIMEOUT = "coalesce_grad_reduction(..., timeout_s=...)"
GROUP_TIMEOUT = "init_process_group(timeout=...)"
"""What the user sets to wait longer, for errors."""


class TimeLimit(float):
    """Seconds to wait for other ranks, and what the user sets to wait longer. Plain numbers are
    those of the option of the backend.
    """

    def __new__(cls, seconds: float, option: str) -> TimeLimit:
        made = super().__new__(cls, seconds)
        made.option = option
        return made

    option: str


def waits_longer(timeout_s: float) -> str:
    """Returns what an error says of a time limit that has passed."""
    option = timeout_s.option if isinstance(timeout_s, TimeLimit) else COMPILE_TIMEOUT
    return f"{option} waits longer."


NOT_ALONE = (
    "One rank cannot run a sharded model alone, for an evaluation or a log, skip layers at random "
    "(with transformers, set the layerdrop values of the configuration to 0), or leave out experts "
    "that none of its tokens chose."
)
"""Advice of errors about ranks that do different things."""

_RESULT_SLACK_S = 5.0
"""How much longer a rank waits than its limit for ranks that came, and must still collect, combine,
or search for those that did not."""

_RECOVERY_S = 0.7
"""How long a rank that was waiting when another rank failed waits for that rank to continue."""
_LATE_RECOVERY_S = 3.0
"""The same for a rank that finds an earlier failure, perhaps of another graph."""

_FIRST_POLL_S, _LAST_POLL_S = 1e-4, 0.05
_POLL_PER_RANK_S = 2.5e-4
"""How much longer each rank of a large group pauses at last: one process serves all of them."""

_MOST_MISSING = 16
"""Missing ranks that an error names."""

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
    """Digests of collective sequences, and of options, that all ranks were found to share."""
    answers: dict[str, Any] = field(default_factory=dict)
    """What the ranks got of their answers to questions that are asked once."""
    successors: dict[tuple[str, ...], str] = field(default_factory=dict)
    """The last events of the group -> the event that followed; see `zpasses.ranks.run_order`."""
    events: tuple[str, ...] = ()
    """The last events of the group. Reset where ranks were found at different events."""
    options: ComparedOptions = field(default_factory=dict)
    """What this rank compiled a graph of the group with last. Unlike the rest, ranks may differ."""
    written: list[str] = field(default_factory=list)
    """Keys that this rank wrote in the last vote in which every rank took part. They stay in the
    store until the next vote."""

    def key(self) -> str:
        return f"{self.prefix}/{self.epoch}/{self.votes}"

    def next_epoch(self, *, resumed: bool) -> None:
        """Start to count votes anew, after a failure that ended the vote at hand."""
        self.epoch += 1
        self.votes = 0
        self.resumed = resumed
        self.written = []


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

    Returns:
        What `combine` makes of all ballots on the group's first rank; the same on every rank.

    Raises:
        AgreementError: when a rank failed, did not vote in time, or votes on another occasion.
    """
    if not has_other_ranks(name):
        return combine([ballot])
    limit = current_timeout_s() if timeout_s is None else timeout_s
    missed = missed or f"reach {occasion}"
    return _VoteRound(name, occasion, missed, advice, limit).run(ballot, combine)


def store_barrier(name: str, occasion: str, timeout_s: float | None = None) -> None:
    """Wait until all ranks of a group are at the same point and none of them has failed.

    Raises as `vote` does.
    """
    vote(name, occasion, {}, lambda ballots: {}, timeout_s)


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

    def run(self, ballot: Ballot, combine: Combine) -> Ballot:
        deadline = time.monotonic() + self.timeout_s
        before = ""
        in_full: Collection[int] = ()
        while True:
            try:
                ended = self._once(ballot, combine, deadline, in_full)
            except _SupersededError as failure:
                before, in_full = f" Before that, {failure}.", ()
                continue
            except AgreementError as error:
                if before:
                    raise AgreementError(f"{error}{before}") from error
                raise
            if "in_full" in ended:
                in_full = ended["in_full"]
                deadline = max(deadline, time.monotonic() + _RESULT_SLACK_S)  # all have come
                continue
            combined: Ballot = ended["combined"]
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

    def _once(
        self, ballot: Ballot, combine: Combine, deadline: float, in_full: Collection[int]
    ) -> dict[str, Any]:
        state, rank = group_state(self.group), compat.process_group(self.group).rank()
        heartbeat.start(_tell_end, state)
        rejoin_after_failure([self.group])
        details = {"graph": compiled_graph(), "options": state.options}
        text = text_of(self.occasion, ballot, details, in_full=rank in in_full)
        attempt = _Attempt(self, state.key(), deadline, ballot, text)
        state.votes += 1
        where = f" of {name_group(self.group)}" if dimension_of(self.group) else ""
        with heartbeat.activity(
            f"waiting for other ranks{where} at {self.occasion}{self._about()}"
        ):
            try:
                ended = attempt.run(combine)
            except heartbeat.STORE_ERRORS as gone:
                raise AgreementError(
                    f"waited for the other ranks of {name_group(self.group)} to {self.missed}. "
                    f"{heartbeat.gone_store(gone)} Look at its log."
                ) from gone
            except AgreementError:
                raise
            except BaseException as cause:
                attempt.leave(cause)
                state.next_epoch(resumed=False)
                raise
        if "superseded" in ended:
            state.next_epoch(resumed=True)
            raise _SupersededError(ended["superseded"])
        if "error" in ended:
            state.next_epoch(resumed=True)
            if ended.get("diverged"):
                state.events = ()
            heartbeat.set_activity(
                f"in an error after waiting for other ranks{where} to {self.missed}"
            )
            error = AgreementError(str(ended["error"]))
            error._zpasses_group = self.group  # type: ignore[attr-defined]
            raise error
        for key in state.written:  # all ranks came to a later vote, so all have read them
            attempt.store.delete_key(key)
        state.written = attempt.written
        return ended


class _Attempt:
    """One vote of this rank in one epoch."""

    def __init__(
        self, vote: _VoteRound, key: str, deadline: float, ballot: Ballot, text: str
    ) -> None:
        group = compat.process_group(vote.group)
        self.store = compat.default_store()
        self.written: list[str] = []
        self._vote, self._key, self._deadline = vote, key, deadline
        self._rank, self._size = group.rank(), group.size()
        self._ballot, self._tally = ballot, {text: [[self._rank, self._rank]]}

    def run(self, combine: Combine) -> dict[str, Any]:
        """Returns how the vote ended: "combined", "in_full", "error" or "superseded"."""
        self._write(str(self._rank))
        below = [self._tally_key(rank) for rank in ranks_below(self._rank, self._size)]
        if self._rank == 0:
            return self._lead(below, combine)
        if below:
            if (ended := self._wait(below, self._deadline)) is not None:
                return ended
            if self.store.check(below):
                self._add(below)
                self._write(f"{self._rank}/all")
        return self._follow()

    def leave(self, error: BaseException) -> None:
        """End the vote for all ranks: this one leaves it by an error, such as an interrupt."""
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        text = f"rank {compat.global_rank()} left the vote to {self._vote.missed} by {reason}"
        with contextlib.suppress(*heartbeat.STORE_ERRORS):  # the others find it gone, too
            self._fail(text)

    # --- ballots ----------------------------------------------------------------------------------
    def _tally_key(self, rank: int) -> str:
        return f"{self._key}/{rank}" + ("/all" if ranks_below(rank, self._size) else "")

    def _write(self, name: str) -> None:
        self.store.set(f"{self._key}/{name}", pack(self._tally))
        self.written.append(f"{self._key}/{name}")

    def _add(self, keys: list[str]) -> None:
        others: list[Tally] = [unpack(data) for data in _read(self.store, keys)]
        add_to(self._tally, others)

    def _lead(self, below: list[str], combine: Combine) -> dict[str, Any]:
        if (failed := self._wait_for_all(below)) is not None:
            return failed
        self._add(below)
        count = Count(self._tally, self._ballot)
        other = count.other_occasion(self._vote.occasion)
        if other is not None and "details" in other[1]:
            return self._fail(self._mismatch_error(*other))
        ask = count.unknown() if other is None else [other[0]]
        ended = {"in_full": ask} if ask else {"combined": combine(count.ballots(self._size))}
        return self._end(ended)

    def _mismatch_error(self, rank: int, said: dict[str, Any]) -> str:
        ranks, occasion = compat.group_ranks(self._vote.group), self._vote.occasion
        graph, details = compiled_graph(), said["details"]
        first, other = ranks[0], ranks[rank]
        if (error := same_graph_differs(first, graph, other, details["graph"])) is not None:
            return error
        where = f"on {name_group(self._vote.group)}, rank"
        error = _mismatch_error(where, first, occasion, other, said["occasion"])
        if graph is None or details["graph"] is None:
            own = group_state(self._vote.group).options
            differ = compared_differ(first, own, other, details["options"])
            return f"{error} In their last compiles, {differ}" if differ else error
        return error + graphs_differ(first, graph, other, details["graph"])

    # --- the end of the vote ----------------------------------------------------------------------
    def _end(self, mine: dict[str, Any]) -> dict[str, Any]:
        """End the vote for all ranks, unless another rank has: then that is the end."""
        self.written.append(self._end_key)
        ended = unpack(self.store.compare_set(self._end_key, "", pack(mine)))
        return self._ended(ended, _RECOVERY_S)

    @property
    def _end_key(self) -> str:
        return end_key(self._key)

    def _ended(self, ended: dict[str, Any], patience_s: float) -> dict[str, Any]:
        """Returns an end. A rank that failed gets some time to show that it continues."""
        if "failure" not in ended:
            return ended
        failure = ended["failure"]
        reason = _with_dimension(str(failure["reason"]), self._vote.group)
        state = group_state(self._vote.group)
        resumed = [f"{state.prefix}/{state.epoch + 1}/resumed/{failure['rank']}"]
        deadline = time.monotonic() + patience_s
        while failure["recoverable"] and time.monotonic() < deadline:
            if self.store.check(resumed):
                return {"superseded": str(failure["reason"])}
            time.sleep(self._last_poll_s)
        return {"error": reason, "diverged": failure["diverged"]}

    def _follow(self) -> dict[str, Any]:
        """Wait for the end of the vote."""
        slack = self._deadline + _RESULT_SLACK_S
        for limit in (self._deadline, slack):
            if (ended := self._wait(None, limit)) is not None:
                return ended
            if not self.store.check([f"{self._key}/0"]):
                break  # nobody collects
        # One rank searches for those that are missing, and tells the others.
        if self.store.add(f"{self._key}/searches", 1) > 1:
            limit = time.monotonic() + _RESULT_SLACK_S
            if (ended := self._wait(None, limit)) is not None:
                return ended
        return self._fail(self._missing_error(self._missing() or [0]))

    def _fail(self, reason: str) -> dict[str, Any]:
        return self._end(failure_of(dist.get_rank(), reason, diverged=True))

    # --- waits ------------------------------------------------------------------------------------
    @property
    def _last_poll_s(self) -> float:
        return max(_LAST_POLL_S, self._size * _POLL_PER_RANK_S)

    def _wait(self, wanted: list[str] | None, deadline: float) -> dict[str, Any] | None:
        """Wait for the end of the vote, or for keys.

        Returns:
            How the vote ended; None when the keys are there, or it is too late.
        """
        pause = _FIRST_POLL_S
        patience_s = _LATE_RECOVERY_S
        while True:
            if self.store.check([self._end_key]):
                return self._ended(unpack(self.store.get(self._end_key)), patience_s)
            patience_s = _RECOVERY_S
            if wanted is not None and self.store.check(wanted):
                return None
            late = time.monotonic() > deadline
            if late or pause >= _LAST_POLL_S:
                conflict = found_conflict()
                if conflict is not None:
                    return {"error": conflict, "diverged": True}
            if late:
                return None
            time.sleep(pause)
            pause = min(pause * 1.5, self._last_poll_s)

    def _wait_for_all(self, keys: list[str]) -> dict[str, Any] | None:
        """Wait for the tallies of all ranks; None when they are there, else how the vote ended."""
        for limit in (self._deadline, self._deadline + _RESULT_SLACK_S):
            if (ended := self._wait(keys, limit)) is not None:
                return ended
            if self.store.check(keys):
                return None
            if missing := self._missing():
                break
        else:  # they came, but some do not get on
            missing = [
                rank
                for rank in ranks_below(0, self._size)
                if not self.store.check([self._tally_key(rank)])
            ]
        return self._fail(self._missing_error(missing))

    # --- missing ranks ----------------------------------------------------------------------------
    def _missing(self) -> list[int]:
        """The first ranks that have not come to the vote, and one more than an error names."""
        found: list[int] = []

        def search(first: int, last: int) -> None:
            if len(found) > _MOST_MISSING:
                return
            if self.store.check([f"{self._key}/{rank}" for rank in range(first, last)]):
                return
            if last - first == 1:
                found.append(first)
                return
            middle = (first + last) // 2
            search(first, middle)
            search(middle, last)

        search(0, self._size)
        return found

    def _missing_error(self, missing: Sequence[int]) -> str:
        vote, ranks = self._vote, compat.group_ranks(self._vote.group)
        named = [ranks[each] for each in missing]
        seen = heartbeat.describe(named[:4])
        return (
            f"rank {list_ranks(named, _MOST_MISSING)} of {name_group(vote.group)} did not "
            f"{vote.missed} within {vote.timeout_s:g} s, but the others did. {seen} "
            f"{vote.advice or NOT_ALONE} Look at its log; {waits_longer(vote.timeout_s)}"
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


def _tell_end(store: Any, votes: Sequence[GroupState], rank: int, how: str) -> None:
    """Let the votes that the other ranks are in, or come to next, end: this rank leaves."""
    reason = (
        f"rank {rank} has ended {how}. The other ranks cannot go on without it; look at its log."
    )
    for state in list(votes):
        store.compare_set(end_key(state.key()), "", pack(failure_of(rank, reason)))


# --- the store -----------------------------------------------------------------------------------
def _read(store: Any, keys: list[str]) -> list[bytes]:
    """The values of keys that are all there: in one round where the store can."""
    found: list[bytes] = (
        store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    )
    return found


def failure_of(
    rank: int, reason: str, *, recoverable: bool = False, diverged: bool = False
) -> dict[str, Any]:
    """Returns the end of a vote that a rank leaves; `reason` is the error on the other ranks.

    Args:
        recoverable: whether the vote starts again if the rank's program continues.
        diverged: whether the ranks forget which events they have agreed on.
    """
    how = {"rank": rank, "reason": reason, "recoverable": recoverable, "diverged": diverged}
    return {"failure": how}


def end_key(vote_key: str) -> str:
    """Returns the key of the end of a vote: what `pack` makes of its result or failure."""
    return f"{vote_key}/end"


def pack(value: dict[str, Any]) -> str:
    """Returns a value as text for the store."""
    # Stores take text; a graph of thousands of similar collectives compresses to a few KiB.
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def unpack(data: bytes) -> dict[str, Any]:
    """Returns a value that was stored by `pack`."""
    loaded = json.loads(zlib.decompress(base64.b64decode(data)))
    assert isinstance(loaded, dict)
    return loaded
