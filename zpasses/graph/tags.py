"""Tags: what a node is to zpasses, written where the node is made.

No pass finds out by walking users what an earlier pass knew. A tag lives in `node.meta["zpasses"]`
and is mirrored into `node.meta["custom"]`, the only key of ours that AOTAutograd's re-tracing
keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

__all__ = [
    "GATHER_ROLES",
    "REDUCE_ROLES",
    "Reduction",
    "Role",
    "Tag",
    "add_tag",
    "retag",
    "tag_of",
    "tagged",
]

Role = Literal[
    "shard",
    "gather_input",
    "gather",
    "gathered",
    "full",
    "reduce_input",
    "reduce",
    "reduced",
    "shard_grad",
    "flat",
]
"""What a node does for a parameter.

shard: the graph input that holds the shard. gather_input, reduce_input: makes a collective's input
(cast, padding). gather, reduce: starts the collective, or is the dialect's op for it. gathered,
reduced: its wait, where another node finishes. full: the full parameter that the model reads.
shard_grad: the reduced gradient of the shard. flat: makes a flat buffer of several tensors. """

GATHER_ROLES: frozenset[Role] = frozenset({"gather_input", "gather", "gathered", "full"})
"""Everything between a shard and its full parameter."""

REDUCE_ROLES: frozenset[Role] = frozenset({"reduce_input", "reduce", "reduced", "shard_grad"})
"""Everything between a full gradient and the gradient of the shard."""


@dataclass(frozen=True)
class Reduction:
    """How a gradient becomes a shard's: what ranks share of the arguments of
    `zpasses::reduce_grad`."""

    rows: int
    """Rows of the full parameter; 0 for a 0-dimensional one."""
    dtype: torch.dtype
    """The shard's."""
    reduce_dtype: torch.dtype | None
    """To communicate and add in; None is the gradient's."""
    group: str
    """Name of the process group."""


@dataclass(frozen=True)
class Tag:
    """What a node is to zpasses."""

    role: Role
    params: tuple[str, ...]
    """Names of the parameters it works for, below the compiled module."""
    nbytes: int = 0
    """Bytes that one rank puts into the collective; 0 for nodes that do not communicate."""
    bucket: int | None = None
    """Number of the bucket it was merged into."""
    origin: str = ""
    """Name of the pass that made it; "capture" for the dialect's own ops."""
    cached: bool = False
    """The value outlives the call (stages 1 and 2)."""
    block_bytes: int = 0
    """For values whose size differs between ranks: bytes where a rank holds all the rows that it
    can; the same on all of them."""
    note: str = ""
    """What the pass chose here, for listings and dumps."""
    reduction: Reduction | None = None
    """Of a shard_grad: how to reduce a gradient that was not reduced here."""
    deferrable: bool = False
    """Of a shard_grad: it may be reduced in a later call."""


_KEY = "zpasses"


def tag_of(node: fx.Node) -> Tag | None:
    """The node's tag, also where only the mirrored copy survived."""
    tag = node.meta.get(_KEY)
    if tag is None:
        custom = node.meta.get("custom")
        tag = custom.get(_KEY) if isinstance(custom, dict) else None
    return tag if isinstance(tag, Tag) else None


def add_tag(node: fx.Node, tag: Tag) -> None:
    """Tag a node, in place of any earlier tag."""
    node.meta[_KEY] = tag
    custom = node.meta.get("custom")
    node.meta["custom"] = {**(custom if isinstance(custom, dict) else {}), _KEY: tag}


def drop_tag(node: fx.Node) -> None:
    node.meta.pop(_KEY, None)
    custom = node.meta.get("custom")
    if isinstance(custom, dict) and _KEY in custom:
        node.meta["custom"] = {key: value for key, value in custom.items() if key != _KEY}


def retag(node: fx.Node, **changes: object) -> None:
    """Change fields of a node's tag; raises ValueError if it has none."""
    tag = tag_of(node)
    if tag is None:
        raise ValueError(f"node {node.name} has no tag to change")
    add_tag(node, replace(tag, **changes))  # type: ignore[arg-type]


def tagged(graph: fx.Graph, *roles: Role) -> Iterator[tuple[fx.Node, Tag]]:
    """Nodes with one of these roles (any, if none is named), in graph order."""
    for node in graph.nodes:
        tag = tag_of(node)
        if tag is not None and (not roles or tag.role in roles):
            yield node, tag
