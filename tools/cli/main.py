"""The commands. Nothing here imports torch at its head: commands that read dumps start in a
fraction of a second."""

from __future__ import annotations

import click

from zpasses.tools.bisect.command import bisect
from zpasses.tools.capture.command import capture
from zpasses.tools.cli.common import Group
from zpasses.tools.cli.completion import completion
from zpasses.tools.cli.reading import collectives, diff, html, list_, memory, show, timeline
from zpasses.tools.cli.running import passes

__all__ = ["cli", "main"]


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    no_args_is_help=True,
)
@click.version_option(package_name="zpasses", message="zpasses %(version)s")
def cli() -> None:
    """See what every pass did to a graph, what it costs in memory, and whether communication hides.

    A run writes a dump with options={"dump": DIR} or ZPASSES_DUMP=DIR; `zpasses capture` writes one
    without running."""


for _command in (
    passes,
    list_,
    show,
    diff,
    collectives,
    memory,
    timeline,
    html,
    capture,
    bisect,
    completion,
):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the console script."""
    cli(prog_name="zpasses")
