"""The suite "checks": what it costs to compare the runs of compiled graphs between ranks.

Each rank trains the GPT of `train` and counts how often graphs and optimizer steps are compared.
Then it times the comparison without a graph, both where the history predicts the event and where
the ranks vote.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zpasses.ranks import run_order
from zpasses.ranks.run_order import RunEvent
from zpasses.runtime import run_checks
from zpasses.tools.bench.launch import run_ranks
from zpasses.tools.bench.model import ModelSize, batches, build_model
from zpasses.tools.bench.peers import PEERS

__all__ = ["ChecksConfig", "ChecksReport", "ChecksResult", "run_checks_suite"]

_WORKER = "zpasses.tools.bench.checks"
_HISTORY = 64
"""Runs before the timed ones, until the events are predicted."""


@dataclass(frozen=True)
class ChecksConfig:
    """What to measure."""

    size: ModelSize = field(default_factory=ModelSize)
    ranks: int = 2
    stages: tuple[int, ...] = (2, 3)
    warmup: int = 12
    """Untimed steps, in which the order of events is learnt."""
    steps: int = 10
    repeats: int = 2000
    """Timed comparisons without a graph."""
    timeout_s: float = 600.0


@dataclass(frozen=True)
class ChecksResult:
    """Figures of the first rank."""

    stage: int
    step_s: float
    """Median of the timed steps."""
    compared: float
    """Compared events per step: runs of graphs and optimizer steps."""
    votes: float
    """Votes per timed step."""
    predicted_us: float
    """One comparison of a predicted event, with all that surrounds the run of a graph."""
    vote_us: float
    """One vote."""

    @property
    def share(self) -> float:
        """Part of a step that the comparisons take."""
        predicted = (self.compared - self.votes) * self.predicted_us
        return (predicted + self.votes * self.vote_us) / 1e6 / self.step_s


@dataclass
class ChecksReport:
    config: ChecksConfig
    results: list[ChecksResult] = field(default_factory=list)


def run_checks_suite(config: ChecksConfig) -> ChecksReport:
    """Measure every stage, each in new processes.

    Raises:
        RankError: if a process fails.
    """
    report = ChecksReport(config)
    for stage in config.stages:
        job = {**asdict(config), "stage": stage}
        first, *_ = run_ranks(_WORKER, job, ranks=config.ranks, timeout_s=config.timeout_s)
        report.results.append(ChecksResult(**first))
    return report


# --- in the measured processes --------------------------------------------------------------------
@contextmanager
def _counted(counts: dict[str, int]) -> Iterator[None]:
    """Counts the comparisons and the votes among them."""
    check, vote = run_order.check_run_event, run_order._vote

    def counting(counter: str, fn: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            counts[counter] += 1
            fn(*args, **kwargs)

        return call

    counted = mock.patch.multiple(run_checks, check_run_event=counting("compared", check))
    with counted, mock.patch.object(run_order, "_vote", counting("votes", vote)):
        yield


def measure(job: dict[str, Any]) -> ChecksResult:
    """Measure one stage in this process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    size = ModelSize(**job["size"])
    trainer = PEERS[f"zpasses-{job['stage']}"].build(build_model(size), mesh)
    data, times = batches(size, job["warmup"] + job["steps"], dist.get_rank()), []
    counts = {"compared": 0, "votes": 0}
    with _counted(counts):
        for number, batch in enumerate(data):
            if number == job["warmup"]:
                counts.update(compared=0, votes=0)
            started = time.perf_counter()
            trainer.backward(*batch)
            trainer.update()
            times.append(time.perf_counter() - started)
    predicted_us, vote_us = _comparison_us(mesh.get_group().group_name, job["repeats"])
    return ChecksResult(
        stage=job["stage"],
        step_s=statistics.median(times[job["warmup"] :]),
        compared=counts["compared"] / job["steps"],
        votes=counts["votes"] / job["steps"],
        predicted_us=predicted_us,
        vote_us=vote_us,
    )


def _comparison_us(group: str, repeats: int) -> tuple[float, float]:
    """Microseconds of a comparison without a graph: predicted, and by vote."""

    def checked(name: str) -> Callable[[list[Any]], Any]:
        return run_checks.with_run_check(
            lambda args: None,
            {group: RunEvent.of(name)},
            name,
            timeout_s=60.0,
            every_run=True,
        )

    same = checked("graph")
    for _ in range(_HISTORY):
        same([])
    others = [checked(f"graph {i}") for i in range(max(1, repeats // 20))]
    return _median_us([same] * repeats), _median_us(others)


def _median_us(calls: list[Callable[[list[Any]], Any]]) -> float:
    times = []
    for call in calls:
        started = time.perf_counter()
        call([])
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        json.dumps(asdict(measure(json.loads(Path(sys.argv[1]).read_text()))))
    )
