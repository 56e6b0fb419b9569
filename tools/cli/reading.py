"""Commands that read a dump."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from zpasses.tools.cli.common import (
    CommandError,
    as_json,
    dump_argument,
    explained,
    graph_argument,
    picking,
    write,
)
from zpasses.tools.cli.common import show as show_page

__all__ = ["collectives", "diff", "html", "list_", "memory", "show", "timeline"]

_after = click.option(
    "--after",
    metavar="PASS",
    help="The graph after this pass, by name, text, or number of the step (0: before all).",
)
_limit = click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=40,
    show_default=True,
    help="Lines of a kind; 0 for all.",
)


def _open(path: Path, rank: int | None, compile_name: str | None) -> Any:
    from zpasses.inspect import open as open_dump

    return open_dump(path, rank=rank, compile_name=compile_name)


@click.command("list")
@dump_argument
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="Whose graphs; by default the lowest rank that was dumped.",
)
@as_json
@explained
def list_(dump: Path, rank: int | None, as_json: bool) -> None:
    """Compiles, graphs and passes of a dump: what each pass changed, how long it took, what
    failed."""
    show_page(_open(dump, rank, None).overview(), as_json)


@click.command("show")
@dump_argument
@graph_argument
@_after
@click.option("--collectives", is_flag=True, help="Only nodes that communicate, and their waits.")
@click.option(
    "--param",
    "params",
    multiple=True,
    metavar="PATTERN",
    help="Only nodes of parameters like this: 'layers.3.*'.",
)
@click.option(
    "--op",
    "ops",
    multiple=True,
    metavar="PATTERN",
    help="Only nodes whose op is like this: 'mm', 'all_gather*'.",
)
@click.option("--node", "names", multiple=True, metavar="PATTERN", help="Only nodes of such names.")
@click.option("--full", is_flag=True, help="Long lists as a whole.")
@picking
@as_json
@explained
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
    as_json: bool,
) -> None:
    """A graph as text, one line a node, with shapes, bytes and parameters.

    Without GRAPH all graphs are shown, without --after each as its last pass left it.
    """
    from zpasses.inspect import Where

    show_page(
        _open(dump, rank, compile_name).show(
            graph, after, Where(collectives, params, ops, names), full=full
        ),
        as_json,
    )


@click.command()
@dump_argument
@click.argument("other", metavar="[GRAPH | DIR_B]", required=False)
@click.argument("graph", metavar="[GRAPH]", required=False)
@click.option(
    "--pass",
    "pass_name",
    metavar="PASS",
    help="What this pass changed; without it, what all passes of the graph did.",
)
@click.option(
    "--after",
    metavar="PASS",
    help="Between dumps or ranks: the graphs after this pass instead of after the last.",
)
@click.option(
    "--ranks",
    type=(int, int),
    metavar="A B",
    help="What is different between two ranks of the dump.",
)
@_limit
@picking
@as_json
@explained
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
    as_json: bool,
) -> None:
    """What changed, by node: inserted, removed, moved, rewired, retagged, remarked, retyped or
    renamed.

    \b
    zpasses diff DIR [GRAPH] [--pass PASS]   what a pass did, or all of them
    zpasses diff DIR_A DIR_B [GRAPH]         what is different between two dumps
    zpasses diff DIR [GRAPH] --ranks 0 1     ... and between two ranks

    The exit status is 0 if nothing is different, 1 if something is, 2 if it cannot be told.
    """
    second = (
        Path(other)
        if other is not None and (graph is not None or Path(other).is_dir() or os.sep in other)
        else None
    )
    name = graph if second is not None else other
    if ranks is not None and (second is not None or rank is not None):
        raise CommandError(
            "--ranks compares ranks of one dump; leave out the second dump and --rank."
        )
    if (second is not None or ranks is not None) and pass_name is not None:
        raise CommandError(
            "--pass shows what a pass did in one dump; between dumps or ranks, --after names the "
            "graphs to compare."
        )
    if second is None and ranks is None and after is not None:
        raise CommandError("--after is for two dumps or ranks; --pass shows what a pass did.")
    if ranks is not None:
        view = _open(dump, ranks[0], compile_name).diff_to(
            _open(dump, ranks[1], compile_name), name, after, limit=limit
        )
    elif second is not None:
        view = _open(dump, rank, compile_name).diff_to(
            _open(second, rank, compile_name), name, after, limit=limit
        )
    else:
        view = _open(dump, rank, compile_name).diff(name, pass_name, limit=limit)
    show_page(view, as_json)
    ctx.exit(0 if view.data["same"] else 1)


@click.command()
@dump_argument
@graph_argument
@_after
@picking
@as_json
@explained
def collectives(
    dump: Path,
    graph: str | None,
    after: str | None,
    rank: int | None,
    compile_name: str | None,
    as_json: bool,
) -> None:
    """Every collective: what it moves, how far its wait is, its time and how much of that is
    exposed.

    Times are those of the cost model for the dump's target. Exposed is how long computation stands
    still for a collective, when computation and each process group have a stream and every node is
    issued as early as the graph's order allows."""
    show_page(_open(dump, rank, compile_name).collectives(graph, after), as_json)


@click.command()
@dump_argument
@graph_argument
@_after
@click.option(
    "--at", metavar="NODE", help="What is alive while this node runs, instead of at the peak."
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=12,
    show_default=True,
    help="Buffers and parameters to show; 0 for all.",
)
@picking
@as_json
@explained
def memory(
    dump: Path,
    graph: str | None,
    after: str | None,
    at: str | None,
    limit: int,
    rank: int | None,
    compile_name: str | None,
    as_json: bool,
) -> None:
    """The peak before and after each pass, the curve, and what is alive at the peak.

    Bytes are those of the liveness model: above what the caller holds (shards, the batch).
    """
    show_page(_open(dump, rank, compile_name).memory(graph, after, at, limit=limit), as_json)


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
@picking
@explained
def timeline(
    dump: Path,
    graph: str | None,
    after: str | None,
    output: Path,
    rank: int | None,
    compile_name: str | None,
) -> None:
    """Write the streams of computation and of each process group as a trace that opens in Perfetto
    (ui.perfetto.dev)."""
    write(output, json.dumps(_open(dump, rank, compile_name).timeline(graph, after)))


@click.command()
@dump_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help='File to write; "-" for standard output.',
)
@picking
@explained
def html(dump: Path, output: Path, rank: int | None, compile_name: str | None) -> None:
    """Write everything as one page that needs neither network nor server."""
    write(output, _open(dump, rank, compile_name).html())
    if str(output) != "-":
        click.echo(f"wrote {output}; open it in a browser", err=True)
