"""Ranks compare the collectives of a graph before they run it.

Before a compiled graph first runs, the ranks of each process group in it compare the sequence of
collectives that the graph runs on that group. They compare through the store, so nobody waits in a
collective that another rank never starts. A difference, or a rank whose compile failed, raises
AgreementError on every rank of the group.

A sequence that was agreed once needs no second vote. A rank may therefore recompile alone, for a
new batch shape for example, as long as it runs the same collectives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from torch import fx

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.graph.nodes import Collective, collectives_by_group
from zpasses.ranks.vote import Ballot, agreed_sequences, has_other_ranks, vote

__all__ = ["agree", "digest"]


def digest(sequence: Sequence[Collective]) -> str:
    """A short name of a sequence of collectives: equal on two ranks if and only if the sequences
    are."""
    return hashlib.sha256(json.dumps([_line(each) for each in sequence]).encode()).hexdigest()[:16]


def agree(graph: fx.Graph, graph_name: str, timeout_s: float) -> None:
    """Raise AgreementError on every rank of a group unless all of them are about to run the same
    collectives on it.

    Args:
        graph: the graph as it will run, after its last pass.
        graph_name: what the error calls it.
        timeout_s: seconds to wait for the other ranks.
    """
    for group, sequence in collectives_by_group(graph).items():
        if has_other_ranks(group):
            _compare(group, graph_name, sequence, timeout_s)


def _compare(group: str, graph_name: str, sequence: list[Collective], timeout_s: float) -> None:
    mine, agreed = digest(sequence), agreed_sequences(group)
    if mine in agreed:
        return
    ballot = {"graph": graph_name, "digest": mine, "lines": [_line(each) for each in sequence]}
    ranks = compat.group_ranks(group)

    def combine(ballots: Sequence[Ballot]) -> Ballot:
        different = next(
            (i for i, each in enumerate(ballots) if each["digest"] != ballots[0]["digest"]), None
        )
        if different is None:
            return {"error": None}
        return {
            "error": _first_difference(
                group, ranks[0], ballots[0], ranks[different], ballots[different]
            )
        }

    error = vote(
        group,
        "compiling a graph",
        ballot,
        combine,
        timeout_s,
        missed=f"compile a graph with new collectives (graph {graph_name} here)",
        timeout_option="options={'agreement_timeout_s': ...}",
    )["error"]
    if error is not None:
        raise AgreementError(error)
    agreed.add(mine)


def _first_difference(group: str, rank_a: int, a: Ballot, rank_b: int, b: Ballot) -> str:
    lines_a, lines_b = a["lines"], b["lines"]
    shared = min(len(lines_a), len(lines_b))
    at = next((i for i in range(shared) if lines_a[i] != lines_b[i]), shared)
    this, that = (lines[at] if at < len(lines) else "nothing more" for lines in (lines_a, lines_b))
    return (
        f"ranks would run different collectives on group {group!r}. First difference: collective "
        f"{at} is {this} on rank {rank_a} (graph "
        f"{a['graph']}, {len(lines_a)} collectives) but {that} on rank {rank_b} (graph "
        f"{b['graph']}, {len(lines_b)} collectives). "
        "Every rank must take the same branches and read the same parameters."
    )


def _line(each: Collective) -> str:
    tensors = ", ".join(
        f"{dtype}{list(shape)}" for dtype, shape in zip(each.dtypes, each.shapes, strict=True)
    )
    reduce_op = f", {each.reduce_op}" if each.reduce_op else ""
    return f"{each.op}({tensors}{reduce_op})"
