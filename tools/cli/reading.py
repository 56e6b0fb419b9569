"""Commands that read a dump. They do not import torch."""

from __future__ import annotations

import os
from pathlib import Path

import click

from zpasses.inspect import CollectiveRows, Inspection, Limits, NodeFilter
from zpasses.inspect import open as open_dump
from zpasses.inspect.collectives_page import SORTS
from zpasses.inspect.json_text import batched, json_pieces
from zpasses.inspect.rank_agreement import ranks_that_differ
from zpasses.tools.cli.common import (
    CommandError,
    as_json,
    dump_argument,
    errors_as_messages,
    graph_argument,
    print_view,
    rank_and_compile_options,
    trace_option,
    trusted_option,
    write_output,
)
from zpasses.tools.cli.completion import complete_graph, complete_node, complete_pass

__all__ = ["collectives", "diff", "hang", "html", "list_", "memory", "show", "timeline"]

_after = click.option(
    "--after",
    metavar="PASS",
    shell_complete=complete_pass,
    help="Graph after this pass: its name, text, or step number (0: before all passes).",
)
_limit = click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=40,
    show_default=True,
    help="Maximum number of lines per kind; 0 for all.",
)


def _open(
    path: Path, rank: int | None, compile_name: str | None, limits: Limits | None
) -> Inspection:
    return open_dump(path, rank=rank, compile_name=compile_name, limits=limits)


@click.command("list")
@dump_argument
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="Rank to show. Default: the lowest rank in the dump.",
)
@trusted_option
@as_json
@errors_as_messages
def list_(dump: Path, rank: int | None, limits: Limits | None, as_json: bool) -> None:
    """List compiles, graphs and passes of a dump: the changes, time and failure of each pass."""
    print_view(_open(dump, rank, None, limits).overview(), as_json)


@click.command("show")
@dump_argument
@graph_argument
@_after
@click.option("--collectives", is_flag=True, help="Only collectives and their waits.")
@click.option(
    "--param",
    "params",
    multiple=True,
    metavar="PATTERN",
    help="Only nodes of matching parameters: 'layers.3.*'.",
)
@click.option(
    "--op",
    "ops",
    multiple=True,
    metavar="PATTERN",
    help="Only nodes with a matching op: 'mm', 'all_gather*'.",
)
@click.option(
    "--node",
    "names",
    multiple=True,
    metavar="PATTERN",
    shell_complete=complete_node,
    help="Only nodes with a matching name.",
)
@click.option("--full", is_flag=True, help="Show long lists completely.")
@rank_and_compile_options
@trusted_option
@as_json
@errors_as_messages
def show(
    dump: Path,
    graph: str | None,
    after: str | None,
    collectives: bool,
    params: tuple[str, ...],
    ops: tuple[str, ...],
    names: tuple[str, ...],
    full: bool,
    rank: int | None,
    compile_name: str | None,
    limits: Limits | None,
    as_json: bool,
) -> None:
    """Show a graph as text, one line per node, with shapes, bytes and parameters.

    Without GRAPH, all graphs are shown. Without --after, each graph is shown after its last pass.
    """
    print_view(
        _open(dump, rank, compile_name, limits).show(
            graph, after, NodeFilter(collectives, params, ops, names), full=full
        ),
        as_json,
    )


@click.command()
@dump_argument
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
@click.option(
    "--ranks",
    type=(int, int),
    metavar="A B",
    help="Compare two ranks of the dump.",
)
@_limit
@rank_and_compile_options
@trusted_option
@as_json
@errors_as_messages
@click.pass_context
def diff(
    ctx: click.Context,
    dump: Path,
    other: str | None,
    graph: str | None,
    pass_name: str | None,
    after: str | None,
    ranks: tuple[int, int] | None,
    limit: int,
    rank: int | None,
    compile_name: str | None,
    limits: Limits | None,
    as_json: bool,
) -> None:
    """Show changes by node: inserted, removed, moved, rewired, retagged, recompute-changed,
    retyped or renamed.

    \b
    zpasses diff DIR [GRAPH] [--pass PASS]   changes of one pass, or of all passes
    zpasses diff DIR_A DIR_B [GRAPH]         differences between two dumps
    zpasses diff DIR [GRAPH] --ranks 0 1     differences between two ranks

    The exit status is 0 for equal graphs, 1 for different graphs, and 2 for an error.
    """
    second = (
        Path(other)
        if other is not None and (graph is not None or Path(other).is_dir() or os.sep in other)
        else None
    )
    name = graph if second is not None else other
    if ranks is not None and (second is not None or rank is not None):
        raise CommandError("--ranks compares ranks of one dump; omit the second dump and --rank.")
    if (second is not None or ranks is not None) and pass_name is not None:
        raise CommandError(
            "--pass shows the changes of a pass in one dump; between dumps or ranks, --after "
            "selects the graphs to compare."
        )
    if second is None and ranks is None and after is not None:
        raise CommandError("--after needs two dumps or ranks; --pass shows the changes of a pass.")
    if ranks is not None:
        first = _open(dump, ranks[0], compile_name, limits)
        view = first.diff_to(
            Inspection(first.dump, ranks[1], compile_name), name, after, limit=limit
        )
    elif second is not None:
        view = _open(dump, rank, compile_name, limits).diff_to(
            _open(second, rank, compile_name, limits), name, after, limit=limit
        )
    else:
        view = _open(dump, rank, compile_name, limits).diff(name, pass_name, limit=limit)
    print_view(view, as_json)
    ctx.exit(0 if view.data["same"] else 1)


@click.command()
@dump_argument
@graph_argument
@_after
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    default="order",
    show_default=True,
    help="Order of the rows: of their start, or by a figure, largest first.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Maximum number of rows of each graph; 0 for all.",
)
@click.option("--exposed", is_flag=True, help="Only collectives for which compute waits.")
@click.option("--source", is_flag=True, help="Show the lines that read the parameters.")
@click.option("--module", is_flag=True, help="Show the modules of the parameters.")
@trace_option
@rank_and_compile_options
@trusted_option
@as_json
@errors_as_messages
def collectives(
    dump: Path,
    graph: str | None,
    after: str | None,
    sort: str,
    limit: int,
    exposed: bool,
    source: bool,
    module: bool,
    trace: Path | None,
    rank: int | None,
    compile_name: str | None,
    limits: Limits | None,
    as_json: bool,
) -> None:
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
    inspection = _open(dump, rank, compile_name, limits)
    print_view(inspection.collectives(graph, after, show, trace), as_json)


@click.command()
@dump_argument
@graph_argument
@_after
@click.option(
    "--at",
    metavar="NODE",
    shell_complete=complete_node,
    help="Show the buffers alive while this node runs. Default: at the peak.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=12,
    show_default=True,
    help="Maximum number of buffers, parameters and modules; 0 for all.",
)
@click.option(
    "--by",
    type=click.Choice(["buffer", "module"]),
    default="buffer",
    show_default=True,
    help="What to list: every buffer, or sums by module, with equal layers in one row.",
)
@rank_and_compile_options
@trusted_option
@as_json
@errors_as_messages
def memory(
    dump: Path,
    graph: str | None,
    after: str | None,
    at: str | None,
    limit: int,
    by: str,
    rank: int | None,
    compile_name: str | None,
    limits: Limits | None,
    as_json: bool,
) -> None:
    """Show the peak before and after each pass, the memory curve, and the buffers alive at the
    peak.

    Sizes follow the liveness model. They exclude what the caller holds (shards and inputs).
    """
    inspection = _open(dump, rank, compile_name, limits)
    print_view(inspection.memory(graph, after, at, limit=limit, by=by), as_json)


@click.command()
@dump_argument
@graph_argument
@_after
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help='File to write; "-" for standard output.',
)
@rank_and_compile_options
@trusted_option
@errors_as_messages
def timeline(
    dump: Path,
    graph: str | None,
    after: str | None,
    output: Path,
    rank: int | None,
    compile_name: str | None,
    limits: Limits | None,
) -> None:
    """Write the estimated streams of compute and of each process group as a trace for Perfetto
    (ui.perfetto.dev).
    """
    trace = _open(dump, rank, compile_name, limits).timeline(graph, after)
    write_output(output, batched(json_pieces(trace, 2)))


@click.command()
@dump_argument
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
@trusted_option
@as_json
@errors_as_messages
def hang(dump: Path, files: tuple[Path, ...], limits: Limits | None, as_json: bool) -> None:
    """Show in which collective of NCCL or RCCL the ranks wait, and which rank is missing.

    FILE is what torch's flight recorder wrote for one rank, as JSON or as a pickle; its name ends
    in the rank. Without any, the command says where they come from, and what helps with gloo.
    """
    print_view(_open(dump, None, None, limits).hang(*files), as_json)


@click.command()
@dump_argument
@click.argument("other", metavar="[DIR_B]", required=False, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help='File to write; "-" for standard output.',
)
@click.option(
    "--ranks", type=(int, int), metavar="A B", help="Show two ranks of the dump side by side."
)
@trace_option
@rank_and_compile_options
@trusted_option
@errors_as_messages
def html(
    dump: Path,
    other: Path | None,
    output: Path,
    ranks: tuple[int, int] | None,
    trace: Path | None,
    rank: int | None,
    compile_name: str | None,
    limits: Limits | None,
) -> None:
    """Write the whole dump as one page that needs neither network nor server.

    With a second dump, or with --ranks, the page also compares the two. Of ranks that run
    different collectives, it shows two without being asked. With --trace, it shows measured times
    beside the predicted ones.
    """
    if ranks is not None and (other is not None or rank is not None):
        raise CommandError("--ranks compares ranks of one dump; omit the second dump and --rank.")
    first = _open(dump, ranks[0] if ranks else rank, compile_name, limits)
    if ranks is None and other is None and rank is None:
        ranks = ranks_that_differ(first.dump)
    others = []
    if ranks is not None:
        others.append(Inspection(first.dump, ranks[1], compile_name))
    if other is not None:
        others.append(_open(other, rank, compile_name, limits))
    write_output(output, first.html_pieces(*others, trace=trace))
    if str(output) != "-":
        click.echo(f"wrote {output}; open it in a browser", err=True)
