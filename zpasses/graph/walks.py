"""Walks over graphs, which are too deep to recurse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def reachable(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yields what `following` leads to from the starts, each once, and the nearest first.

    Args:
        starts: where the walk begins.
        following: returns what comes after one of them. It is called after that was yielded.
    """
    found = list(dict.fromkeys(starts))
    seen = set(found)
    for at in found:  # grows
        yield at
        fresh = [each for each in dict.fromkeys(following(at)) if each not in seen]
        seen.update(fresh)
        found += fresh
