"""Passes and pipelines: the base class of passes, pipelines as text, the pass runner, and the
registry of installed passes.

The runner (`run_passes`) verifies the graph after each pass and records what the pass changed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import logging
import os
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import fx

from zpasses import compat
from zpasses.cost.routes import route_figures
from zpasses.cost.schedule_evaluation import Evaluation
from zpasses.cost.target import current_target
from zpasses.errors import AgreementError, OptionError, PassError, raising_line, suggestion
from zpasses.graph.nodes import collectives, input_nbytes
from zpasses.graph.verifier import PreviousGraph, check, check_unchanged
from zpasses.option_values import build_dataclass, format_value
from zpasses.ranks.vote import has_other_ranks

__all__ = [
    "Level",
    "Pass",
    "PassRecord",
    "Pipeline",
    "Verify",
    "catalogue",
    "package_digest",
    "run_passes",
]

log = logging.getLogger("zpasses")


class Level(enum.Enum):
    """The graph that a pass rewrites."""

    CAPTURED = "captured"
    """The graph that Dynamo captured, with local shards in place of sharded parameters."""
    JOINT = "joint"
    """Forward and backward together, before partitioning; also the graph of a model that runs
    without gradients.
    """
    FORWARD = "forward"
    BACKWARD = "backward"
    PARTITIONED = "partitioned"
    """The forward and the backward graph, one after the other."""


class Pass(compat.CustomGraphPass):
    """A rewrite of one graph. Derive a frozen dataclass from it: its fields are the pass's options.

    An instance can also be handed to Inductor's hooks
    (`torch._inductor.config.joint_custom_pre_pass`, `post_grad_custom_post_pass`, ...) to rewrite
    graphs that zpasses did not capture.
    """

    name: ClassVar[str]
    """Name of the pass in pipelines, in kebab-case."""
    level: ClassVar[Level]
    warn_if_unchanged: ClassVar[bool] = False
    """Whether to log a warning when the pass changes nothing."""
    changes_inputs: ClassVar[bool] = False
    """Whether the pass may add, remove, reorder or write to the graph's inputs."""
    changes_outputs: ClassVar[bool] = False
    """Whether the pass may change the number, order or kind of the graph's outputs."""
    votes_at_run_time: ClassVar[str] = ""
    """What the ranks vote on when collectives of the pass first run; "" if they do not vote."""
    reorders_sums: ClassVar[bool] = False
    """Whether floating-point sums may be added up in another order, which changes their rounding.
    `verify="simulate"` then compares with a tolerance."""

    @abstractmethod
    def rewrite(self, graph: fx.Graph) -> int:
        """Rewrite `graph` in place and return the number of changes.

        The runner lints, verifies, times and records.
        """

    def __call__(self, graph: fx.Graph) -> None:
        run_passes(graph, [self])

    def is_simulatable(self) -> bool:
        """Whether `verify="simulate"` can check the pass: if all ranks run the graph of this rank,
        on inputs of their own, this rank computes what it should.
        """
        return not (self.changes_inputs or self.changes_outputs)

    def votes(self) -> bool:
        """Whether the ranks vote on what the pass does to a graph."""
        return False

    def is_cacheable(self) -> bool:
        """Whether a later process may run a graph that the pass rewrote, without running the pass:
        it leaves nothing behind but the graph and the answers of its votes.
        """
        return True

    def with_memory_budget(self, budget: str) -> Pass:
        """Return the pass for a memory budget of the step, such as "60GiB" or "10%": the option
        `memory_budget` of the backend. Passes without such an option return themselves.
        """
        return self

    def fallback_cost(self, graph: fx.Graph, limit_bytes: int) -> Evaluation | None:
        """Return the cost of a schedule that the pass does at least as well as on a graph, if the
        graph's peak may reach `limit_bytes`. The graph stays as it is.

        Passes that plan no schedule return None, as does a pass that knows of no schedule that
        surely fits.
        """
        return None

    def uuid(self) -> str:
        """Return the pass's part of the key of Inductor's compile caches.

        If the pass votes, the part is unique to this process. Otherwise a rank with a cache hit
        would skip the pass, and the other ranks would wait for its vote.
        """
        return self.digest() + _vote_key_suffix([self])

    def digest(self) -> str:
        """Return a hash of everything that determines the pass: the sources of zpasses and of the
        pass, its options, the backends of the process groups, and the target.
        """
        module = inspect.getsourcefile(type(self))
        parts = (
            package_digest(),
            _file_digest(module),
            str(self),
            repr(sorted(_environment().items())),
        )
        return hashlib.sha256("|".join(parts).encode()).hexdigest()

    def __str__(self) -> str:
        """Format the pass as pipeline text, with the options that differ from their defaults."""
        options = [
            f"{field.name}={format_value(getattr(self, field.name))}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if field.init and getattr(self, field.name) != field.default
        ]
        return self.name + (f"{{{','.join(options)}}}" if options else "")


_TOKEN = uuid4().hex


def process_token() -> str:
    """Part of cache keys that must not match in another process, nor in a fork of this one."""
    return f"{_TOKEN}{os.getpid():x}"


def _vote_key_suffix(passes: Iterable[Pass]) -> str:
    voting = any(each.votes() for each in passes) and dist.is_initialized()
    return (
        f"-{process_token()}" if voting and any(map(has_other_ranks, compat.group_names())) else ""
    )


@dataclass(frozen=True)
class PassRecord:
    """What one run of a pass did to one graph."""

    name: str
    text: str
    """The pass with its options, as pipeline text."""
    changes: int
    """The number of changes that the pass returned."""
    time_us: float
    """Time of the rewrite, in microseconds."""
    check_us: float
    """Time of the checks after it, in microseconds."""
    nodes_before: int
    nodes_after: int
    collectives_before: int
    collectives_after: int
    bytes_before: int
    """Bytes of the inputs of all collectives on this rank."""
    bytes_after: int


@dataclass(frozen=True)
class Pipeline(compat.CustomGraphPass):
    """Passes in the order in which they run; as text, `merge-reads,reduce-grads{form=all_reduce}`.

    Calling a pipeline on a graph runs all its passes on that graph, regardless of level. The
    backend runs each pass at its own level.

    Raises:
        OptionError: for something that is no pass, or a pass class without a name or level.
    """

    passes: tuple[Pass, ...] = ()

    def __post_init__(self) -> None:
        for each in self.passes:
            if not isinstance(each, Pass):
                raise OptionError(
                    f"pipeline: got {each!r} ({type(each).__name__}); expected instances of Pass, "
                    "such as GatherParams()."
                )
            kind = type(each)
            if not isinstance(getattr(kind, "name", None), str):
                raise OptionError(
                    f"pass class {kind.__name__} has no name; give it one in kebab-case: "
                    'name = "my-pass".'
                )
            if not isinstance(getattr(kind, "level", None), Level):
                levels = ", ".join(f"Level.{level.name}" for level in Level)
                raise OptionError(
                    f"pass {each.name} has no level, which says what graph it rewrites; set "
                    f"{kind.__name__}.level to one of {levels}."
                )

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """Parse pipeline text. A named pipeline in it stands for its passes.

        Raises:
            OptionError: for an unknown pass or option, or a value of the wrong type. The message
                suggests the most similar known name.
        """
        known = catalogue()
        passes: list[Pass] = []
        for name, options in _parse_items(text):
            entry = known.get(name)
            if entry is None:
                raise OptionError(
                    f"pipeline {text!r}: no pass is called {name!r}.{suggestion(name, known)}"
                )
            if isinstance(entry, Pipeline):
                if options:
                    raise OptionError(
                        f"pipeline {text!r}: {name!r} is a named pipeline, which takes no options; "
                        f"name its passes: {entry}."
                    )
                passes.extend(entry.passes)
            else:
                passes.append(build_dataclass(entry, options, f"pass {name!r}"))
        return cls(tuple(passes))

    def at(self, level: Level) -> tuple[Pass, ...]:
        """Return the passes that run at one level, in order.

        `FORWARD` and `BACKWARD` include the passes of level `PARTITIONED`.
        """
        both = Level.PARTITIONED if level in (Level.FORWARD, Level.BACKWARD) else level
        return tuple(each for each in self.passes if each.level in (level, both))

    def with_memory_budget(self, budget: str) -> Pipeline:
        """Return the pipeline for a memory budget of the step; see `Pass.with_memory_budget`."""
        return Pipeline(tuple(each.with_memory_budget(budget) for each in self.passes))

    def fallback_cost(self, graph: fx.Graph, limit_bytes: int) -> Evaluation | None:
        """Return the first cost that one of the passes knows; see `Pass.fallback_cost`."""
        found = (each.fallback_cost(graph, limit_bytes) for each in self.passes)
        return next((cost for cost in found if cost is not None), None)

    def __call__(self, graph: fx.Graph) -> None:
        run_passes(graph, self.passes)

    def uuid(self) -> str:
        """Return the pipeline's part of the key of Inductor's compile caches; see `Pass.uuid`."""
        return self.digest() + _vote_key_suffix(self.passes)

    def digest(self) -> str:
        """Return a hash of everything that determines the passes.

        The backend uses it as the key, because it runs its passes before any cache lookup.
        """
        return hashlib.sha256("|".join(each.digest() for each in self.passes).encode()).hexdigest()

    def __str__(self) -> str:
        return ",".join(str(each) for each in self.passes)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)


# --- running --------------------------------------------------------------------------------------
Verify = Literal["off", "static", "simulate"]
"""How graphs are checked after each pass."""


def run_passes(
    graph: fx.Graph,
    passes: Iterable[Pass],
    *,
    observe: Callable[[PassRecord, fx.Graph], None] | None = None,
    verify: Verify = "static",
) -> list[PassRecord]:
    """Run passes on a graph in place, and verify the graph after each.

    Args:
        observe: called after each pass with its record and the graph.
        verify: "simulate" also runs the graph before and after each pass on simulated ranks, and
            compares. "off" checks nothing.

    Raises:
        PassError: if a pass raises or leaves an invalid graph. The message names the pass, and the
            node that is invalid.
        AgreementError: if a vote of a pass fails.
    """
    records = []
    before = _Totals.of(graph)
    snapshot: PreviousGraph | None = None
    for each in passes:
        if verify != "off":
            snapshot = snapshot or PreviousGraph(graph)
        simulation = None
        if verify == "simulate" and each.is_simulatable():
            from zpasses.simulate.pass_check import start_simulation

            simulation = start_simulation(graph)
        started = time.perf_counter()
        changes = _rewrite(each, graph)
        rewritten = time.perf_counter()
        if changes and snapshot is not None:
            check(
                graph,
                snapshot,
                each.name,
                changes_inputs=each.changes_inputs,
                changes_outputs=each.changes_outputs,
            )
            if simulation is not None:
                simulation(graph, each.name, each.reorders_sums)
            snapshot = None
        elif snapshot is not None:
            check_unchanged(graph, snapshot, each.name)
        if not changes and each.warn_if_unchanged:
            log.warning("pass %s changed nothing", each)
        after = _Totals.of(graph) if changes else before
        records.append(
            PassRecord(
                name=each.name,
                text=str(each),
                changes=changes,
                time_us=(rewritten - started) * 1e6,
                check_us=(time.perf_counter() - rewritten) * 1e6,
                nodes_before=before.nodes,
                nodes_after=after.nodes,
                collectives_before=before.collectives,
                collectives_after=after.collectives,
                bytes_before=before.nbytes,
                bytes_after=after.nbytes,
            )
        )
        before = after
        if observe is not None:
            observe(records[-1], graph)
    return records


def _rewrite(each: Pass, graph: fx.Graph) -> int:
    try:
        changes = each.rewrite(graph)
    except (PassError, AgreementError):
        raise
    except Exception as error:
        where = raising_line(error)
        raise PassError(
            f"pass {str(each)!r} failed: {type(error).__name__}: {error}"
            f"{where and f'; raised at {where}'}"
        ) from error
    if not isinstance(changes, int) or changes < 0:
        raise PassError(
            f"pass {each.name!r} returned {changes!r}; expected the number of changes that it made."
        )
    return changes


@dataclass(frozen=True)
class _Totals:
    nodes: int
    collectives: int
    nbytes: int

    @classmethod
    def of(cls, graph: fx.Graph) -> _Totals:
        found = [input_nbytes(node, each) for node, each in collectives(graph)]
        return cls(len(graph.nodes), len(found), sum(found))


# --- text -----------------------------------------------------------------------------------------
_ITEM = re.compile(r"\s*(?P<name>[A-Za-z][\w-]*)\s*(?:\{(?P<options>[^{}]*)\})?\s*(?P<end>,|$)")
_OPTION = re.compile(r"\s*(?P<key>[A-Za-z_]\w*)\s*=\s*(?P<value>[^,=]*?)\s*$")


def _parse_items(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Parse `a,b{x=1,y=2}` into ("a", {}) and ("b", {"x": "1", "y": "2"})."""
    position = 0
    while position < len(text.rstrip()):
        match = _ITEM.match(text, position)
        if match is None or (match["end"] and not text[match.end() :].strip()):
            raise OptionError(
                f"pipeline {text!r}: cannot parse {text[position:].strip()!r}; expected passes "
                "separated by commas with options in braces, such as "
                "merge-reads,reduce-grads{form=all_reduce}."
            )
        yield match["name"], _options(text, match["options"])
        position = match.end()


def _options(text: str, inside: str | None) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in (inside or "").split(",") if (inside or "").strip() else []:
        match = _OPTION.match(part)
        if match is None:
            raise OptionError(
                f"pipeline {text!r}: cannot parse option {part.strip()!r}; expected name=value."
            )
        if match["key"] in options:
            raise OptionError(f"pipeline {text!r}: option {match['key']!r} is given twice.")
        options[match["key"]] = match["value"]
    return options


# --- discovery ------------------------------------------------------------------------------------
_GROUP = "zpasses.passes"


@functools.cache
def catalogue() -> dict[str, type[Pass] | Pipeline]:
    """Return every installed pass and named pipeline by name, from the entry-point group
    `zpasses.passes`.

    Raises:
        OptionError: if an entry point does not load, is neither a pass nor a pipeline, or has
            another name than its pass; or if there are no entry points.
    """
    found: dict[str, type[Pass] | Pipeline] = {}
    for point in entry_points(group=_GROUP):
        try:
            entry = point.load()
        except Exception as error:
            raise OptionError(
                f"entry point {point.name} = {point.value} in group {_GROUP!r} does not load: "
                f"{error}"
            ) from error
        if not (
            isinstance(entry, Pipeline) or (isinstance(entry, type) and issubclass(entry, Pass))
        ):
            raise OptionError(
                f"entry point {point.name} = {point.value} is neither a Pass class nor a Pipeline."
            )
        if isinstance(entry, type) and entry.name != point.name:
            raise OptionError(
                f"entry point {point.name} = {point.value} holds the pass called {entry.name!r}; "
                "use one name."
            )
        found[point.name] = entry
    if not found:
        raise OptionError(
            f"no entry points in group {_GROUP!r}: install zpasses (pip install -e .) so that its "
            "passes can be found."
        )
    return found


# --- cache keys -----------------------------------------------------------------------------------
@functools.cache
def package_digest() -> str:
    """Return a hash of torch's version and of the sources of zpasses: a change anywhere in them may
    change what a pass does.
    """
    digest = hashlib.sha256(torch.__version__.encode())
    folders = [Path(__file__).parents[1]]
    passes = find_spec("zpasses.passes")  # in a checkout, not below the folder of zpasses
    if passes is not None and passes.origin is not None:
        folders.append(Path(passes.origin).parent)
    for path in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _file_digest(path: str | None) -> str:
    return hashlib.sha256(
        Path(path).read_bytes() if path and Path(path).exists() else b""
    ).hexdigest()


def _environment() -> dict[str, str]:
    """Return what passes read besides the graph: the backend of each process group, the target, and
    the known figures of its routes.

    Second groups are left out: passes make them, and their backend is that of another group.
    """
    known = compat.group_backends() if torch.distributed.is_initialized() else {}
    groups = {name: each for name, each in known.items() if compat.parent_group(name) == name}
    target = current_target()
    return {**groups, "target": repr(target), "routes": repr(route_figures(target))}


def describe_records(records: Sequence[PassRecord]) -> list[dict[str, Any]]:
    """Return records as dictionaries of plain values, for tables and JSON."""
    return [dataclasses.asdict(record) for record in records]
