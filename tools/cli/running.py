"""Commands that need torch. They import it when they run."""

from __future__ import annotations

import click

from zpasses.tools.cli.common import as_json, errors_as_messages, print_view

__all__ = ["passes"]


@click.command()
@click.argument("name", metavar="[PASS]", required=False)
@as_json
@errors_as_messages
def passes(name: str | None, as_json: bool) -> None:
    """List all passes, or show one pass with the graph before and after it.

    This command loads torch, which takes a few seconds.
    """
    from zpasses.tools.cli.catalogue import all_passes_view, pass_view

    print_view(pass_view(name) if name is not None else all_passes_view(), as_json)
