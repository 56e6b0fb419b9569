"""The command group. No module that it imports loads torch, so that commands which read dumps start
quickly.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Sequence

import click

from zpasses.tools.bisect.bisect_command import bisect
from zpasses.tools.capture.capture_command import capture
from zpasses.tools.cli.common import (
    CommandGroup,
    as_json,
    errors_as_messages,
    is_full,
    print_view,
)
from zpasses.tools.cli.completion import completion
from zpasses.tools.cli.reading import collectives, diff, hang, html, list_, memory, show, timeline
from zpasses.tools.measure.measure_command import measure
from zpasses.tools.plan.plan_command import plan
from zpasses.tools.tune.tune_command import tune


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    no_args_is_help=True,
)
@click.version_option(package_name="zpasses", message="zpasses %(version)s")
def cli() -> None:
    """Show what passes do to graphs, how much memory they need, and which communication is exposed.

    A run writes a dump with options={"dump": DIR} or ZPASSES_DUMP=DIR. `zpasses capture` writes one
    without running the model.
    """


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


for _command in (
    *(passes, list_, show, diff, collectives, memory, timeline, html, hang),
    *(capture, plan, measure, tune, bisect, completion),
):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the console script.

    The process ends without freeing its memory object by object, which takes a tenth of the
    processor time of a capture of 80 layers, and of `zpasses html` of its dump.
    """
    status: list[int] = []
    atexit.register(_leave, status)  # runs after the handlers that are registered later
    gc.disable()
    try:
        cli(prog_name="zpasses")
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            status.append(exit_.code or 0)
        raise
    except OSError as error:
        if not is_full(error):
            raise
        where = error.filename or "the output, or a temporary file"
        print(f"zpasses: cannot write {where}: {error.strerror}; free some space.", file=sys.stderr)
        status.append(2)
        raise SystemExit(2) from error


def _leave(status: Sequence[int]) -> None:
    """Ends the process with a status, if there is one."""
    if not status:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads, or it is closed
            stream.flush()
    os._exit(status[0])
