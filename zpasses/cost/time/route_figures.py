"""Bandwidth, latency and overlap cost of each route that a collective can take within a node.

Figures are measured if the environment variable `ZPASSES_CALIBRATION` names a file that `python -m
zpasses.tools.calibrate` wrote, and the file contains the target's architecture. All others are
priors from the literature, which nobody has checked on hardware of this project.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zpasses.cost.time.target import Target
from zpasses.errors import OptionError

CALIBRATION_VARIABLE = "ZPASSES_CALIBRATION"
FORMAT = 1
MAX_CHUNK_BYTES = 64 << 20
"""Most bytes per rank that a copy engine gathers in one call. Larger gathers are split into chunks.
"""
MAX_RANKS = 8
"""Most ranks of a group that a copy-engine route takes."""


@dataclass(frozen=True)
class RouteFigures:
    """Figures of one route between the ranks of one node."""

    latency_us: float
    """The part of a collective's duration that does not depend on its bytes, in microseconds."""
    gb_s: float
    """Sustained bandwidth at which a rank sends over all its links together, in GB/s (10^9 bytes).
    """
    compute_slowdown: float
    """Factor by which kernels take longer while such a collective runs beside them; 1 is no
    slowdown.
    """
    collective_slowdown: float = 1.0
    """Factor by which the collective takes longer while kernels run beside it; 1 is no slowdown."""
    copied_full: float = 0.0
    """Extra copies of each byte of the full tensor, out of a buffer that all ranks write to."""
    copied_parts: float = 0.0
    """Extra copies of each byte of a rank's part, into such a buffer."""
    source: str = ""
    """Where the figures are from."""


_LINK_EFFICIENCY = 48 / 64
"""Usable share of a link's peak: about 48 of the 64 GB/s of one xGMI link (AMD, MI300X data sheet
and RCCL guides).
"""
_RCCL_COMPUTE_SLOWDOWN = 1.22
"""A matmul beside RCCL takes 1.11 to 1.33 times as long as beside a gather by SDMA engines (AMD's
figures for mori). This is the middle.
"""
_SDMA_BANDWIDTH_RATIO = 1.08
"""A gather of tens of MB by SDMA engines has between the same and 16 % more bandwidth than RCCL
(AMD, arXiv:2511.06605). This is the middle.
"""
_SDMA_LATENCY_RATIO = 4.5
"""A small gather by SDMA engines takes 4.5 times as long as RCCL's without further tuning (AMD,
arXiv:2511.06605).
"""
_RCCL_OVERLAP_GAIN = (0.21 + 0.42) / 2
"""Realised share of the ideal gain from overlapping matmuls and RCCL collectives on MI300X: 21 %,
or 42 % if collectives start first and have reserved compute units (AMD, arXiv:2412.14335). Graphs
of zpasses start them first but reserve nothing. This is the middle.
"""
_SDMA_OVERLAP_GAIN = 0.72
"""The same share for copy engines."""
_PRIOR_SOURCE, _MEASURED = "literature, uncalibrated", "measured"


def _collective_slowdown(overlap_gain: float, compute_slowdown: float) -> float:
    """Derives the slowdown of a collective beside compute from the measured gain of overlapping
    both.

    Take compute and a collective that each last 1 by themselves. The ideal speedup is 2, and
    overlap realises 1 + overlap_gain, so both together take 2 / (1 + overlap_gain). The compute
    lasts `compute_slowdown` of that, during which the collective progresses at 1 / slowdown. The
    rest of the collective runs by itself.
    """
    together = 2 / (1 + overlap_gain)
    return compute_slowdown / (1 + compute_slowdown - together)


def route_figures(target: Target) -> Mapping[str, RouteFigures]:
    """Returns the figures of all routes of a target by name. Measured figures replace priors.

    Raises:
        OptionError: if `ZPASSES_CALIBRATION` names a file that cannot be read.
    """
    figures = dict(_priors(target))
    path = os.environ.get(CALIBRATION_VARIABLE)
    if path:
        measured = calibrated_figures(Path(path), target.architecture)
        figures.update({route: each for route, each in measured.items() if route in figures})
    return figures


def planned_route(target: Target) -> str | None:
    """Returns the copy-engine route that schedules use on a target without being asked to.

    It is mori where the hardware has it. Other routes have only been described, so they need
    measured figures.
    """
    for route in target.routes[:1]:
        if route == "mori" or route_figures(target)[route].source.startswith(_MEASURED):
            return route
    return None


def engine_obstacle(ranks: Sequence[int], target: Target) -> str:
    """Why no copy engine reaches all ranks of a group; "" if one does."""
    if len(ranks) == 1:
        return "one rank has nothing to gather"
    if len({rank // target.ranks_per_node for rank in ranks}) > 1:
        return f"ranks {ranks[0]} to {ranks[-1]} are not on one node of {target.ranks_per_node}"
    return (
        f"{len(ranks)} ranks; a route takes at most {MAX_RANKS}" if len(ranks) > MAX_RANKS else ""
    )


@functools.cache
def _priors(target: Target) -> Mapping[str, RouteFigures]:
    latency = target.launch_us + (target.ranks_per_node - 1) * target.hop_us
    if target.architecture == "cpu":
        return {"c10d": RouteFigures(latency, target.link_gb_s, 1.0, source=target.source)}
    bandwidth = _LINK_EFFICIENCY * target.link_gb_s
    by_rccl, by_engines = (
        _collective_slowdown(_RCCL_OVERLAP_GAIN, _RCCL_COMPUTE_SLOWDOWN),
        _collective_slowdown(_SDMA_OVERLAP_GAIN, 1.0),
    )
    rccl = f"{_PRIOR_SOURCE}: RCCL beside matrix products on MI300X"
    mori = f"{_PRIOR_SOURCE}: AMD's figures for SDMA engines, and mori's copies"
    symm_mem = f"{_PRIOR_SOURCE}: two barriers and a copy in, as torch's code does"
    figures = {
        "c10d": RouteFigures(latency, bandwidth, _RCCL_COMPUTE_SLOWDOWN, by_rccl, source=rccl),
        "mori": RouteFigures(
            _SDMA_LATENCY_RATIO * latency,
            _SDMA_BANDWIDTH_RATIO * bandwidth,
            1.0,
            by_engines,
            copied_full=1.0,
            copied_parts=1.0,
            source=mori,
        ),
        "symm_mem": RouteFigures(
            2 * latency, bandwidth, 1.0, by_engines, copied_parts=1.0, source=symm_mem
        ),
    }
    return {
        route: each for route, each in figures.items() if route == "c10d" or route in target.routes
    }


# --- measured figures -----------------------------------------------------------------------------
def machine_key(architecture: str, versions: Mapping[str, str]) -> str:
    """Returns the key of a machine in a calibration file: "gfx942 mori=1.2.4 torch=2.13.0"."""
    return " ".join(
        [architecture, *(f"{name}={version}" for name, version in sorted(versions.items()))]
    )


def calibrated_figures(path: Path, architecture: str) -> dict[str, RouteFigures]:
    """Returns the measured figures of an architecture by route.

    Figures that were measured with this torch take precedence over those of other versions.

    Raises:
        OptionError: if the file is not one that the calibration wrote.
    """
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"got format {content['format']}; this release reads {FORMAT}")
        machines: list[dict[str, Any]] = [
            each for each in content["machines"].values() if each["architecture"] == architecture
        ]
        machines.sort(key=lambda each: each["versions"].get("torch") == torch.__version__)
        found: dict[str, RouteFigures] = {}
        for machine in machines:
            source = f"{_MEASURED}: {machine_key(architecture, machine['versions'])}"
            found.update(
                {
                    route: RouteFigures(**values, source=source)
                    for route, values in machine["routes"].items()
                }
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"{CALIBRATION_VARIABLE}={path}: {type(error).__name__}: {error}. Expected a "
            "file that `python -m zpasses.tools.calibrate` wrote."
        ) from error
    return found
