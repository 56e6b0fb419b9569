"""The suite "train": peers in turn, each in fresh processes, on the same model and data."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zpasses.tools.bench.launch import RankError, run_ranks
from zpasses.tools.bench.measure import ResidentMemory
from zpasses.tools.bench.model import ModelSize
from zpasses.tools.bench.peers import PEERS, Peer

__all__ = [
    "LOSS_TOLERANCE",
    "NORM_TOLERANCE",
    "PeerResult",
    "TrainConfig",
    "TrainReport",
    "run_train",
]

_WORKER = "zpasses.tools.bench.worker"

LOSS_TOLERANCE = 1e-2
"""Largest relative difference of a peer's loss from the baseline's, at any step: room for rounding,
which AdamW amplifies."""

NORM_TOLERANCE = 1e-3
"""The same for the norm of an early gradient, which shows a wrong scale; AdamW's losses do not."""


@dataclass(frozen=True)
class TrainConfig:
    """What to train, how long, and how often."""

    size: ModelSize
    peers: tuple[str, ...]
    baseline: str
    ranks: int = 2
    steps: int = 20
    """Timed steps of a run."""
    warmup: int = 3
    """Steps before those; compilation falls here."""
    rounds: int = 1
    """Runs of every peer, interleaved, so that the ratio to the baseline is between neighbours in
    time."""
    timeout_s: float = 600.0
    """Limit of one run."""


@dataclass
class PeerResult:
    """What one peer needed. Times in seconds, the slowest rank's; bytes of one rank, the
    largest."""

    peer: str
    summary: str
    rounds_s: list[float] = field(default_factory=list)
    """Median step time of each round."""
    step_s: float = 0.0
    """Median of the rounds."""
    ratio: float | None = None
    """Step time over the baseline's in the same round; the median of the rounds."""
    peak_bytes: int = 0
    """The most that a step, its update included, holds above the resting state."""
    backward_peak_bytes: int = 0
    """The same without the update, whose temporaries are the optimizer's own."""
    resting_bytes: int = 0
    """Held between two steps: parameters, gradients, optimizer state and whatever else."""
    collectives: dict[str, float] = field(default_factory=dict)
    """Collectives per step, by kind."""
    sent_bytes: dict[str, float] = field(default_factory=dict)
    """Bytes that a rank sends per step, by kind, counted alike for all (see `measure.Traffic`)."""
    communication_s: float | None = None
    """Time of those bytes at the speed of one large bare collective."""
    waste_s: float | None = None
    """Step time beyond compute and that communication; negative where they overlap."""
    compile_s: float = 0.0
    """What the first steps of the first round took beyond a later one, caches cold."""
    passes_s: float = 0.0
    """Time in zpasses' own passes in that round."""
    checks_s: float = 0.0
    """Time in the checks after them."""
    passes_share: float = 0.0
    """Passes and checks over compile time."""
    losses: list[float] = field(default_factory=list)
    """Mean over ranks, of every step from the first."""
    gradient_norm: float | None = None
    """After the first steps; None where the peer does not tell."""


@dataclass
class TrainReport:
    """All that was measured."""

    config: TrainConfig
    bounds: dict[str, Any]
    """Bare collectives over the bytes of all parameters: "bytes", and by kind "time_s" and
    "sent_bytes"."""
    compute_s: float | None
    """Step time without communication, with as many processes as ranks at work if that was
    measured."""
    peers: list[PeerResult]
    skipped: dict[str, str]
    """Peer -> why it cannot run here."""
    failed: dict[str, str]
    """Peer -> the end of its log, or how what it trains differs."""


def run_train(config: TrainConfig) -> TrainReport:
    """Measure every peer that is installed; those that fail are reported, and do not stop the
    others."""
    chosen = [PEERS[name] for name in config.peers]
    skipped = {peer.name: reason for peer in chosen if (reason := peer.missing())}
    results = {
        peer.name: PeerResult(peer.name, peer.summary)
        for peer in chosen
        if peer.name not in skipped
    }
    failed: dict[str, str] = {}
    bounds = _run(config, "bounds", None, {})[0] if config.ranks > 1 else {}
    with (
        tempfile.TemporaryDirectory(prefix="zpasses-bench-caches-") as caches,
        tqdm(total=len(results) * (config.rounds + 1)) as bar,
    ):
        for number in range(config.rounds):
            for name, result in results.items():
                bar.set_description(name)
                if name not in failed:
                    try:
                        _run_round(config, result, number, caches)
                    except RankError as error:
                        failed[name] = str(error)
                bar.update(2 if number == 0 else 1)
    measured = [result for name, result in results.items() if name not in failed]
    report = TrainReport(config, bounds, None, measured, skipped, failed)
    _relate(report)
    return report


def _run_round(config: TrainConfig, result: PeerResult, number: int, caches: str) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(Path(caches, result.peer))}
    ranks = _run(config, "time", PEERS[result.peer], env)
    result.rounds_s.append(max(rank["step_s"] for rank in ranks))
    if number > 0:
        return
    for name in ("compile_s", "passes_s", "checks_s"):
        setattr(result, name, max(rank[name] for rank in ranks))
    result.passes_share = (
        (result.passes_s + result.checks_s) / result.compile_s if result.compile_s else 0.0
    )
    result.collectives, result.sent_bytes = ranks[0]["collectives"], ranks[0]["sent_bytes"]
    result.losses = [
        statistics.fmean(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)
    ]
    memory = _run(config, "memory", PEERS[result.peer], {**env, **ResidentMemory.ENVIRONMENT})
    for name in ("resting_bytes", "peak_bytes", "backward_peak_bytes"):
        setattr(result, name, max(rank[name] for rank in memory))
    result.gradient_norm = memory[0]["gradient_norm"]


def _run(
    config: TrainConfig, kind: str, peer: Peer | None, env: Mapping[str, str]
) -> Sequence[Any]:
    job = {
        "kind": kind,
        "size": dataclasses.asdict(config.size),
        "steps": config.steps,
        "warmup": config.warmup,
        "peer": peer and peer.name,
    }
    ranks = (peer.ranks if peer else None) or config.ranks
    return run_ranks(_WORKER, job, ranks=ranks, timeout_s=config.timeout_s, env=env)


# --- what the numbers say together ----------------------------------------------------------------
def _relate(report: TrainReport) -> None:
    """Fill in what follows from several peers: ratios, communication, waste; and find who trains
    something else."""
    by_name = {result.peer: result for result in report.peers}
    compute = by_name.get("compute-all") or by_name.get("compute")
    baseline = by_name.get(report.config.baseline)
    for result in report.peers:
        result.step_s = statistics.median(result.rounds_s)
        if baseline:
            result.ratio = statistics.median(
                ours / theirs
                for ours, theirs in zip(result.rounds_s, baseline.rounds_s, strict=True)
            )
    report.compute_s = compute.step_s if compute else None
    for result in report.peers:
        result.communication_s = _bare_time(result.sent_bytes, report.bounds)
        if compute:
            result.waste_s = result.step_s - compute.step_s - result.communication_s
    reference = (
        baseline
        if baseline and PEERS[baseline.peer].reduces
        else next((r for r in report.peers if PEERS[r.peer].reduces), None)
    )
    for result in report.peers if reference else ():
        assert reference is not None
        difference = PEERS[result.peer].reduces and _difference(result, reference)
        if difference:
            report.failed[result.peer] = difference


def _bare_time(sent_bytes: Mapping[str, float], bounds: Mapping[str, Any]) -> float:
    total = 0.0
    for kind, sent in sent_bytes.items():
        like = kind if kind in bounds.get("time_s", {}) else "all_gather"
        total += sent * bounds["time_s"][like] / bounds["sent_bytes"][like] if bounds else 0.0
    return total


def _difference(result: PeerResult, reference: PeerResult) -> str | None:
    for step, (ours, theirs) in enumerate(zip(result.losses, reference.losses, strict=True)):
        if not abs(ours - theirs) <= LOSS_TOLERANCE * abs(theirs):  # also where one is not a number
            return f"trains something else than {reference.peer}: loss {ours:.6f} instead of {theirs:.6f} at step {step}"
    ours_norm, theirs_norm = result.gradient_norm, reference.gradient_norm
    if (
        ours_norm is None
        or theirs_norm is None
        or abs(ours_norm - theirs_norm) <= NORM_TOLERANCE * theirs_norm
    ):
        return None
    return f"trains something else than {reference.peer}: gradient norm {ours_norm:.6f} instead of {theirs_norm:.6f}"
