"""Ranks compare what they do, and decide identically what each of them plans by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.ranks.vote import Ballot, exchange, vote

__all__ = ["adopt", "compare"]

Difference = Callable[[int, Ballot, int, Ballot], str | None]
"""Returns the error about two ranks and what they said, or None if these agree."""


def compare(
    group: str,
    occasion: str,
    mine: Ballot,
    difference: Difference,
    timeout_s: float | None = None,
    *,
    on_difference: Callable[[], None] = lambda: None,
    **texts: str,
) -> None:
    """Compare what the ranks of a group say with what its first rank says.

    Args:
        group, occasion, timeout_s: as for `vote`.
        mine: what this rank says.
        difference: must not raise; it runs on the first rank only, in the order of the ranks.
        on_difference: called on every rank if two differ, but not after other errors of the vote.
        texts: `missed`, `advice` and `timeout_option` of `vote`.

    Raises:
        AgreementError: on every rank, if two differ, or as `vote` does.
    """

    def combine(ballots: Sequence[Ballot]) -> Ballot:
        ranks = compat.group_ranks(group)
        for rank, each in zip(ranks[1:], ballots[1:], strict=True):
            error = difference(ranks[0], ballots[0], rank, each)
            if error is not None:
                return {"error": error}
        return {"error": None}

    text = vote(group, occasion, mine, combine, timeout_s, **texts)["error"]
    if text is not None:
        on_difference()
        error = AgreementError(text)
        error._zpasses_group = group  # type: ignore[attr-defined]
        raise error


def adopt(
    groups: Iterable[str],
    question: str,
    signature: Any,
    mine: Any,
    *,
    planned_for: Any = None,
    merge: Callable[[Sequence[Any]], Any] = lambda plans: plans[0],
) -> tuple[Any, list[str]]:
    """Returns the plan that all ranks take, and the groups whose ranks all have this signature.

    A plan depends on shapes, and ranks may have different shapes. A rank may also recompile when
    the other ranks do not. The same signature therefore always gets the same plan, as long as
    `planned_for` is the same.

    Args:
        groups: names of process groups. Each passes on to the next what it adopts, so ranks of
            several groups end with the plan of one rank.
        question: what is planned; it must be the same on all ranks.
        signature: what the plan is about, equal on all ranks and independent of shapes. It has an
            equal `repr` wherever it is equal, and contains no name of a group: these differ between
            the replicas of hybrid sharding.
        mine: this rank's plan, of plain JSON values.
        planned_for: what else the plan depends on, such as the target.
        merge: makes one plan of those of all ranks, in group order. The default takes the first.

    Raises:
        AgreementError: on every rank, when one of them asks something else, failed, or does not
            answer in time.
    """
    key = _hash(question, signature)
    remember = _hash(key, planned_for)
    shared = []
    for group in groups:
        answers = exchange(group, question, [key, mine], remember=remember)
        # Where another rank has other collectives, the comparison of collectives reports it later.
        if all(theirs == key for theirs, _ in answers):
            mine = merge([plan for _, plan in answers])
            shared.append(group)
    return mine, shared


def _hash(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()
