"""`zpasses bisect`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from zpasses.tools.cli.common import explained

__all__ = ["bisect"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument(
    "command", metavar="SCRIPT [ARGUMENTS]...", nargs=-1, required=True, type=click.UNPROCESSED
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=1e-3,
    show_default=True,
    help="How far values may lie from the run without passes, relative to their tensor's norm.",
)
@click.option(
    "--calls",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Compiled calls to compare, of each rank.",
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=1800.0,
    show_default=True,
    help="Of one run.",
)
@click.option(
    "-o",
    "--output",
    "out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Keep the log and the dump of every run here.",
)
@click.option("--json", "as_json", is_flag=True, help="Print plain values instead of text.")
@click.pass_context
@explained
def bisect(
    context: click.Context,
    command: tuple[str, ...],
    tolerance: float,
    calls: int,
    timeout_s: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Find the first pass after which a run goes wrong.

    SCRIPT is a Python file with its arguments, or a command such as `torchrun --nproc-per-node 2
    train.py`. It is run without passes, then with one pass more each time. A run goes wrong if it
    fails, hangs, or if what its compiled calls return (outputs and gradients) differs from the run
    without passes. The script should be short and seeded. Ends with status 1 if a pass was found.
    """
    from zpasses.tools.bisect.run import BisectRequest, run_bisect

    request = BisectRequest(
        command, tolerance, calls, timeout_s, None if out is None else out.absolute()
    )
    report = run_bisect(request, lambda text: click.echo(text, err=as_json))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=1))
    elif report.culprit is None:
        click.echo(f"No pass changes the run: {report.reason}.")
    else:
        click.echo(
            f"First wrong after pass {report.culprit + 1} of {len(report.passes)}: "
            f"{report.passes[report.culprit]}\n{report.reason}"
        )
        if report.tail:
            click.echo(f"The end of its output:\n{report.tail}")
    context.exit(0 if report.culprit is None else 1)
