"""The command `zpasses tune`. It imports torch when it runs: `zpasses --help` stays quick."""

from __future__ import annotations

import click

from zpasses.tools.cli.common import as_json, print_view
from zpasses.tools.cli.running import count_option, program_command, warmup_option
from zpasses.tools.tune.table import tune_view


@program_command(
    "COMMAND [ARGUMENTS]...",
    count_option(
        "--plans", 4, "Memory budgets to try, those with the shortest predicted step.", 20, 0
    ),
    count_option("--steps", 10, "Optimizer steps to time in each run."),
    warmup_option,
    click.option(
        "--memory",
        metavar="SIZE",
        help='Largest peak of a plan, such as "60GiB". Default: whatever runs.',
    ),
    as_json,
)
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
