"""Finds the graphs and steps of a dump by their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zpasses.dumps.dump_errors import DumpError
from zpasses.dumps.format import Compile, Dump, Failure, Graph, Step
from zpasses.dumps.nodes import Node, Snapshot
from zpasses.errors import suggestion


class NotInDumpError(DumpError):
    """The dump contains nothing of the given name."""


@dataclass(frozen=True)
class SelectedGraph:
    """One graph of a dump, with its rank and compile."""

    rank: int
    compile: Compile
    graph: Graph

    @property
    def title(self) -> str:
        """ "0/0 forward": the compile's and the graph's name."""
        return f"{self.compile.name} {self.graph.name}"


def select_rank(dump: Dump, rank: int | None = None) -> int:
    """The given rank, or the lowest rank that wrote.

    Raises:
        NotInDumpError: if that rank wrote nothing.
    """
    if not dump.ranks:
        raise NotInDumpError(
            f"{dump.path} contains no graphs of any rank; did the run stop before its first "
            "compile?"
        )
    if rank is None:
        return min(dump.ranks)
    if rank not in dump.ranks:
        held = ", ".join(map(str, sorted(dump.ranks)))
        raise NotInDumpError(
            f"{dump.path} contains only ranks {held}, and not rank {rank}; all ranks write with "
            f"options={{'dump_ranks': 'all'}}."
        )
    return rank


def select_graphs(
    dump: Dump,
    graph: str | None = None,
    *,
    rank: int | None = None,
    compile_name: str | None = None,
) -> list[SelectedGraph]:
    """Graphs of one rank, in the order in which they were compiled.

    Args:
        graph: "joint", "forward", ...; None for all.
        rank: None for the lowest rank that wrote.
        compile_name: Dynamo's compile id ("0/0"), or the name of the compile's folder; None for
            all.

    Raises:
        NotInDumpError: if there is no such rank, compile or graph. The message suggests similar
            names.
    """
    rank = select_rank(dump, rank)
    compiles = dump.ranks[rank].compiles
    if compile_name is not None:
        compiles = tuple(each for each in compiles if compile_name in (each.name, each.folder))
        if not compiles:
            names = dict.fromkeys(each.name for each in dump.ranks[rank].compiles)
            raise NotInDumpError(
                f"rank {rank} of {dump.path} has no compile "
                f"{compile_name!r}.{suggestion(compile_name, names)}"
            )
    everything = [
        SelectedGraph(rank, each, found) for each in compiles for found in each.graphs.values()
    ]
    if graph is None:
        return everything
    found = [each for each in everything if each.graph.name == graph]
    if not found:
        names = dict.fromkeys(each.graph.name for each in everything)
        raise NotInDumpError(f"{dump.path} has no graph {graph!r}.{suggestion(graph, names)}")
    return found


def is_executed(name: str) -> bool:
    """Whether a graph of this name runs. The joint graph is split into forward and backward, and
    what Dynamo captured becomes the joint graph.
    """
    return name.partition(".")[0] not in ("captured", "joint")


MAIN = ("forward", "inference", "backward")
"""The graphs that run in every step, unless a variant of them does, which is executed, too."""


def select_main(
    dump: Dump,
    graph: str | None = None,
    *,
    rank: int | None = None,
    compile_name: str | None = None,
) -> list[SelectedGraph]:
    """As `select_graphs`, but without a name only forward, backward and inference, or all graphs if
    none of these exists.
    """
    found = select_graphs(dump, graph, rank=rank, compile_name=compile_name)
    if graph is not None:
        return found
    return [each for each in found if each.graph.name in MAIN] or found


def step_after(picked: SelectedGraph, after: str | int | None) -> Step:
    """The step of a graph after a pass.

    Args:
        after: name of the pass, the pass as pipeline text, or number of the step (0 is the graph
            before the first pass; also as text). If a pass ran several times, its last run is
            taken. None is the last step without an error.

    Raises:
        NotInDumpError: if no such pass ran on the graph.
    """
    steps = picked.graph.steps
    if after is None:
        return picked.graph.last
    if isinstance(after, int) or after.isdigit():
        if int(after) < len(steps):
            return steps[int(after)]
        raise NotInDumpError(
            f"graph {picked.title} has no step {after}; expected 0 (before the first pass) to "
            f"{len(steps) - 1}."
        )
    for step in reversed(steps):
        if step.after is not None and after in (step.after, _name(step)):
            return step
    known = dict.fromkeys(_name(step) for step in steps if step.after is not None)
    raise NotInDumpError(
        f"no pass {after!r} ran on graph "
        f"{picked.title}.{suggestion(after, known) if known else ' No pass did.'}"
    )


def steps_after(
    picked: Sequence[SelectedGraph], after: str | int | None
) -> list[tuple[SelectedGraph, Step]]:
    """The step after a pass, of each graph on which it ran and left a graph.

    Raises:
        NotInDumpError: if it ran on none of them.
    """
    found, missing = [], None
    for each in picked:
        try:
            step = step_after(each, after)
            if step.number is not None or len(picked) == 1:
                found.append((each, step))
        except NotInDumpError as error:
            missing = error
    if missing is not None and not found:
        if len(picked) == 1:
            raise missing
        known = dict.fromkeys(
            _name(step) for each in picked for step in each.graph.steps if step.after is not None
        )
        raise NotInDumpError(
            f"no pass {after!r} ran on "
            f"{', '.join(each.title for each in picked)}.{suggestion(str(after), known)}"
        )
    return found


def step_before(picked: SelectedGraph, step: Step) -> Step:
    """The step before a pass; the step itself if it is the first."""
    return picked.graph.steps[max(step.index - 1, 0)]


def snapshot_of(picked: SelectedGraph, step: Step) -> Snapshot:
    """The graph of a step.

    Raises:
        NotInDumpError: if the pass failed and no graph was written.
    """
    if step.snapshot is None:
        failure = f" It failed: {error_text(step.error)}" if step.error is not None else ""
        raise NotInDumpError(
            f"graph {picked.title} {step_title(step)} is not in the dump.{failure}"
        )
    return step.snapshot


def step_title(step: Step) -> str:
    """ "before the first pass", "after schedule{cap_mb=4}", "after schedule (which failed)"."""
    failed = " (which failed)" if step.error is not None else ""
    return f"after {step.after}{failed}" if step.after else "before the first pass"


def failure_text(step: Step) -> str:
    """A warning about a step whose pass failed; empty for other steps."""
    if step.error is None:
        return ""
    return f"FAILED: {error_text(step.error)} The graph is what the pass left, and may be wrong."


def error_text(error: Failure) -> str:
    """Type and message of an error, and the line that raised it."""
    message = error.message.rstrip()
    end = "" if message.endswith((".", "!", "?")) else "."
    raised = f" Raised at {error.raised}." if error.raised and error.raised not in message else ""
    return f"{error.type}: {message}{end}{raised}"


def node_named(snapshot: Snapshot, name: str) -> Node:
    """The node of this name.

    Raises:
        NotInDumpError: if there is none. The message suggests similar names.
    """
    if name not in snapshot.by_name:
        raise NotInDumpError(
            f"the graph has no node {name!r}.{_some(suggestion(name, snapshot.by_name))}"
        )
    return snapshot.by_name[name]


def _some(hint: str) -> str:
    return hint.partition(" Known:")[0]  # a graph has too many names to list


def _name(step: Step) -> str:
    return step.run.name if step.run is not None else (step.after or "").partition("{")[0]
