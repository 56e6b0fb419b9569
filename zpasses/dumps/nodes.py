"""Graphs of a dump as plain data: a node with all of its metadata, and a snapshot of a graph at one
moment.

Subclasses of `Record` are declared once: files contain their fields by name, without those that
have their default, and `zpasses.dumps.files.decoded` checks what it reads against the declaration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Union

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A number of bytes, nodes or lines, or an id."""
Micros = Annotated[float, Meta(ge=0, lt=1 << 63)]
"""A finite time in microseconds."""


class Record(Struct, frozen=True, omit_defaults=True):
    """A record of a file. Readers ignore fields that it does not declare."""


# --- arguments ------------------------------------------------------------------------------------
class Ref(Record, frozen=True):
    """An argument that is the value of another node."""

    node: Count
    """Id of that node."""


class Repr(Record, frozen=True):
    """An argument that JSON cannot express (a dtype, a device, a symbol), as text."""

    text: str = field(name="repr")


class Items(Record, frozen=True):
    """An argument that is a dictionary or a slice. Its keys are texts."""

    items: Mapping[str, Any] = field(name="map")
    """Key -> argument."""


Argument = Union[None, bool, int, float, str, Ref, Repr, Items, "tuple[Argument, ...]"]
"""Lists of the graph are tuples here. Fields of arguments are declared as Any, because files have
JSON there, of which `Node.resolve` makes arguments.
"""


def references(argument: Argument) -> Iterator[int]:
    """Ids of the nodes in an argument, in order of appearance."""
    if isinstance(argument, Ref):
        yield argument.node
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)
    elif isinstance(argument, Items):
        for item in argument.items.values():
            yield from references(item)


def _argument(value: Any) -> Argument:
    """The argument that JSON stands for."""
    if isinstance(value, list):
        return tuple(map(_argument, value))
    if not isinstance(value, dict):
        return value  # type: ignore[no-any-return]
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == "node" and type(inner) is int:
            return Ref(inner)
        if key == "repr" and isinstance(inner, str):
            return Repr(inner)
        if key == "map" and isinstance(inner, dict):
            return Items({name: _argument(item) for name, item in inner.items()})
    raise ValueError(
        f'argument {str(value)[:80]} is invalid; expected {{"node": id}}, {{"repr": text}} or '
        '{"map": object}'
    )


# --- nodes ----------------------------------------------------------------------------------------
class Value(Record, frozen=True):
    """One tensor or number that a node produces."""

    shape: tuple[int | str, ...]
    """A dynamic size is its expression as text."""
    dtype: str
    """ "float32", "bfloat16", ... for a tensor, "SymInt", "int", ... for a number."""
    device: str
    """ "cpu", "cuda:0", ... for a tensor, empty for a number."""
    nbytes: Count
    """A dynamic size counts with its hint."""


class Tag(Record, frozen=True):
    """The role that zpasses gives a node: `zpasses.graph.tags.Tag` as plain data."""

    role: str
    params: tuple[str, ...]
    nbytes: Count = 0
    bucket: Count | None = None
    origin: str = ""
    cached: bool = False
    kept: bool = False
    deferrable: bool = False
    note: str = ""


class RecomputeMark(Record, frozen=True):
    """The checkpoint policy that AOTAutograd's partitioner reads for a value that backward
    needs."""

    policy: str
    """A checkpoint policy of torch: "must_recompute", "prefer_recompute", "must_save",
    "prefer_save", ...
    """
    region: Count = 0
    """Number of the checkpoint that set the policy. Marks by passes of zpasses use a number of
    their own, higher than all others.
    """

    @property
    def text(self) -> str:
        """The mark as listings print it."""
        return "recomputed" if self.policy == "must_recompute" else self.policy.replace("_", " ")


class Source(Record, frozen=True):
    """The place in the user's model that a node comes from."""

    file: str
    line: Count
    text: str = ""
    """The line of code, without indentation."""
    module: str = ""
    """Path of the module: "layers.3.mlp"."""


class Buffer(Record, frozen=True):
    """A block of memory that a node allocates, according to `zpasses.cost.memory`. It is alive from
    node `first` to node `last`, both included.
    """

    nbytes: Count
    first: Count
    """Id of the node during which it is allocated. This is the node itself, except for values that
    forward saved, which exist from the start.
    """
    last: Count
    """Id of the last node that needs it."""
    kind: str
    """ "parameter" (full or partial), "gradient", "bucket", "activation", "scratch" or "other"."""
    params: tuple[str, ...] = ()
    """Names of the parameters that it holds data of."""


class Collective(Record, frozen=True):
    """The communication of one node."""

    kind: str
    """The op without namespace and overload: "all_gather_into_tensor", "unshard", ..."""
    group: str
    """Name of the process group."""
    ranks: Count
    """Number of ranks in the group."""
    nbytes: Count
    """Bytes of this rank's input."""
    full_bytes: Count
    """Bytes of the full tensors: the output of a gather, the input of a reduction."""
    waits: tuple[Count, ...] = ()
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
    "dp", "dp/2". Empty if the group belongs to no mesh."""

    @property
    def is_host_copy(self) -> bool:
        """Whether it is a copy to or from the host, which concerns no other rank."""
        return self.kind in ("offload", "reload")

    @property
    def title(self) -> str:
        """What pages call the group: its label, or its name if it has none."""
        return self.label or self.group


class Node(Record, frozen=True, dict=True):
    """One node of a graph in one state. Snapshots share the object of a node that does not change
    between them.
    """

    id: Count
    """A node has the same id in all passes and levels of a compile. A node of the forward or
    backward graph has the id of the joint graph's node with the same name.
    """
    name: str
    op: str
    """ "placeholder", "call_function", "get_attr", "call_method", "call_module" or "output"."""
    target: str
    """The op ("aten.mm.default"), or the name of an input, attribute or method."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    vals: tuple[Value, ...] = ()
    """All tensors and numbers that it produces."""
    params: tuple[str, ...] = ()
    """Names of the parameters that the node works for."""
    tag: Tag | None = None
    mark: RecomputeMark | None = None
    """The recompute policy. None leaves the choice to the partitioner."""
    source: Source | None = None
    """None if torch recorded no source location."""
    source_index: Count | None = None
    """Index in `SnapshotHeader.sources`, which stands for `source` in files; None elsewhere."""
    buffers: tuple[Buffer, ...] = ()
    """Memory that it allocates. Empty for views, and for memory that the caller holds."""
    cost_us: Micros = 0.0
    """Time of the computation, or of the collective that it starts, by the target's cost model."""
    stream: Literal["compute", "communication"] | None = None
    """None for a node that takes no time."""
    collective: Collective | None = None
    """None if the node starts no collective."""

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Ids of the nodes that it reads, in order and without duplicates."""
        arguments = (*self.args, *self.kwargs.values())
        return tuple(dict.fromkeys(id for each in arguments for id in references(each)))

    def resolve(self, sources: Sequence[Source]) -> None:
        """Complete a node that was decoded: make arguments of JSON, and a source of its index.

        Raises:
            ValueError: if an argument or the index is invalid.
        """
        force_setattr(self, "args", tuple(map(_argument, self.args)))
        if self.kwargs:
            kwargs = {key: _argument(item) for key, item in self.kwargs.items()}
            force_setattr(self, "kwargs", kwargs)
        if self.source_index is not None:
            if self.source_index >= len(sources):
                found = f"'source_index' is {self.source_index}"
                raise ValueError(f"{found}; expected a number below {len(sources)}")
            force_setattr(self, "source", sources[self.source_index])
            force_setattr(self, "source_index", None)

    @property
    def nbytes(self) -> int:
        """Bytes of all of its values."""
        return sum(value.nbytes for value in self.vals)


class SnapshotHeader(Record, frozen=True):
    """The first line of the file of a snapshot. One line per node follows."""

    number: Count
    """Number of the snapshot, as in the file's name."""
    graph: str
    level: str
    after: str | None
    """These three: see `zpasses.dumps.format.StepEvent`."""
    base: Count | None
    """An earlier snapshot: nodes that are not written are as they were there; None if all are
    written.
    """
    written: Count
    """Number of node lines."""
    live_bytes: tuple[Count, ...]
    spans: tuple[tuple[Micros, Micros], ...]
    """These two: see `Snapshot`."""
    sources: tuple[Source, ...] = ()
    """Sources of the written nodes, which name them by their index here."""
    order: tuple[Count, ...] | None = None
    """Ids of all nodes in graph order; None if it is that of the base, or of the lines where there
    is no base.
    """


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

    def alive_at(self, node: Node) -> list[tuple[Node, Buffer]]:
        """(allocating node, buffer) of each buffer that is alive while a node runs, largest first.
        Their bytes add up to the node's of `live_bytes`.
        """
        return sorted(self.buffers_at(node), key=lambda pair: -pair[1].nbytes)

    def buffers_at(self, node: Node) -> Iterator[tuple[Node, Buffer]]:
        """As `alive_at`, in graph order."""
        position = self.position
        at = position[node.id]
        for each in self.nodes:
            for buffer in each.buffers:
                if position[buffer.first] <= at <= position[buffer.last]:
                    yield each, buffer
