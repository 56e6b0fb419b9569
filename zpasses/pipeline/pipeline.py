"""Passes and pipelines: what a pass is, how a pipeline is written as text, and what the runner
guarantees."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import logging
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import fx

from zpasses import compat
from zpasses.cost.routes import known_figures
from zpasses.cost.target import current_target
from zpasses.errors import AgreementError, OptionError, PassError, nearest
from zpasses.graph.nodes import collectives, input_nbytes
from zpasses.graph.verifier import Snapshot, check, check_unchanged
from zpasses.option_values import build, format_value
from zpasses.ranks.vote import has_other_ranks

__all__ = ["Level", "Pass", "PassRecord", "Pipeline", "catalogue", "run_passes"]

log = logging.getLogger("zpasses")


class Level(enum.Enum):
    """The graph that a pass rewrites."""

    CAPTURED = "captured"
    """Dynamo's graph of the model's own calls, sharded parameters as local shards."""
    JOINT = "joint"
    """Forward and backward together, before partitioning; also the graph of a model run without
    gradients."""
    FORWARD = "forward"
    BACKWARD = "backward"
    PARTITIONED = "partitioned"
    """Forward and backward alike, each by itself."""


class Pass(compat.CustomGraphPass):
    """A rewrite of one graph. Derive a frozen dataclass from it: its fields are the pass's options.

    An instance can also be handed to Inductor's hooks
    (`torch._inductor.config.joint_custom_pre_pass`, `post_grad_custom_post_pass`, ...) to rewrite
    graphs that zpasses did not capture."""

    name: ClassVar[str]
    """What pipelines call it, in kebab-case."""
    level: ClassVar[Level]
    must_change: ClassVar[bool] = False
    """Whether a run that changes nothing deserves a word in the log."""

    @abstractmethod
    def rewrite(self, graph: fx.Graph) -> int:
        """Rewrite `graph` in place; return how many things were changed. The runner lints, checks,
        times and records."""

    def __call__(self, graph: fx.Graph) -> None:
        run_passes(graph, [self])

    def votes(self) -> bool:
        """Whether the ranks choose together what the pass does to a graph."""
        return False

    def uuid(self) -> str:
        """What Inductor's hooks add to the key of their compile caches.

        Where ranks vote, it is another one in each process: a rank whose cache answers would not
        come to the vote that others wait for."""
        return self.digest() + _process_of_votes([self])

    def digest(self) -> str:
        """A key: the source of the toolkit and of the pass, its options, the process groups, and
        the target."""
        module = inspect.getsourcefile(type(self))
        parts = (
            _toolkit_digest(),
            _file_digest(module),
            str(self),
            repr(sorted(_environment().items())),
        )
        return hashlib.sha256("|".join(parts).encode()).hexdigest()

    def __str__(self) -> str:
        """The pass as pipeline text, options that differ from their defaults in braces."""
        options = [
            f"{field.name}={format_value(getattr(self, field.name))}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if field.init and getattr(self, field.name) != field.default
        ]
        return self.name + (f"{{{','.join(options)}}}" if options else "")


THIS_PROCESS = uuid4().hex
"""In keys of what no other process may answer."""


def _process_of_votes(passes: Iterable[Pass]) -> str:
    voting = any(each.votes() for each in passes) and dist.is_initialized()
    return f"-{THIS_PROCESS}" if voting and any(map(has_other_ranks, compat.group_names())) else ""


@dataclass(frozen=True)
class PassRecord:
    """What one run of a pass did to one graph."""

    name: str
    text: str
    """The pass with its options, as pipeline text."""
    changes: int
    """What the pass itself counted."""
    time_us: float
    """The rewrite."""
    check_us: float
    """The checks after it."""
    nodes_before: int
    nodes_after: int
    collectives_before: int
    collectives_after: int
    bytes_before: int
    """Bytes that this rank puts into collectives, all calls together."""
    bytes_after: int


@dataclass(frozen=True)
class Pipeline(compat.CustomGraphPass):
    """Passes in the order in which they run. Written as text:
    `merge-reads,reduce-grads{form=all_reduce}`.

    Called on a graph, it runs all its passes on that graph, whatever their level; the backend runs
    each at its own level."""

    passes: tuple[Pass, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """Read a pipeline; a named pipeline in it stands for its passes.

        Raises:
            OptionError: for an unknown pass or option, or an ill-typed value; the message names the
                nearest right word.
        """
        known = catalogue()
        passes: list[Pass] = []
        for name, options in _split(text):
            entry = known.get(name)
            if entry is None:
                raise OptionError(
                    f"pipeline {text!r}: no pass is called {name!r}.{nearest(name, known)}"
                )
            if isinstance(entry, Pipeline):
                if options:
                    raise OptionError(
                        f"pipeline {text!r}: {name!r} is a named pipeline, which takes no options; "
                        f"name its passes: {entry}."
                    )
                passes.extend(entry.passes)
            else:
                passes.append(build(entry, options, f"pass {name!r}"))
        return cls(tuple(passes))

    def at(self, level: Level) -> tuple[Pass, ...]:
        """The passes of one level, in order."""
        both = Level.PARTITIONED if level in (Level.FORWARD, Level.BACKWARD) else level
        return tuple(each for each in self.passes if each.level in (level, both))

    def __call__(self, graph: fx.Graph) -> None:
        run_passes(graph, self.passes)

    def uuid(self) -> str:
        """As that of a pass."""
        return self.digest() + _process_of_votes(self.passes)

    def digest(self) -> str:
        """A key of what the passes do; the backend, whose passes run in front of all caches, needs
        no other."""
        return hashlib.sha256("|".join(each.digest() for each in self.passes).encode()).hexdigest()

    def __str__(self) -> str:
        return ",".join(str(each) for each in self.passes)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)


# --- running --------------------------------------------------------------------------------------
def run_passes(
    graph: fx.Graph,
    passes: Iterable[Pass],
    *,
    observe: Callable[[PassRecord, fx.Graph], None] | None = None,
) -> list[PassRecord]:
    """Run passes on a graph and check it after each.

    Args:
        observe: called after each pass with its record and the graph as it is then.

    Raises:
        PassError: names the pass, and the node that is wrong.
    """
    records = []
    before = _Totals.of(graph)
    snapshot: Snapshot | None = None
    for each in passes:
        snapshot = snapshot or Snapshot(graph)
        started = time.perf_counter()
        changes = _rewrite(each, graph)
        rewritten = time.perf_counter()
        if changes:
            check(graph, snapshot, each.name)
            snapshot = None
        else:
            check_unchanged(graph, snapshot, each.name)
            if each.must_change:
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
        return each.rewrite(graph)
    except (PassError, AgreementError):
        raise
    except Exception as error:
        raise PassError(f"pass {str(each)!r} failed: {type(error).__name__}: {error}") from error


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


def _split(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """`a,b{x=1,y=2}` -> ("a", {}), ("b", {"x": "1", "y": "2"})."""
    position = 0
    while position < len(text.rstrip()):
        match = _ITEM.match(text, position)
        if match is None or (match["end"] and not text[match.end() :].strip()):
            raise OptionError(
                f"pipeline {text!r}: cannot read {text[position:].strip()!r}; expected passes "
                "separated by commas, options in braces: "
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
                f"pipeline {text!r}: cannot read option {part.strip()!r}; expected name=value."
            )
        if match["key"] in options:
            raise OptionError(f"pipeline {text!r}: option {match['key']!r} is given twice.")
        options[match["key"]] = match["value"]
    return options


# --- discovery ------------------------------------------------------------------------------------
_GROUP = "zpasses.passes"


@functools.cache
def catalogue() -> dict[str, type[Pass] | Pipeline]:
    """Every installed pass and named pipeline by name, from the entry-point group `zpasses.passes`.

    Raises:
        OptionError: when an entry point does not load, or is neither a pass nor a pipeline, or
            disagrees about its name.
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
_TOOLKIT = Path(__file__).parents[1]
"""The folder of the package `zpasses`: all rooms, since a change in any of them may change what a
pass does."""


@functools.cache
def _toolkit_digest() -> str:
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(_TOOLKIT.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _file_digest(path: str | None) -> str:
    return hashlib.sha256(
        Path(path).read_bytes() if path and Path(path).exists() else b""
    ).hexdigest()


def _environment() -> dict[str, str]:
    """What a pass may look up besides the graph: the backend of each process group, and the
    target."""
    groups = compat.group_backends() if torch.distributed.is_initialized() else {}
    target = current_target()
    return {**groups, "target": repr(target), "routes": repr(known_figures(target))}


def describe_records(records: Sequence[PassRecord]) -> list[dict[str, Any]]:
    """Records as plain values, for tables and JSON."""
    return [dataclasses.asdict(record) for record in records]
