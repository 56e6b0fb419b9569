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

    @property
    def costs(self) -> tuple[float, ...]:
        """All figures, each better if it is less."""
        return (
            self.latency_us,
            -self.gb_s,
            self.compute_slowdown,
            self.collective_slowdown,
            self.copied_full,
            self.copied_parts,
        )


@dataclass(frozen=True)
class _Contention:
    """How matrix products and a gather beside them slow each other."""

    compute: float
    collective: float
    source: str


_LINK_EFFICIENCY = {"gfx942": 48 / 64, "gfx950": 0.65, "sm": 0.84}
"""Usable share of `Target.link_gb_s`, by the start of the architecture's name.

gfx942: 48 of the 64 GB/s of one xGMI link (AMD, "Understanding RCCL Bandwidth and xGMI Performance
on MI300X"). gfx950: RCCL gathers 128 MiB per rank at 333 GiB/s of output (ROCm/mori#200). sm: NCCL
gathers 64 MiB per rank on 8 x H100 (pytorch#172714).
"""
_SDMA_BANDWIDTH_RATIO = 1.16
"""Bandwidth of SDMA engines, without mori's copies, by that of RCCL: 361 by 333 GiB/s with the
copies on both sides (ROCm/mori#200). On MI300X, gathers of tens of MB reach up to 1.16
(arXiv:2511.06605).
"""
_SDMA_LATENCY_RATIO = 4.5
"""A small gather by SDMA engines takes 4.5 times as long as RCCL's without further tuning (AMD,
arXiv:2511.06605).
"""
_UNCALIBRATED, _MEASURED = "literature, uncalibrated", "measured"

# `python -m tests.zpasses.cost.time.published` fits the figures below, and those from #200 and
# #172714 above, to half of what is published, and predicts the other half.
_ON_AMD = "arXiv:2412.14335 on MI300X, ROCm/mori#200 on MI355X"
_ON_NVIDIA = "pytorch#172714 and #179937 on H100"
_CONTENTION = {
    # Plain overlap realises 21 % of its ideal gain, and 72 % with DMA engines. Beside a product
    # that outlasts them, gathers cost 39 % of their own time, and none by SDMA engines.
    ("gfx", "c10d"): _Contention(1.22, 2.14, _ON_AMD),
    ("gfx", "engines"): _Contention(1.0, 1.19, _ON_AMD),
    # Products take 30 to 40 % longer beside NCCL. Nothing published says that NCCL slows, too.
    ("sm", "c10d"): _Contention(1.35, 1.0, _ON_NVIDIA),
    ("sm", "engines"): _Contention(1.07, 1.0, _ON_NVIDIA),
}
"""By vendor and kind of route: NVIDIA's devices have no figures of AMD's."""


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


def planned_routes(target: Target) -> tuple[str, ...]:
    """Returns the copy-engine routes that schedules use on a target without being asked to, the
    preferred one first.

    These are mori where the hardware has it, and those with measured figures: other routes have
    only been described. A route that another one is at least as good as in every figure is left
    out.
    """
    figures = route_figures(target)
    known = (
        each
        for each in target.routes
        if each == "mori" or figures[each].source.startswith(_MEASURED)
    )
    return _undominated(tuple(known), figures)


def engine_routes(target: Target) -> tuple[str, ...]:
    """Returns the copy-engine routes that a plan for a target chooses from: the planned ones, or
    else those that the hardware has. The preferred one is first, and counts for gathers that name
    no route.
    """
    return planned_routes(target) or _undominated(target.routes, route_figures(target))


def _undominated(routes: Sequence[str], figures: Mapping[str, RouteFigures]) -> tuple[str, ...]:
    found: list[str] = []
    for route in routes:
        mine = figures[route].costs
        others = (figures[each].costs for each in routes if each != route)
        worse = (
            all(theirs <= cost for theirs, cost in zip(other, mine, strict=True))
            and (other != mine)
            for other in others
        )
        if not any(worse) and all(figures[each].costs != mine for each in found):
            found.append(route)
    return tuple(found)


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
    share = next(
        each for name, each in _LINK_EFFICIENCY.items() if target.architecture.startswith(name)
    )
    bandwidth = share * target.link_gb_s
    vendor = "gfx" if target.architecture.startswith("gfx") else "sm"
    by_kernels, by_engines = (_CONTENTION[vendor, kind] for kind in ("c10d", "engines"))

    def figures(latency_us: float, gb_s: float, beside: _Contention, **copied: Any) -> RouteFigures:
        source = f"{_UNCALIBRATED}: {beside.source}"
        return RouteFigures(
            latency_us, gb_s, beside.compute, beside.collective, **copied, source=source
        )

    # NCCL's zero-SM gathers have two barriers. Symmetric memory has a copy in, too, as torch's code
    # does.
    known = {
        "c10d": figures(latency, bandwidth, by_kernels),
        "mori": figures(
            _SDMA_LATENCY_RATIO * latency,
            _SDMA_BANDWIDTH_RATIO * bandwidth,
            by_engines,
            copied_full=1.0,
            copied_parts=1.0,
        ),
        "nccl_zero": figures(2 * latency, bandwidth, by_engines),
        "symm_mem": figures(2 * latency, bandwidth, by_engines, copied_parts=1.0),
    }
    return {
        route: each for route, each in known.items() if route == "c10d" or route in target.routes
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
