"""The content of a dump as plain data. docs/dump-format.md describes the files. This module does
not import torch.

A dump has ranks, a rank has compiles, a compile has graphs, and a graph has steps. A step is the
graph before its first pass, or after one pass. Sizes are in bytes and times in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from zpasses.dumps.limits import Limits
from zpasses.dumps.nodes import Count, Micros, Record, Snapshot

FORMAT = "zpasses-dump"
VERSION = 3


# --- steps ----------------------------------------------------------------------------------------
class Counts(Record, frozen=True):
    """Size figures of one graph."""

    nodes: Count
    collectives: Count
    nbytes: Count
    """Sum of the input bytes of this rank's collectives."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> Counts:
        started = [
            each.nbytes
            for node in snapshot.nodes
            if (each := node.collective) is not None and not each.is_host_copy
        ]
        return cls(len(snapshot.nodes), len(started), sum(started))


class PassRun(Record, frozen=True):
    """One run of a pass on one graph."""

    name: str
    text: str
    """The pass with its options, as pipeline text."""
    options: Mapping[str, Any]
    """All options, including defaults, as plain values."""
    changes: Count
    """Number of changes that the pass reported."""
    time_us: Micros
    """Time of the rewrite."""
    check_us: Micros
    """Time of the verification after it."""
    checks: tuple[str, ...]
    """Names of the checks that ran."""
    before: Counts
    after: Counts
    notes: tuple[str, ...] = ()
    """Messages of the pass while it ran, such as its plan or its reason to skip a node."""


class Failure(Record, frozen=True):
    """An exception."""

    type: str
    message: str
    where: str = ""
    """The pass or the phase that raised it: "schedule{cap_mb=4}", "codegen", "agreement"."""
    traceback: str = ""
    raised: str = ""
    """ "FILE:LINE in FUNCTION: CODE", the line that raised it; empty if it is unknown."""


# --- records of events.jsonl ----------------------------------------------------------------------
class Event(Record, frozen=True, tag_field="event"):
    """A record of events.jsonl. Its field `event` is its kind."""


class StepEvent(Event, frozen=True, tag="step"):
    """A graph before its first pass, or after one pass: see `Step`."""

    graph: str
    level: str
    after: str | None = None
    number: Count | None = None
    counts: Counts | None = None
    run: PassRun | None = None
    error: Failure | None = None
    of: str = ""
    """These four: see `Graph`."""
    given: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    stepped: tuple[str, ...] = ()


class Agreement(Event, frozen=True, tag="agreement"):
    """A comparison between ranks of the collectives of one graph and process group."""

    graph: str
    group: str
    digest: str
    """Digest of the group's collectives in order."""
    collectives: Count
    """Number of collectives."""
    result: str
    """ "agreed", "off" (option agreement=False) or "single-rank" (the group has no other real
    ranks).
    """
    label: str = ""
    """Label of the group; see `Collective.label`."""


class Prediction(Event, frozen=True, tag="prediction"):
    """What the cost model predicts for a graph after its last pass."""

    total_us: Micros
    """Duration of the graph as it is: what is achieved."""
    exposed_us: Micros = msgspec.field(name="waited_us")
    """Time in which no kernel runs because a collective is awaited."""
    possible_us: Micros
    """Duration with the plan that the pass `schedule` makes within `limit_bytes`."""
    bound_us: Micros
    """Duration that no schedule of the graph's collectives can beat."""
    peak_bytes: Count
    limit_bytes: Count
    """The largest peak that the plan of `possible_us` may reach."""
    collectives: Count
    """Number of launches."""
    number: Count | None = None
    """Number of the snapshot that it is about; None if it is unknown."""
    graph: str = ""


class NoteEvent(Event, frozen=True, tag="note"):
    """A decision made at runtime, after the compile."""

    text: str
    concerning: str = ""
    """Name of the pass that it is about."""


class ErrorEvent(Event, frozen=True, tag="error"):
    """An error outside of a pass."""

    failure: Failure


# --- graphs ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """A graph before its first pass, or after one pass."""

    index: int
    """Index in the graph's steps. Step 0 is the graph before the first pass."""
    level: str
    """"captured", "joint", "forward", "backward", "flush" or "variant"."""
    after: str | None
    """The pass as pipeline text; None for the graph before the level's first pass."""
    number: int | None
    """Number of the snapshot. A pass that changed nothing has the number of the step before it.
    None if no graph could be written.
    """
    counts: Counts | None = None
    """Figures of the snapshot; None if the dump does not contain them."""
    run: PassRun | None = None
    """None before the first pass, and for a pass that failed."""
    error: Failure | None = None
    """Exception of a pass that failed. The snapshot is then the graph that the pass left, which may
    be wrong, if it could be written.
    """
    load: Callable[[int], Snapshot] | None = field(default=None, repr=False, compare=False)
    """Reads a snapshot by its number."""

    @cached_property
    def snapshot(self) -> Snapshot | None:
        """The graph. It is read from its file on first access.

        Raises:
            DumpError: if the file is missing, damaged or too large.
        """
        return None if self.number is None or self.load is None else self.load(self.number)


@dataclass(frozen=True)
class Graph:
    """One graph and its passes."""

    name: str
    """ "captured", "joint", "forward", "backward", "inference" or "flush". A variant, which carries
    values between calls, is "forward.variant0" and so on. A second graph of the same name is
    "flush.2".
    """
    steps: tuple[Step, ...]
    of: str = ""
    """Name of the graph that a variant was made from; empty for other graphs."""
    given: tuple[str, ...] = ()
    """Parameters whose full values (or pending gradients) a variant takes as inputs."""
    kept: tuple[str, ...] = ()
    """Parameters whose full values (or pending gradients) a variant returns."""
    stepped: tuple[str, ...] = ()
    """Parameters that step in a variant (`zpasses.step_in_backward`)."""
    agreements: tuple[Agreement, ...] = ()
    prediction: Prediction | None = None
    """None for graphs without collectives of parameters."""

    @property
    def first(self) -> Step:
        """The graph before the first pass."""
        return self.steps[0]

    @property
    def last(self) -> Step:
        """The last step with a snapshot and without an error; the first step if there is none."""
        good = [step for step in self.steps if step.number is not None and step.error is None]
        return good[-1] if good else self.steps[0]

    @property
    def error(self) -> Failure | None:
        """The first error of its steps, or None."""
        return next((step.error for step in self.steps if step.error is not None), None)


class Param(Record, frozen=True):
    """A sharded parameter of the model."""

    name: str
    shape: tuple[int | str, ...]
    """Shape of the full parameter. It is also () if only the shard is known."""
    dtype: str
    """Dtype of the shard."""
    nbytes: Count
    """Bytes of the full parameter, in the shard's dtype."""
    shard_bytes: Count
    """Bytes of this rank's shard."""
    rows: Count
    """Rows of the full parameter; 0 for a 0-dimensional one."""
    group: str = ""
    """Name of the process group that it is sharded over."""


class CompileInfo(Record, frozen=True):
    """One call of the backend: the content of compile.json."""

    name: str
    """Dynamo's compile id, "0/0", or "flush" for graphs that zpasses makes itself."""
    rank: Count
    world: Count
    """Number of ranks."""
    state: Literal["compiling", "done", "failed"]
    """ "compiling": in progress, or the process died."""
    created: str = ""
    """Time in ISO 8601, UTC."""
    options: Mapping[str, Any] = {}
    """Options that differ from their defaults."""
    pipeline: str = ""
    """The passes as text."""
    codegen: str = ""
    recompile_reason: str = ""
    """Which guard of Dynamo failed, if the compile repeats that of an earlier call."""
    target: Mapping[str, Any] = {}
    """All figures of `zpasses.cost.time.target.Target`."""
    groups: Mapping[str, tuple[Count, ...]] = {}
    """Process group -> its ranks."""
    group_labels: Mapping[str, str] = {}
    """Process group -> its label, for groups of mesh dimensions; see `Collective.label`."""
    inputs: tuple[Mapping[str, Any], ...] = ()
    """{name, shape, dtype, param} of each input of the captured graph."""
    parameters: Mapping[str, Param] = {}
    """Name -> sharded parameter."""
    error: Failure | None = None
    """Why the compile failed, or None."""

    def group_title(self, group: str) -> str:
        """What pages call a process group: its label, or its name if it has none."""
        return self.group_labels.get(group) or group


@dataclass(frozen=True)
class Compile:
    """One call of the backend: its data and graphs."""

    folder: str
    """Name of the folder: "000-0_0"."""
    path: Path
    info: CompileInfo
    notes: tuple[str, ...]
    """Decisions made at runtime, after the compile."""
    graphs: Mapping[str, Graph]
    """Name -> graph, in order of appearance."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """File of the user's model -> its text, for files that nodes come from."""

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def error(self) -> Failure | None:
        """Why the compile failed, or None."""
        return self.info.error


@dataclass(frozen=True)
class Rank:
    """The compiles of one rank."""

    rank: int
    compiles: tuple[Compile, ...]


@dataclass(frozen=True)
class Dump:
    """A whole dump."""

    path: Path
    version: int
    meta: Mapping[str, Any]
    """Content of zpasses-dump.json: "zpasses", "torch", "created", "world", ..."""
    ranks: Mapping[int, Rank]
    """Rank -> its compiles, for the ranks that wrote."""
    limits: Limits = field(default_factory=Limits, repr=False, compare=False)
    """Upper bounds for files that are read later."""
