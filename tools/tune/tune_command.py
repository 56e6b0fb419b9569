"""The command `zpasses tune`. It imports torch when it runs: `zpasses --help` stays quick."""

from __future__ import annotations

import click

from zpasses.tools.cli.common import as_json, errors_as_messages, print_view
from zpasses.tools.tune.table import tune_view


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument(
    "command", metavar="COMMAND [ARGUMENTS]...", nargs=-1, required=True, type=click.UNPROCESSED
)
@click.option(
    "--plans",
    type=click.IntRange(0, 20),
    default=4,
    show_default=True,
    help="Memory budgets to try, those with the shortest predicted step.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Optimizer steps to time in each run.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Optimizer steps before them.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help='Largest peak of a plan, such as "60GiB". Default: whatever runs.',
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=1800.0,
    show_default=True,
    help="Time limit of one run.",
)
@as_json
@errors_as_messages
def tune(
    command: tuple[str, ...],
    plans: int,
    steps: int,
    warmup: int,
    memory: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Run a training program with several plans, and print the options of the fastest.

    COMMAND is a Python file with its arguments, or a command such as `torchrun --nproc-per-node 2
    train.py`. Each run is ended after the timed steps, so the program should not write checkpoints
    before. The first run has the options of the program. The others replace `pipeline` and
    `memory_budget`.
    """
    from zpasses.tools.tune.tune_run import TuneRequest, run_tune

    request = TuneRequest(command, plans, warmup, steps, memory, timeout_s)
    found = run_tune(request, lambda text: click.echo(text, err=True))
    print_view(tune_view(found), as_json)
