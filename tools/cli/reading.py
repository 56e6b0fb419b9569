"""Commands that read a dump. They do not import torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from zpasses.inspect import CollectiveRows, Inspection, NodeFilter
from zpasses.inspect.collectives_page import SORTS
from zpasses.inspect.rank_agreement import ranks_that_differ
from zpasses.inspect.view import View
from zpasses.tools.cli.common import (
    CommandError,
    DumpArguments,
    dump_command,
    graph_argument,
    trace_option,
    write_output,
)
from zpasses.tools.cli.completion import complete_graph, complete_node, complete_pass

Command = TypeVar("Command", bound=Callable[..., Any])

_after = click.option(
    "--after",
    metavar="PASS",
    shell_complete=complete_pass,
    help="Graph after this pass: its name, text, or step number (0: before all passes).",
)
_output = click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help='File to write; "-" for standard output.',
)
_ranks = click.option("--ranks", type=(int, int), metavar="A B", help="Compare two ranks.")


def _limit(default: int, what: str) -> Callable[[Command], Command]:
    return click.option(
        "--limit",
        type=click.IntRange(min=0),
        default=default,
        show_default=True,
        help=f"Maximum number of {what}; 0 for all.",
    )


def _patterns(name: str, argument: str, text: str, **options: Any) -> Callable[[Command], Command]:
    return click.option(
        name, argument, multiple=True, metavar="PATTERN", help=f"Only nodes {text}.", **options
    )


@dump_command("list", picks=("rank",))
def list_(given: DumpArguments) -> View:
    """List compiles, graphs and passes of a dump: the changes, time and failure of each pass."""
    return given.open().overview()


@dump_command()
@graph_argument
@_after
@click.option("--collectives", is_flag=True, help="Only collectives and their waits.")
@_patterns("--param", "params", "of matching parameters: 'layers.3.*'")
@_patterns("--op", "ops", "with a matching op: 'mm', 'all_gather*'")
@_patterns("--node", "names", "with a matching name", shell_complete=complete_node)
@click.option("--full", is_flag=True, help="Show long lists completely.")
def show(
    given: DumpArguments,
    graph: str | None,
    after: str | None,
    collectives: bool,
    params: tuple[str, ...],
    ops: tuple[str, ...],
    names: tuple[str, ...],
    full: bool,
) -> View:
    """Show a graph as text, one line per node, with shapes, bytes and parameters.

    Without GRAPH, all graphs are shown. Without --after, each graph is shown after its last pass.
    """
    return given.open().show(graph, after, NodeFilter(collectives, params, ops, names), full=full)


@dump_command(status=lambda view: 0 if view.data["same"] else 1)
@click.argument("other", metavar="[GRAPH | DIR_B]", required=False, shell_complete=complete_graph)
@click.argument("graph", metavar="[GRAPH]", required=False)
@click.option(
    "--pass",
    "pass_name",
    metavar="PASS",
    shell_complete=complete_pass,
    help="Changes of this pass. Default: of all passes of the graph.",
)
@click.option(
    "--after",
    metavar="PASS",
    help="Between dumps or ranks: compare graphs after this pass. Default: after the last.",
)
@_ranks
@_limit(40, "lines per kind")
def diff(
    given: DumpArguments,
    other: str | None,
    graph: str | None,
    pass_name: str | None,
    after: str | None,
    ranks: tuple[int, int] | None,
    limit: int,
) -> View:
    """Show changes by node: inserted, removed, moved, rewired, retagged, recompute-changed,
    retyped or renamed.

    \b
    zpasses diff DIR [GRAPH] [--pass PASS]   changes of one pass, or of all passes
    zpasses diff DIR_A DIR_B [GRAPH]         differences between two dumps
    zpasses diff DIR [GRAPH] --ranks 0 1     differences between two ranks

    The exit status is 0 for equal graphs, 1 for different graphs, and 2 for an error.
    """
    second = None
    if other is not None and (graph is not None or Path(other).is_dir() or os.sep in other):
        second = Path(other)
    name = graph if second is not None else other
    if (second is not None or ranks is not None) and pass_name is not None:
        raise CommandError(
            "--pass shows the changes of a pass in one dump; between dumps or ranks, --after "
            "selects the graphs to compare."
        )
    if second is None and ranks is None and after is not None:
        raise CommandError("--after needs two dumps or ranks; --pass shows the changes of a pass.")
    first, *others = _opened(given, second, ranks)
    if others:
        return first.diff_to(others[0], name, after, limit=limit)
    return first.diff(name, pass_name, limit=limit)


def _opened(
    given: DumpArguments, other: Path | None, ranks: tuple[int, int] | None
) -> list[Inspection]:
    """The dump, then what to compare it with: another dump, or another rank."""
    if ranks is None:
        return [given.open()] if other is None else [given.open(), given.open(other)]
    if other is not None or given.rank is not None:
        raise CommandError("--ranks compares ranks of one dump; omit the second dump and --rank.")
    first = given.open(rank=ranks[0])
    return [first, Inspection(first.dump, ranks[1], given.compile_name)]


@dump_command()
@graph_argument
@_after
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    default="order",
    show_default=True,
    help="Order of the rows: of their start, or by a figure, largest first.",
)
@_limit(0, "rows of each graph")
@click.option("--exposed", is_flag=True, help="Only collectives for which compute waits.")
@click.option("--source", is_flag=True, help="Show the lines that read the parameters.")
@click.option("--module", is_flag=True, help="Show the modules of the parameters.")
@trace_option
def collectives(
    given: DumpArguments,
    graph: str | None,
    after: str | None,
    sort: str,
    limit: int,
    exposed: bool,
    source: bool,
    module: bool,
    trace: Path | None,
) -> View:
    """List every collective: its size, the distance to its wait, its time, and how much of it is
    exposed.

    Times are those of the cost model for the dump's target. A collective is exposed for as long as
    compute waits for it; the part of it before its transfer starts is queueing behind earlier
    collectives of its group. The model has one stream for compute and one for each process group,
    and issues every node as early as the graph's order allows.

    With --trace, measured times stand beside these, by collective and by module. The trace must be
    of the run that wrote the dump; `zpasses measure` writes both.
    """
    if trace is not None and after is not None:
        raise CommandError(
            "--trace measures the graphs that ran, after their last pass; omit --after."
        )
    show = CollectiveRows(sort, limit, exposed, source, module)
    return given.open().collectives(graph, after, show, trace)


@dump_command()
@graph_argument
@_after
@click.option(
    "--at",
    metavar="NODE",
    shell_complete=complete_node,
    help="Show the buffers alive while this node runs. Default: at the peak.",
)
@_limit(12, "buffers, parameters and modules")
@click.option(
    "--by",
    type=click.Choice(["buffer", "module"]),
    default="buffer",
    show_default=True,
    help="What to list: every buffer, or sums by module, with equal layers in one row.",
)
def memory(
    given: DumpArguments, graph: str | None, after: str | None, at: str | None, limit: int, by: str
) -> View:
    """Show the peak before and after each pass, the memory curve, and the buffers alive at the
    peak.

    Sizes follow the liveness model. They exclude what the caller holds (shards and inputs).
    """
    return given.open().memory(graph, after, at, limit=limit, by=by)


@dump_command(prints=False)
@graph_argument
@_after
@_output
def timeline(given: DumpArguments, graph: str | None, after: str | None, output: Path) -> None:
    """Write the estimated streams of compute and of each process group as a trace for Perfetto
    (ui.perfetto.dev).
    """
    write_output(output, json.dumps(given.open().timeline(graph, after)))


@dump_command(picks=())
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
def hang(given: DumpArguments, files: tuple[Path, ...]) -> View:
    """Show in which collective of NCCL or RCCL the ranks wait, and which rank is missing.

    FILE is what torch's flight recorder wrote for one rank, as JSON or as a pickle; its name ends
    in the rank. Without any, the command says where they come from, and what helps with gloo.
    """
    return given.open().hang(*files)


@dump_command(prints=False)
@click.argument("other", metavar="[DIR_B]", required=False, type=click.Path(path_type=Path))
@_output
@_ranks
@trace_option
def html(
    given: DumpArguments,
    other: Path | None,
    output: Path,
    ranks: tuple[int, int] | None,
    trace: Path | None,
) -> None:
    """Write the whole dump as one page that needs neither network nor server.

    With a second dump, or with --ranks, the page also compares the two. Of ranks that run
    different collectives, it shows two without being asked. With --trace, it shows measured times
    beside the predicted ones.
    """
    first, *others = _opened(given, other, ranks)
    if not others and given.rank is None and (differ := ranks_that_differ(first.dump)):
        others = [Inspection(first.dump, differ[1], given.compile_name)]
    write_output(output, first.html(*others, trace=trace))
    if str(output) != "-":
        click.echo(f"wrote {output}; open it in a browser", err=True)
