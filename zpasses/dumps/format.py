"""What a dump says, as plain data. docs/dump-format.md describes the files; nothing here imports torch.

A dump has ranks, a rank has compiles, a compile has graphs, a graph has steps: the graph as it came and after every pass that ran on
it. Bytes are bytes and times are microseconds, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Union

__all__ = [
    "FORMAT",
    "VERSION",
    "Agreement",
    "Argument",
    "Buffer",
    "Collective",
    "Compile",
    "CompileInfo",
    "Counts",
    "Dump",
    "Event",
    "Failure",
    "Graph",
    "Node",
    "Param",
    "PassRun",
    "Rank",
    "Ref",
    "Snapshot",
    "Source",
    "Step",
    "Tag",
    "Text",
    "Value",
    "references",
]

FORMAT = "zpasses-dump"
VERSION = 1


# --- arguments ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the value of another node."""

    node: int
    """Its id."""


@dataclass(frozen=True, slots=True)
class Text:
    """An argument that JSON has no word for (a dtype, a device, a slice, a symbol), as text."""

    text: str


Argument = Union[None, bool, int, float, str, Ref, Text, "tuple[Argument, ...]", "Mapping[str, Argument]"]
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


# --- nodes -------------------------------------------------------------------------------------------------------------------------
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
    """What a node is to zpasses: `zpasses.tags.Tag` as plain data."""

    role: str
    params: tuple[str, ...]
    nbytes: int = 0
    bucket: int | None = None
    origin: str = ""
    retained: bool = False
    deferrable: bool = False
    note: str = ""


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
    """One piece of memory that a node allocates, by the model of `zpasses.memory`: alive from `first` to `last`, both included."""

    nbytes: int
    first: int
    """Id of the node during which it is allocated: the node's own, but for values that forward saved, which are there from the start."""
    last: int
    """Id of the last node that needs it."""
    kind: str
    """"parameter" (a full or partial one), "gradient", "bucket", "activation", "saved", "scratch" or "other"."""
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
    """How it travels, where a pass chose: "coalesced", "flat", ..."""
    verdict: str = ""
    """Why a pass chose so, or left it alone."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a graph, in one state. Two snapshots share the object of a node that did not change between them."""

    id: int
    """The same for one node through all passes and levels of a compile; a node that forward or backward took over by name keeps it."""
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
    """Bytes alive while each node runs, one figure a node, by the model of `zpasses.memory`."""

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
        """(who allocated it, buffer) of what is alive while a node runs, largest first; sums up to `live_at`."""
        position = self.position
        at = position[node if isinstance(node, int) else node.id]
        alive = [(each, buffer) for each in self.nodes for buffer in each.buffers if position[buffer.first] <= at <= position[buffer.last]]
        return sorted(alive, key=lambda pair: -pair[1].nbytes)


# --- steps -------------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Counts:
    """Of one graph."""

    nodes: int
    collectives: int
    nbytes: int
    """Bytes that this rank puts into collectives."""


@dataclass(frozen=True, slots=True)
class PassRun:
    """One run of a pass on one graph."""

    name: str
    text: str
    """The pass with its options, as pipeline text."""
    options: Mapping[str, Any]
    """All of them, defaults too, as plain values."""
    changes: int
    """What the pass itself counted."""
    time_us: float
    """The rewrite."""
    check_us: float
    """The checks after it."""
    checks: tuple[str, ...]
    """What was checked."""
    before: Counts
    after: Counts
    notes: tuple[str, ...] = ()
    """What the pass said while it ran: tiers, plans, refusals."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception."""

    type: str
    message: str
    where: str = ""
    """The pass or phase that raised: "bucket{mb=4}", "codegen", "agreement"."""
    traceback: str = ""


@dataclass(frozen=True)
class Step:
    """A graph as it came, or after one pass."""

    index: int
    """In its graph; 0 is the graph before the first pass."""
    level: str
    """"captured", "joint", "forward", "backward", "pack", "flush" or "variant"."""
    after: str | None
    """The pass as pipeline text; None for the graph as it came to this level."""
    number: int | None
    """Of the snapshot; the same as the step's before if the pass changed nothing, None if there was no graph left to write."""
    run: PassRun | None = None
    error: Failure | None = None
    """Why the pass failed; the snapshot is then the graph that it left behind, which may be wrong, if there is one."""
    load: Callable[[int], Snapshot] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def snapshot(self) -> Snapshot | None:
        """The graph, read from its file when first asked for.

        Raises:
            DumpError: when the file is missing, damaged or too large.
        """
        return None if self.number is None or self.load is None else self.load(self.number)


@dataclass(frozen=True)
class Agreement:
    """Ranks compared what they were about to communicate."""

    graph: str
    group: str
    digest: str
    """Of the group's collectives in order."""
    collectives: int
    verdict: str
    """"agreed", "differs", "off" (option agreement=False) or "alone" (a group of one, or a fake one)."""


@dataclass(frozen=True)
class Graph:
    """One graph through its passes."""

    name: str
    """"captured", "joint", "forward", "backward", "inference", "pack", "flush", and for forms of a graph that carry values from call to
    call "forward.variant0", ...; a second one of the same name is "flush.2"."""
    steps: tuple[Step, ...]
    of: str = ""
    """For a variant, the graph that it was cut from."""
    given: tuple[str, ...] = ()
    """For a variant, the parameters whose full values (or pending gradients) it takes in."""
    kept: tuple[str, ...] = ()
    """For a variant, the parameters whose full values (or pending gradients) it hands out."""
    agreements: tuple[Agreement, ...] = ()

    @property
    def first(self) -> Step:
        """Before the first pass."""
        return self.steps[0]

    @property
    def last(self) -> Step:
        """The last step that has a snapshot and did not fail; the first one where all failed."""
        good = [step for step in self.steps if step.number is not None and step.error is None]
        return good[-1] if good else self.steps[0]

    @property
    def error(self) -> Failure | None:
        return next((step.error for step in self.steps if step.error is not None), None)


@dataclass(frozen=True, slots=True)
class Param:
    """A sharded parameter of the model."""

    name: str
    shape: tuple[int | str, ...]
    """Of the full parameter; () also where only the shard is known."""
    dtype: str
    """Of the shard."""
    nbytes: int
    """Of the full parameter, in the shard's dtype."""
    shard_bytes: int
    """Of this rank's shard."""
    rows: int
    """Of the full parameter; 0 for a 0-dimensional one."""
    group: str = ""


@dataclass(frozen=True)
class CompileInfo:
    """One call of the backend."""

    name: str
    """Dynamo's id, "0/0"; "pack" and "flush" for graphs that zpasses made itself."""
    rank: int
    world: int
    state: str
    """"compiling" (under way, or killed), "done" or "failed"."""
    created: str = ""
    """When, in ISO 8601, UTC."""
    options: Mapping[str, Any] = field(default_factory=dict)
    pipeline: str = ""
    codegen: str = ""
    target: Mapping[str, Any] = field(default_factory=dict)
    """Every figure of `zpasses.target.Target`."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Process group -> its ranks."""
    inputs: tuple[Mapping[str, Any], ...] = ()
    """{name, shape, dtype, param} of each input of the captured graph."""
    parameters: Mapping[str, Param] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """One record of events.jsonl as it stands, for readers that want more than graphs and steps."""

    kind: str
    """"snapshot", "pass", "variant", "agreement", "note" or "error"; readers skip kinds that they do not know."""
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Compile:
    """One call of the backend with all that it left."""

    folder: str
    """Name of the folder: "000-0_0"."""
    path: Path
    info: CompileInfo
    events: tuple[Event, ...]
    graphs: Mapping[str, Graph]
    error: Failure | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    """File of the user's model -> its text, for the files that nodes came from."""

    @property
    def name(self) -> str:
        return self.info.name


@dataclass(frozen=True)
class Rank:
    rank: int
    compiles: tuple[Compile, ...]


@dataclass(frozen=True)
class Dump:
    path: Path
    version: int
    meta: Mapping[str, Any]
    """The first file: {"zpasses", "torch", "created", "world"}."""
    ranks: Mapping[int, Rank]
