"""Graphs in a dump, as plain data: nodes with all that is known of them, and snapshots of a graph
at one moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Union

__all__ = [
    "Argument",
    "Buffer",
    "Collective",
    "Mark",
    "Node",
    "Ref",
    "Snapshot",
    "Source",
    "Tag",
    "Text",
    "Value",
    "references",
]


# --- arguments ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the value of another node."""

    node: int
    """Its id."""


@dataclass(frozen=True, slots=True)
class Text:
    """An argument that JSON has no word for (a dtype, a device, a slice, a symbol), as text."""

    text: str


Argument = Union[
    None, bool, int, float, str, Ref, Text, "tuple[Argument, ...]", "Mapping[str, Argument]"
]
"""A list of the graph is a tuple here, a dictionary a mapping with text for keys."""


def references(argument: Argument) -> Iterator[int]:
    """Ids of the nodes in an argument, in order of appearance."""
    if isinstance(argument, Ref):
        yield argument.node
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)
    elif isinstance(argument, Mapping):
        for item in argument.values():
            yield from references(item)


# --- nodes ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Value:
    """One tensor (or number) that a node produces."""

    shape: tuple[int | str, ...]
    """A dynamic size is its expression, as text."""
    dtype: str
    """"float32", "bfloat16", ...; "SymInt", "int", ... where the value is no tensor."""
    device: str
    nbytes: int
    """A dynamic size counts by its hint."""


@dataclass(frozen=True, slots=True)
class Tag:
    """What a node is to zpasses: `zpasses.graph.tags.Tag` as plain data."""

    role: str
    params: tuple[str, ...]
    nbytes: int = 0
    bucket: int | None = None
    origin: str = ""
    cached: bool = False
    deferrable: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """What AOTAutograd's partitioner is told to do with a value that backward needs."""

    policy: str
    """"must_recompute", "prefer_recompute", "must_save", "prefer_save", ...: a checkpoint policy of
    torch."""
    region: int = 0
    """Of which checkpoint; the passes of zpasses use one of their own, behind all others."""

    @property
    def text(self) -> str:
        """As listings say it."""
        return "recomputed" if self.policy == "must_recompute" else self.policy.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Source:
    """Where in the user's model a node came from."""

    file: str
    line: int
    text: str = ""
    """The line itself, without indentation."""
    module: str = ""
    """Path of the module: "layers.3.mlp"."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One piece of memory that a node allocates, by the model of `zpasses.cost.memory`: alive from
    `first` to `last`, both included."""

    nbytes: int
    first: int
    """Id of the node during which it is allocated: the node's own, but for values that forward
    saved, which are there from the start."""
    last: int
    """Id of the last node that needs it."""
    kind: str
    """"parameter" (a full or partial one), "gradient", "bucket", "activation", "saved", "scratch"
    or "other"."""
    params: tuple[str, ...] = ()
    """The parameters that it belongs to."""


@dataclass(frozen=True, slots=True)
class Collective:
    """What a node communicates."""

    kind: str
    """The op without namespace and overload: "all_gather_into_tensor", "unshard", ..."""
    group: str
    ranks: int
    """Size of the group."""
    nbytes: int
    """What this rank puts in."""
    full_bytes: int
    """Of the full tensors: what a gather returns, what a reduction takes."""
    waits: tuple[int, ...] = ()
    """Ids of the nodes that await it; none for an op of the dialect, which waits by itself."""
    route: str = ""
    """How it travels, where a pass chose: "coalesced", "flat", by copy engines: "mori", "mori
    coalesced"."""
    verdict: str = ""
    """Why a pass chose so, or left it alone."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a graph, in one state. Two snapshots share the object of a node that did not
    change between them."""

    id: int
    """The same for one node through all passes and levels of a compile; a node that forward or
    backward took over by name keeps it."""
    name: str
    op: str
    """"placeholder", "call_function", "get_attr", "call_method", "call_module" or "output"."""
    target: str
    """"aten.mm.default"; the name of an input, attribute or method."""
    args: tuple[Argument, ...] = ()
    kwargs: Mapping[str, Argument] = field(default_factory=dict)
    vals: tuple[Value, ...] = ()
    params: tuple[str, ...] = ()
    """Names of the parameters that it works for."""
    tag: Tag | None = None
    mark: Mark | None = None
    """Whether backward computes it again; None for what the partitioner may treat as it likes."""
    source: Source | None = None
    buffers: tuple[Buffer, ...] = ()
    """What it allocates; nothing for views and for memory that the caller holds."""
    cost_us: float = 0.0
    """By the target's cost model: of the computation, or of the communication that it starts."""
    stream: str | None = None
    """"compute", "communication", or None for what takes no time."""
    collective: Collective | None = None
    inputs: tuple[int, ...] = ()
    """Ids of the nodes that it reads, each once, in order."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that it produces."""
        return sum(value.nbytes for value in self.vals)


@dataclass(frozen=True)
class Snapshot:
    """A graph at one moment, its nodes in the order in which they run."""

    number: int
    """Of the file in the compile's folder."""
    nodes: tuple[Node, ...]
    live_bytes: tuple[int, ...]
    """Bytes alive while each node runs, one figure a node, by the model of
    `zpasses.cost.memory`."""

    @cached_property
    def by_id(self) -> dict[int, Node]:
        return {node.id: node for node in self.nodes}

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def position(self) -> dict[int, int]:
        """Id -> index in `nodes`."""
        return {node.id: at for at, node in enumerate(self.nodes)}

    @cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """Id -> ids of the nodes that read it, in graph order."""
        found: dict[int, list[int]] = {node.id: [] for node in self.nodes}
        for node in self.nodes:
            for read in node.inputs:
                found[read].append(node.id)
        return {key: tuple(users) for key, users in found.items()}

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    def live_at(self, node: Node | int) -> int:
        """Bytes alive while a node (or the node of this id) runs."""
        return self.live_bytes[self.position[node if isinstance(node, int) else node.id]]

    def alive_at(self, node: Node | int) -> list[tuple[Node, Buffer]]:
        """(who allocated it, buffer) of what is alive while a node runs, largest first; sums up to
        `live_at`."""
        position = self.position
        at = position[node if isinstance(node, int) else node.id]
        alive = [
            (each, buffer)
            for each in self.nodes
            for buffer in each.buffers
            if position[buffer.first] <= at <= position[buffer.last]
        ]
        return sorted(alive, key=lambda pair: -pair[1].nbytes)
