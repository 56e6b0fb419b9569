"""Command line of the benchmarks; see `python -m zpasses.tools.bench --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields

import zpasses.tools.bench as bench
from zpasses.errors import OptionError, suggestion
from zpasses.tools.bench.compiling import CompileConfig, run_compile
from zpasses.tools.bench.device import DeviceConfig, run_device
from zpasses.tools.bench.launch import RankError
from zpasses.tools.bench.model import ModelSize
from zpasses.tools.bench.overhead import OverheadConfig, run_overhead
from zpasses.tools.bench.peers import PEERS, peer_of
from zpasses.tools.bench.report import (
    compile_table,
    device_table,
    overhead_table,
    schedule_table,
    train_table,
    write_json,
)
from zpasses.tools.bench.schedule import SCHEDULERS, ScheduleConfig, run_schedule
from zpasses.tools.bench.schedule_models import MODELS
from zpasses.tools.bench.train import TrainConfig, default_peers, run_train
from zpasses.tools.capture.meshes import MeshShape

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one suite. Returns the exit code: 1 if a run failed, or a peer's training differs."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in (*_SUITES, "-h", "--help"):
        given.insert(0, "train")
    parser = argparse.ArgumentParser(
        prog="python -m zpasses.tools.bench", description=bench.__doc__, formatter_class=_FORMAT
    )
    suites = parser.add_subparsers(dest="suite", metavar="{" + ",".join(_SUITES) + "}")
    for name, (add_options, _, summary) in _SUITES.items():
        suite = suites.add_parser(
            name,
            help=summary,
            description=summary,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        add_options(suite)
        suite.add_argument("--json", metavar="FILE", help="write everything measured to this file")
        suite.add_argument(
            "--timeout",
            type=_at_least(1),
            default=600,
            metavar="S",
            help="time limit of one run, seconds",
        )
        suite.set_defaults(parser=suite)
    options = parser.parse_args(given)
    try:
        return _SUITES[options.suite][1](options)
    except RankError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1


_FORMAT = argparse.RawDescriptionHelpFormatter


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def _numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    return lambda text: tuple(_at_least(least)(part) for part in text.split(","))


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}.{suggestion(name, known)}")
        return given

    return names


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        try:
            peer_of(name)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _mesh(text: str) -> MeshShape:
    try:
        return MeshShape.parse(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size_options(parser: argparse.ArgumentParser) -> None:
    for item in fields(ModelSize):
        parser.add_argument(
            f"--{item.name}", type=_at_least(1), default=item.default, help="of the model"
        )


def _size(options: argparse.Namespace) -> ModelSize:
    size = ModelSize(**{item.name: getattr(options, item.name) for item in fields(ModelSize)})
    if wrong := size.check():
        options.parser.error(wrong)
    return size


# --- train ----------------------------------------------------------------------------------------
def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        type=_peers,
        metavar="A,B",
        help="what to run, in this order; zpasses:OPTION=VALUE is zpasses with other options "
        "(default: all that take the mesh)",
    )
    parser.add_argument(
        "--mesh",
        type=_mesh,
        metavar="NAME=SIZE,...",
        help="device mesh of the ranks: dp=2,tp=2 for tensor parallelism, replicate=2,shard=2 for "
        "hybrid sharding",
    )
    parser.add_argument(
        "--baseline",
        choices=list(PEERS),
        default="fsdp2-eager",
        metavar="PEER",
        help="peer that ratios and losses are compared with",
    )
    parser.add_argument(
        "--ranks",
        type=_at_least(1),
        default=argparse.SUPPRESS,
        help="processes, one thread each (default: those of the mesh, or 2)",
    )
    parser.add_argument("--steps", type=_at_least(1), default=20, help="timed steps of a run")
    parser.add_argument("--warmup", type=_at_least(1), default=3, help="untimed steps before them")
    parser.add_argument(
        "--rounds", type=_at_least(1), default=1, help="runs of every peer, interleaved"
    )
    parser.add_argument("--backwards", type=_at_least(1), default=1, help="backwards of a step")
    parser.add_argument(
        "--reduce",
        choices=("step", "backward"),
        default="step",
        help="reduce gradients once per step, or in every backward",
    )
    _size_options(parser)


def _train(options: argparse.Namespace) -> int:
    size = _size(options)
    names = ("baseline", "steps", "warmup", "rounds", "mesh", "backwards", "reduce")
    mesh = options.mesh
    config = TrainConfig(
        size,
        options.peers or default_peers(mesh),
        ranks=getattr(options, "ranks", 2 if mesh is None else mesh.ranks),
        timeout_s=options.timeout,
        **{name: getattr(options, name) for name in names},
    )
    try:
        report = run_train(config)
    except OptionError as error:
        options.parser.error(str(error))
    print(train_table(report))
    if options.json:
        write_json(options.json, "train", report)
    return 1 if report.failed else 0


# --- device ---------------------------------------------------------------------------------------
def _device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        type=_peers,
        default="fsdp2-eager,fsdp2-compiled,zpasses-2,zpasses-3",
        metavar="A,B",
        help="what to run, in this order; others are compared with the first",
    )
    parser.add_argument("--device", default="cuda", help="the accelerator, or cpu")
    for name, least, default, text in (
        ("ranks", 1, 8, "size of the fake group"),
        ("steps", 1, 10, "timed steps of a run"),
        ("warmup", 1, 3, "untimed steps before them"),
        ("rounds", 1, 1, "runs of every peer, interleaved"),
    ):
        parser.add_argument(f"--{name}", type=_at_least(least), default=default, help=text)
    _size_options(parser)


def _device(options: argparse.Namespace) -> int:
    names = ("peers", "device", "ranks", "steps", "warmup", "rounds")
    report = run_device(
        DeviceConfig(
            _size(options),
            timeout_s=options.timeout,
            **{name: getattr(options, name) for name in names},
        )
    )
    print(device_table(report))
    if options.json:
        write_json(options.json, "device", report)
    return 1 if report.failed else 0


# --- overhead -------------------------------------------------------------------------------------
def _overhead_options(parser: argparse.ArgumentParser) -> None:
    default = OverheadConfig()
    parser.add_argument(
        "--params", type=_at_least(1), default=default.params, help="parameters of the model"
    )
    parser.add_argument(
        "--steps", type=_at_least(1), default=default.steps, help="steps of a block"
    )
    parser.add_argument(
        "--blocks", type=_at_least(1), default=default.blocks, help="blocks per model, alternating"
    )
    parser.add_argument(
        "--codegens",
        type=_names(default.codegens),
        default=",".join(default.codegens),
        metavar="A,B",
        help="code generators",
    )


def _overhead(options: argparse.Namespace) -> int:
    config = OverheadConfig(
        options.params,
        options.steps,
        options.blocks,
        codegens=options.codegens,
        timeout_s=options.timeout,
    )
    report = run_overhead(config)
    print(overhead_table(report))
    if options.json:
        write_json(options.json, "overhead", report)
    return 0


# --- schedule -------------------------------------------------------------------------------------
def _schedule_options(parser: argparse.ArgumentParser) -> None:
    default = ScheduleConfig()
    for name, parse, text in (
        ("models", _names(list(MODELS)), "models to capture"),
        ("worlds", _numbers(1), "fake ranks"),
        ("tokens", _numbers(1), "tokens of the one sequence per rank"),
        ("schedulers", _names(SCHEDULERS), "schedulers to compare"),
        ("targets", lambda given: tuple(given.split(",")), "hardware to plan for"),
    ):
        parser.add_argument(
            f"--{name}",
            type=parse,
            default=",".join(map(str, getattr(default, name))),
            metavar="A,B",
            help=text,
        )
    parser.add_argument(
        "--layers",
        type=_at_least(0),
        default=default.layers,
        help="layers of every model; 0 takes each model's own number",
    )


def _schedule(options: argparse.Namespace) -> int:
    names = ("models", "worlds", "tokens", "targets", "schedulers", "layers")
    report = run_schedule(
        ScheduleConfig(
            timeout_s=options.timeout, **{name: getattr(options, name) for name in names}
        )
    )
    print(schedule_table(report))
    if options.json:
        write_json(options.json, "schedule", report)
    return 1 if report.failed else 0


# --- compile --------------------------------------------------------------------------------------
def _compile_options(parser: argparse.ArgumentParser) -> None:
    default = CompileConfig()
    parser.add_argument(
        "--peers",
        type=_peers,
        default=",".join(default.peers),
        metavar="A,B",
        help="what to start; ratios compare with the first",
    )
    parser.add_argument(
        "--layers",
        type=_numbers(1),
        default=",".join(map(str, default.layers)),
        metavar="N,M",
        help="numbers of layers",
    )
    parser.add_argument("--ranks", type=_at_least(1), default=default.ranks, help="processes")
    parser.add_argument(
        "--rounds", type=_at_least(1), default=default.rounds, help="warm starts of every peer"
    )
    parser.add_argument(
        "--cold-rounds",
        type=_at_least(1),
        default=default.cold_rounds,
        help="cold starts of every peer",
    )
    for item in fields(ModelSize):
        if item.name != "layers":
            parser.add_argument(
                f"--{item.name}", type=_at_least(1), default=item.default, help="of the model"
            )


def _compile(options: argparse.Namespace) -> int:
    chosen = {
        item.name: getattr(options, item.name)
        for item in fields(ModelSize)
        if item.name != "layers"
    }
    size = ModelSize(**chosen)
    wrong = size.check()
    if wrong:
        options.parser.error(wrong)
    report = run_compile(
        CompileConfig(
            options.peers,
            options.layers,
            options.ranks,
            options.rounds,
            options.cold_rounds,
            size,
            options.timeout,
        )
    )
    print(compile_table(report))
    if options.json:
        write_json(options.json, "compile", report)
    return 0


_SUITES: dict[
    str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]
] = {
    "train": (_train_options, _train, "peers train the same GPT on the same data"),
    "device": (
        _device_options,
        _device,
        "one rank of a larger group on one accelerator, without communication",
    ),
    "overhead": (_overhead_options, _overhead, "runtime overhead per parameter and step"),
    "schedule": (
        _schedule_options,
        _schedule,
        "schedulers of collectives by predicted time and memory, beside Inductor's",
    ),
    "compile": (_compile_options, _compile, "the first step with cold and warm compile caches"),
}


if __name__ == "__main__":
    sys.exit(main())
