"""FX graphs as passes see them: dialect operators, tags, queries, edits, verification and listings.

This package knows nothing about ranks or costs. It re-exports the names that most passes need, so
that a pass can import them from `zpasses.graph`.
"""

from zpasses.graph.dialect import AVERAGE_GRAD, REDUCE_GRAD, UNSHARD
from zpasses.graph.printer import listing
from zpasses.graph.queries import (
    Collective,
    Editor,
    calls,
    collective_of,
    collectives,
    collectives_by_group,
    erase_dead,
    is_wait,
    named_arguments,
    nbytes,
    propagate,
    value_of,
)
from zpasses.graph.tags import Tag, add_tag, retag, tag_of, tagged
from zpasses.graph.verifier.order import Race, find_races

__all__ = [
    "AVERAGE_GRAD",
    "REDUCE_GRAD",
    "UNSHARD",
    "Collective",
    "Editor",
    "Race",
    "Tag",
    "add_tag",
    "calls",
    "collective_of",
    "collectives",
    "collectives_by_group",
    "erase_dead",
    "find_races",
    "is_wait",
    "listing",
    "named_arguments",
    "nbytes",
    "propagate",
    "retag",
    "tag_of",
    "tagged",
    "value_of",
]
