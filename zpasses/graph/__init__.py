"""FX graphs of the toolkit: the dialect's operators, tags, queries, edits, the verifier, and
listings.

Nothing here knows about ranks or costs. What passes are written with is importable from
`zpasses.graph` itself."""

from zpasses.graph.nodes import (
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
from zpasses.graph.ops import REDUCE_GRAD, UNSHARD
from zpasses.graph.printer import listing
from zpasses.graph.tags import Tag, add_tag, retag, tag_of, tagged

__all__ = [
    "REDUCE_GRAD",
    "UNSHARD",
    "Collective",
    "Editor",
    "Tag",
    "add_tag",
    "calls",
    "collective_of",
    "collectives",
    "collectives_by_group",
    "erase_dead",
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
