"""What a dump says, as plain data. docs/dump-format.md describes the files; nothing here imports
torch.

A dump has ranks, a rank has compiles, a compile has graphs, a graph has steps: the graph as it came
and after every pass that ran on it. Bytes are bytes and times are microseconds, as everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from zpasses.dumps.nodes import (
    Argument,
    Buffer,
    Collective,
    Mark,
    Node,
    Ref,
    Snapshot,
    Source,
    Tag,
    Text,
    Value,
    references,
)

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
    "Mark",
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
VERSION = 2


# --- steps ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Counts:
    """Of one graph."""

    nodes: int
    collectives: int
    nbytes: int
    """Bytes that this rank puts into collectives."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> Counts:
        started = [node.collective.nbytes for node in snapshot.nodes if node.collective is not None]
        return cls(len(snapshot.nodes), len(started), sum(started))


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
    """The pass or phase that raised: "bucket{cap_mb=4}", "codegen", "agreement"."""
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
    """Of the snapshot; the same as the step's before if the pass changed nothing, None if there was
    no graph left to write."""
    counts: Counts | None = None
    """Of the snapshot; None in dumps that do not say, where no pass ran."""
    run: PassRun | None = None
    error: Failure | None = None
    """Why the pass failed; the snapshot is then the graph that it left behind, which may be wrong,
    if there is one."""
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
    """"agreed", "differs", "off" (option agreement=False) or "alone" (a group of one, or a fake
    one)."""


@dataclass(frozen=True)
class Graph:
    """One graph through its passes."""

    name: str
    """"captured", "joint", "forward", "backward", "inference", "pack", "flush", and for forms of a
    graph that carry values from call to call "forward.variant0", ...; a second one of the same name
    is "flush.2"."""
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
    """Every figure of `zpasses.cost.target.Target`."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Process group -> its ranks."""
    inputs: tuple[Mapping[str, Any], ...] = ()
    """{name, shape, dtype, param} of each input of the captured graph."""
    parameters: Mapping[str, Param] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """One record of events.jsonl as it stands, for readers that want more than graphs and steps."""

    kind: str
    """"snapshot", "pass", "variant", "agreement", "note" or "error"; readers skip kinds that they
    do not know."""
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

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided when the code ran, after the compile."""
        return tuple(
            str(event.data.get("text", "")) for event in self.events if event.kind == "note"
        )


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
