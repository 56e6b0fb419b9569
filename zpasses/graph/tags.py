"""Tags: each node's role in sharding, recorded where the node is created.

Later passes read tags instead of walking users to rediscover what an earlier pass knew. A tag is
stored in `node.meta["zpasses"]` and mirrored in `node.meta["custom"]`, because `custom` survives
AOTAutograd's retracing and other keys do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

Role = Literal[
    "shard",
    "part",
    "rows",
    "gather_input",
    "gather",
    "gathered",
    "full",
    "reduce_input",
    "reduce",
    "reduced",
    "shard_grad",
    "flat",
    "offload",
    "reload",
]
"""What a node does for a parameter.

- shard: the graph input that holds the shard.
- part: rows of a full parameter that forward saves and backward gathers again.
- rows: an exchange of which rows of a table each rank needs, and the wait for such rows.
- gather_input, reduce_input: a step that prepares a collective's input (cast, padding).
- gather, reduce: starts the collective, or is the dialect op for it.
- gathered, reduced: the collective's wait, if later nodes complete the result.
- full: the full parameter that the model reads.
- shard_grad: the reduced gradient of the shard.
- flat: builds a flat buffer of several tensors.
- offload, reload: starts the copy of a saved value to the host, or back; also those of the shards
  of a gradient and of a parameter.
"""

SOURCE_ROLES: frozenset[Role] = frozenset({"shard", "part"})
"""Roles of what gathers read."""

GATHER_ROLES: frozenset[Role] = frozenset({"gather_input", "gather", "gathered", "full"})
"""Roles of the nodes between a shard and its full parameter."""

REDUCE_ROLES: frozenset[Role] = frozenset({"reduce_input", "reduce", "reduced", "shard_grad"})
"""Roles of the nodes between a full gradient and the gradient of the shard."""


@dataclass(frozen=True)
class Reduction:
    """How the gradient of a parameter is reduced, equally on all ranks."""

    rows: int
    """Rows of the full parameter; 0 for a 0-dimensional one."""
    dtype: torch.dtype
    """Dtype of the shard and of its gradient."""
    reduce_dtype: torch.dtype | None
    """Dtype of the communication and of the sum; None uses the gradient's."""
    group: str | None
    """Name of the process group over which the parameter is sharded; None for the gradient of a
    shard, which is reduced over this group already."""
    replicate_group: str | None = None
    """Name of the process group of the ranks that hold equal shards; None without replicas."""
    to_host: bool = False
    """Whether the gradient of the shard is copied to the host, where the shard rests."""


@dataclass(frozen=True)
class Tag:
    """The role of one node, and what passes need to know about it."""

    role: Role
    params: tuple[str, ...]
    """Names of the parameters that the node works for, relative to the compiled module."""
    nbytes: int = 0
    """Bytes that one rank sends into the collective; 0 for nodes that do not communicate."""
    bucket: int | None = None
    """Number of the bucket that the collective was merged into."""
    origin: str = ""
    """Name of the pass that created the node; "capture" for ops of the captured dialect."""
    cached: bool = False
    """The value outlives the call: a full parameter that later calls find unchanged."""
    kept: bool = False
    """On a full parameter: it stays in memory until backward, which frees it if it is not cached,
    too."""
    block_bytes: int = 0
    """Bytes on a rank with a full block of rows, for values whose size differs between ranks.

    Equal on all ranks.
    """
    note: str = ""
    """What the pass decided for this node, shown in listings and dumps."""
    reduction: Reduction | None = None
    """On a shard_grad: how to reduce a gradient that this graph leaves unreduced."""
    deferrable: bool = False
    """On a shard_grad: the reduction may be deferred to a later call."""
    encoding: str = ""
    """On a gather or reduction of records: how their values are encoded
    (`zpasses.graph.encoding`), equally on all ranks."""
    reshard_group: str | None = None
    """On a gather: process group of some of its ranks, from which backward gathers again."""
    defers_average: bool = False
    """On a deferrable shard_grad: only its average over replicas is deferred."""


_KEY = "zpasses"


def tag_of(node: fx.Node) -> Tag | None:
    """Returns the node's tag, or its mirrored copy if only that survived; None without a tag."""
    tag = node.meta.get(_KEY)
    if tag is None:
        custom = node.meta.get("custom")
        tag = custom.get(_KEY) if isinstance(custom, dict) else None
    return tag if isinstance(tag, Tag) else None


def params_of(node: fx.Node) -> tuple[str, ...]:
    """Returns the parameters that a node works for, as its tag says; () without a tag."""
    tag = tag_of(node)
    return tag.params if tag is not None else ()


def add_tag(node: fx.Node, tag: Tag) -> None:
    """Sets the tag of a node, replacing any earlier tag."""
    node.meta[_KEY] = tag
    custom = node.meta.get("custom")
    node.meta["custom"] = {**(custom if isinstance(custom, dict) else {}), _KEY: tag}


def drop_tag(node: fx.Node) -> None:
    """Removes a node's tag and its mirror."""
    node.meta.pop(_KEY, None)
    custom = node.meta.get("custom")
    if isinstance(custom, dict) and _KEY in custom:
        node.meta["custom"] = {key: value for key, value in custom.items() if key != _KEY}


def retag(node: fx.Node, **changes: object) -> None:
    """Changes fields of a node's tag. Raises ValueError if the node has no tag."""
    tag = tag_of(node)
    if tag is None:
        raise ValueError(f"node {node.name} has no tag to change; add one with add_tag first")
    add_tag(node, replace(tag, **changes))  # type: ignore[arg-type]


def tagged(graph: fx.Graph, *roles: Role) -> Iterator[tuple[fx.Node, Tag]]:
    """Yields the nodes with one of these roles and their tags, in graph order.

    Without roles, yields all tagged nodes.
    """
    for node in graph.nodes:
        tag = tag_of(node)
        if tag is not None and (not roles or tag.role in roles):
            yield node, tag


_OF_MODEL = "zpasses_of_model"


def mark_of_model(node: fx.Node) -> None:
    """Marks a collective of the model itself, such as one of tensor parallelism.

    Passes never take it for one that gathers a parameter or reduces a gradient.
    """
    custom = node.meta.get("custom")
    node.meta["custom"] = {**(custom if isinstance(custom, dict) else {}), _OF_MODEL: True}


def is_of_model(node: fx.Node) -> bool:
    """Whether a collective is marked as one of the model itself."""
    custom = node.meta.get("custom")
    return isinstance(custom, dict) and bool(custom.get(_OF_MODEL))


def full_param(wait: fx.Node) -> fx.Node | None:
    """Returns the full parameter that a gather produces: its wait itself, or the rows of it without
    padding.
    """
    for node in (wait, *wait.users):
        tag = tag_of(node)
        if tag is not None and tag.role == "full":
            return node
    return None


def is_resident(wait: fx.Node) -> bool:
    """Whether a gather produces a parameter that is cached throughout the step of stage 3."""
    full = full_param(wait)
    tag = tag_of(full) if full is not None else None
    return tag is not None and tag.cached and tag.kept
