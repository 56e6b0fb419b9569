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

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from zpasses import compat
from zpasses.cost.memory import device_memory
from zpasses.errors import OptionError, ZpassesError
from zpasses.graph.queries import nbytes
from zpasses.host.host_arena import HostArena
from zpasses.optim.expected_states import expected_layouts
from zpasses.optim.offload_budget import (
    AgreedSizes,
    OffloadOptions,
    agreed_sizes,
    check_host_memory,
    sharding_groups_of,
)
from zpasses.optim.resting_state import (
    Bucket,
    RestingState,
    SameStream,
    StateValue,
    Turn,
    on_device,
    watched,
)
from zpasses.optim.state_buckets import (
    DEFAULT_BUCKET,
    StatePlan,
    ValueLayout,
    in_parts,
    layout_of_value,
    nbytes_of,
    plan_states,
    plan_states_beside,
)
from zpasses.option_values import format_size
from zpasses.ranks.failures import report_failure
from zpasses.runtime.free_memory import planned_peak_bytes, usable_bytes
from zpasses.runtime.offloaded import OFFLOAD_ATTRIBUTE, device_of_shard, is_offloaded
from zpasses.runtime.partial_step import PartialStep
from zpasses.runtime.platform import SideStream, platform_of
from zpasses.runtime.step_hook import EARLY_ATTRIBUTE, install_step_hook, with_evaluated_closure

log = logging.getLogger("zpasses")

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def offload_optimizer(
    optimizer: O,
    *,
    device_bytes: str = "0B",
    bucket_bytes: str = DEFAULT_BUCKET,
    host_bytes: str | None = None,
) -> O:
    """Let the states of an optimizer rest on the host, in place, and return the optimizer.

    `optimizer.step()` brings them to the device bucket by bucket, steps there, and sends them back
    while the program goes on. The results have the same bits. State dicts, checkpoints, schedulers,
    gradient scaling, clipping and hooks work as before; `optimizer.state` holds host tensors. Call
    it on every rank, before or after the first step. On CPUs, the host is another allocation.

    It serves optimizers that step each parameter by itself, from state that they hold for it. Two
    small parameters step on trial, together and one after the other, to see that. What has no
    dimensions, such as counts of steps, stays where the optimizer makes it. So do values that are
    not plain tensors, such as quantized ones. Copies of the optimizer (`copy.deepcopy`, `pickle`)
    have their states on the device.

    With `device_bytes="auto"`, as many states stay as fit. That is decided in the first step, when
    the step's graphs are compiled and gradients exist: of 90 % of the memory that is free then, the
    largest planned peak of the graphs is left free, or what the process has taken at a time, if
    torch counts it, and the buckets in flight. The rank with the least decides. Until then, states
    are where they were. Call it again to decide again in the next step, or to give a size.

    Args:
        optimizer: the optimizer, whose parameters have their final device and are sharded.
        device_bytes: how many bytes of states stay on the device, on each rank, or "auto".
        bucket_bytes: bytes of the states that come and go together. Two buckets are on the device
            at a time, and three in the step that makes the states. A parameter whose states are
            larger has a bucket of its own.
        host_bytes: the most that a rank may take of the host; None allows its share of what the
            machine has available. The memory is taken at once, or when "auto" has decided, and
            locked for accelerators.

    Raises:
        MemoryBudgetError: on every rank, if the host memory of one of them does not suffice. When
            parameters were added to the optimizer, its next step raises it, and with "auto" the
            first one.
        ZpassesError: for an optimizer that cannot be offloaded, if ranks give other options, or for
            "auto" on a device whose free memory torch cannot tell.
        OptionError: for an option that is no size.
        AgreementError: if another rank does not call it in time.
    """
    options = OffloadOptions.parse(
        "offload_optimizer", "states", device_bytes, host_bytes, bucket_bytes, may_be_auto=True
    )
    if options.bucket_bytes < 1:
        raise OptionError(
            f"offload_optimizer, bucket_bytes: got {bucket_bytes!r}; expected the bytes of states "
            f"that travel together, such as {DEFAULT_BUCKET!r}."
        )
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, compat.STEP_HOOKS[0]):
        raise ZpassesError(
            f"offload_optimizer: got {type(optimizer).__name__}; expected a torch.optim.Optimizer. "
            "Pass the optimizer itself, before a trainer wraps it."
        )
    if is_offloaded(optimizer):
        getattr(optimizer, OFFLOAD_ATTRIBUTE).begin(optimizer, options)
        return optimizer
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ZpassesError("offload_optimizer: differentiable=True needs all states on the device.")
    if hasattr(optimizer, EARLY_ATTRIBUTE):
        raise ZpassesError(
            "offload_optimizer: parameters of this optimizer step in backward "
            "(zpasses.step_in_backward), and states come from the host when step() is called. Use "
            "one of the two."
        )
    offload = _Offload(optimizer, options)
    offload.begin(optimizer, options)
    setattr(optimizer, OFFLOAD_ATTRIBUTE, offload)
    optimizer.register_load_state_dict_pre_hook(offload.before_load)
    optimizer.register_load_state_dict_post_hook(offload.after_load)
    install_step_hook()
    return optimizer


def state_plan(optimizer: Optimizer) -> StatePlan:
    """Returns where the states of an offloaded optimizer rest, in bytes.

    Raises:
        ZpassesError: if they are not offloaded, or no step has decided yet (`device_bytes="auto"`).
    """
    offload: _Offload | None = getattr(optimizer, OFFLOAD_ATTRIBUTE, None)
    if offload is None:
        raise ZpassesError(
            f"state_plan: the states of this {type(optimizer).__name__} are not offloaded. Call "
            "zpasses.offload_optimizer(optimizer) first."
        )
    if offload.plan is None:
        raise ZpassesError(
            "state_plan: with device_bytes='auto', the first step decides which states stay. Ask "
            "after optimizer.step()."
        )
    return offload.plan


@dataclass(frozen=True)
class _Hidden:
    """A tensor that torch's `load_state_dict` does not see."""

    value: Tensor


def _rest(value: StateValue | None) -> Any:
    return None if value is None else value.rest


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _riding_bytes(params: Iterable[Tensor]) -> list[int]:
    """Returns the bytes that come with the states of each parameter: those that rest on the host,
    and their gradients.
    """
    return [
        2 * nbytes(compat.local_part(param)) if device_of_shard(param) is not None else 0
        for param in params
    ]


# --- the step -------------------------------------------------------------------------------------
class _Offload:
    """The offloaded states of one optimizer."""

    def __init__(self, optimizer: Optimizer, options: OffloadOptions) -> None:
        self._options = options
        params = _params_of(optimizer)
        trained = [param for param in params if param.requires_grad] or params
        devices = {
            device_of_shard(param) or compat.local_part(param.detach()).device for param in trained
        }
        self._device = next(iter(devices))
        if len(devices) > 1 or self._device.type == "meta":
            raise ZpassesError(
                f"offload_optimizer: parameters are on {', '.join(map(str, devices))}; expected "
                "one device with memory. Give the parameters of each device an optimizer of their "
                "own, and call to_empty for those on meta first."
            )
        platform = platform_of(self._device.type)
        new: Callable[[], SideStream] = SameStream if platform is None else platform.side_stream
        self._inward, self._outward = new(), new()
        self.plan: StatePlan | None = None
        self._layouts: Mapping[Tensor, Sequence[ValueLayout]] = {}
        self._buckets: list[Bucket] = []
        self._values: dict[Tensor, dict[Any, StateValue]] = {}
        self._seen: dict[Tensor, dict[Any, Any]] = {}
        self._staying: list[list[Tensor]] = []
        """The keys of `_seen`, in parts of the size of a bucket: a step needs memory for values of
        its own."""
        self._largest_peak: int | None = None
        """The peak of forward and backward above which the states that stay do not fit; None if
        they were not chosen for a peak."""

    def begin(self, optimizer: Optimizer, options: OffloadOptions) -> None:
        """Decide where states rest; with "auto", the next step does."""
        before, self._options = self._options, options
        try:
            if options.device_bytes != "auto":
                self._place(optimizer)
            else:
                self._agreed(optimizer)  # now, so that what is refused is refused here
                self._layouts = {}
        except BaseException:
            self._options = before
            raise

    def _agreed(
        self, optimizer: Optimizer
    ) -> tuple[Mapping[Tensor, Sequence[ValueLayout]], AgreedSizes]:
        """Returns what the optimizer holds for its parameters, and what ranks decide from."""
        layouts: Mapping[Tensor, Sequence[ValueLayout]] = {}
        self._usable, room, failure = 0, 0, None
        try:
            layouts = expected_layouts(optimizer)
            if self._options.device_bytes == "auto":
                there = self._bytes_on_device(watched(optimizer), layouts)
                self._usable = usable_bytes(self._device, "device_bytes", there)
                room = self._usable - max(
                    planned_peak_bytes(), device_memory.fallen_bytes(self._device)
                )
        except Exception as raised:
            failure = raised
        error = None if failure is None else f"{type(failure).__name__}: {failure}"
        if isinstance(failure, (OptionError, ZpassesError)):
            error = str(failure)
        groups = sharding_groups_of(_params_of(optimizer))
        sizes, owner = [nbytes_of(each) for each in layouts.values()], type(optimizer).__name__
        riding = _riding_bytes(layouts)
        held = sum(each.host.numel() for each in self._buckets)
        try:
            return layouts, agreed_sizes(
                groups, self._options, owner, sizes, error, riding, room, self._usable, held
            )
        except ZpassesError as told:
            if failure is None:
                raise
            raise told from failure

    def _bytes_on_device(self, state: RestingState, params: Iterable[Tensor]) -> int:
        return sum(
            layout.nbytes
            for param in params
            for key, value in state.raw(param).items()
            if (layout := layout_of_value(key, value)) is not None
            and value is not _rest(self._values.get(param, {}).get(key))
            and compat.local_part(value).device == self._device
        )

    def _planned(self, agreed: AgreedSizes) -> StatePlan:
        options, self._largest_peak = self._options, None
        if options.device_bytes != "auto":
            return plan_states(
                agreed.sizes, options.device_bytes, options.bucket_bytes, agreed.more
            )
        plan = plan_states_beside(
            agreed.sizes, agreed.room_bytes, agreed.usable_bytes, options.bucket_bytes, agreed.more
        )
        if plan is None:
            plan = plan_states(agreed.sizes, 0, options.bucket_bytes, agreed.more)
            room = agreed.room_bytes
            log.warning(
                "offload_optimizer: all states rest on the host, and a step still exceeds what is "
                "free. Beside forward and backward, %s are %s, and buckets of states take %s. Give "
                "a smaller bucket_bytes than %s, memory_budget or batch.",
                format_size(abs(room)),
                "left" if room >= 0 else "missing",
                format_size(plan.in_flight_bytes),
                format_size(options.bucket_bytes),
            )
        if plan.device_bytes:
            left = self._usable - plan.device_bytes - plan.in_flight_bytes
            self._largest_peak = max(left, planned_peak_bytes())
        return plan

    def _warn_of_larger_peak(self) -> None:
        peak = planned_peak_bytes()
        if self._largest_peak is None or peak <= self._largest_peak:
            return
        log.warning(
            "offload_optimizer: a graph that was compiled after device_bytes='auto' was decided "
            "plans to take %s above what rests, and the states on the device leave %s. Call "
            "zpasses.offload_optimizer(optimizer, device_bytes='auto') again on every rank: its "
            "next step decides again.",
            format_size(peak),
            format_size(self._largest_peak),
        )
        self._largest_peak = peak

    def _place(self, optimizer: Optimizer) -> None:
        """Decide where each state rests, and bring it there."""
        watched(optimizer)
        self._outward.synchronize()
        layouts, agreed = self._agreed(optimizer)
        plan = self._planned(agreed)
        check_host_memory(self._options, plan.host_bytes, agreed.available_bytes)
        try:
            self._move(optimizer, plan, agreed.sizes, layouts)
        except (OSError, RuntimeError) as raised:
            groups = sharding_groups_of(_params_of(optimizer))
            report_failure(groups, raised, "offloading states")
            raise
        self.plan, self._layouts = plan, layouts
        log.info(
            "%s: %s of states on the host, %s on the device, and up to %s more in a step",
            type(optimizer).__name__,
            format_size(plan.host_bytes),
            format_size(plan.device_bytes),
            format_size(plan.in_flight_bytes),
        )

    def _move(
        self,
        optimizer: Optimizer,
        plan: StatePlan,
        sizes: Sequence[int],
        layouts: Mapping[Tensor, Sequence[ValueLayout]],
    ) -> None:
        """Bring states where a plan has them.

        Each bucket has memory of its own, which is freed when the last of its values has moved. So
        a move takes little more of the host than the larger of the two plans, and states leave the
        device before others come. If it fails, the optimizer has all states where they are then,
        and the next step places them again.
        """
        self.plan, self._layouts = None, {}
        self._buckets, self._values, self._seen = [], {}, {}
        params = list(layouts)
        for positions in plan.buckets:
            own = {params[at]: layouts[params[at]] for at in positions}
            arena = HostArena(sum(map(nbytes_of, own.values())), self._device)
            self._buckets.append(bucket := Bucket.of(own, arena))
            self._values |= bucket.values
            self._adopt(optimizer, own, layouts)
        self._seen = {params[at]: {} for at in plan.resident}
        if self._device.type == "cpu":  # nothing else takes values out of earlier buckets there
            for param in self._seen:
                entries = watched(optimizer).raw(param)
                for key, value in entries.items():
                    entries[key] = on_device(value, param, copy=True)
        self._adopt(optimizer, self._seen, layouts)
        parts = in_parts(sizes, plan.resident, self._options.bucket_bytes)
        self._staying = [[params[at] for at in part] for part in parts]

    # --- new values -------------------------------------------------------------------------------
    def _adopt(
        self,
        optimizer: Optimizer,
        params: Iterable[Tensor],
        expected: Mapping[Tensor, Sequence[ValueLayout]],
    ) -> bool:
        """Bring values that are not where they rest there, such as those that were loaded.

        Args:
            expected: what the optimizer holds for its parameters.

        Returns:
            Whether all values of these parameters are as planned.
        """
        state = watched(optimizer)
        for param in params:
            layouts = expected.get(param)
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
                    entries[key] = stays[key] = on_device(value, param)
                else:
                    self._outward.synchronize()
                    moves[key].host.copy_(compat.local_part(value))
                    entries[key] = moves[key].rest_like(value)
        return True

    def before_load(self, optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        """Hide values from `load_state_dict`, which would bring all of them to the device."""
        watched(optimizer).wait()  # they may be values of this optimizer

        def hide(entries: Any) -> Any:
            if not isinstance(entries, dict):
                return entries
            return {
                key: value if layout_of_value(key, value) is None else _Hidden(value)
                for key, value in entries.items()
            }

        return {**loaded, "state": {key: hide(value) for key, value in loaded["state"].items()}}

    def after_load(self, optimizer: Optimizer) -> None:
        """Uncover them, in the dtypes that torch gives them. The next step brings them to rest."""
        for param, entries in optimizer.state.items():
            for key, value in entries.items() if isinstance(entries, dict) else ():
                if isinstance(value, _Hidden):
                    floats = isinstance(param, Tensor) and param.is_floating_point()
                    entries[key] = value.value.to(param.dtype) if floats else value.value
        watched(optimizer)

    # --- one step ---------------------------------------------------------------------------------
    def step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the step of the optimizer.

        Returns:
            Arguments with which the `step` of its class has nothing left to do.
        """
        args, kwargs = with_evaluated_closure(args, kwargs)
        groups: dict[Tensor, int] = {
            param: number
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
            if param.grad is not None
        }
        if not self._adopt(optimizer, groups, self._layouts):
            self._place(optimizer)
        self._warn_of_larger_peak()
        stepped = PartialStep(optimizer)

        def run(params: Iterable[Tensor]) -> None:
            part: dict[int, list[Tensor]] = {}
            for param in params:
                part.setdefault(groups[param], []).append(param)
            stepped.run(part, args[1:], kwargs)

        state = watched(optimizer)
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
        staying = [own for each in self._staying if (own := [p for p in each if p in params])]
        chosen = [[param for param in each.values if param in params] for each in self._buckets]
        turns = [
            Turn(bucket, own, state)
            for bucket, own in zip(self._buckets, chosen, strict=True)
            if own
        ]
        for at in range(min(2, len(turns))):
            nbytes = max(turn.nbytes for turn in turns[at::2])
            slot = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            for turn in turns[at::2]:
                turn.slot = slot
        self._inward.follow_current()  # earlier work may have used the memory of the slots
        self._inward.run(self._outward.record().wait)  # of the step before
        part = 0
        try:
            self._fetch(turns, 0)
            for own in staying or ([] if turns else [[]]):
                part += 1
                run(own)
            for at, turn in enumerate(turns):
                part += 1
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
                "at rest as they were left, so a state dict has them.",
                part,
                len(staying) + len(turns),
            )
            raise
        finally:
            for turn in turns[:2]:
                self._inward.keep(turn.slot)
                self._outward.keep(turn.slot)
            if any(turn.riders for turn in turns):
                self._outward.synchronize()  # nothing else waits before it reads a parameter

    def _fetch(self, turns: Sequence[Turn], at: int) -> None:
        """Start to bring a bucket in, once the one before it in the same memory has gone out."""
        if at >= len(turns):
            return
        turn, free = turns[at], turns[at - 2].gone if at >= 2 else None
        if turn.brings():
            if free is not None:
                self._inward.run(free.wait)
            self._inward.run(turn.copy_in)
            free = self._inward.record()
        turn.ready = free
