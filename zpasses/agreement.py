"""Ranks agree before they communicate.

Before a compiled graph first runs, the ranks of each process group in it compare the sequence of collectives that the graph runs on
that group. They compare through the store, not through collectives, and never wait longer than a time limit. A difference, or a rank
whose compile failed, becomes an error on all of them.

A sequence that was agreed once needs no second vote, so a rank may recompile alone, for a new batch shape say, as long as it
communicates the same.
"""

from __future__ import annotations

import hashlib
import json
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import fx

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.graph import Collective, collectives

__all__ = ["agree", "consult", "digest", "exchange", "has_other_ranks", "is_reported", "meet", "report_failure", "reported_failure"]

_VERDICT_SLACK_S = 10.0
"""How much longer the others wait than the first rank of the group, who collects and decides."""


@dataclass
class _Ledger:
    """What one process group has agreed on so far."""

    prefix: str
    votes: int = 0
    agreed: set[str] = field(default_factory=set)
    consulted: str | None = None
    """The last vote in which every rank was heard; what they said is in the store until the next one."""
    answers: dict[str, list[Any]] = field(default_factory=dict)
    """What every rank said to a question that is asked once."""


# State belongs to a process group, which offers no place for it.
_ledgers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Ledger] = weakref.WeakKeyDictionary()


def digest(sequence: Sequence[Collective]) -> str:
    """A short name of a sequence of collectives."""
    return hashlib.sha256(json.dumps([_line(each) for each in sequence]).encode()).hexdigest()[:16]


def agree(graph: fx.Graph, graph_name: str, timeout_s: float) -> None:
    """Raise AgreementError on every rank of a group unless all of them are about to run the same collectives on it.

    Args:
        graph: the graph as it will run, all passes done.
        graph_name: what the error calls it.
        timeout_s: seconds to wait for the other ranks.
    """
    by_group: dict[str, list[Collective]] = {}
    for _, each in collectives(graph):
        by_group.setdefault(each.group, []).append(each)
    for group, sequence in sorted(by_group.items()):
        _vote(group, graph_name, sequence, timeout_s)


def report_failure(groups: Sequence[str], graph_name: str, error: BaseException) -> None:
    """Tell the other ranks of these groups that this rank will not vote, because its compile failed."""
    for name in groups:
        _post_failure(name, f"rank {dist.get_rank()} failed while compiling graph {graph_name}: {type(error).__name__}: {str(error)[:500]}")
    error._zpasses_reported = True  # type: ignore[attr-defined]


def is_reported(error: BaseException | None) -> bool:
    """Whether the other ranks know of a failure already."""
    while error is not None:
        if isinstance(error, AgreementError) or hasattr(error, "_zpasses_reported"):
            return True
        error = compat.wrapped_error(error) or error.__cause__ or error.__context__
    return False


def consult(
    name: str,
    occasion: str,
    ballot: dict[str, Any],
    unite: Callable[[Sequence[dict[str, Any]]], dict[str, Any]],
    timeout_s: float,
    failure: str | None = None,
) -> dict[str, Any]:
    """Exchange what the ranks of a group know; every rank gets what `unite` makes of all ballots on the group's first rank.

    Args:
        name: the process group.
        occasion: what the ranks are at, for errors: ranks that are at different ones must not mistake each other.
        ballot: this rank's part, plain values.
        timeout_s: seconds to wait for the other ranks.
        failure: why this rank cannot go on; it tells the others and returns its own ballot at once.

    Raises:
        AgreementError: when a rank failed, did not come in time, or is at something else.
    """
    if not has_other_ranks(name):
        return unite([ballot])
    if failure is not None:
        _post_failure(name, f"rank {dist.get_rank()} {failure}")
        return ballot
    group, store = compat.process_group(name), compat.default_store()
    ledger = _ledger(name, group, store)
    vote = f"{ledger.prefix}/{ledger.votes}"
    ledger.votes += 1
    store.set(f"{vote}/{group.rank()}", _pack({"occasion": occasion, "ballot": ballot}))
    if group.rank() == 0:
        verdict = _collect(store, vote, name, occasion, unite, timeout_s)
        store.set(f"{vote}/verdict", _pack(verdict))
    elif _wait(store, [f"{vote}/verdict"], timeout_s + _VERDICT_SLACK_S):
        verdict = {"error": _absent(name, occasion, store, vote, timeout_s)}
    else:
        verdict = _unpack(store.get(f"{vote}/verdict"))
    if verdict["error"]:
        raise AgreementError(str(verdict["error"]))
    if "united" not in verdict:
        raise AgreementError(_apart(dist.get_rank(), occasion, compat.group_ranks(name)[0], "compiling a graph"))
    _forget(ledger, store, group.rank())
    ledger.consulted = vote
    united: dict[str, Any] = verdict["united"]
    return united


def meet(name: str, occasion: str, timeout_s: float) -> None:
    """Wait until all ranks of a group are at the same point, as far as none of them has failed; see `consult`."""
    consult(name, occasion, {}, lambda ballots: {}, timeout_s)


def _forget(ledger: _Ledger, store: Any, rank: int) -> None:
    """Delete what this rank said in the vote before: all ranks have come to a later one, so all have read it."""
    if ledger.consulted is None:
        return
    store.delete_key(f"{ledger.consulted}/{rank}")
    if rank == 0:
        store.delete_key(f"{ledger.consulted}/verdict")


def _collect(
    store: Any, vote: str, name: str, occasion: str, unite: Callable[[Sequence[dict[str, Any]]], dict[str, Any]], timeout_s: float
) -> dict[str, Any]:
    ranks = compat.group_ranks(name)
    keys = [f"{vote}/{rank}" for rank in range(len(ranks))]
    missing = _wait(store, keys, timeout_s)
    there = [(rank, key) for rank, key in zip(ranks, keys, strict=True) if key not in missing]
    ballots = {rank: _unpack(data) for (rank, _), data in zip(there, _read(store, [key for _, key in there]), strict=True)}
    for ballot in ballots.values():
        if "failed" in ballot:
            return {"error": str(ballot["failed"])}
    if missing:
        return {"error": _absent(name, occasion, store, vote, timeout_s)}
    for rank, ballot in ballots.items():
        other = ballot.get("occasion", "compiling a graph")
        if other != occasion:
            return {"error": _apart(ranks[0], occasion, rank, other)}
    return {"error": None, "united": unite([ballot["ballot"] for ballot in ballots.values()])}


def _absent(group: str, occasion: str, store: Any, vote: str, timeout_s: float) -> str:
    missing = [rank for i, rank in enumerate(compat.group_ranks(group)) if not store.check([f"{vote}/{i}"])]
    return (
        f"rank {', '.join(map(str, missing or compat.group_ranks(group)[:1]))} of group {group!r} did not reach {occasion} within "
        f"{timeout_s:g} s, but the others did. It stopped, is much slower, or runs other code. Look at its log; timeout_s=... waits longer."
    )


def _apart(rank: int, occasion: str, other_rank: int, other: str) -> str:
    return (
        f"rank {rank} is at {occasion}, but rank {other_rank} at {other}: every rank must do the same things in the same order."
        " Compile the same graphs, run the same backwards, leave windows alike."
    )


def _post_failure(name: str, reason: str) -> None:
    if not has_other_ranks(name):
        return
    group, store = compat.process_group(name), compat.default_store()
    ledger = _ledger(name, group, store)
    vote = f"{ledger.prefix}/{ledger.votes}"
    store.set(f"{vote}/{group.rank()}", _pack({"failed": reason}))
    store.set(f"{vote}/failed", reason)
    if group.rank() == 0:
        store.set(f"{vote}/verdict", _pack({"error": reason}))
    ledger.votes += 1


def reported_failure(name: str) -> str | None:
    """Why another rank of the group said that it will not come to the next vote, if one did; asks without waiting."""
    if not has_other_ranks(name):
        return None
    group, store = compat.process_group(name), compat.default_store()
    key = f"{(ledger := _ledger(name, group, store)).prefix}/{ledger.votes}/failed"
    return store.get(key).decode() if store.check([key]) else None


def exchange(group: str, question: str, mine: Any, timeout_s: float, *, remember: str | None = None) -> list[Any]:
    """Every rank of a group tells the others what it would answer, so that all can choose alike.

    Args:
        group: name of the process group. Where it has no other ranks (or is a fake one), this rank's answer is the only one.
        question: what is asked; it must be the same on all ranks.
        mine: this rank's answer, of plain JSON values.
        timeout_s: seconds to wait for the other ranks.
        remember: a key; if something was asked under it before, return the answers of then: for compiles, which a rank may repeat alone.

    Returns:
        The answers, in the order of the group's ranks; the same list on every rank.

    Raises:
        AgreementError: on every rank, when one of them asks something else, failed, or does not answer in time.
    """
    if not has_other_ranks(group):
        return [mine]
    ledger = _ledger(group, compat.process_group(group), compat.default_store())
    if remember is not None and remember in ledger.answers:
        return ledger.answers[remember]
    united = consult(group, question, {"answer": mine}, lambda ballots: {"answers": [ballot["answer"] for ballot in ballots]}, timeout_s)
    answers: list[Any] = united["answers"]
    if remember is not None:
        ledger.answers[remember] = answers
    return answers


def has_other_ranks(group: str) -> bool:
    """Whether a group has ranks besides this one that can be asked: those of a fake world cannot."""
    return compat.group_backend(group) != "fake" and compat.process_group(group).size() > 1


def _ledger(name: str, group: dist.ProcessGroup, store: Any) -> _Ledger:
    ledger = _ledgers.get(group)
    if ledger is None:
        # A store outlives its groups: number the groups that had this name, so that old votes are not read again.
        entered = store.add(f"zpasses/{name}/entered", 1)
        ledger = _ledgers[group] = _Ledger(f"zpasses/{name}/{(entered - 1) // group.size()}")
    return ledger


def _vote(name: str, graph_name: str, sequence: list[Collective], timeout_s: float) -> None:
    if not has_other_ranks(name):
        return
    group, store = compat.process_group(name), compat.default_store()
    ledger, mine = _ledger(name, group, store), digest(sequence)
    if mine in ledger.agreed:
        return
    vote = f"{ledger.prefix}/{ledger.votes}"
    ledger.votes += 1
    store.set(f"{vote}/{group.rank()}", _pack({"graph": graph_name, "digest": mine, "lines": [_line(each) for each in sequence]}))
    if group.rank() == 0:
        error = _decide(store, vote, name, graph_name, timeout_s)
        store.set(f"{vote}/verdict", _pack({"error": error}))
    else:
        error = _await_verdict(store, vote, name, graph_name, timeout_s)
    if error:
        raise AgreementError(error)
    ledger.agreed.add(mine)


def _decide(store: Any, vote: str, name: str, graph_name: str, timeout_s: float) -> str | None:
    ranks = compat.group_ranks(name)
    keys = [f"{vote}/{rank}" for rank in range(len(ranks))]
    missing = _wait(store, keys, timeout_s)
    if missing:
        return _late(graph_name, name, [ranks[keys.index(key)] for key in missing], timeout_s)
    ballots = [_unpack(data) for data in _read(store, keys)]
    for ballot in ballots:
        if "failed" in ballot:
            return str(ballot["failed"])
    for rank, ballot in zip(ranks, ballots, strict=True):
        if "digest" not in ballot:
            return _apart(ranks[0], f"compiling graph {graph_name}", rank, str(ballot["occasion"]))
        if ballot["digest"] != ballots[0]["digest"]:
            return _first_difference(name, ranks[0], ballots[0], rank, ballot)
    return None


def _await_verdict(store: Any, vote: str, name: str, graph_name: str, timeout_s: float) -> str | None:
    if not _wait(store, [f"{vote}/verdict"], timeout_s + _VERDICT_SLACK_S):
        verdict = _unpack(store.get(f"{vote}/verdict"))["error"]
        return None if verdict is None else str(verdict)
    ranks = compat.group_ranks(name)
    missing = [rank for i, rank in enumerate(ranks) if not store.check([f"{vote}/{i}"])]
    return _late(graph_name, name, missing or ranks[:1], timeout_s)


def _wait(store: Any, keys: list[str], timeout_s: float) -> list[str]:
    """Wait for keys; return those that did not come in time."""
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except Exception:  # the type depends on the store; what matters is which keys are there
        return [key for key in keys if not store.check([key])]
    return []


def _read(store: Any, keys: list[str]) -> list[bytes]:
    """What lies under keys that are all there: in one round where the store can."""
    found: list[bytes] = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    return found


def _late(graph_name: str, group: str, ranks: list[int], timeout_s: float) -> str:
    return (
        f"graph {graph_name}: rank {', '.join(map(str, ranks))} of group {group!r} did not compile a graph with new collectives within "
        f"{timeout_s:g} s, but the others did. It stopped, is much slower, or takes another branch. Look at its log; "
        "options={'agreement_timeout_s': ...} waits longer."
    )


def _first_difference(group: str, rank_a: int, a: dict[str, Any], rank_b: int, b: dict[str, Any]) -> str:
    lines_a, lines_b = a["lines"], b["lines"]
    at = next((i for i, (x, y) in enumerate(zip(lines_a, lines_b, strict=False)) if x != y), min(len(lines_a), len(lines_b)))
    this, that = (lines[at] if at < len(lines) else "nothing more" for lines in (lines_a, lines_b))
    return (
        f"ranks would run different collectives on group {group!r}. First difference: collective {at} is {this} on rank {rank_a} (graph "
        f"{a['graph']}, {len(lines_a)} collectives) but {that} on rank {rank_b} (graph {b['graph']}, {len(lines_b)} collectives). "
        "Every rank must take the same branches and read the same parameters."
    )


def _line(each: Collective) -> str:
    tensors = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in zip(each.dtypes, each.shapes, strict=True))
    return f"{each.op}({tensors}{', ' + each.reduce_op if each.reduce_op else ''})"


def _pack(value: dict[str, Any]) -> str:
    # Stores take text; a graph of thousands of like collectives compresses to a few KiB.
    return zlib.compress(json.dumps(value).encode()).hex()


def _unpack(data: bytes) -> dict[str, Any]:
    loaded = json.loads(zlib.decompress(bytes.fromhex(data.decode())))
    assert isinstance(loaded, dict)
    return loaded
