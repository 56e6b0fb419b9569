"""Command line of the benchmarks; see `python -m zpasses.tools.bench --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zpasses.tools.bench as bench
from zpasses.errors import OptionError
from zpasses.tools.bench.compiling import CompileConfig, compile_table, run_compile
from zpasses.tools.bench.device import DeviceConfig, device_table, run_device
from zpasses.tools.bench.launch import RankError
from zpasses.tools.bench.optimizer_steps import (
    OptimizerConfig,
    optimizer_table,
    run_optimizer,
)
from zpasses.tools.bench.overhead import OverheadConfig, overhead_table, run_overhead
from zpasses.tools.bench.predicted_schedules import ScheduleConfig, run_schedule, schedule_table
from zpasses.tools.bench.report import write_json
from zpasses.tools.bench.train import TrainConfig, run_train, train_table
from zpasses.tools.config_options import add_options, config_of


@dataclass(frozen=True)
class Suite:
    """One subcommand. Its options are the fields of its config."""

    summary: str
    config: type
    """A frozen dataclass."""
    run: Callable[[Any], Any]
    """Returns a report from a config."""
    table: Callable[[Any], str]


_ABOUT = {
    "train": "peers train the same GPT on the same data",
    "device": "one rank of a larger group on one accelerator, without communication",
    "compile": "the first step with cold and warm compile caches",
    "schedule": "schedulers of collectives by predicted time and memory, beside Inductor's",
    "optimizer": "the step of AdamW on sharded models",
    "overhead": "runtime overhead per parameter and step",
}
_PARTS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], str]]] = {
    "train": (TrainConfig, run_train, train_table),
    "device": (DeviceConfig, run_device, device_table),
    "compile": (CompileConfig, run_compile, compile_table),
    "schedule": (ScheduleConfig, run_schedule, schedule_table),
    "optimizer": (OptimizerConfig, run_optimizer, optimizer_table),
    "overhead": (OverheadConfig, run_overhead, overhead_table),
}
SUITES = {name: Suite(about, *_PARTS[name]) for name, about in _ABOUT.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one suite. Returns the exit code: 1 if a run failed, or a peer's training differs."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in (*SUITES, "-h", "--help"):
        given.insert(0, "train")
    parser = argparse.ArgumentParser(
        prog="python -m zpasses.tools.bench", description=bench.__doc__, formatter_class=_FORMAT
    )
    commands = parser.add_subparsers(dest="suite", metavar="{" + ",".join(SUITES) + "}")
    for name, suite in SUITES.items():
        command = commands.add_parser(name, help=suite.summary, description=suite.summary)
        add_options(command, suite.config)
        command.add_argument("--json", metavar="FILE", help="Write everything measured to FILE.")
        command.set_defaults(command=command)
    options = vars(parser.parse_args(given))
    suite, command, file = options["suite"], options["command"], options["json"]
    chosen = SUITES[suite]
    try:
        report = chosen.run(config_of(chosen.config, options))
    except OptionError as error:
        command.error(str(error))
    except RankError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    print(chosen.table(report))
    if file:
        write_json(file, suite, report)
    return 1 if getattr(report, "failed", None) else 0


_FORMAT = argparse.RawDescriptionHelpFormatter


if __name__ == "__main__":
    sys.exit(main())
