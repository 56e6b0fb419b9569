"""Starts the routes of each process group, and keeps them from the first collective (or `init`) to
`shutdown`.

The ranks try a route once per process group and device type, by vote. A plan may name another route
for each launch, so a group can have several. Nothing falls back after a launch. The first rank of
the group logs each choice and its reason.
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


class _Routes:
    """The routes of one process group on one type of device."""

    def __init__(self, group: str, device: str, capacity_bytes: int) -> None:
        self._group, self._device, self._capacity_bytes = group, device, capacity_bytes
        self._platform = platform_of(device)
        self._none = ""
        """Why no route can be taken."""
        self._tried: dict[str, Route | str] = {}
        """The routes that were started, or why they could not be."""
        self.chosen: dict[str, tuple[Route, RouteChoice]] = {}
        """By the name of the preferred route; "" for the order of `_CANDIDATES`."""

    def choose(self, preferred: str, timeout_s: float) -> tuple[Route, RouteChoice]:
        if preferred not in self.chosen:
            names = sorted(_CANDIDATES, key=lambda each: each != preferred)
            route, reason = self.first_of(names, timeout_s)
            choice = RouteChoice(self._group, self._device, route.name, reason)
            is_new = choice not in (each for _, each in self.chosen.values())
            self.chosen[preferred] = route, choice
            if not is_new:
                return route, choice
            members = compat.process_group(self._group)
            fallback = isinstance(route, C10dRoute) and members.size() > 1
            level = logging.WARNING if fallback else logging.INFO
            log.log(level if members.rank() == 0 else logging.DEBUG, "sdma: %s", choice)
            runtime_note("sdma", str(choice))
        return self.chosen[preferred]

    def first_of(self, names: Sequence[str], timeout_s: float) -> tuple[Route, str]:
        """Returns the first route that the group can take, and why it cannot take those before."""
        answers: Sequence[Answer] | None = None
        chosen: Route = C10dRoute()
        refused: list[str] = []
        for name in names:
            if name not in self._tried and not self._none:
                # Asked anew for each choice: another group may have started a route meanwhile.
                answers = self._ask(timeout_s) if answers is None else answers
                if answers:
                    self._tried[name] = self._try(name, answers, timeout_s)
            if self._none:
                return chosen, self._none
            route = self._tried[name]
            if isinstance(route, Route):
                chosen = route
                break
            refused.append(name)
        # In one order, so that equal choices have equal texts.
        texts = (f"{each}: {self._tried[each]}" for each in _CANDIDATES if each in refused)
        return chosen, "; ".join(texts)

    def leave(self, timeout_s: float) -> str | None:
        """Gives back what the routes share with other ranks. From now on, there is only the
        functional collective. Returns a reason if that was not possible.
        """
        alive, left = compat.group_names(), None
        for route in self._tried.values():
            if self._platform is not None and self._group in alive and isinstance(route, Route):
                left = route.leave(self._group, timeout_s, self._platform) or left
        self._none = "sdma was shut down"
        gone = RouteChoice(self._group, self._device, "c10d", self._none)
        self.chosen = dict.fromkeys(self.chosen, (C10dRoute(), gone))
        return left

    def _ask(self, timeout_s: float) -> Sequence[Answer]:
        """Returns what the ranks can tell before a route is started; nothing if none can be."""
        group, platform = self._group, self._platform
        if compat.group_backend(group) == "fake" or compat.process_group(group).size() == 1:
            self._none = "the group has no other ranks"
            return ()
        answers = exchange(
            group,
            f"sdma: the capabilities of {self._device}",
            None if platform is None else _answer(group, platform, self._capacity_bytes),
            timeout_s,
        )
        if platform is None or any(answer is None for answer in answers):
            self._none = f"{self._device} has no copy engines for collectives"
            return ()
        return list(answers)

    def _try(self, name: str, answers: Sequence[Answer], timeout_s: float) -> Route | str:
        assert self._platform is not None
        candidate = _CANDIDATES[name]
        of_ranks = [{**answer, "refusal": answer["refusals"][name]} for answer in answers]
        reason = unavailable_reason(self._group, of_ranks)
        if reason is None and candidate is mori_route:
            reason = mori_route.disagreement(self._group, of_ranks)
        if reason is not None:
            return reason
        started: Route | str = candidate.start(
            self._group, self._platform, self._capacity_bytes, timeout_s
        )
        return started


# The state belongs to a process group, which has no attribute for it.
_routes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _Routes]] = (
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
    return _choose(name, torch.device(device), "", capacity_mib << 20, limit)[1]


def route_of(group: str, device: torch.device, preferred: str = "") -> Route:
    """Returns the route of a group for tensors of a device. Chooses it now if that has not been
    done.

    Args:
        preferred: the route to take if the group can; "" for the most preferred that it can take.

    Raises:
        ValueError: if there is no route of that name.
    """
    if preferred and preferred not in _CANDIDATES:
        raise ValueError(
            f"zpasses::sdma op: got route={preferred!r}; expected one of {', '.join(_CANDIDATES)}, "
            "or nothing for the most preferred that the group can take."
        )
    return _choose(group, device, preferred, CAPACITY_MIB << 20, current_timeout_s())[0]


def route_choice(group: str, preferred: str = "") -> RouteChoice | None:
    """Returns the choice for a group and a preferred route, or None if it has not been made."""
    known = _routes.get(compat.process_group(group), {}).values()
    return next((each.chosen[preferred][1] for each in known if preferred in each.chosen), None)


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
    found = _Routes(group, device.type, CAPACITY_MIB << 20)
    for name in _CANDIDATES:
        route, _ = found.first_of((name,), limit)
        routes[route.name] = route
    return routes


def report() -> list[RouteChoice]:
    """Returns all choices so far."""
    known = (each for by_device in _routes.values() for each in by_device.values())
    return list(dict.fromkeys(choice for each in known for _, choice in each.chosen.values()))


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
        for known in _routes.values():
            for each in known.values():
                left = each.leave(limit) or left
        return left


def _choose(
    group: str, device: torch.device, preferred: str, capacity_bytes: int, timeout_s: float
) -> tuple[Route, RouteChoice]:
    members = compat.process_group(group)
    found = _routes.get(members, {}).get(device.type)
    if found is not None and preferred in found.chosen:
        return found.chosen[preferred]
    raise_if_capturing(device)
    with _lock:
        known = _routes.setdefault(members, {})
        if device.type not in known:
            known[device.type] = _Routes(group, device.type, capacity_bytes)
        return known[device.type].choose(preferred, timeout_s)


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
