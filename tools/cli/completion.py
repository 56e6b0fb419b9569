"""Shell completion, by click: commands and options, and the graphs, passes and nodes of a dump."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from zpasses.errors import ZpassesError
from zpasses.inspect import Inspection
from zpasses.inspect import open as open_dump
from zpasses.inspect.escape import one_line
from zpasses.inspect.find import select_graphs

_MOST = 200
"""Names that a shell is given at once."""


def _from_dump(
    names_in: Callable[[Inspection, click.Context], Iterable[str]],
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """A completion by names of the dump that the command line names. Errors complete nothing."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        given = _argument(ctx, 0, "dump")
        if given is None:
            return []
        try:
            names = dict.fromkeys(names_in(open_dump(Path(given)), ctx))
        except (ZpassesError, OSError):
            return []
        found = [name for name in names if name.startswith(incomplete) and one_line(name) == name]
        return [CompletionItem(name) for name in found[:_MOST]]

    return complete


def _argument(ctx: click.Context, place: int, *names: str) -> str | None:
    """A positional argument. If the line ends with an option that lacks its value, click has not
    assigned the arguments to their names.
    """
    for name in names:
        if ctx.params.get(name) is not None:
            return str(ctx.params[name])
    return ctx.args[place] if len(ctx.args) > place else None


def _graphs(inspection: Inspection, ctx: click.Context) -> Iterable[str]:
    return (each.graph.name for each in select_graphs(inspection.dump, rank=ctx.params.get("rank")))


def _passes(inspection: Inspection, ctx: click.Context) -> Iterable[str]:
    graph = _argument(ctx, 1, "graph", "other")
    for each in select_graphs(inspection.dump, rank=ctx.params.get("rank")):
        if graph in (None, each.graph.name):
            yield from ((step.after or "").partition("{")[0] for step in each.graph.steps[1:])


def _compiles(inspection: Inspection, ctx: click.Context) -> Iterable[str]:
    return (each.name for rank in inspection.dump.ranks.values() for each in rank.compiles)


def _nodes(inspection: Inspection, ctx: click.Context) -> Iterable[str]:
    graph = _argument(ctx, 1, "graph")
    if graph is None:
        return ()
    snapshot = inspection.step_of(graph, ctx.params.get("after")).snapshot
    return () if snapshot is None else (node.name for node in snapshot.nodes)


complete_graph, complete_pass = _from_dump(_graphs), _from_dump(_passes)
complete_compile, complete_node = _from_dump(_compiles), _from_dump(_nodes)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, and names of a dump in a shell.

    For bash, add `eval "$(zpasses completion bash)"` to ~/.bashrc. For zsh, add the same line with
    zsh to ~/.zshrc. For fish, run `zpasses completion fish >
    ~/.config/fish/completions/zpasses.fish`.
    """
    from click.shell_completion import get_completion_class

    root = ctx.find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(root, {}, "zpasses", "_ZPASSES_COMPLETE").source())
