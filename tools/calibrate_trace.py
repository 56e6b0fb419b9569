"""Figures of a target from a run that `zpasses measure` recorded, or from traces of any run.

The command is `python -m zpasses.tools.calibrate --measured DIR`. It takes the collectives and the
operators that the trace joins to nodes of the dump. The measured time of a collective is that of
the rank that waited least for the others. A latency and a bandwidth are fitted to these times. The
throughput of matrix products, and the bandwidth of memory, are scaled by predicted over measured
time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zpasses.cost.time.target import TARGETS, Target
from zpasses.dumps.nodes import Node, Snapshot
from zpasses.inspect import Limits
from zpasses.inspect import open as open_dump
from zpasses.inspect.measured import Measured

log = logging.getLogger(__name__)


_LEAST_HOP_US = 0.001
"""A target's times must be positive."""
_SLACK = 1.05
"""Factor by which a predicted time exceeds that of its bytes if arithmetic bounds it."""


@dataclass(frozen=True)
class TraceCollective:
    """One collective of a graph, within one node."""

    rounds: int
    """Steps of its ring."""
    moved_bytes: float
    """Bytes that one rank receives."""
    time_us: float
    """The mean of its runs, on the rank that waited least."""


@dataclass(frozen=True)
class TraceFigures:
    """What traces say about a target."""

    collectives: tuple[TraceCollective, ...]
    arithmetic: tuple[float, float] = (0.0, 0.0)
    """Measured and predicted time of operators that arithmetic bounds."""
    memory: tuple[float, float] = (0.0, 0.0)
    """The same of those that memory bounds."""


def target_from_run(folder: Path, traces: Sequence[Path] = ()) -> Target:
    """The target of a dump, with the figures that were measured.

    Args:
        folder: the dump.
        traces: of any of its ranks. None takes those of `zpasses measure` in the folder.

    Raises:
        DumpError: if the dump or a trace cannot be read, or they are of different runs.
        ValueError: if the run has collectives of fewer than two sizes.
    """
    traces = traces or sorted(folder.glob("trace-rank*.json.gz"))
    if not traces:
        raise ValueError(
            f"{folder} has no trace-rank*.json.gz; expected the folder of `zpasses measure`, or "
            "--trace FILE for each trace."
        )
    inspection = open_dump(folder, limits=Limits.trusted())
    measured = [inspection.measured(trace) for trace in traces]
    name = str(measured[0].graphs[0].graph.compile.info.target.get("name", ""))
    if name not in TARGETS:
        raise ValueError(f"{folder} is of target {name!r}; expected one of {', '.join(TARGETS)}.")
    known = measured[0].graphs[0].graph.compile.info.target
    given = {key: known[key] for key in _FIGURES if isinstance(known.get(key), (int, float))}
    base = replace(TARGETS[name], **given)
    return fit_target(base, read_figures(measured, base))


_FIGURES = ("ranks_per_node", "link_gb_s", "memory_gb_s", "tflops", "launch_us", "hop_us")


def read_figures(measured: Sequence[Measured], base: Target) -> TraceFigures:
    """The collectives and operators of the traces of one run.

    Args:
        measured: one trace of each rank.
        base: the target whose predictions the dump has.
    """
    times: dict[tuple[str, str, int], TraceCollective] = {}
    sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for each in measured:
        for graph in each.graphs:
            snapshot = graph.snapshot
            for key, found in graph.collectives.items():
                one = _collective(snapshot.by_id[key], found.time_us, base)
                place = (graph.graph.compile.folder, graph.graph.graph.name, key)
                if one is not None and (place not in times or one.time_us < times[place].time_us):
                    times[place] = one
            for key, time in graph.operators.items():
                node = snapshot.by_id[key]
                if node.cost_us > base.kernel_us:
                    both = sums[_is_arithmetic(node, snapshot, base)]
                    both[0] += time
                    both[1] += node.cost_us
    arithmetic, memory = ((both[0], both[1]) for both in (sums[True], sums[False]))
    return TraceFigures(tuple(times.values()), arithmetic, memory)


def _collective(node: Node, time_us: float, base: Target) -> TraceCollective | None:
    collective = node.collective
    if collective is None or not 1 < collective.ranks <= base.ranks_per_node or time_us <= 0:
        return None
    ranks, passes = collective.ranks, 2 if "all_reduce" in collective.kind else 1
    moved = passes * (ranks - 1) / ranks * collective.full_bytes
    return TraceCollective(passes * (ranks - 1), moved, time_us)


def _is_arithmetic(node: Node, snapshot: Snapshot, base: Target) -> bool:
    inputs = sum(snapshot.by_id[key].nbytes for key in node.inputs if key in snapshot.by_id)
    return node.cost_us > _SLACK * (node.nbytes + inputs) / (base.memory_gb_s * 1e3)


def fit_target(base: Target, figures: TraceFigures) -> Target:
    """A target with the figures of a run. What the run does not say is taken from `base`.

    Raises:
        ValueError: for collectives of fewer than two sizes.
    """
    sizes = {each.moved_bytes for each in figures.collectives}
    if len(sizes) < 2:
        raise ValueError(
            f"the run has collectives of {len(sizes)} size{'' if len(sizes) == 1 else 's'} within "
            "a node; expected at least two. Measure a run with more collectives, such as stage 3 "
            "with schedule{plan=one-ahead,cap_mb=0}."
        )
    hop_us = base.hop_us
    launch_us, us_per_byte = _line(figures.collectives, hop_us)
    if launch_us <= 0:
        hop_us = _LEAST_HOP_US
        launch_us, us_per_byte = _line(figures.collectives, hop_us)
    changes: dict[str, float] = {}
    if us_per_byte > 0:
        changes = {
            "hop_us": hop_us,
            "launch_us": max(launch_us, _LEAST_HOP_US),
            "link_gb_s": 1e-3 / us_per_byte,
        }
    else:
        log.warning(
            "the measured times of collectives do not rise with their bytes, so the figures of "
            "links are those of target %s. Measure on an idle machine, with more --steps.",
            base.name,
        )
    for name, (measured, predicted) in (
        ("tflops", figures.arithmetic),
        ("memory_gb_s", figures.memory),
    ):
        if measured and predicted:
            changes[name] = getattr(base, name) * predicted / measured
    rounded: dict[str, Any] = {name: float(f"{value:.4g}") for name, value in changes.items()}
    return replace(base, **rounded)


def fit_line(
    moved_bytes: Sequence[float], times_us: Sequence[float], hops_us: Sequence[float] | float = 0.0
) -> tuple[float, float]:
    """The latency and the time per byte that minimise the relative errors of times.

    Args:
        hops_us: the part of each time that neither explains.
    """
    times = np.asarray(times_us, dtype=np.float64)
    slope, latency = np.polyfit(np.asarray(moved_bytes), times - hops_us, 1, w=1 / times)
    return float(latency), float(slope)


def _line(collectives: Sequence[TraceCollective], hop_us: float) -> tuple[float, float]:
    return fit_line(
        [each.moved_bytes for each in collectives],
        [each.time_us for each in collectives],
        [each.rounds * hop_us for each in collectives],
    )
