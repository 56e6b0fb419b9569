"""Ranks decide identically what each of them plans by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zpasses.ranks.vote import exchange

__all__ = ["adopt"]


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
