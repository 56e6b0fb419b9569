"""What is known of the routes that a collective can take within a node: bandwidth, latency, and
what they cost the compute beside them.

Figures are measured ones, if `ZPASSES_CALIBRATION` names a file that `python -m
zpasses.tools.calibrate` wrote and that file has the target's architecture; else priors out of the
literature, which nobody has checked on a machine of ours."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zpasses.cost.target import Target
from zpasses.errors import OptionError

__all__ = [
    "PIECE_BYTES",
    "RouteFigures",
    "calibrated_figures",
    "figures_of",
    "known_figures",
    "machine_key",
]

CALIBRATION_VARIABLE = "ZPASSES_CALIBRATION"
FORMAT = 1
PIECE_BYTES = 64 << 20
"""Most bytes of one rank that a copy engine gathers in one call; larger gathers go in pieces."""


@dataclass(frozen=True)
class RouteFigures:
    """One route on one kind of node, its ranks all on that node."""

    latency_us: float
    """The part of a collective's time that does not depend on its bytes, in microseconds."""
    gb_s: float
    """What a rank sends over all its links together, sustained, in 10^9 bytes a second."""
    compute_slowdown: float
    """How many times longer compute takes while such a collective runs beside it; 1: not at all."""
    collective_slowdown: float = 1.0
    """How many times longer the collective takes while compute runs beside it; 1: not at all."""
    copied_full: float = 0.0
    """Copies that each byte of the full tensor takes besides: out of a buffer that all ranks write
    to."""
    copied_parts: float = 0.0
    """Copies that each byte of a rank's part takes besides: into such a buffer."""
    source: str = ""


_USABLE = 48 / 64
"""Of a link's peak: about 48 of the 64 GB/s of one xGMI link (AMD, MI300X data sheet and RCCL
guides)."""
_SLOWED = 1.22
"""A matrix product beside RCCL takes 1.11 to 1.33 times as long as beside a gather by SDMA engines
(AMD's figures for mori): the middle."""
_FASTER = 1.08
"""A gather by SDMA engines of tens of MB: from par with RCCL to 16 % more bandwidth: the middle
(AMD, arXiv:2511.06605)."""
_SMALL = 4.5
"""A small gather by SDMA engines takes 4.5 times as long as RCCL's, if nothing is done about it
(the same)."""
_REALISED = (0.21 + 0.42) / 2
"""Of what running products and RCCL's collectives side by side could gain at best, MI300X gains 21
%, or 42 % when collectives are started first and have compute units of their own (AMD,
arXiv:2412.14335). Graphs of ours start them first, and reserve nothing: the middle."""
_REALISED_BY_ENGINES = 0.72
"""The same by copy engines."""
_PRIOR = "literature, uncalibrated"


def _slowed(realised: float, compute_slowdown: float) -> float:
    """How many times longer a collective takes beside compute, if of both, 1 long by themselves,
    side by side gains such a share of 1.

    Both together take 2 / (1 + realised). The compute takes `compute_slowdown` of that, in which
    the collective gets on by 1 / slowed; the rest of the collective then runs by itself."""
    together = 2 / (1 + realised)
    return compute_slowdown / (1 + compute_slowdown - together)


def figures_of(route: str, target: Target) -> RouteFigures | None:
    """What is known of a route ("c10d", "mori", "symm_mem") on a target; None where the target does
    not have it."""
    return known_figures(target).get(route)


def known_figures(target: Target) -> Mapping[str, RouteFigures]:
    """Figures by route: measured ones in place of priors, where there are some.

    Raises:
        OptionError: when `ZPASSES_CALIBRATION` names a file that cannot be read.
    """
    figures = dict(_priors(target))
    path = os.environ.get(CALIBRATION_VARIABLE)
    if path:
        measured = calibrated_figures(Path(path), target.architecture)
        figures.update({route: each for route, each in measured.items() if route in figures})
    return figures


@functools.cache
def _priors(target: Target) -> Mapping[str, RouteFigures]:
    latency = target.launch_us + (target.ranks_per_node - 1) * target.hop_us
    if target.architecture == "cpu":
        return {"c10d": RouteFigures(latency, target.link_gb_s, 1.0, source=target.source)}
    bandwidth = _USABLE * target.link_gb_s
    by_rccl, by_engines = _slowed(_REALISED, _SLOWED), _slowed(_REALISED_BY_ENGINES, 1.0)
    rccl = f"{_PRIOR}: RCCL beside matrix products on MI300X"
    mori = f"{_PRIOR}: AMD's figures for SDMA engines, and mori's copies"
    symm_mem = f"{_PRIOR}: two barriers and a copy in, as torch's code does"
    figures = {
        "c10d": RouteFigures(latency, bandwidth, _SLOWED, by_rccl, source=rccl),
        "mori": RouteFigures(
            _SMALL * latency,
            _FASTER * bandwidth,
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


# --- measured ones --------------------------------------------------------------------------------
def machine_key(architecture: str, versions: Mapping[str, str]) -> str:
    """How a calibration file names a machine: "gfx942 torch=2.13.0 mori=1.2.4"."""
    return " ".join(
        [architecture, *(f"{name}={version}" for name, version in sorted(versions.items()))]
    )


def calibrated_figures(path: Path, architecture: str) -> dict[str, RouteFigures]:
    """The routes of an architecture as measured: with this torch if there are such figures, else
    with another.

    Raises:
        OptionError: when the file cannot be read as one that the calibration wrote.
    """
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}; this release reads {FORMAT}")
        machines: list[dict[str, Any]] = [
            each for each in content["machines"].values() if each["architecture"] == architecture
        ]
        machines.sort(key=lambda each: each["versions"].get("torch") == torch.__version__)
        found: dict[str, RouteFigures] = {}
        for machine in machines:
            source = f"measured: {machine_key(architecture, machine['versions'])}"
            found.update(
                {
                    route: RouteFigures(**values, source=source)
                    for route, values in machine["routes"].items()
                }
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"{CALIBRATION_VARIABLE}={path}: {type(error).__name__}: {error}. Expected what "
            "`python -m zpasses.tools.calibrate` writes."
        ) from error
    return found
