"""Walks over graphs, which are too deep to recurse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def reachable(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yields what `following` leads to from the starts, which come first, each once.

    Args:
        starts: where the walk begins.
        following: returns what comes after one of them. It is called after that was yielded.
    """
    queue = list(dict.fromkeys(starts))
    seen = set(queue)
    while queue:
        at = queue.pop()
        yield at
        for each in following(at):
            if each not in seen:
                seen.add(each)
                queue.append(each)
