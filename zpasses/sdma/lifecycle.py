"""Chooses the route of each process group, and keeps it from the first collective (or `init`) to
`shutdown`.

The ranks choose a route once per process group and device type, by vote. Nothing falls back after a
launch. The first rank of the group logs the choice and its reason.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zpasses import compat
from zpasses.cost.time.route_figures import MAX_CHUNK_BYTES
from zpasses.pipeline.events import runtime_note
from zpasses.ranks.agree import exchange
from zpasses.ranks.vote import current_timeout_s
from zpasses.runtime.platform import Platform, node_name, platform_of
from zpasses.sdma import mori_route, symm_route, zero_sm_route
from zpasses.sdma.refusals import Answer, unavailable_reason
from zpasses.sdma.routes import C10dRoute, Route, raise_if_capturing

log = logging.getLogger("zpasses")

CAPACITY_MIB = MAX_CHUNK_BYTES >> 20
"""Default for the most MiB per rank in one call of mori. Larger gathers are split. The buffers take
18 times this size on 8 ranks.
"""
_CANDIDATES: dict[str, Any] = {
    "mori": mori_route,
    "nccl_zero": zero_sm_route,
    "symm_mem": symm_route,
}
"""Copy-engine routes, the preferred one first."""


@dataclass(frozen=True)
class RouteChoice:
    """The route of one process group."""

    group: str
    """Name of the process group."""
    device: str
    """Type of the device, "cuda" or "cpu"."""
    route: str
    """"mori", "nccl_zero", "symm_mem" or "c10d"."""
    reason: str
    """Why no preferred route was taken; "" if this is the most preferred one."""

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"group {self.group!r} on {self.device} gathers by {self.route}{reason}"


# The state belongs to a process group, which has no attribute for it.
_routes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, tuple[Route, RouteChoice]]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.RLock()


def init(
    group: dist.ProcessGroup | str | None = None,
    *,
    capacity_mib: int = CAPACITY_MIB,
    timeout_s: float | None = None,
) -> RouteChoice:
    """Choose the route of a group now instead of at its first collective. All ranks of the group
    must call it with the same arguments.

    A later call returns the earlier choice. A group of at most eight ranks on one node can get a
    copy-engine route. Other groups keep the functional collective, and the choice holds the reason.

    Args:
        group: the process group or its name; None is the default group.
        capacity_mib: most MiB per rank in one call of mori. Its buffers take 2 * (ranks + 1) times
            this size, and the outputs that `nccl_zero` registers at most 2 * ranks times.
        timeout_s: seconds to wait for the other ranks at each stage. None is 300 s, the default of
            the option `agreement_timeout_s`.

    Raises:
        ValueError: if the capacity or the time limit is not positive.
        RuntimeError: if torch.distributed has not been initialised.
        AgreementError: on every rank, if one of them does not arrive in time.
    """
    limit = current_timeout_s() if timeout_s is None else timeout_s
    if capacity_mib <= 0 or limit <= 0:
        raise ValueError(
            f"sdma.init: got capacity_mib={capacity_mib}, timeout_s={limit:g}; expected both to "
            "be greater than 0."
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "sdma.init: there is no process group yet; call torch.distributed.init_process_group "
            "first."
        )
    name = compat.group_name(group if group is not None else dist.group.WORLD)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return _get_or_choose_route(name, torch.device(device), capacity_mib << 20, limit)[1]


def route_of(group: str, device: torch.device) -> Route:
    """Returns the route of a group for tensors of a device. Chooses it now if the group has none
    yet.
    """
    return _get_or_choose_route(group, device, CAPACITY_MIB << 20, current_timeout_s())[0]


def route_choice(group: str) -> RouteChoice | None:
    """Returns the choice for a group, or None if it has not been made."""
    known = _routes.get(compat.process_group(group), {})
    return next((choice for _, choice in known.values()), None)


def available_routes(
    group: str, device: torch.device, timeout_s: float | None = None
) -> dict[str, Route]:
    """Start every route that the group can take, the functional collective first, to measure them
    side by side.

    All ranks of the group must call it with the same arguments. It does not change the group's own
    choice.

    Returns:
        route name -> started route.
    """
    routes: dict[str, Route] = {"c10d": C10dRoute()}
    limit = current_timeout_s() if timeout_s is None else timeout_s
    for name in _CANDIDATES:
        route, _ = _choose_route(group, device.type, CAPACITY_MIB << 20, limit, (name,))
        routes[route.name] = route
    return routes


def report() -> list[RouteChoice]:
    """Returns all choices so far."""
    return [choice for known in _routes.values() for _, choice in known.values()]


def shutdown(timeout_s: float | None = None) -> str | None:
    """Leave the copy engines. Call it on every rank before `destroy_process_group`, when no
    collective is in flight.

    Later collectives run as functional collectives. A process can also end without this call;
    mori's memory is then released with the process.

    Args:
        timeout_s: seconds to wait for the other ranks at each stage. None is 300 s, the default of
            the option `agreement_timeout_s`.

    Returns:
        None, or why the ranks could not leave together. What they share then stays as it is until
        the process ends.
    """
    limit = current_timeout_s() if timeout_s is None else timeout_s
    with _lock:
        platform = platform_of("cuda" if torch.cuda.is_available() else "cpu")
        left = mori_route.shut_down(limit, platform) if platform is not None else None
        alive = compat.group_names()
        for known in _routes.values():
            for device, (route, choice) in known.items():
                if platform is not None and choice.group in alive:
                    left = route.leave(choice.group, limit, platform) or left
                known[device] = (
                    C10dRoute(),
                    RouteChoice(choice.group, device, "c10d", "sdma was shut down"),
                )
        return left


def _get_or_choose_route(
    group: str, device: torch.device, capacity_bytes: int, timeout_s: float
) -> tuple[Route, RouteChoice]:
    members = compat.process_group(group)
    found = _routes.get(members, {}).get(device.type)
    if found is not None:
        return found
    raise_if_capturing(device)
    with _lock:
        found = _routes.setdefault(members, {}).get(device.type)
        if found is None:
            route, reason = _choose_route(group, device.type, capacity_bytes, timeout_s)
            choice = RouteChoice(group, device.type, route.name, reason)
            found = _routes[members][device.type] = route, choice
            level = (
                logging.WARNING
                if isinstance(route, C10dRoute) and members.size() > 1
                else logging.INFO
            )
            log.log(level if members.rank() == 0 else logging.DEBUG, "sdma: %s", choice)
            runtime_note("sdma", str(choice))
        return found


def _choose_route(
    group: str,
    device: str,
    capacity_bytes: int,
    timeout_s: float,
    names: Sequence[str] = tuple(_CANDIDATES),
) -> tuple[Route, str]:
    fallback = C10dRoute()
    if compat.group_backend(group) == "fake" or compat.process_group(group).size() == 1:
        return fallback, "the group has no other ranks"
    platform = platform_of(device)
    answers = exchange(
        group,
        f"sdma: the capabilities of {device}",
        None if platform is None else _answer(group, platform, capacity_bytes),
        timeout_s,
    )
    if platform is None or any(answer is None for answer in answers):
        return fallback, f"{device} has no copy engines for collectives"
    reasons: list[str] = []
    for name in names:
        candidate = _CANDIDATES[name]
        of_ranks = [{**answer, "refusal": answer["refusals"][name]} for answer in answers]
        reason = unavailable_reason(group, of_ranks)
        if reason is None and candidate is mori_route:
            reason = mori_route.disagreement(group, of_ranks)
        route = reason or candidate.start(group, platform, capacity_bytes, timeout_s)
        if not isinstance(route, str):
            return route, "; ".join(reasons)
        reasons.append(f"{name}: {route}")
    return fallback, "; ".join(reasons)


def _answer(group: str, platform: Platform, capacity_bytes: int) -> Answer:
    """What this rank can tell before any route is started."""
    refusals = {
        name: candidate.local_obstacle(group, platform, capacity_bytes)
        for name, candidate in _CANDIDATES.items()
    }
    place = {"node": node_name(), "device": platform.device_id()}
    return {**place, **mori_route.answer(), "refusals": refusals}


def _after_fork() -> None:
    """A forked child has no engines, and must not use the parent's routes."""
    global _lock
    _lock = threading.RLock()
    _routes.clear()
    if mori_route.is_started():
        mori_route.disable("this process was forked from one that had started mori")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def reset_routes() -> None:
    """Forget all routes. Only for tests, which may register another fake device."""
    _routes.clear()
    mori_route.disable(None)
