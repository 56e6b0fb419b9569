"""The command `zpasses measure`. It imports torch when it runs: `zpasses --help` stays quick."""

from __future__ import annotations

from pathlib import Path

import click

from zpasses.inspect import CollectiveRows, Limits
from zpasses.inspect import open as open_dump
from zpasses.tools.cli.common import as_json, print_view
from zpasses.tools.cli.running import count_option, program_command, warmup_option


@program_command(
    "COMMAND [ARGUMENTS]...",
    click.option(
        "-o",
        "--output",
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("zpasses-measured"),
        show_default=True,
        help="New folder for the dump and the traces.",
    ),
    count_option("--steps", 3, "Optimizer steps to record."),
    warmup_option,
    as_json,
    limited="the run",
)
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
