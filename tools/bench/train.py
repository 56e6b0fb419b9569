"""The suite "train": every peer trains the same model on the same data, each in new processes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from zpasses.errors import OptionError
from zpasses.tools.bench.launch import interleaved, run_ranks
from zpasses.tools.bench.measure import ResidentMemory
from zpasses.tools.bench.model import ModelSize
from zpasses.tools.bench.peers import PEERS, Peer, peer_of
from zpasses.tools.bench.report import MIB, report_text, two_decimals
from zpasses.tools.capture.mesh_shapes import MeshShape

LOSS_TOLERANCE = 1e-2
"""Largest relative difference of a peer's loss to the baseline's, at any step. AdamW amplifies
rounding errors.
"""

NORM_TOLERANCE = 1e-3
"""The same for the norm of an early gradient. It shows a wrong scale, which losses under AdamW do
not.
"""


@dataclass(frozen=True)
class TrainConfig:
    """What to train, and how often."""

    size: ModelSize = field(default_factory=ModelSize)
    peers: tuple[str, ...] = ()
    """What to run, in this order; zpasses:OPTION=VALUE is zpasses with other options. Default: all
    that take the mesh, without trainers."""
    baseline: str = "fsdp2-eager"
    """Peer that ratios and losses are compared with."""
    mesh: MeshShape | None = None
    """Device mesh of the ranks: dp=2,tp=2 for tensor parallelism, replicate=2,shard=2 for hybrid
    sharding."""
    ranks: int = 0
    """Processes, one thread each. Default: those of the mesh, or 2."""
    steps: int = 20
    """Timed steps of a run."""
    warmup: int = 3
    """Untimed steps before them, which include compilation."""
    backwards: int = 1
    """Forwards and backwards of a step, whose gradients add up."""
    reduce: Literal["step", "backward"] = "step"
    """When gradients are reduced: once per step, by peers that can, or in every backward."""
    rounds: int = 1
    """Runs of every peer, interleaved, so that it and the baseline run close together in time."""
    timeout_s: float = 600.0
    """Time limit of one run, in seconds."""

    def completed(self) -> TrainConfig:
        """With the ranks and the peers that it takes by default.

        Raises:
            OptionError: if the peers, the mesh, the ranks and the model do not fit each other.
        """
        own = [peer for peer in PEERS.values() if peer.worker == Peer.worker]
        default = [peer.name for peer in own if self.mesh is None or peer.any_mesh]
        ranks = self.ranks or (2 if self.mesh is None else self.mesh.ranks)
        config = dataclasses.replace(self, ranks=ranks, peers=self.peers or tuple(default))
        chosen = [peer_of(name) for name in (*config.peers, config.baseline)]
        if config.reduce == "backward":
            for peer in chosen:
                if peer.worker != Peer.worker:
                    raise OptionError(f"{peer.name} decides by itself when it reduces.")
        if config.mesh is not None:
            _check_mesh(config.mesh, ranks, config.size, chosen)
        return config


@dataclass
class PeerResult:
    """Results of one peer. Times are in seconds and those of the slowest rank. Bytes are the
    largest of all ranks.
    """

    peer: str
    summary: str
    rounds_s: list[float] = field(default_factory=list)
    """Median step time of each round."""
    step_s: float = 0.0
    """Median of the rounds."""
    ratio: float | None = None
    """Median over rounds of the step time relative to the baseline's in the same round."""
    peak_ratio: float | None = None
    """`peak_bytes` relative to the baseline's."""
    peak_bytes: int = 0
    """Peak of a step, including its update, above the resting state."""
    backward_peak_bytes: int = 0
    """The same without the update, which allocates temporaries of the optimizer."""
    resting_bytes: int = 0
    """Held between two steps: parameters, gradients, optimizer state and everything else."""
    window_bytes: int = 0
    """Held before the last forward of a step with several backwards, above the resting state."""
    after_bytes: int = 0
    """Held after such a step's gradients are reduced, above the resting state."""
    collectives: dict[str, float] = field(default_factory=dict)
    """Collectives per step, by kind."""
    sent_bytes: dict[str, float] = field(default_factory=dict)
    """Bytes that a rank sends per step, by kind, counted in the same way for all peers (see
    `measure.Traffic`).
    """
    communication_s: float | None = None
    """Time of those bytes at the speed of one large bare collective."""
    waste_s: float | None = None
    """Step time minus compute and that communication. It is negative if they overlap."""
    compile_s: float = 0.0
    """Time of the first steps of the first round, with cold caches, minus the time of later steps.
    """
    passes_s: float = 0.0
    """Time in zpasses' own passes in that round."""
    checks_s: float = 0.0
    """Time in the checks after them."""
    passes_share: float = 0.0
    """Share of passes and checks in the compile time."""
    losses: list[float] = field(default_factory=list)
    """Mean over ranks, for every step from the first."""
    gradient_norm: float | None = None
    """Norm after the first steps; None if the peer does not expose gradients."""


@dataclass
class TrainReport:
    """All results."""

    config: TrainConfig
    bounds: dict[str, Any]
    """Bare collectives over the bytes of all parameters: "bytes", and by kind "time_s" and
    "sent_bytes".
    """
    compute_s: float | None
    """Step time without communication, with one process per rank if that was measured."""
    peers: list[PeerResult]
    skipped: dict[str, str]
    """Peer -> why it cannot run here."""
    failed: dict[str, str]
    """Peer -> the end of its log, or how its training differs."""


def run_train(config: TrainConfig) -> TrainReport:
    """Measure every peer that is installed. A peer that fails is reported and does not stop the
    others.

    Raises:
        OptionError: as `TrainConfig.completed`.
    """
    config = config.completed()
    chosen = [peer_of(name) for name in config.peers]
    skipped = {peer.name: reason for peer in chosen if (reason := peer.missing())}
    measured = [peer for peer in chosen if peer.name not in skipped]
    results = {peer.name: PeerResult(peer.name, peer.summary) for peer in measured}
    bare = config.ranks > 1 and config.mesh is None
    bounds = _run(config, "bounds", None, {})[0] if bare else {}
    failed = interleaved(
        results,
        config.rounds,
        lambda name, number, env: _run_round(config, results[name], number, env),
    )
    ended = [result for name, result in results.items() if name not in failed]
    report = TrainReport(config, bounds, None, ended, skipped, failed)
    _relate(report)
    return report


def _check_mesh(mesh: MeshShape, ranks: int, size: ModelSize, peers: Sequence[Peer]) -> None:
    if mesh.ranks != ranks:
        raise OptionError(f"mesh {mesh} has {mesh.ranks} ranks; expected {ranks}.")
    if mesh.model_names not in ((), ("tp",)):
        raise OptionError(
            f"mesh {mesh}: the model has no use for dimension {', '.join(mesh.model_names)}; "
            "expected tp, or only dimensions of data parallelism."
        )
    parts = dict(zip(mesh.names, mesh.sizes, strict=True)).get("tp", 1)
    if size.heads % parts:
        raise OptionError(
            f"mesh {mesh}: --heads {size.heads} is not divisible by the {parts} ranks of dimension "
            "tp."
        )
    others = [peer.name for peer in peers if not peer.any_mesh]
    if others:
        raise OptionError(
            f"mesh {mesh}: {', '.join(others)} takes no such mesh; name FSDP2 and zpasses peers, "
            "e.g. --peers fsdp2-eager,zpasses-3."
        )


def _run_round(
    config: TrainConfig, result: PeerResult, number: int, caches: Mapping[str, str]
) -> None:
    env = {**caches, "HF_HUB_OFFLINE": "1"}
    ranks = _run(config, "time", peer_of(result.peer), env)
    result.rounds_s.append(max(rank["step_s"] for rank in ranks))
    if number > 0:
        return
    for name in ("compile_s", "passes_s", "checks_s"):
        setattr(result, name, max(rank[name] for rank in ranks))
    if result.compile_s:
        result.passes_share = (result.passes_s + result.checks_s) / result.compile_s
    result.collectives, result.sent_bytes = ranks[0]["collectives"], ranks[0]["sent_bytes"]
    steps = zip(*(rank["losses"] for rank in ranks), strict=True)
    result.losses = [statistics.fmean(losses) for losses in steps]
    memory = _run(config, "memory", peer_of(result.peer), {**env, **ResidentMemory.ENVIRONMENT})
    for name in ("resting", "peak", "backward_peak", "window", "after"):
        setattr(result, f"{name}_bytes", max(rank[f"{name}_bytes"] for rank in memory))
    result.gradient_norm = memory[0]["gradient_norm"]


def _run(
    config: TrainConfig, kind: str, peer: Peer | None, env: Mapping[str, str]
) -> Sequence[Any]:
    task = {name: getattr(config, name) for name in ("steps", "warmup", "backwards", "reduce")}
    task |= {"kind": kind, "size": dataclasses.asdict(config.size), "peer": peer and peer.name}
    task["mesh"] = None if config.mesh is None else str(config.mesh)
    ranks = (peer.ranks if peer else None) or config.ranks
    worker = peer.worker if peer else Peer.worker
    return run_ranks(worker, task, ranks=ranks, timeout_s=config.timeout_s, env=env)


# --- comparisons ----------------------------------------------------------------------------------
def _relate(report: TrainReport) -> None:
    """Compute ratios, communication and waste from the results of several peers, and find peers
    whose training differs.
    """
    by_name = {result.peer: result for result in report.peers}
    compute = by_name.get("compute-all") or by_name.get("compute")
    baseline = by_name.get(report.config.baseline)
    for result in report.peers:
        result.step_s = statistics.median(result.rounds_s)
        if baseline:
            pairs = zip(result.rounds_s, baseline.rounds_s, strict=True)
            result.ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            if baseline.peak_bytes:
                result.peak_ratio = result.peak_bytes / baseline.peak_bytes
    report.compute_s = compute.step_s if compute else None
    for result in report.peers:
        if report.config.mesh is None:
            result.communication_s = _bare_time(result.sent_bytes, report.bounds)
        if compute and result.communication_s is not None:
            result.waste_s = result.step_s - compute.step_s - result.communication_s
    for result in report.peers:
        peer = peer_of(result.peer)
        alike = [
            other
            for other in (*([baseline] if baseline else []), *report.peers)
            if peer_of(other.peer).reduces and peer_of(other.peer).worker == peer.worker
        ]
        if peer.reduces and (difference := _difference(result, alike[0])):
            report.failed[result.peer] = difference


def _bare_time(sent_bytes: Mapping[str, float], bounds: Mapping[str, Any]) -> float:
    total = 0.0
    for kind, sent in sent_bytes.items():
        like = kind if kind in bounds.get("time_s", {}) else "all_gather"
        total += sent * bounds["time_s"][like] / bounds["sent_bytes"][like] if bounds else 0.0
    return total


def _difference(result: PeerResult, reference: PeerResult) -> str | None:
    said = f"training differs from {reference.peer}:"
    for step, (ours, theirs) in enumerate(zip(result.losses, reference.losses, strict=True)):
        if not abs(ours - theirs) <= LOSS_TOLERANCE * abs(theirs):  # also true for NaN
            return f"{said} loss {ours:.6f} instead of {theirs:.6f} at step {step}"
    norm, expected = result.gradient_norm, reference.gradient_norm
    if norm is None or expected is None or abs(norm - expected) <= NORM_TOLERANCE * expected:
        return None
    return f"{said} gradient norm {norm:.6f} instead of {expected:.6f}"


# --- table ----------------------------------------------------------------------------------------
def train_table(report: TrainReport) -> str:
    """One line per peer, then the bounds, and the peers that were skipped or failed."""
    config = report.config
    rows = [_row(result, config) for result in report.peers]
    return report_text(report, rows or "No peer ran.", "", *_bounds(report))


def _row(result: PeerResult, config: TrainConfig) -> dict[str, Any]:
    windows = {"in window MiB": result.window_bytes / MIB, "reduced MiB": result.after_bytes / MIB}
    return {
        "peer": result.peer,
        "step ms": result.step_s * 1e3,
        f"/ {config.baseline}": two_decimals(result.ratio),
        "comm ms": None if result.communication_s is None else result.communication_s * 1e3,
        "waste ms": None if result.waste_s is None else result.waste_s * 1e3,
        "peak MiB": result.peak_bytes / MIB,
        "peak ratio": two_decimals(result.peak_ratio),
        "fwd+bwd MiB": result.backward_peak_bytes / MIB,
        **(windows if config.backwards > 1 else {}),
        "rest MiB": result.resting_bytes / MIB,
        "collectives": f"{sum(result.collectives.values()):g}",
        "sent MiB": sum(result.sent_bytes.values()) / MIB,
        "compile s": result.compile_s,
        "passes s": two_decimals(result.passes_s),
        "checks s": two_decimals(result.checks_s),
        "share": f"{result.passes_share:.1%}",
        "loss": f"{result.losses[-1]:.4f}",
    }


def _bounds(report: TrainReport) -> Iterator[str]:
    if report.compute_s is not None:
        yield f"compute without communication: {report.compute_s * 1e3:.1f} ms"
    if report.bounds:
        size = f"{report.bounds['bytes'] / 1e6:.1f} MB"
        times = ", ".join(
            f"{kind.replace('_', '-')} {time_s * 1e3:.1f} ms"
            for kind, time_s in report.bounds["time_s"].items()
        )
        yield f"bare collectives over the {size} of all parameters: {times}"
        yield (
            "comm ms: time of the sent bytes at those speeds. waste ms: step - compute - comm; "
            "negative if they overlap."
        )
