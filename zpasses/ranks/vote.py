"""Votes: the ranks of a process group exchange what they know through the store, and every rank
gets the same result.

A vote never waits longer than its time limit. A rank that cannot go on says so instead of voting,
and the vote becomes an error on every other rank. The group's first rank collects the ballots and
decides, so all ranks see one result."""

from __future__ import annotations

import json
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zpasses import compat
from zpasses.errors import AgreementError

__all__ = [
    "Ballot",
    "agreed_sequences",
    "exchange",
    "has_other_ranks",
    "is_reported",
    "report_failure",
    "reported_failure",
    "store_barrier",
    "vote",
]

_RESULT_SLACK_S = 10.0
"""How much longer the others wait than the first rank of the group, which collects and decides."""

Ballot = dict[str, Any]
"""What one rank says, or what the first rank makes of all of them: plain JSON values."""

Combine = Callable[[Sequence[Ballot]], Ballot]
"""Makes one result of the ballots of all ranks, in group order."""


@dataclass
class _Ledger:
    """The votes of one process group so far."""

    prefix: str
    votes: int = 0
    agreed: set[str] = field(default_factory=set)
    """Digests of collective sequences that all ranks were found to share."""
    last: str | None = None
    """The last vote in which every rank was heard. Its ballots stay in the store until the next
    one."""
    answers: dict[str, list[Any]] = field(default_factory=dict)
    """Answers of all ranks to questions that are asked once."""


# State belongs to a process group, which offers no place for it.
_ledgers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Ledger] = weakref.WeakKeyDictionary()


def has_other_ranks(group: str) -> bool:
    """Whether a group has ranks besides this one that can be asked: those of a fake world
    cannot."""
    return compat.group_backend(group) != "fake" and compat.process_group(group).size() > 1


def vote(
    name: str,
    occasion: str,
    ballot: Ballot,
    combine: Combine,
    timeout_s: float,
    *,
    failure: str | None = None,
    missed: str | None = None,
    timeout_option: str = "timeout_s=...",
) -> Ballot:
    """Exchange what the ranks of a group know; every rank gets what `combine` makes of all ballots
    on the group's first rank.

    Args:
        name: the process group.
        occasion: what the ranks are doing. Ranks that vote on different occasions get an error.
        ballot: this rank's part.
        combine: must not raise; it runs on the first rank only.
        timeout_s: seconds to wait for the other ranks.
        failure: why this rank cannot go on. It tells the other ranks and returns its own ballot at
            once.
        missed: what a missing rank did not do, for the error; by default to reach the occasion.
        timeout_option: what the user sets to wait longer, for the error.

    Raises:
        AgreementError: when a rank failed, did not vote in time, or votes on another occasion.
    """
    if not has_other_ranks(name):
        return combine([ballot])
    if failure is not None:
        _post_failure(name, f"rank {dist.get_rank()} {failure}")
        return ballot
    group, store = compat.process_group(name), compat.default_store()
    ledger = _ledger(name, group, store)
    key = f"{ledger.prefix}/{ledger.votes}"
    ledger.votes += 1
    missing_error = _MissingError(name, missed or f"reach {occasion}", timeout_s, timeout_option)
    store.set(f"{key}/{group.rank()}", _pack({"occasion": occasion, "ballot": ballot}))
    if group.rank() == 0:
        result = _collect(store, key, name, occasion, combine, timeout_s, missing_error)
        store.set(f"{key}/result", _pack(result))
    elif _wait(store, [f"{key}/result"], timeout_s + _RESULT_SLACK_S):
        result = {"error": missing_error.text(store, key)}
    else:
        result = _unpack(store.get(f"{key}/result"))
    if result["error"]:
        raise AgreementError(str(result["error"]))
    _delete_last_ballots(ledger, store, group.rank())
    ledger.last = key
    combined: Ballot = result["combined"]
    return combined


def store_barrier(name: str, occasion: str, timeout_s: float) -> None:
    """Wait until all ranks of a group are at the same point and none of them has failed; raises as
    `vote` does."""
    vote(name, occasion, {}, lambda ballots: {}, timeout_s)


def exchange(
    group: str, question: str, mine: Any, timeout_s: float, *, remember: str | None = None
) -> list[Any]:
    """Every rank of a group tells the others its answer, so that all of them choose identically.

    Args:
        group: name of the process group. Where it has no other ranks (or is a fake one), this
            rank's answer is the only one.
        question: what is asked; it must be the same on all ranks.
        mine: this rank's answer, of plain JSON values.
        timeout_s: seconds to wait for the other ranks.
        remember: a key. If something was asked under it before, the earlier answers are returned. A
            rank may then repeat a compile alone.

    Returns:
        The answers, in the order of the group's ranks; the same list on every rank.

    Raises:
        AgreementError: on every rank, when one of them asks something else, failed, or does not
            answer in time.
    """
    if not has_other_ranks(group):
        return [mine]
    ledger = _ledger(group, compat.process_group(group), compat.default_store())
    if remember is not None and remember in ledger.answers:
        return ledger.answers[remember]
    combined = vote(
        group,
        question,
        {"answer": mine},
        lambda ballots: {"answers": [each["answer"] for each in ballots]},
        timeout_s,
    )
    answers: list[Any] = combined["answers"]
    if remember is not None:
        ledger.answers[remember] = answers
    return answers


def agreed_sequences(group: str) -> set[str]:
    """Digests of the collective sequences that the ranks of a group were found to share. Callers
    add to it."""
    return _ledger(group, compat.process_group(group), compat.default_store()).agreed


# --- failures -------------------------------------------------------------------------------------
def report_failure(groups: Sequence[str], graph_name: str, error: BaseException) -> None:
    """Tell the other ranks of these groups that this rank will not vote, because its compile
    failed."""
    for name in groups:
        _post_failure(
            name,
            f"rank {dist.get_rank()} failed while compiling graph {graph_name}: "
            f"{type(error).__name__}: {str(error)[:500]}",
        )
    error._zpasses_reported = True  # type: ignore[attr-defined]


def is_reported(error: BaseException | None) -> bool:
    """Whether the other ranks know of a failure already."""
    while error is not None:
        if isinstance(error, AgreementError) or hasattr(error, "_zpasses_reported"):
            return True
        error = compat.wrapped_error(error) or error.__cause__ or error.__context__
    return False


def reported_failure(name: str) -> str | None:
    """Why another rank of the group said that it will not come to the next vote, if one did; asks
    without waiting."""
    if not has_other_ranks(name):
        return None
    group, store = compat.process_group(name), compat.default_store()
    key = f"{(ledger := _ledger(name, group, store)).prefix}/{ledger.votes}/failed"
    return store.get(key).decode() if store.check([key]) else None


def _post_failure(name: str, reason: str) -> None:
    if not has_other_ranks(name):
        return
    group, store = compat.process_group(name), compat.default_store()
    ledger = _ledger(name, group, store)
    key = f"{ledger.prefix}/{ledger.votes}"
    store.set(f"{key}/{group.rank()}", _pack({"failed": reason}))
    store.set(f"{key}/failed", reason)
    if group.rank() == 0:
        store.set(f"{key}/result", _pack({"error": reason}))
    ledger.votes += 1


@dataclass(frozen=True)
class _MissingError:
    """The message about ranks that did not vote in time."""

    group: str
    missed: str
    timeout_s: float
    option: str

    def text(self, store: Any, key: str) -> str:
        ranks = compat.group_ranks(self.group)
        missing = [
            rank for i, rank in enumerate(ranks) if not store.check([f"{key}/{i}"])
        ] or ranks[:1]
        return (
            f"rank {', '.join(map(str, missing))} of group {self.group!r} did not {self.missed} "
            f"within {self.timeout_s:g} s, but the "
            f"others did. It stopped, is much slower, or runs other code. Look at its log; "
            f"{self.option} waits longer."
        )


def _mismatch_error(rank: int, occasion: str, other_rank: int, other: str) -> str:
    return (
        f"rank {rank} is at {occasion}, but rank {other_rank} at {other}: every rank must do the "
        "same things in the same order."
        " Compile the same graphs, run the same backwards, leave windows alike."
    )


# --- the store ------------------------------------------------------------------------------------
def _collect(
    store: Any,
    key: str,
    name: str,
    occasion: str,
    combine: Combine,
    timeout_s: float,
    missing_error: _MissingError,
) -> dict[str, Any]:
    ranks = compat.group_ranks(name)
    keys = [f"{key}/{rank}" for rank in range(len(ranks))]
    missing = _wait(store, keys, timeout_s)
    there = [(rank, each) for rank, each in zip(ranks, keys, strict=True) if each not in missing]
    ballots = {
        rank: _unpack(data)
        for (rank, _), data in zip(there, _read(store, [each for _, each in there]), strict=True)
    }
    for ballot in ballots.values():
        if "failed" in ballot:
            return {"error": str(ballot["failed"])}
    if missing:
        return {"error": missing_error.text(store, key)}
    for rank, ballot in ballots.items():
        if ballot["occasion"] != occasion:
            return {"error": _mismatch_error(ranks[0], occasion, rank, ballot["occasion"])}
    return {"error": None, "combined": combine([ballot["ballot"] for ballot in ballots.values()])}


def _delete_last_ballots(ledger: _Ledger, store: Any, rank: int) -> None:
    """Delete what this rank said in the vote before. All ranks have come to a later one, so all
    have read it."""
    if ledger.last is None:
        return
    store.delete_key(f"{ledger.last}/{rank}")
    if rank == 0:
        store.delete_key(f"{ledger.last}/result")


def _ledger(name: str, group: dist.ProcessGroup, store: Any) -> _Ledger:
    ledger = _ledgers.get(group)
    if ledger is None:
        # A store outlives its groups: number the groups that had this name, so that old votes are
        # not read again.
        entered = store.add(f"zpasses/{name}/entered", 1)
        ledger = _ledgers[group] = _Ledger(f"zpasses/{name}/{(entered - 1) // group.size()}")
    return ledger


def _wait(store: Any, keys: list[str], timeout_s: float) -> list[str]:
    """Wait for keys; return those that did not come in time."""
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except Exception:  # the type depends on the store; what matters is which keys are there
        return [key for key in keys if not store.check([key])]
    return []


def _read(store: Any, keys: list[str]) -> list[bytes]:
    """What lies under keys that are all there: in one round where the store can."""
    found: list[bytes] = (
        store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    )
    return found


def _pack(value: dict[str, Any]) -> str:
    # Stores take text; a graph of thousands of like collectives compresses to a few KiB.
    return zlib.compress(json.dumps(value).encode()).hex()


def _unpack(data: bytes) -> dict[str, Any]:
    loaded = json.loads(zlib.decompress(bytes.fromhex(data.decode())))
    assert isinstance(loaded, dict)
    return loaded
