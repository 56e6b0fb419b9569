"""Commands that need torch; they import it when they run."""

from __future__ import annotations

import click

from zpasses.tools.cli.common import as_json, explained, show

__all__ = ["passes"]


@click.command()
@click.argument("name", metavar="[PASS]", required=False)
@as_json
@explained
def passes(name: str | None, as_json: bool) -> None:
    """The catalogue of passes, or one of them with the graph before and after.

    Passes are made of torch, so this loads it, which takes a few seconds.
    """
    from zpasses.tools.cli.catalogue import all_passes_view, pass_view

    show(pass_view(name) if name is not None else all_passes_view(), as_json)
