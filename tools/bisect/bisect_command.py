"""The command `zpasses bisect`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from zpasses.inspect.view import Text, View
from zpasses.tools.bisect.bisect_run import BisectReport, BisectRequest, run_bisect
from zpasses.tools.cli.common import as_json, print_view
from zpasses.tools.cli.running import count_option, program_command


@program_command(
    "SCRIPT [ARGUMENTS]...",
    click.option(
        "--tolerance",
        type=click.FloatRange(min=0),
        default=1e-3,
        show_default=True,
        help="Largest difference to the run without passes, relative to the norm of each tensor.",
    ),
    count_option("--calls", 32, "Number of compiled calls to compare on each rank."),
    click.option(
        "-o",
        "--output",
        "out",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="Folder to keep the log and the dump of every run.",
    ),
    as_json,
)
def bisect(
    command: tuple[str, ...],
    tolerance: float,
    calls: int,
    timeout_s: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Find the first pass after which a run goes wrong.

    SCRIPT is a Python file with its arguments, or a command such as `torchrun --nproc-per-node 2
    train.py`. It runs without passes, and then with one more pass each time. A run is wrong if it
    fails, hangs, or if its compiled calls return other outputs or gradients than without passes.
    The script should be short and should set its seeds. The exit status is 1 if a pass was found.
    """
    request = BisectRequest(
        command, tolerance, calls, timeout_s, None if out is None else out.absolute()
    )
    report = run_bisect(request, lambda text: click.echo(text, err=as_json))
    print_view(View("", (_said(report),), dataclasses.asdict(report)), as_json)
    click.get_current_context().exit(0 if report.culprit is None else 1)


def _said(report: BisectReport) -> Text:
    if report.culprit is None:
        return Text((f"No pass breaks the run: {report.reason}.",))
    number, passes = report.culprit, report.passes
    first = f"The run first goes wrong after pass {number + 1} of {len(passes)}: {passes[number]}"
    ended = ["The end of its output:", *report.tail.split("\n")] if report.tail else []
    return Text((first, *report.reason.split("\n"), *ended))
