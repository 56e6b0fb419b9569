"""States of an optimizer that rest on the host, and their turn on the device."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zpasses import compat
from zpasses.host.host_arena import HostArena
from zpasses.optim.state_buckets import ValueLayout, layout_of_value
from zpasses.runtime.offloaded import device_of_shard
from zpasses.runtime.platform import SideStream


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
            (param, {key: on_device(value, param) for key, value in entries.items()})
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


def watched(optimizer: Optimizer) -> RestingState:
    """Returns `optimizer.state`, which torch and programs may have replaced."""
    if not isinstance(optimizer.state, RestingState):
        optimizer.state = RestingState(dict, optimizer.state)
    return optimizer.state


def on_device(value: Any, param: Tensor, *, copy: bool = False) -> Any:
    """Returns a state at rest where the optimizer would have it.

    Args:
        copy: whether a value that is there is copied, too.
    """
    if layout_of_value(None, value) is None:
        return value
    device = compat.local_part(param).device
    return wrapped(compat.local_part(value).to(device, copy=copy), value)


def wrapped(local: Tensor, like: Any) -> Any:
    return compat.wrap_local(local, compat.spec_of(like)) if isinstance(like, DTensor) else local


@dataclass
class StateValue:
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
            self.rest = wrapped(self.host, value)
        return self.rest

    def view(self, slot: Tensor) -> Tensor:
        """Returns the value in a bucket on the device."""
        return part_of(slot, self.offset, self.layout)


@dataclass
class Bucket:
    """Parameters whose states come and go together, in memory of its own."""

    values: dict[Tensor, dict[Any, StateValue]]
    host: Tensor
    """uint8[bytes of the bucket]: its memory, laid out as on the device."""

    @classmethod
    def of(cls, layouts: Mapping[Tensor, Sequence[ValueLayout]], arena: HostArena) -> Bucket:
        """A bucket that fills this arena."""
        values: dict[Tensor, dict[Any, StateValue]] = {}
        end = 0
        for param, own in layouts.items():
            values[param] = {}
            for each in own:
                host = arena.tensor(end, each.dtype, each.shape, each.stride)
                values[param][each.key] = StateValue(each, end, host)
                end += each.nbytes
        return cls(values, arena.bytes.narrow(0, 0, end))

    def exists(self) -> bool:
        """Whether one of its values is on the host."""
        return any(each.rest is not None for own in self.values.values() for each in own.values())


@dataclass
class Rider:
    """A shard of a parameter on the host, or of its gradient, which comes with the states."""

    owner: DTensor
    host: Tensor
    layout: ValueLayout
    offset: int
    """In the slot, in bytes."""
    returns: bool
    """Whether it is copied back. The step leaves gradients as they are."""

    def copy_in(self, slot: Tensor) -> None:
        part_of(slot, self.offset, self.layout).copy_(self.host, non_blocking=True)

    def copy_out(self, slot: Tensor) -> None:
        if self.returns:
            self.host.copy_(part_of(slot, self.offset, self.layout), non_blocking=True)

    def come(self, slot: Tensor) -> None:
        compat.swap_local(self.owner, part_of(slot, self.offset, self.layout))

    def go(self) -> None:
        compat.swap_local(self.owner, self.host)


def riders_of(params: Iterable[Tensor], offset: int) -> list[Rider]:
    """Returns what comes with the states of these parameters, from this byte of the slot on."""
    riders = []
    for param in params:
        for owner in (param, param.grad) if device_of_shard(param) is not None else ():
            if not isinstance(owner, DTensor):
                continue
            host = compat.local_of(owner)
            layout = layout_of_value(None, host) or layout_of_value(None, host.contiguous())
            if layout is not None:
                riders.append(Rider(owner, host, layout, offset, owner is param))
                offset += layout.nbytes
    return riders


def part_of(slot: Tensor, offset: int, layout: ValueLayout) -> Tensor:
    """Returns a value in a slot."""
    part = slot.narrow(0, offset, layout.nbytes).view(layout.dtype)
    return part.as_strided(layout.shape, layout.stride, part.storage_offset())


@dataclass
class Turn:
    """A bucket in one step."""

    bucket: Bucket
    params: list[Tensor]
    """Those that step."""
    state: RestingState
    riders: list[Rider] = field(init=False)
    slot: Tensor = field(init=False)
    """uint8, at least `nbytes`, on the device."""
    ready: Any = None
    """The event after which the current stream may use the slot."""
    gone: Any = None
    """The event after which the slot is free again."""

    def __post_init__(self) -> None:
        self.riders = riders_of(self.params, self.bucket.host.numel())

    @property
    def nbytes(self) -> int:
        """Bytes of the states, and of what comes with them."""
        return self.bucket.host.numel() + sum(each.layout.nbytes for each in self.riders)

    def brings(self) -> bool:
        """Whether something comes in."""
        return bool(self.riders) or self.bucket.exists()

    def copy_in(self) -> None:
        self._part().copy_(self.bucket.host, non_blocking=True)
        for each in self.riders:
            each.copy_in(self.slot)

    def copy_out(self) -> None:
        self.bucket.host.copy_(self._part(), non_blocking=True)
        for each in self.riders:
            each.copy_out(self.slot)

    def _part(self) -> Tensor:
        return self.slot.narrow(0, 0, self.bucket.host.numel())

    def come(self) -> None:
        """Give the optimizer its states on the device."""
        if self.ready is not None:
            self.ready.wait()
        for entries, key, value in self._values():
            if value.rest is not None and entries.get(key) is value.rest:
                entries[key] = value.placed = wrapped(value.view(self.slot), value.rest)
        for each in self.riders:
            each.come(self.slot)

    def go(self) -> None:
        """Put what the optimizer holds after the step into the slot, and give it the host tensors.

        A value with another layout than planned stays; the next step plans again.
        """
        for entries, key, value in self._values():
            found = entries.get(key)
            if found is None or found is not value.placed:
                if layout_of_value(key, found) != value.layout:
                    continue
                there, local = value.view(self.slot), compat.local_part(found)
                if local.data_ptr() != there.data_ptr():
                    there.copy_(local)
            entries[key], value.placed = value.rest_like(found), None
        for each in self.riders:
            each.go()

    def _values(self) -> Iterator[tuple[dict[Any, Any], Any, StateValue]]:
        for param in self.params:
            entries = self.state.raw(param)
            for key, value in self.bucket.values[param].items():
                yield entries, key, value


class SameStream:
    """The streams of a device that has no others: what it is given is done when it returns."""

    handle = 0

    def follow_current(self) -> None: ...

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def run(self, work: Callable[[], Any]) -> None:
        work()

    def record(self) -> SameStream:
        return self

    def wait(self) -> None: ...

    def keep(self, tensor: Tensor) -> None: ...

    def synchronize(self) -> None: ...
