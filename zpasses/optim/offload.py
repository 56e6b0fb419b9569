"""States of optimizers on the host: they come to the device bucket by bucket, only for the step.

    compute   | stays  | bucket 0 | bucket 1 | bucket 2 | next forward
    in        | 0        1          2 ...
    out                           0          1          2

The hook that runs last before `optimizer.step` does the whole step: it runs the step of the
optimizer's class on one bucket after another, and what torch then calls finds no parameter left.
So hooks, schedulers and other wrappers of `step` see one step.

Two blocks of device memory take turns. Each is written by the stream `in`, used by the current
stream, and read by the stream `out`, and an event stands between each of the three and the next.
`SideStream.keep` delays the reuse of both after the step, while the last buckets go out. The host
waits for these only where it reads a state (`RestingState`).
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zpasses import compat
from zpasses.cost.memory import device_memory
from zpasses.errors import MemoryBudgetError, ZpassesError
from zpasses.optim.host_arena import HostArena
from zpasses.optim.state_plan import (
    OFFLOAD_ATTRIBUTE,
    PartialStep,
    StatePlan,
    ValueLayout,
    expected_layouts,
    layout_of_value,
    local_part,
    nbytes_of,
    plan_states,
)
from zpasses.option_values import format_size, parse_size
from zpasses.ranks.agree import exchange
from zpasses.ranks.local_ranks import local_ranks
from zpasses.runtime.layout import layout_of
from zpasses.runtime.param_value import is_sharded_parameter
from zpasses.sdma.platform import SideStream, platform_of

log = logging.getLogger("zpasses")

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def offload_optimizer(
    optimizer: O,
    *,
    device_bytes: str = "0B",
    bucket_bytes: str = "256MiB",
    host_bytes: str | None = None,
) -> O:
    """Let the states of an optimizer rest on the host, in place, and return the optimizer.

    `optimizer.step()` brings them to the device bucket by bucket, steps there, and sends them back
    while the program goes on. The results have the same bits. State dicts, checkpoints, schedulers,
    gradient scaling, clipping and hooks work as before; `optimizer.state` holds host tensors. Call
    it on every rank, before or after the first step. On CPUs, the host is another allocation.

    It serves optimizers that step each parameter by itself, from state that they hold for it. What
    has no dimensions, such as counts of steps, stays where the optimizer makes it. So do values
    that are not plain tensors, such as quantized ones. Copies of the optimizer (`copy.deepcopy`,
    `pickle`) have their states on the device.

    Args:
        optimizer: the optimizer, whose parameters have their final device and are sharded.
        device_bytes: how many bytes of states stay on the device, on each rank.
        bucket_bytes: bytes of the states that come and go together. Two buckets are on the device
            at a time, and three in the step that makes the states. A parameter whose states are
            larger has a bucket of its own.
        host_bytes: the most that a rank may take of the host; None allows its share of what the
            machine has available. The memory is taken at once, and locked for accelerators.

    Raises:
        MemoryBudgetError: on every rank, if the host memory of one of them does not suffice. When
            parameters were added to the optimizer, its next step raises it.
        ZpassesError: for an optimizer that cannot be offloaded, or if ranks give other options.
        OptionError: for an option that is no size.
        AgreementError: if another rank does not call it in time.
    """
    options = _Options(
        parse_size(device_bytes, "offload_optimizer, device_bytes"),
        parse_size(bucket_bytes, "offload_optimizer, bucket_bytes"),
        None if host_bytes is None else parse_size(host_bytes, "offload_optimizer, host_bytes"),
    )
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ZpassesError(
            f"offload_optimizer: got {type(optimizer).__name__}; expected a torch.optim.Optimizer. "
            "Pass the optimizer itself, before a trainer wraps it."
        )
    if getattr(optimizer, OFFLOAD_ATTRIBUTE, None) is not None:
        raise ZpassesError(
            f"offload_optimizer: the states of this {type(optimizer).__name__} are offloaded "
            "already. Call it once per optimizer."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ZpassesError("offload_optimizer: differentiable=True needs all states on the device.")
    offload = _Offload(optimizer, options)
    setattr(optimizer, OFFLOAD_ATTRIBUTE, offload)
    optimizer.register_load_state_dict_pre_hook(offload.before_load)
    optimizer.register_load_state_dict_post_hook(offload.after_load)
    _install_hook()
    return optimizer


def state_plan(optimizer: Optimizer) -> StatePlan:
    """Returns where the states of an offloaded optimizer rest, in bytes.

    Raises:
        ZpassesError: if they are not offloaded.
    """
    offload: _Offload | None = getattr(optimizer, OFFLOAD_ATTRIBUTE, None)
    if offload is None:
        raise ZpassesError(
            f"state_plan: the states of this {type(optimizer).__name__} are not offloaded. Call "
            "zpasses.offload_optimizer(optimizer) first."
        )
    return offload.plan


@dataclass(frozen=True)
class _Options:
    device_bytes: int
    bucket_bytes: int
    host_bytes: int | None


@functools.cache
def _install_hook() -> None:
    # Disabled for the compiler: a step that a program compiles runs as it is.
    step: Any = torch.compiler.disable(_step)

    def come_last(optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Global hooks run before those of an optimizer. Move its own to the end of those."""
        offload: _Offload | None = getattr(optimizer, OFFLOAD_ATTRIBUTE, None)
        if offload is not None:
            if offload.handle is not None:
                offload.handle.remove()
            offload.handle = optimizer.register_step_pre_hook(step)

    register_optimizer_step_pre_hook(torch.compiler.disable(come_last))


def _step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Nothing but the optimizer holds what is offloaded, so the host memory goes when it does.
    return getattr(optimizer, OFFLOAD_ATTRIBUTE).step(optimizer, args, kwargs)


# --- states at rest -------------------------------------------------------------------------------
class RestingState(defaultdict[Any, Any]):
    """`optimizer.state` whose values may still be on their way to the host. Looking one up waits
    for that.
    """

    on_the_way: SideStream | None = None

    def raw(self, param: Tensor) -> dict[Any, Any]:
        """Returns what the optimizer holds for a parameter, without waiting."""
        found: dict[Any, Any] = defaultdict.get(self, param) or {}
        return found

    def wait(self) -> None:
        """Make the host wait until all values are there."""
        if self.on_the_way is not None:
            self.on_the_way.synchronize()
            self.on_the_way = None

    def __reduce__(self) -> Any:
        """A copy has no hooks, so it is a plain dict of states on the device."""
        moved = (
            (param, {key: _on_device(value, param) for key, value in entries.items()})
            if isinstance(param, Tensor) and isinstance(entries, dict)
            else (param, entries)
            for param, entries in self.items()
        )
        return defaultdict, (dict,), None, None, moved


def _waits(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def call(self: RestingState, *args: Any) -> Any:
        self.wait()
        return method(self, *args)

    return call


for _name in ("__getitem__", "__iter__", "copy", "get", "items", "pop", "popitem", "values"):
    setattr(RestingState, _name, _waits(_name))


def _watched(optimizer: Optimizer) -> RestingState:
    """Returns `optimizer.state`, which torch and programs may have replaced."""
    if not isinstance(optimizer.state, RestingState):
        optimizer.state = RestingState(dict, optimizer.state)
    return optimizer.state


def _on_device(value: Any, param: Tensor) -> Any:
    """Returns a state at rest where the optimizer would have it."""
    if layout_of_value(None, value) is None:
        return value
    return _wrapped(local_part(value).to(local_part(param).device), value)


def _wrapped(local: Tensor, like: Any) -> Any:
    return compat.wrap_local(local, compat.spec_of(like)) if isinstance(like, DTensor) else local


@dataclass
class _Value:
    """A value that rests on the host."""

    layout: ValueLayout
    offset: int
    """Of the value in its bucket, in bytes."""
    host: Tensor
    rest: Any = None
    """What `optimizer.state` holds between steps: `host`, or a DTensor around it; None while the
    optimizer has no such value."""
    placed: Any = None
    """What it holds in a step."""

    def rest_like(self, value: Any) -> Any:
        """Returns what rests, once this value has been copied to `host`."""
        if self.rest is None:
            self.rest = _wrapped(self.host, value)
        return self.rest

    def view(self, slot: Tensor) -> Tensor:
        """Returns the value in a bucket on the device."""
        layout = self.layout
        part = slot.narrow(0, self.offset, layout.nbytes).view(layout.dtype)
        return part.as_strided(layout.shape, layout.stride, part.storage_offset())


@dataclass
class _Bucket:
    """Parameters whose states come and go together. They lie in the arena as on the device."""

    values: dict[Tensor, dict[Any, _Value]]
    host: Tensor
    """uint8[bytes of the bucket]: its part of the arena."""

    @classmethod
    def of(
        cls, layouts: Mapping[Tensor, Sequence[ValueLayout]], arena: HostArena, start: int
    ) -> _Bucket:
        """A bucket that begins at this byte of the arena."""
        values: dict[Tensor, dict[Any, _Value]] = {}
        end = start
        for param, own in layouts.items():
            values[param] = {}
            for each in own:
                host = arena.tensor(end, each.dtype, each.shape, each.stride)
                values[param][each.key] = _Value(each, end - start, host)
                end += each.nbytes
        return cls(values, arena.bytes.narrow(0, start, end - start))

    def exists(self) -> bool:
        """Whether one of its values is on the host."""
        return any(each.rest is not None for own in self.values.values() for each in own.values())


@dataclass(frozen=True)
class _Hidden:
    """A tensor that torch's `load_state_dict` does not see."""

    value: Tensor


def _rest(value: _Value | None) -> Any:
    return None if value is None else value.rest


# --- the step -------------------------------------------------------------------------------------
class _Offload:
    """The offloaded states of one optimizer."""

    def __init__(self, optimizer: Optimizer, options: _Options) -> None:
        self.handle: Any = None
        self._options = options
        params = [param for group in optimizer.param_groups for param in group["params"]]
        devices = {local_part(param.detach()).device for param in params}
        self._device = next(iter(devices))
        if len(devices) > 1 or self._device.type == "meta":
            raise ZpassesError(
                f"offload_optimizer: parameters are on {', '.join(map(str, devices))}; expected "
                "one device with memory. Give the parameters of each device an optimizer of their "
                "own, and call to_empty for those on meta first."
            )
        platform = platform_of(self._device.type)
        new: Callable[[], SideStream] = _SameStream if platform is None else platform.side_stream
        self._inward, self._outward = new(), new()
        self._place(optimizer)

    def _place(self, optimizer: Optimizer) -> None:
        """Decide where each state rests, and bring it there."""
        _watched(optimizer).wait()
        options, layouts = self._options, expected_layouts(optimizer)
        sizes, available = _agreed_sizes(optimizer, layouts, options)
        plan = plan_states(sizes, options.device_bytes, options.bucket_bytes)
        _check_host_memory(plan.host_bytes, available, options.host_bytes)
        params = list(layouts)
        members = [[params[at] for at in bucket] for bucket in plan.buckets]
        own = [sum(nbytes_of(layouts[param]) for param in bucket) for bucket in members]
        arena = self.arena = HostArena(sum(own), self._device)
        starts = itertools.accumulate(own, initial=0)
        self.plan = plan
        self._layouts = layouts
        self._buckets = [
            _Bucket.of({param: layouts[param] for param in bucket}, arena, start)
            for bucket, start in zip(members, starts, strict=False)
        ]
        self._values = {param: own for each in self._buckets for param, own in each.values.items()}
        self._seen: dict[Tensor, dict[Any, Any]] = {params[at]: {} for at in plan.resident}
        self._adopt(optimizer, layouts)
        log.info(
            "%s: %s of states on the host, %s on the device, and up to %s more in a step",
            type(optimizer).__name__,
            format_size(plan.host_bytes),
            format_size(plan.device_bytes),
            format_size(plan.in_flight_bytes),
        )

    # --- new values -------------------------------------------------------------------------------
    def _adopt(self, optimizer: Optimizer, params: Iterable[Tensor]) -> bool:
        """Bring values that are not where they rest there, such as those that were loaded.

        Returns:
            Whether all values of these parameters are as planned.
        """
        state = _watched(optimizer)
        for param in params:
            layouts = self._layouts.get(param)
            if layouts is None:
                return False
            moves, stays = self._values.get(param, {}), self._seen.get(param)
            entries = state.raw(param)
            for key, value in entries.items():
                if value is (stays.get(key) if stays is not None else _rest(moves.get(key))):
                    continue
                layout = layout_of_value(key, value)
                if layout is None:
                    continue
                if layout not in layouts:
                    return False
                if stays is not None:
                    entries[key] = stays[key] = _on_device(value, param)
                else:
                    state.wait()
                    moves[key].host.copy_(local_part(value))
                    entries[key] = moves[key].rest_like(value)
        return True

    def before_load(self, optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        """Hide values from `load_state_dict`, which would bring all of them to the device."""
        hidden = {
            index: {
                key: value if layout_of_value(key, value) is None else _Hidden(value)
                for key, value in entries.items()
            }
            if isinstance(entries, dict)
            else entries
            for index, entries in loaded["state"].items()
        }
        return {**loaded, "state": hidden}

    def after_load(self, optimizer: Optimizer) -> None:
        """Uncover them, in the dtypes that torch gives them. The next step brings them to rest."""
        for param, entries in optimizer.state.items():
            for key, value in entries.items() if isinstance(entries, dict) else ():
                if isinstance(value, _Hidden):
                    floats = isinstance(param, Tensor) and param.is_floating_point()
                    entries[key] = value.value.to(param.dtype) if floats else value.value
        _watched(optimizer)

    # --- one step ---------------------------------------------------------------------------------
    def step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the step of the optimizer.

        Returns:
            Arguments with which the `step` of its class has nothing left to do.
        """
        args, kwargs = _with_evaluated_closure(args, kwargs)
        groups = {
            param: number
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
            if param.grad is not None
        }
        if not self._adopt(optimizer, groups):
            self._place(optimizer)
        stepped = PartialStep(optimizer)

        def run(params: Iterable[Tensor]) -> None:
            part: dict[int, list[Tensor]] = {}
            for param in params:
                part.setdefault(groups[param], []).append(param)
            stepped.run(part, args[1:], kwargs)

        state = _watched(optimizer)
        state.on_the_way = None  # what follows waits on the device
        try:
            self._stream(state, groups, run)
        finally:
            state.on_the_way = self._outward
        stepped.finish()
        return (PartialStep(optimizer).on({}), *args[1:]), kwargs

    def _stream(
        self,
        state: RestingState,
        params: Collection[Tensor],
        run: Callable[[Iterable[Tensor]], None],
    ) -> None:
        """Step parameters whose states stay, and then the others, bucket by bucket."""
        staying = [param for param in params if param in self._seen]
        chosen = [[param for param in each.values if param in params] for each in self._buckets]
        turns = [
            _Turn(bucket, own, state)
            for bucket, own in zip(self._buckets, chosen, strict=True)
            if own
        ]
        for at in range(min(2, len(turns))):
            nbytes = max(turn.bucket.host.numel() for turn in turns[at::2])
            slot = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            for turn in turns[at::2]:
                turn.slot = slot
        self._inward.follow_current()  # earlier work may have used the memory of the slots
        self._inward.run(self._outward.record().wait)  # of the step before
        steps = 0
        try:
            self._fetch(turns, 0)
            if staying or not turns:
                run(staying)
            for at, turn in enumerate(turns):
                steps = at + 1
                self._fetch(turns, at + 1)
                turn.come()
                try:
                    run(turn.params)
                finally:
                    turn.go()
                    self._outward.follow_current()
                    self._outward.run(turn.copy_out)
                    turn.gone = self._outward.record()
        except BaseException:
            log.warning(
                "an optimizer's step raised in part %d of %d. Parameters of earlier parts have "
                "stepped, those of this one as far as it came, and others have not. All states are "
                "on the host as they were left; gradients are as they were.",
                steps + bool(staying),
                len(turns) + bool(staying),
            )
            raise
        finally:
            for turn in turns[:2]:
                self._inward.keep(turn.slot)
                self._outward.keep(turn.slot)

    def _fetch(self, turns: Sequence[_Turn], at: int) -> None:
        """Start to bring a bucket in, once the one before it in the same memory has gone out."""
        if at >= len(turns):
            return
        turn, free = turns[at], turns[at - 2].gone if at >= 2 else None
        if turn.bucket.exists():
            if free is not None:
                self._inward.run(free.wait)
            self._inward.run(turn.copy_in)
            free = self._inward.record()
        turn.ready = free


@dataclass
class _Turn:
    """A bucket in one step."""

    bucket: _Bucket
    params: list[Tensor]
    """Those that step."""
    state: RestingState
    slot: Tensor = field(init=False)
    """uint8, at least as long as the bucket, on the device."""
    ready: Any = None
    """The event after which the current stream may use the slot."""
    gone: Any = None
    """The event after which the slot is free again."""

    def copy_in(self) -> None:
        self._part().copy_(self.bucket.host, non_blocking=True)

    def copy_out(self) -> None:
        self.bucket.host.copy_(self._part(), non_blocking=True)

    def _part(self) -> Tensor:
        return self.slot.narrow(0, 0, self.bucket.host.numel())

    def come(self) -> None:
        """Give the optimizer its states on the device."""
        if self.ready is not None:
            self.ready.wait()
        for entries, key, value in self._values():
            if value.rest is not None and entries.get(key) is value.rest:
                entries[key] = value.placed = _wrapped(value.view(self.slot), value.rest)

    def go(self) -> None:
        """Put what the optimizer holds after the step into the slot, and give it the host tensors.

        A value with another layout than planned stays; the next step plans again.
        """
        for entries, key, value in self._values():
            found = entries.get(key)
            if found is None or found is not value.placed:
                if layout_of_value(key, found) != value.layout:
                    continue
                there, local = value.view(self.slot), local_part(found)
                if local.data_ptr() != there.data_ptr():
                    there.copy_(local)
            entries[key], value.placed = value.rest_like(found), None

    def _values(self) -> Iterator[tuple[dict[Any, Any], Any, _Value]]:
        for param in self.params:
            entries = self.state.raw(param)
            for key, value in self.bucket.values[param].items():
                yield entries, key, value


class _SameStream:
    """The streams of a device that has no others: what it is given is done when it returns."""

    handle = 0

    def follow_current(self) -> None: ...

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def run(self, work: Callable[[], Any]) -> None:
        work()

    def record(self) -> _SameStream:
        return self

    def wait(self) -> None: ...

    def keep(self, tensor: Tensor) -> None: ...

    def synchronize(self) -> None: ...


def _with_evaluated_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure of a step once, and hand on what it returned."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return args, kwargs
    with torch.enable_grad():
        loss = closure()

    def known() -> Any:
        return loss

    if len(args) > 1:
        return (args[0], known, *args[2:]), kwargs
    return args, {**kwargs, "closure": known}


# --- what ranks agree on --------------------------------------------------------------------------
def _agreed_sizes(
    optimizer: Optimizer, layouts: Mapping[Tensor, Sequence[ValueLayout]], options: _Options
) -> tuple[list[int], int]:
    """Returns the bytes of each parameter's states on the rank that holds most of them, so that all
    ranks have the same buckets, and the least share of host memory of a rank.
    """
    groups = {
        group
        for param in layouts
        if isinstance(param, DTensor) and is_sharded_parameter(param)
        for group in layout_of(param).sharding_groups
    }
    free = device_memory.free_bytes(torch.device("cpu"))
    agreed: dict[str, Any] = {
        "what": [type(optimizer).__name__, len(layouts), *astuple(options)],
        "sizes": [nbytes_of(each) for each in layouts.values()],
        "available": sys.maxsize if free is None else free // local_ranks(),
        "error": None,
    }
    for group in sorted(groups):
        agreed = exchange(group, "the states of an optimizer to offload", agreed, merge=_merged)
    if agreed["error"] is not None:
        raise ZpassesError(agreed["error"])
    return agreed["sizes"], agreed["available"]


def _merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = answers[0]
    error = next((each["error"] for each in answers if each["error"] is not None), None)
    other = next((each["what"] for each in answers if each["what"] != first["what"]), None)
    if error is not None or other is not None:
        return {
            **first,
            "error": error
            or f"offload_optimizer: ranks differ in the optimizer, the number of its parameters, "
            f"device_bytes, bucket_bytes or host_bytes: {first['what']} on one rank, {other} on "
            "another. Call it alike on every rank.",
        }
    sizes = [max(each) for each in zip(*(each["sizes"] for each in answers), strict=True)]
    return {**first, "sizes": sizes, "available": min(each["available"] for each in answers)}


def _check_host_memory(needed: int, available: int, given: int | None) -> None:
    least = available if given is None else min(given, available)
    if needed and (needed > least or (given is not None and given > available)):
        raise MemoryBudgetError(
            f"offload_optimizer: the states that do not stay on the device need "
            f"{format_size(needed)} of host memory on a rank. Given: host_bytes="
            f"{'None' if given is None else format_size(given)}. Available: "
            f"{format_size(available)}, the least share of a rank in what its machine has free. "
            "Let more states stay (device_bytes), shard over more ranks, or give a budget that the "
            "machine has."
        )
