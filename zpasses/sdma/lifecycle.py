"""Which route a group takes, from its first collective (or `init`) to `shutdown`.

A route is chosen once for a process group and a type of device, by vote, and kept: nothing falls
back after a launch. The first rank of the group logs the choice and the reason."""

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
from zpasses.cost.routes import PIECE_BYTES
from zpasses.pipeline.recorder import runtime_note
from zpasses.ranks.vote import exchange
from zpasses.sdma import mori_route, symm_route
from zpasses.sdma.platform import Platform, platform_of
from zpasses.sdma.routes import C10dRoute, Route, refuse_capture

__all__ = ["Choice", "available_routes", "chosen", "init", "report", "route_of", "shutdown"]

log = logging.getLogger("zpasses")

CAPACITY_MIB = PIECE_BYTES >> 20
"""Most MiB of one rank in one call of mori, unless `init` says otherwise; larger gathers go in
pieces. Its buffers take 18 times that."""
TIMEOUT_S = 300.0

_CANDIDATES: dict[str, Any] = {"mori": mori_route, "symm_mem": symm_route}
"""Copy-engine routes, the preferred one first."""


@dataclass(frozen=True)
class Choice:
    """The route of one group."""

    group: str
    """Name of the process group."""
    device: str
    """Type of the device, "cuda" or "cpu"."""
    route: str
    """"mori", "symm_mem" or "c10d"."""
    reason: str
    """Why no preferred route was taken; "" if this is the most preferred one."""

    def __str__(self) -> str:
        return f"group {self.group!r} on {self.device} gathers by {self.route}{': ' + self.reason if self.reason else ''}"


# State belongs to a process group, which offers no place for it.
_routes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, tuple[Route, Choice]]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.RLock()


def init(
    group: dist.ProcessGroup | str | None = None,
    *,
    capacity_mib: int = CAPACITY_MIB,
    timeout_s: float = TIMEOUT_S,
) -> Choice:
    """Choose the route of a group now instead of at its first collective; all ranks of the group
    must call it alike.

    Calling it again returns the choice of then. Ranks that share a node by eight or fewer can get a
    copy-engine route; others keep the functional collective, for the reason that the choice holds.

    Args:
        group: the process group or its name; None is the default group.
        capacity_mib: most MiB of one rank in one call of mori. Its buffers take 2 * (ranks + 1)
            times that.
        timeout_s: seconds to wait for the other ranks at each step.

    Raises:
        ValueError: for a capacity or time limit that is not positive.
        RuntimeError: where torch.distributed has not been initialised.
        AgreementError: on every rank, when one of them does not come in time.
    """
    if capacity_mib <= 0 or timeout_s <= 0:
        raise ValueError(
            f"sdma.init: got capacity_mib={capacity_mib}, timeout_s={timeout_s}; expected both to "
            "be greater than 0."
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "sdma.init: there is no process group yet; call torch.distributed.init_process_group "
            "first."
        )
    name = compat.group_name(group if group is not None else dist.group.WORLD)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return _route(name, torch.device(device), capacity_mib << 20, timeout_s)[1]


def route_of(group: str, device: torch.device) -> Route:
    """The route of a group for tensors of a device, chosen now if it has not been."""
    return _route(group, device, CAPACITY_MIB << 20, TIMEOUT_S)[0]


def chosen(group: str) -> Choice | None:
    """The choice for a group, if it has been made."""
    known = _routes.get(compat.process_group(group), {})
    return next((choice for _, choice in known.values()), None)


def available_routes(
    group: str, device: torch.device, timeout_s: float = TIMEOUT_S
) -> dict[str, Route]:
    """Every route that the group can take, started, the functional collective first; for measuring
    them side by side.

    All ranks of the group must call it alike. The group's own choice is not touched.
    """
    routes: dict[str, Route] = {"c10d": C10dRoute()}
    for name in _CANDIDATES:
        route, _ = _choose(group, device.type, CAPACITY_MIB << 20, timeout_s, (name,))
        routes[route.name] = route
    return routes


def report() -> list[Choice]:
    """All choices so far."""
    return [choice for known in _routes.values() for _, choice in known.values()]


def shutdown(timeout_s: float = 30.0) -> str | None:
    """Leave the copy engines; to be called on every rank, before `destroy_process_group`, when
    nothing is under way any more.

    Later collectives of ours run as functional ones. A process that ends without it ends as well:
    mori's memory goes with it.

    Returns:
        None, or why the ranks could not say goodbye together; then mori is left as it is until the
        process ends.
    """
    with _lock:
        platform = platform_of("cuda" if torch.cuda.is_available() else "cpu")
        left = mori_route.shut_down(timeout_s, platform) if platform is not None else None
        for known in _routes.values():
            for device, (_, choice) in known.items():
                known[device] = (
                    C10dRoute(),
                    Choice(choice.group, device, "c10d", "sdma was shut down"),
                )
        return left


def _route(
    group: str, device: torch.device, capacity_bytes: int, timeout_s: float
) -> tuple[Route, Choice]:
    members = compat.process_group(group)
    found = _routes.get(members, {}).get(device.type)
    if found is not None:
        return found
    refuse_capture(device)
    with _lock:
        found = _routes.setdefault(members, {}).get(device.type)
        if found is None:
            route, reason = _choose(group, device.type, capacity_bytes, timeout_s)
            choice = Choice(group, device.type, route.name, reason)
            found = _routes[members][device.type] = route, choice
            level = (
                logging.WARNING
                if isinstance(route, C10dRoute) and members.size() > 1
                else logging.INFO
            )
            log.log(level if members.rank() == 0 else logging.DEBUG, "sdma: %s", choice)
            runtime_note("sdma", str(choice))
        return found


def _choose(
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
        group, f"sdma: what {device} has", _examine(group, platform, capacity_bytes), timeout_s
    )
    if platform is None or any(answer is None for answer in answers):
        return fallback, f"{device} has no copy engines for collectives"
    reasons: list[str] = []
    for name in names:
        candidate = _CANDIDATES[name]
        reason = candidate.check(group, [answer[name] for answer in answers])
        route = reason or candidate.start(group, platform, capacity_bytes, timeout_s)
        if not isinstance(route, str):
            return route, "; ".join(reasons)
        reasons.append(f"{name}: {route}")
    return fallback, "; ".join(reasons)


def _examine(group: str, platform: Platform | None, capacity_bytes: int) -> dict[str, Any] | None:
    if platform is None:
        return None
    return {
        name: candidate.examine(group, platform, capacity_bytes)
        for name, candidate in _CANDIDATES.items()
    }


def _after_fork() -> None:
    """A child has no engines, and must not answer for its parent's."""
    global _lock
    _lock = threading.RLock()
    _routes.clear()
    if mori_route.is_started():
        mori_route.forget("this process was forked from one that had started mori")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def start_afresh() -> None:
    """Forget all routes, as only tests may: another fake may stand for the device now."""
    _routes.clear()
    mori_route.forget(None)
