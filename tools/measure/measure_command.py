"""The command `zpasses measure`. It imports torch when it runs: `zpasses --help` stays quick."""

from __future__ import annotations

from pathlib import Path

import click

from zpasses.inspect import CollectiveRows, Limits
from zpasses.inspect import open as open_dump
from zpasses.tools.cli.common import as_json, errors_as_messages, print_view


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument(
    "command", metavar="COMMAND [ARGUMENTS]...", nargs=-1, required=True, type=click.UNPROCESSED
)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("zpasses-measured"),
    show_default=True,
    help="New folder for the dump and the traces.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Optimizer steps to record.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Optimizer steps before them.",
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=1800.0,
    show_default=True,
    help="Time limit of the run.",
)
@as_json
@errors_as_messages
def measure(
    command: tuple[str, ...],
    output: Path,
    steps: int,
    warmup: int,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Run a training program for a few steps, and show measured times beside the predicted ones.

    COMMAND is a Python file with its arguments, or a command such as `torchrun --nproc-per-node 2
    train.py`. Every rank writes a dump and a trace of torch.profiler into one folder. The program
    is ended after the recorded steps, so it should not write checkpoints before. Options of the
    command stand before COMMAND.
    """
    from zpasses.tools.measure.measure_run import MeasureRun, run_measure

    run = MeasureRun(command, output, warmup, steps, timeout_s)
    traces = run_measure(run, lambda text: click.echo(text, err=True))
    inspection = open_dump(output, limits=Limits.trusted())
    print_view(inspection.collectives(show=CollectiveRows(module=True), trace=traces[0]), as_json)
    if len(traces) > 1:
        click.echo(
            f"This is rank 0. For another rank: zpasses collectives {output} --trusted --trace "
            f"{output / traces[1].name}",
            err=True,
        )
