"""Measures the routes of collectives on this machine, for the cost model.

    torchrun --nproc-per-node 8 -m zpasses.tools.calibrate --out mi300x.json
    ZPASSES_CALIBRATION=mi300x.json torchrun --nproc-per-node 8 train.py

Every rank of one node takes part. For each route that all ranks have, the command times all-gathers
of several sizes by themselves and in parallel with matrix products. It fits a latency, a bandwidth
and two slowdowns (of compute, and of gathers that overlap with compute) to the slowest rank's
times. The file has one entry per architecture and versions, so it can hold several machines. The
machine should be otherwise idle.

    zpasses measure -o measured -- torchrun --nproc-per-node 8 train.py
    ZPASSES_TARGET="$(python -m zpasses.tools.calibrate --measured measured)" torchrun ...

With --measured, the figures are those of a run of your own program instead, and the command prints
a target.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zpasses import compat, sdma
from zpasses.cost.time.route_figures import FORMAT, machine_key
from zpasses.dumps.dump_errors import DumpError
from zpasses.errors import OptionError
from zpasses.runtime.platform import platform_of
from zpasses.sdma.lifecycle import available_routes
from zpasses.sdma.mori_route import installed_version
from zpasses.sdma.routes import Route
from zpasses.tools.calibrate_trace import fit_line, target_from_run
from zpasses.tools.config_options import add_options, config_of

SMALLEST = 64 << 10
"""Bytes of the smallest full tensor."""


@dataclass(frozen=True)
class Settings:
    """How the command measures."""

    largest_mib: int = 1024
    """Largest full tensor, in MiB; the smallest has 64 KiB."""
    repeat: int = 10
    """Number of runs, of which the median counts."""
    matrix: int = 4096
    """Rows and columns of the matrices that are multiplied in parallel."""


@dataclass(frozen=True)
class Sample:
    """All-gathers of one size by one route. Times are the slowest rank's medians (us)."""

    route: str
    full_bytes: int
    """Bytes of the full tensor."""
    ranks: int
    """Number of ranks in the group."""
    gather_us: float
    """The gather by itself."""
    compute_us: float
    """Matrix products by themselves, enough of them to cover the gather."""
    overlapped_compute_us: float
    """The same products, started after the gather."""
    short_compute_us: float
    """Fewer products, of about half the gather's time, started after the gather."""
    overlapped_gather_us: float
    """From the start of that gather until the gather has ended too."""

    @property
    def moved_bytes(self) -> float:
        """Bytes that one rank receives."""
        return self.full_bytes * (self.ranks - 1) / self.ranks

    @property
    def slowdown(self) -> float:
        """Factor by which the gather slows down overlapping compute; at least 1."""
        lost = (self.overlapped_compute_us - self.compute_us) / self.gather_us
        return 1 / (1 - min(max(lost, 0.0), 0.9))

    @property
    def collective_slowdown(self) -> float:
        """Factor by which compute slows down an overlapping gather; at least 1."""
        # The part of the gather that ran during the products, in time of the gather by itself.
        moved = self.gather_us - (self.overlapped_gather_us - self.short_compute_us)
        return self.short_compute_us / min(
            max(moved, 0.1 * self.short_compute_us), self.short_compute_us
        )


def fit(samples: Sequence[Sample]) -> dict[str, float]:
    """Figures of one route: a line through time over bytes that minimises the relative error, and
    the slowdowns of large gathers.

    Raises:
        ValueError: for samples of fewer than two sizes.
    """
    sizes = len({sample.full_bytes for sample in samples})
    if sizes < 2:
        raise ValueError(f"fit: got samples of {sizes} size; expected at least two.")
    latency, us_per_byte = fit_line(
        [sample.moved_bytes for sample in samples], [sample.gather_us for sample in samples]
    )
    large = sorted(samples, key=lambda sample: sample.full_bytes)[-3:]
    return {
        "latency_us": round(max(latency, 0.0), 3),
        "gb_s": round(1e-3 / max(us_per_byte, 1e-12), 4),
        "compute_slowdown": round(statistics.median(sample.slowdown for sample in large), 4),
        "collective_slowdown": round(
            statistics.median(sample.collective_slowdown for sample in large), 4
        ),
    }


def measure(
    group: str, device: torch.device, sizes: Sequence[int], repeat: int = 10, matrix: int = 4096
) -> list[Sample]:
    """Time all-gathers of the given sizes by every route of the group. Every rank of the group must
    call it with the same arguments.

    Args:
        group: name of the process group.
        device: device of the tensors.
        sizes: bytes of the full tensors.
        repeat: number of runs, of which the median counts.
        matrix: rows and columns of the matrices that are multiplied in parallel.
    """
    clock = _Clock(group, device, repeat)
    product = _products(device, matrix)
    one = clock.time(lambda: product(1))
    samples = []
    for name, route in available_routes(group, device).items():
        for size in sizes:
            samples.append(_sample(name, route, size, clock, product, one))
    return samples


def _sample(
    name: str, route: Route, size: int, clock: _Clock, product: Callable[[int], None], one_us: float
) -> Sample:
    source = torch.zeros(size // clock.ranks, dtype=torch.uint8, device=clock.device)

    def gather() -> Any:
        return route.all_gather([source], clock.ranks, clock.group)[0]

    gather_us = clock.time(lambda: compat.functional.wait_tensor(gather()))
    count = max(1, round(1.5 * gather_us / one_us))
    compute_us = clock.time(lambda: product(count))

    def overlapped(count: int, mark: bool) -> Any:
        started = gather()
        product(count)
        if mark:
            clock.mark()
        compat.functional.wait_tensor(started)

    overlapped_us = clock.time(lambda: overlapped(count, True))
    few = max(1, round(0.5 * gather_us / one_us))
    short_us, both_us = (
        clock.time(lambda: overlapped(few, True)),
        clock.time(lambda: overlapped(few, False)),
    )
    return Sample(
        name,
        size // clock.ranks * clock.ranks,
        clock.ranks,
        gather_us,
        compute_us,
        overlapped_us,
        short_us,
        both_us,
    )


def _products(device: torch.device, matrix: int) -> Callable[[int], None]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    factor, result = (torch.zeros(matrix, matrix, dtype=dtype, device=device) for _ in range(2))

    def run(count: int) -> None:
        for _ in range(count):
            torch.mm(factor, factor, out=result)

    return run


class _Clock:
    """Times work on the current stream. All ranks start together, and the slowest rank counts."""

    def __init__(self, group: str, device: torch.device, repeat: int) -> None:
        self.group, self.device, self.ranks = group, device, compat.process_group(group).size()
        self._repeat = repeat
        self._marked: Any = None

    def mark(self) -> None:
        """End the measured time here, before the work ends."""
        self._marked = self._now()

    def time(self, work: Callable[[], Any]) -> float:
        """Median time of the slowest rank, in microseconds."""
        work()
        times = []
        for _ in range(self._repeat):
            dist.barrier(compat.process_group(self.group))
            self._synchronize()
            self._marked, began = None, self._now()
            work()
            ended = self._marked or self._now()
            self._synchronize()
            times.append(self._between(began, ended))
        slowest = torch.tensor([statistics.median(times)], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, compat.process_group(self.group))
        return float(slowest)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return float(
            (ended - began) * 1e6 if self.device.type != "cuda" else began.elapsed_time(ended) * 1e3
        )

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def write(
    path: Path, samples: Sequence[Sample], architecture: str, versions: dict[str, str]
) -> dict[str, Any]:
    """Add a machine to a calibration file, and return its entry. It replaces an entry of the same
    architecture and versions.
    """
    content: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"format": FORMAT, "machines": {}}
    )
    by_route: dict[str, list[Sample]] = {}
    for sample in samples:
        by_route.setdefault(sample.route, []).append(sample)
    machine = {
        "architecture": architecture,
        "versions": versions,
        "routes": {route: fit(each) for route, each in by_route.items()},
        "samples": [asdict(sample) for sample in samples],
    }
    content["machines"][machine_key(architecture, versions)] = machine
    partial = path.with_suffix(path.suffix + ".new")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.rename(path)
    return machine


def _versions(routes: Sequence[str]) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if torch.version.hip:
        found["hip"] = str(torch.version.hip)
    if "mori" in routes:
        found["mori"] = installed_version()
    if "nccl_zero" in routes:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _calibrate(settings: Settings, out: Path) -> None:
    """Measure on this rank. Rank 0 writes and prints what all have measured."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        sizes = [
            SMALLEST << shift
            for shift in range(0, 32, 2)
            if SMALLEST << shift <= settings.largest_mib << 20
        ]
        samples = measure(
            compat.group_name(dist.group.WORLD), device, sizes, settings.repeat, settings.matrix
        )
        if dist.get_rank() == 0:
            platform = platform_of(device.type)
            architecture = platform.architecture() if platform is not None else "cpu"
            machine = write(
                out, samples, architecture, _versions([sample.route for sample in samples])
            )
            print(json.dumps(machine["routes"], indent=1))
        sdma.shutdown()
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m zpasses.tools.calibrate",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("calibration.json"),
        help="file to write; an existing file keeps its other machines",
    )
    add_options(parser, Settings)
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="DIR",
        help="print the target of a run that `zpasses measure` recorded, or of a dump",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="with --measured: a trace of torch.profiler of the run that wrote the dump; once per\n"
        "rank. By default, those in the folder",
    )
    options = parser.parse_args(arguments)
    if options.measured is not None:
        try:
            print(target_from_run(options.measured, options.trace))
        except (DumpError, ValueError) as error:
            parser.error(str(error))
        return
    if options.trace:
        parser.error("--trace needs --measured DIR, the dump of the run")
    try:
        settings = config_of(Settings, vars(options))
    except OptionError as error:
        parser.error(str(error))
    if "RANK" not in os.environ:
        parser.error(
            "start the command on all devices of a node: torchrun --nproc-per-node 8 -m "
            "zpasses.tools.calibrate"
        )
    _calibrate(settings, options.out)


if __name__ == "__main__":
    main()
