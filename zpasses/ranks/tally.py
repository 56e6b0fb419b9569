"""How the ballots of a vote reach the first rank: up a tree, and equal ones once.

Rank 0 collects those of ranks 1 to 31 and of ranks 32, 64, 96, ..., each of which collects those of
the 31 ranks after it. A rank writes one text for all ballots that it has collected: a tally, which
names each distinct ballot and the ranks that cast it. A long ballot is named by its digest, because
ranks mostly cast equal ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

_FAN = 32
"""Ranks of a branch of the tree."""

_SHORT = 160
"""Characters of a ballot that is not named by its digest."""

Tally = dict[str, list[list[int]]]
"""Text of a ballot -> the ranks that cast it, as pairs of the first and the last of a range."""


def ranks_below(rank: int, size: int) -> list[int]:
    """Returns the ranks of a group of `size` whose tallies a rank collects, in order."""
    found: list[int] = []
    step = 1
    while step < size and rank % (step * _FAN) == 0:
        found += range(rank + step, min(rank + step * _FAN, size), step)
        step *= _FAN
    return found


def text_of(occasion: str, ballot: Any, details: Any = None, *, in_full: bool = False) -> str:
    """Returns the text of a ballot.

    Args:
        occasion: what the rank votes on.
        ballot: of plain JSON values.
        details: of plain JSON values; only a ballot in full has them.
        in_full: never name the ballot by its digest.
    """
    if in_full:
        return json.dumps({"occasion": occasion, "ballot": ballot, "details": details})
    text = json.dumps(ballot)
    said = {"ballot": ballot} if len(text) <= _SHORT else {"digest": _digest(text)}
    return json.dumps({"occasion": occasion, **said})


def add_to(tally: Tally, others: Iterable[Tally]) -> None:
    """Add the tallies of the ranks below, in their order."""
    for other in others:
        for text, ranges in other.items():
            known = tally.setdefault(text, [])
            for first, last in ranges:
                if known and known[-1][1] == first - 1:
                    known[-1][1] = last
                else:
                    known.append([first, last])


class Count:
    """The tally of all ranks, as the first rank reads it."""

    def __init__(self, tally: Tally, own: Any) -> None:
        """Read the tally of all ranks, and this rank's own ballot."""
        self._cast = [(json.loads(text), ranges) for text, ranges in tally.items()]
        text = json.dumps(own)
        self._known = {_digest(text): json.loads(text)}  # lists for tuples, as the others' are
        for said, _ in self._cast:
            if "details" in said:
                self._known[_digest(json.dumps(said["ballot"]))] = said["ballot"]

    def other_occasion(self, occasion: str) -> tuple[int, dict[str, Any]] | None:
        """Returns the first rank that votes on another occasion, and what it said."""
        others = [each for each in self._cast if each[0]["occasion"] != occasion]
        found = min(others, key=lambda each: each[1][0][0], default=None)
        return None if found is None else (found[1][0][0], found[0])

    def unknown(self) -> list[int]:
        """Returns one rank for each ballot of which only the digest is known."""
        return sorted(
            {
                said["digest"]: ranges[0][0]
                for said, ranges in self._cast
                if said.get("digest", "") not in {"", *self._known}
            }.values()
        )

    def ballots(self, size: int) -> Sequence[Any]:
        """Returns the ballots of all ranks, in order. Equal ones may be one object."""
        found: list[Any] = [None] * size
        for said, ranges in self._cast:
            ballot = said["ballot"] if "ballot" in said else self._known[said["digest"]]
            for first, last in ranges:
                found[first : last + 1] = [ballot] * (last + 1 - first)
        return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
