"""A simulated asynchronous device on CPU tensors: code that runs inside of it only enqueues work.

    device = SimulatedDevice()
    x = device.put(torch.ones(4))
    with device:
        y = x * 2                         # enqueued on the current stream; y holds NaN so far
        side = device.stream("side")
        side.follow_current()
        side.run(lambda: out.copy_(y))    # asynchronous to what follows
        event = side.record()
        event.wait()                      # the current stream waits, and the host does not
    device.returns([out])
    assert device.schedule.first_difference(seeds=50) is None

Memory is freed when the host drops its last reference, as by a caching allocator. It is then
overwritten with NaN, and given to later operators, in the order of the stream that allocated it,
unless `SimulatedStream.keep` delays that. Uninitialised memory holds NaN, too. Nothing runs while
code is recorded: afterwards, `StreamSchedule.run(seed)` runs everything in an order that the seed
draws.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from zpasses import compat
from zpasses.graph.aliases import shared_arguments, written_arguments
from zpasses.graph.queries import WAIT
from zpasses.graph.verifier.operators import is_factory_of_uninitialised
from zpasses.simulate.simulator import SimulationError
from zpasses.testing.stream_schedule import Point, StreamSchedule

COMPUTE = "compute"

Operator = Callable[["SimulatedDevice", Sequence[Any], Mapping[str, Any]], Any]
"""A simulated operator: (device, args, kwargs) -> what the host gets back at once."""


def poison(tensor: Tensor) -> None:
    """Overwrites memory as whoever gets it next does: NaN, and large numbers for integers."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(_POISON)


_POISON = 0x55


@dataclass(eq=False)
class _Block:
    """Memory of the device, which tasks use, apart from the storage that the host holds."""

    raw: Tensor
    """uint8[bytes]."""
    typed: Tensor
    """The whole memory in the dtype in which it was allocated."""
    freed: Callable[[], bool]
    stream: str
    keepers: list[str] = field(default_factory=list)
    """Streams of `SimulatedStream.keep`."""


class SimulatedEvent:
    """What `SimulatedStream.record` returns, in place of `torch.cuda.Event`."""

    def __init__(self, device: SimulatedDevice, point: Point) -> None:
        self._device, self._point = device, point

    def wait(self) -> None:
        """Makes the current stream wait for what the event's stream was given before it."""
        self._device.follow(self._device.current, self._point)


class SimulatedStream:
    """A stream, with the interface of `zpasses.runtime.platform.SideStream`."""

    _handles = itertools.count(1)
    _by_handle: dict[int, SimulatedStream] = {}

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.name, self._device, self.handle = name, device, next(SimulatedStream._handles)
        SimulatedStream._by_handle[self.handle] = self

    @classmethod
    def of(cls, handle: int) -> SimulatedStream:
        return cls._by_handle[handle]

    def follow_current(self) -> None:
        device = self._device
        device.follow(self.name, device.schedule.now((device.rank, device.current)))

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        with self._device.on(self.name):
            return self._device.allocate((nbytes,), (1,), torch.uint8)

    def run(self, work: Callable[[], Any]) -> None:
        with self._device.on(self.name):
            work()

    def record(self) -> SimulatedEvent:
        device = self._device
        return SimulatedEvent(device, device.schedule.now((device.rank, self.name)))

    def keep(self, tensor: Tensor) -> None:
        """Delays the reuse of memory after it is freed until this stream has done what it was given
        by then.
        """
        self._device.block_of(tensor).keepers.append(self.name)

    def synchronize(self) -> None:
        """Makes the host wait: what it enqueues afterwards, on any stream, starts after that."""
        self._device.barrier(self.record()._point)


class SimulatedDevice(compat.TorchDispatchMode):
    """One rank's device.

    Args:
        rank: the rank whose code is recorded.
        schedule: holds the tasks of all ranks; None makes one for this rank.
        operators: simulated operators, which replace those of the same name.
    """

    def __init__(
        self,
        rank: int = 0,
        schedule: StreamSchedule | None = None,
        operators: Callable[[Any], Operator | None] = lambda target: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rank, self.schedule = rank, StreamSchedule() if schedule is None else schedule
        self.current, self.label = COMPUTE, ""
        self._operators = operators
        self._blocks: dict[int, _Block] = {}
        self._streams: dict[str, SimulatedStream] = {}
        self._reuses = 0
        self._reusable: dict[tuple[str, int], list[Tensor]] = {}

    # --- streams ----------------------------------------------------------------------------------
    def stream(self, name: str) -> SimulatedStream:
        """Returns the stream of a name."""
        return self._streams.setdefault(name, SimulatedStream(self, name))

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Inside, operators are enqueued on this stream."""
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    def follow(self, name: str, point: Point) -> None:
        """What the stream is given from now on starts after a point of another stream."""
        if point.stream != (self.rank, name):
            self.schedule.add((self.rank, name), "wait", lambda: None, (), [point])

    def barrier(self, point: Point) -> None:
        """What any stream of this rank is given from now on starts after a point."""
        self.stream(COMPUTE)
        for name in {*self._streams, *(name for _, name in self.schedule.streams)}:
            self.follow(name, point)

    def enqueue(
        self,
        run: Callable[[], object],
        touches: Sequence[Tensor] = (),
        *,
        label: str = "",
        is_ready: Callable[[], bool] = lambda: True,
    ) -> Point:
        """Enqueues work on the current stream. `touches` is what it reads and writes, as `memory`
        returns it.
        """
        where = (self.rank, self.current)
        return self.schedule.add(where, self.label or label, run, touches, (), is_ready)

    # --- memory -----------------------------------------------------------------------------------
    def put(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a host tensor in the device's memory."""
        with compat.no_dispatch_modes():
            copied = self.allocate(tensor.shape, tensor.stride(), tensor.dtype)
            block = self.block_of(copied)
            content = torch.zeros_like(block.raw)
            _as(content, copied).copy_(tensor.detach())
            self.schedule.add_memory(block.raw, content)
        return copied

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns uninitialised memory for use on the current stream."""
        with compat.no_dispatch_modes():
            last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            count = max(0 if 0 in size else last + 1, 1)
            reusable = self._reusable.get((self.current, count * dtype.itemsize))
            raw = reusable.pop() if reusable else self._new_memory(count, dtype)
            typed, given = raw.view(dtype), from_dlpack(raw)
            held = torch.empty(0, dtype=dtype).set_(given.untyped_storage(), 0, size, stride)
            freed = compat.storage_freed_check(held)
            self._blocks[held.untyped_storage().data_ptr()] = _Block(
                raw, typed, freed, self.current
            )
            return held

    def _new_memory(self, count: int, dtype: torch.dtype) -> Tensor:
        raw = torch.zeros(count * dtype.itemsize, dtype=torch.uint8)
        poison(raw.view(dtype))
        self.schedule.add_memory(raw, raw.clone())
        return raw

    def block_of(self, tensor: Tensor) -> _Block:
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is None:
            raise SimulationError(
                f"{self.label or 'an operator'} uses a tensor {list(tensor.shape)} that is not in "
                "the memory of the simulated device; pass it through SimulatedDevice.put."
            )
        return block

    def memory(self, value: Any) -> Any:
        """Replaces tensors by tensors over the same memory that do not count as references of the
        host. Constants of the host stay as they are.
        """

        def replace(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            block = self._blocks.get(each.untyped_storage().data_ptr())
            return each.detach() if block is None else _as(block.raw, each)

        with compat.no_dispatch_modes():
            return compat.pytree.tree_map(replace, value)

    def collect_freed(self) -> None:
        """Enqueues the reuse of the memory that the host has freed since the last call."""
        freed = [(at, block) for at, block in self._blocks.items() if block.freed()]
        for at, block in freed:
            del self._blocks[at]
            label = f"reuse of memory freed before {self.label or 'the next operator'}"
            stream, after = (self.rank, block.stream), list[Point]()
            if block.keepers:
                # The allocator waits, and not the stream that would reuse the memory.
                names = (block.stream, *block.keepers)
                after = [self.schedule.now((self.rank, name)) for name in names]
                stream = (self.rank, f"allocator, reuse {self._reuses}")
                self._reuses += 1
            else:
                self._reusable.setdefault((block.stream, block.raw.numel()), []).append(block.raw)
            run = functools.partial(poison, block.typed)
            self.schedule.add(stream, label, run, [block.typed], after)

    # --- the caller -------------------------------------------------------------------------------
    def returns(self, outputs: Sequence[Any], inputs: Sequence[Any] = ()) -> None:
        """Ends the program of this rank: the caller reads the outputs on the compute stream, and
        then overwrites them and the inputs.
        """
        given = self.memory(list(outputs))
        results: list[Any] = []
        tensors = [each for each in given if isinstance(each, Tensor)]

        def read() -> None:
            results[:] = [each.clone() if isinstance(each, Tensor) else each for each in given]

        self.collect_freed()
        self.label = "output"
        self.enqueue(read, tensors)
        self.label = "the caller"
        outside = [each for each in (*outputs, *inputs) if isinstance(each, Tensor)]
        blocks = dict.fromkeys(
            self._blocks[at]
            for each in outside
            if (at := each.untyped_storage().data_ptr()) in self._blocks
        )
        for block in blocks:
            self.enqueue(functools.partial(poison, block.typed), [block.typed])
        self.schedule.results[self.rank] = lambda: tuple(results)

    # --- operators --------------------------------------------------------------------------------
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.collect_freed()
        simulated = self._operators(func)
        if simulated is not None:
            return simulated(self, args, kwargs)
        if func is WAIT or (shared_arguments(func) and not written_arguments(func)):
            return func(*args, **kwargs)  # the host waits for nothing, and makes views itself
        if func.namespace == "prim" or compat.op_name(func) in ("_local_scalar_dense", "item"):
            raise SimulationError(f"{func} needs values on the host, which would have to wait.")
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        if is_factory_of_uninitialised(func):
            return self.outputs_of(func, args, kwargs)
        return self.compute(func, *args, **kwargs)

    def _write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        written = [given[name] for name in written_arguments(func)]
        for each in compat.pytree.tree_leaves(written):
            self.block_of(each)
        device_args, device_kwargs = self.memory((args, kwargs))
        touched = _tensors((device_args, device_kwargs))
        self.enqueue(lambda: func(*device_args, **device_kwargs), touched, label=str(func))
        returns = func._schema.returns
        if not returns:
            return None
        return written[0] if len(returns) == 1 else tuple(written)

    def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Enqueues a function of tensors, and returns the memory of its results."""
        outputs = self.outputs_of(function, args, kwargs)
        device_args, device_kwargs = self.memory((args, kwargs))
        targets = _tensors(self.memory(outputs))

        seed = len(self.schedule.streams.get((self.rank, self.current), ()))
        is_random = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())

        def run() -> None:
            if is_random:  # the same numbers in any order
                torch.manual_seed(seed)
            results = _tensors(function(*device_args, **device_kwargs))
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)

        touched = [*_tensors((device_args, device_kwargs)), *targets]
        self.enqueue(run, touched, label=str(function))
        return outputs

    def outputs_of(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Returns new memory for what a function returns, found by running it on meta tensors."""

        def to_meta(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            layout = (each.shape, each.stride())
            return torch.empty_strided(*layout, dtype=each.dtype, device="meta")

        meta_args, meta_kwargs = compat.pytree.tree_map(to_meta, (args, dict(kwargs)))
        schema = getattr(function, "_schema", None)
        if schema is not None and any(each.name == "device" for each in schema.arguments):
            meta_kwargs["device"] = torch.device("meta")
        return compat.pytree.tree_map(
            lambda each: (
                self.allocate(each.shape, each.stride(), each.dtype)
                if isinstance(each, Tensor)
                else each
            ),
            function(*meta_args, **meta_kwargs),
        )


def _as(raw: Tensor, like: Tensor) -> Tensor:
    """Memory, uint8[bytes], as a tensor with the dtype, place and strides of another."""
    made = torch.empty(0, dtype=like.dtype)
    return made.set_(raw.untyped_storage(), like.storage_offset(), like.shape, like.stride())


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in compat.pytree.tree_leaves(value) if isinstance(each, Tensor)]
