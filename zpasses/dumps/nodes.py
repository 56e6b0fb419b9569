"""Graphs of a dump as plain data: a node with all of its metadata, and a snapshot of a graph at one
moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Union

__all__ = [
    "Argument",
    "Buffer",
    "Collective",
    "Node",
    "RecomputeMark",
    "Ref",
    "Repr",
    "Snapshot",
    "Source",
    "Tag",
    "Value",
    "references",
]


# --- arguments ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the value of another node."""

    node: int
    """Id of that node."""


@dataclass(frozen=True, slots=True)
class Repr:
    """An argument that JSON cannot express (a dtype, a device, a slice, a symbol), as text."""

    text: str


Argument = Union[
    None, bool, int, float, str, Ref, Repr, "tuple[Argument, ...]", "Mapping[str, Argument]"
]
"""Lists of the graph are tuples here. Dictionaries are mappings with text keys."""


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
    """One tensor or number that a node produces."""

    shape: tuple[int | str, ...]
    """A dynamic size is its expression as text."""
    dtype: str
    """ "float32", "bfloat16", ... for a tensor, "SymInt", "int", ... for a number."""
    device: str
    """ "cpu", "cuda:0", ... for a tensor, empty for a number."""
    nbytes: int
    """A dynamic size counts with its hint."""


@dataclass(frozen=True, slots=True)
class Tag:
    """The role that zpasses gives a node: `zpasses.graph.tags.Tag` as plain data."""

    role: str
    params: tuple[str, ...]
    nbytes: int = 0
    bucket: int | None = None
    origin: str = ""
    cached: bool = False
    kept: bool = False
    deferrable: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class RecomputeMark:
    """The checkpoint policy that AOTAutograd's partitioner reads for a value that backward
    needs."""

    policy: str
    """A checkpoint policy of torch: "must_recompute", "prefer_recompute", "must_save",
    "prefer_save", ...
    """
    region: int = 0
    """Number of the checkpoint that set the policy. Marks by passes of zpasses use a number of
    their own, higher than all others.
    """

    @property
    def text(self) -> str:
        """The mark as listings print it."""
        return "recomputed" if self.policy == "must_recompute" else self.policy.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Source:
    """The place in the user's model that a node comes from."""

    file: str
    line: int
    text: str = ""
    """The line of code, without indentation."""
    module: str = ""
    """Path of the module: "layers.3.mlp"."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A block of memory that a node allocates, according to `zpasses.cost.memory`. It is alive from
    node `first` to node `last`, both included.
    """

    nbytes: int
    first: int
    """Id of the node during which it is allocated. This is the node itself, except for values that
    forward saved, which exist from the start.
    """
    last: int
    """Id of the last node that needs it."""
    kind: str
    """ "parameter" (full or partial), "gradient", "bucket", "activation", "saved", "scratch" or
    "other".
    """
    params: tuple[str, ...] = ()
    """Names of the parameters that it holds data of."""


@dataclass(frozen=True, slots=True)
class Collective:
    """The communication of one node."""

    kind: str
    """The op without namespace and overload: "all_gather_into_tensor", "unshard", ..."""
    group: str
    """Name of the process group."""
    ranks: int
    """Number of ranks in the group."""
    nbytes: int
    """Bytes of this rank's input."""
    full_bytes: int
    """Bytes of the full tensors: the output of a gather, the input of a reduction."""
    waits: tuple[int, ...] = ()
    """Ids of the nodes that wait for it. Empty for an op of the dialect, which includes its wait.
    """
    route: str = ""
    """The implementation that a pass chose: "coalesced", "flat", or with copy engines "mori" or
    "mori coalesced". Empty if no pass chose one.
    """
    decision: str = ""
    """The pass's reason to replace the collective or to keep it."""
    label: str = ""
    """Name of the mesh dimension of the group, with a number from the second group of that name on:
    "dp", "dp/2". Empty if the group belongs to no mesh, and in older dumps."""

    @property
    def title(self) -> str:
        """What pages call the group: its label, or its name if it has none."""
        return self.label or self.group


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a graph in one state. Snapshots share the object of a node that does not change
    between them.
    """

    id: int
    """A node has the same id in all passes and levels of a compile. A node of the forward or
    backward graph has the id of the joint graph's node with the same name.
    """
    name: str
    op: str
    """ "placeholder", "call_function", "get_attr", "call_method", "call_module" or "output"."""
    target: str
    """The op ("aten.mm.default"), or the name of an input, attribute or method."""
    args: tuple[Argument, ...] = ()
    kwargs: Mapping[str, Argument] = field(default_factory=dict)
    vals: tuple[Value, ...] = ()
    """All tensors and numbers that it produces."""
    params: tuple[str, ...] = ()
    """Names of the parameters that the node works for."""
    tag: Tag | None = None
    mark: RecomputeMark | None = None
    """The recompute policy. None leaves the choice to the partitioner."""
    source: Source | None = None
    """None if torch recorded no source location."""
    buffers: tuple[Buffer, ...] = ()
    """Memory that it allocates. Empty for views, and for memory that the caller holds."""
    cost_us: float = 0.0
    """Time of the computation, or of the collective that it starts, by the target's cost model."""
    stream: str | None = None
    """ "compute", "communication", or None for a node that takes no time."""
    collective: Collective | None = None
    """None if the node starts no collective."""
    inputs: tuple[int, ...] = ()
    """Ids of the nodes that it reads, in order and without duplicates."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of its values."""
        return sum(value.nbytes for value in self.vals)


@dataclass(frozen=True)
class Snapshot:
    """A graph at one moment, with its nodes in execution order."""

    number: int
    """Number of the snapshot's file in the compile's folder."""
    nodes: tuple[Node, ...]
    live_bytes: tuple[int, ...]
    """Bytes alive while each node runs, in graph order, by the model of `zpasses.cost.memory`."""
    spans: tuple[tuple[float, float], ...]
    """Start and end of each node in microseconds, in graph order; see
    `zpasses.cost.time.step_time.Timeline.spans`.
    """

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
        """Bytes alive while a node (given as node or id) runs."""
        return self.live_bytes[self.position[node if isinstance(node, int) else node.id]]

    def alive_at(self, node: Node | int) -> list[tuple[Node, Buffer]]:
        """(allocating node, buffer) of each buffer that is alive while a node runs, largest first.
        Their bytes add up to `live_at`.
        """
        return sorted(self.buffers_at(node), key=lambda pair: -pair[1].nbytes)

    def buffers_at(self, node: Node | int) -> Iterator[tuple[Node, Buffer]]:
        """As `alive_at`, in graph order."""
        position = self.position
        at = position[node if isinstance(node, int) else node.id]
        for each in self.nodes:
            for buffer in each.buffers:
                if position[buffer.first] <= at <= position[buffer.last]:
                    yield each, buffer
