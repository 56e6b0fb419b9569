"""The inspector in Python: the pages of the command line, and their figures as values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zpasses.dumps import Dump, Limits, Snapshot, Step, read
from zpasses.dumps.dump_errors import NotATraceError
from zpasses.inspect.collectives_page import CollectiveRows, collectives_view
from zpasses.inspect.communication import Communication, communication
from zpasses.inspect.difference import Difference, compare
from zpasses.inspect.difference_page import comparison_view, differences_view, pass_differences
from zpasses.inspect.find import (
    SelectedGraph,
    node_named,
    select_graphs,
    select_main,
    snapshot_of,
    step_after,
    steps_after,
)
from zpasses.inspect.flight_recorder import read_recorder
from zpasses.inspect.hang_page import hang_view
from zpasses.inspect.listing import MAX_ITEMS, NodeFilter
from zpasses.inspect.listing_page import show_view
from zpasses.inspect.measured import Measured, measure
from zpasses.inspect.measured_page import no_runs_text
from zpasses.inspect.memory import Memory, memory, parameter_sizes
from zpasses.inspect.memory_page import memory_view
from zpasses.inspect.model_sources import parameter_sources
from zpasses.inspect.node_spans import Schedule, schedule
from zpasses.inspect.overview_page import list_view
from zpasses.inspect.timeline import chrome_trace
from zpasses.inspect.traces import read_trace
from zpasses.inspect.view import View


def open_dump(
    path: str | Path,
    *,
    rank: int | None = None,
    compile_name: str | None = None,
    limits: Limits | None = None,
) -> Inspection:
    """Open a dump for inspection.

    Args:
        path: the folder that `options={"dump": ...}` named.
        rank: the rank to inspect; None is the lowest that wrote.
        compile_name: only this compile ("0/0"); None is all.
        limits: upper bounds for what is read; None is `Limits()`.

    Raises:
        DumpError: as `zpasses.dumps.read`. Methods of the result raise NotInDumpError for a rank,
            compile, graph, pass or node that does not exist.
    """
    return Inspection(read(path, limits), rank, compile_name)


def _sides(one: Inspection, other: Inspection) -> tuple[str, str]:
    """What two inspections are called beside each other: by their dumps' folders, or ranks."""
    folders = one.dump.path.resolve().name, other.dump.path.resolve().name
    ranks = f"rank {one._where['rank']}", f"rank {other._where['rank']}"
    return next((each for each in (folders, ranks) if each[0] != each[1]), ("first", "second"))


class Inspection:
    """One rank of a dump.

    Graphs are given by name ("joint", "forward", ...). Passes are given by name, as pipeline text,
    or by step number.

    Methods that end in `_of` return figures of one graph, in the first compile that has it. The
    other methods return pages (`View`). A page prints as text, shows as HTML in notebooks, and has
    plain values in `data`.
    """

    def __init__(
        self, dump: Dump, rank: int | None = None, compile_name: str | None = None
    ) -> None:
        self.dump = dump
        self._where: dict[str, Any] = {"rank": rank, "compile_name": compile_name}

    def __repr__(self) -> str:
        return f"<dump {self.dump.path}>"

    def _repr_html_(self) -> str:
        return self.overview()._repr_html_()

    # --- pages ------------------------------------------------------------------------------------
    def overview(self) -> View:
        """Compiles, graphs and passes."""
        return list_view(self.dump, self._where["rank"])

    def show(
        self,
        graph: str | None = None,
        after: str | int | None = None,
        where: NodeFilter | None = None,
        *,
        full: bool = False,
    ) -> View:
        """Listings of graphs, after one pass or after the last. `full` shows long lists
        completely."""
        return show_view(self._pick(graph), after, where, None if full else MAX_ITEMS)

    def diff(
        self, graph: str | None = None, pass_name: str | int | None = None, *, limit: int = 40
    ) -> View:
        """The changes of one pass, or of all passes together."""
        return differences_view(pass_differences(self._pick(graph), pass_name), limit)

    def diff_to(
        self,
        other: Inspection,
        graph: str | None = None,
        after: str | int | None = None,
        *,
        limit: int = 40,
    ) -> View:
        """The differences to another dump, or to another rank of this one."""
        sides = _sides(self, other)
        return comparison_view(self._pick(graph), other._pick(graph), after, limit, sides)

    def collectives(
        self,
        graph: str | None = None,
        after: str | int | None = None,
        show: CollectiveRows | None = None,
        trace: str | Path | None = None,
    ) -> View:
        """Every collective, with totals. `show` sorts, filters and adds columns.

        Args:
            graph: None for all graphs that run; with a trace, for those that it has runs of.
            trace: a trace of `torch.profiler`, whose times stand beside the predicted ones.
        """
        if trace is None:
            return collectives_view(self._to_run(graph), after, show)
        measured = self.measured(trace)
        ran = [each.graph for each in measured.graphs] if graph is None else self._pick(graph)
        return collectives_view(ran, after, show, measured)

    def measured(self, trace: str | Path) -> Measured:
        """What a trace of `torch.profiler` says about the graphs of this dump.

        The graphs are those of the trace's rank if it wrote and no other is chosen.

        Raises:
            NotATraceError: if the file is no trace, or has no run of a graph of this dump.
            DumpError: if it is damaged or exceeds the limits.
        """
        found = read_trace(trace, self.dump.limits)
        where = dict(self._where)
        if where["rank"] is None and found.rank in self.dump.ranks:
            where["rank"] = found.rank
        measured = measure(found, select_graphs(self.dump, **where))
        if not measured.graphs:
            raise NotATraceError(no_runs_text(measured, self.dump))
        return measured

    def memory(
        self,
        graph: str | None = None,
        after: str | int | None = None,
        at: str | None = None,
        *,
        limit: int = 12,
        by: str = "buffer",
    ) -> View:
        """Peaks of all steps, and what is alive at the peak or while the node `at` runs: each
        buffer, or with `by="module"` the sums of modules.
        """
        return memory_view(self._to_run(graph), after, at, limit, by)

    def hang(self, *recorders: str | Path) -> View:
        """In which collective the ranks wait, and which rank is missing.

        Args:
            recorders: files of torch's flight recorder, one per rank. Their names end in the rank.
                Without any, the page says where they come from.

        Raises:
            DumpError: if a file is damaged or exceeds the limits.
        """
        found = [read_recorder(Path(path), self.dump.limits) for path in recorders]
        return hang_view(self.dump, {state.rank: state for state in found})

    def timeline(self, graph: str | None = None, after: str | int | None = None) -> dict[str, Any]:
        """All streams as a Chrome trace."""
        graphs = []
        for each, step in steps_after(self._to_run(graph), after):
            graphs.append((each.title, snapshot_of(each, step), parameter_sources(each.compile)))
        return chrome_trace(graphs)

    def html(self, *others: Inspection, trace: str | Path | None = None) -> str:
        """The whole dump as one self-contained HTML page.

        Args:
            others: further dumps or ranks, which the page compares with this one.
            trace: a trace of `torch.profiler`, whose times stand beside the predicted ones. The
                page shows its rank, if no other is chosen.
        """
        from zpasses.inspect.report import render

        known = [(other.dump, other._where["rank"]) for other in others]
        if trace is None:
            return render(self.dump, **self._where, others=known)
        measured = self.measured(trace)
        where = {**self._where, "rank": measured.graphs[0].graph.rank}
        return render(self.dump, **where, others=known, measured=measured)

    def write_html(self, path: str | Path) -> Path:
        """Write `html()` to a file."""
        Path(path).write_text(self.html(), encoding="utf-8")
        return Path(path)

    # --- figures ----------------------------------------------------------------------------------
    def step_of(self, graph: str, after: str | int | None = None) -> Step:
        """A step of a graph; `step.snapshot` is the graph with its nodes."""
        return step_after(self._pick(graph)[0], after)

    def diff_of(self, graph: str, pass_name: str | int | None = None) -> Difference:
        """The changes of one pass, or of all passes together, in one graph."""
        return pass_differences(self._pick(graph)[:1], pass_name)[0].difference

    def diff_of_steps(self, graph: str, before: str | int, after: str | int) -> Difference:
        """The changes between two steps of a graph."""
        return compare(self._snapshot(graph, before), self._snapshot(graph, after))

    def collectives_of(self, graph: str, after: str | int | None = None) -> Communication:
        """The collectives of one graph."""
        return communication(self._snapshot(graph, after))

    def memory_of(
        self, graph: str, after: str | int | None = None, at: str | None = None
    ) -> Memory:
        """Bytes alive along one graph, and its buffers at the peak or while the node `at` runs."""
        snapshot = self._snapshot(graph, after)
        node = node_named(snapshot, at) if at is not None else None
        return memory(snapshot, node, parameter_sizes(self._pick(graph)[0].compile))

    def schedule_of(self, graph: str, after: str | int | None = None) -> Schedule:
        """The estimated schedule of one graph."""
        return schedule(self._snapshot(graph, after))

    def _snapshot(self, graph: str, after: str | int | None) -> Snapshot:
        picked = self._pick(graph)[0]
        return snapshot_of(picked, step_after(picked, after))

    def _pick(self, graph: str | None) -> list[SelectedGraph]:
        return select_graphs(self.dump, graph, **self._where)

    def _to_run(self, graph: str | None) -> list[SelectedGraph]:
        return select_main(self.dump, graph, **self._where)
