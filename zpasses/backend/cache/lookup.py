"""Whether a graph is taken from the compile cache: all ranks take it, or none does.

A rank that takes a graph from the cache skips the votes of the passes, so another rank must not
wait in them. The ranks ask each other once for each list of parameters. Later compiles of the same
parameters, for another shape for example, may happen on one rank alone. They take a graph only if
the votes of its passes would come to nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zpasses import compat
from zpasses.backend.cache.entry import GraphArtifacts
from zpasses.backend.cache.key import GraphKey
from zpasses.ranks.agree import (
    are_remembered,
    exchange,
    first_two,
    is_remembered,
    restore_answers,
)

_OCCASION = "taking a graph from the compile cache"

_LEAST_OF_FREE = 0.8
"""A graph that was planned for free memory is used if that is at most so much less than now."""


def find_artifacts(
    key: GraphKey,
    groups: Sequence[str],
    free_bytes: int | None,
    load: Callable[[GraphArtifacts], None],
) -> GraphArtifacts | str:
    """Returns the stored form of a graph, which all ranks take; or why it is compiled.

    Args:
        groups: names of the process groups of the graph.
        free_bytes: the budget that `memory_budget="auto"` found, on all ranks; None without it.
        load: loads what the graph needs first, without a vote. It may raise anything.

    Raises:
        AgreementError: when another rank failed, or does not come in time.
    """
    found = GraphArtifacts.read(key.digest)
    if isinstance(found, GraphArtifacts):
        found = _loaded(found, free_bytes, load)
    question = _question(key)
    agreed = []
    # With hybrid sharding, the first group tells the ranks of each replica whether one of them has
    # no entry, and the second tells it to all replicas.
    for group in groups:
        mine = found.entry.fingerprint(group) if isinstance(found, GraphArtifacts) else None
        asked_before = is_remembered(group, question)
        answers = exchange(group, _OCCASION, mine, remember=question, merge=first_two)
        if isinstance(found, str) or asked_before:
            continue
        other = next((each for each in answers if each[1] != mine), None)
        if other is None:
            agreed.append(group)
        else:
            at, fingerprint = other
            has = "no entry" if fingerprint is None else "another entry"
            found = f"rank {compat.group_ranks(group)[at]} has {has}"
    if isinstance(found, str):
        return found
    for group in agreed:
        restore_answers(found.entry.answers_of(group))
    if not are_remembered(found.entry.answers):
        return "the ranks have not agreed on its schedule since they started"
    return found


def decline_artifacts(key: GraphKey, groups: Sequence[str]) -> None:
    """Tells the other ranks that this rank compiles the graph, whatever is in the cache.

    Raises:
        AgreementError: as `find_artifacts`.
    """
    for group in groups:
        exchange(group, _OCCASION, None, remember=_question(key), merge=first_two)


def _question(key: GraphKey) -> str:
    return f"compile cache {key.question}"


def _loaded(
    found: GraphArtifacts, free_bytes: int | None, load: Callable[[GraphArtifacts], None]
) -> GraphArtifacts | str:
    planned = found.entry.free_bytes
    if (
        planned is not None
        and free_bytes is not None
        and not _LEAST_OF_FREE * free_bytes <= planned <= free_bytes
    ):
        return f"its entry was planned for {planned} free bytes, and {free_bytes} are free now"
    try:
        load(found)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        return f"its entry cannot be loaded ({type(error).__name__}: {text})"
    return found
