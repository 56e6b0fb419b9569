"""Ranks compare the options of the backend before they plan within a memory budget.

What does not fit one rank's budget is an error of that rank, which says nothing of the other ranks'
options. So ranks compare them before any of them plans.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from zpasses.ranks.agree import compare
from zpasses.ranks.current_compile import ComparedOptions, compared_differ
from zpasses.ranks.vote import Ballot, group_state, has_other_ranks


def compare_options(
    groups: Sequence[str], graph_name: str, options: ComparedOptions, *, votes: bool
) -> None:
    """Compare the options of a compile with those of the other ranks.

    Options that were found equal once need no second vote. A rank may therefore recompile without
    the other ranks.

    Args:
        groups: names of the process groups of the graph.
        graph_name: what the error calls the graph.
        options: those that ranks must give alike.
        votes: whether to vote; otherwise, only errors of later votes name the options.

    Raises:
        AgreementError: on every rank of a group, if one of them gives others, comes to another
            vote, failed, or does not come in time.
    """
    meanings = json.dumps({name: meaning for name, (_, meaning) in options.items()})
    agreed = f"options {hashlib.sha256(meanings.encode()).hexdigest()}"

    def difference(rank_a: int, a: Ballot, rank_b: int, b: Ballot) -> str | None:
        return compared_differ(rank_a, a["options"], rank_b, b["options"])

    for group in filter(has_other_ranks, groups):
        state = group_state(group)
        state.options = options
        if votes and agreed not in state.agreed:
            missed = f"compile a graph with new options (graph {graph_name} here)"
            compare(group, "comparing options", {"options": options}, difference, missed=missed)
            state.agreed.add(agreed)
