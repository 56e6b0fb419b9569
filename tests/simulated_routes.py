"""What the routes of copy engines use, on simulated devices: symmetric memory, and mori's handles.

def program(device):
    route = SymmRoute(SimulatedSymmMemory(device, size=2))
    (full,) = route.all_gather([device.put(mine)], 2, "0")
    return [torch.ops._c10d_functional.wait_tensor(full)]

schedule = record_ranks(2, program)
assert schedule.first_difference(seeds=50) is None
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zpasses import compat
from zpasses.sdma.routes import SideStreamWork
from zpasses.testing.simulated_device import SimulatedDevice, SimulatedStream
from zpasses.testing.stream_graphs import LOW_CONTENTION, Exchange
from zpasses.testing.stream_schedule import StreamSchedule

__all__ = ["SimulatedAllgather", "SimulatedSymmMemory", "record_ranks"]


def record_ranks(
    size: int, program: Callable[[SimulatedDevice], Sequence[Tensor]]
) -> StreamSchedule:
    """Record what the hosts of several ranks enqueue, one after another.

    Args:
        size: the number of ranks.
        program: runs on the device of each rank, and returns what the caller then reads.
    """
    schedule = StreamSchedule()
    with torch.no_grad():
        for rank in range(size):
            device = SimulatedDevice(rank, schedule)
            with device:
                outputs = program(device)
            device.returns(outputs)
    return schedule


class SimulatedSymmMemory:
    """torch's collectives by copy engines, as `zpasses.runtime.platform.SymmMemory`.
    Like torch's own, they keep neither their inputs nor their outputs.
    """

    def __init__(self, device: SimulatedDevice, size: int) -> None:
        self._device, self._size, self._calls = device, size, itertools.count()
        self.stream: SimulatedStream = device.stream("symmetric memory")

    def all_gather(self, source: Tensor, group: str) -> Tensor:
        output = source.new_empty((source.shape[0] * self._size, *source.shape[1:]))
        return self._start("_low_contention_all_gather", source, output, group, "")

    def reduce_scatter(self, source: Tensor, reduce_op: str, group: str) -> Tensor:
        output = source.new_empty((source.shape[0] // self._size, *source.shape[1:]))
        return self._start("_low_contention_reduce_scatter", source, output, group, reduce_op)

    def _start(self, name: str, source: Tensor, output: Tensor, group: str, op: str) -> Tensor:
        key, members = (group, next(self._calls)), range(self._size)
        exchange = Exchange(self._device, key, members, LOW_CONTENTION[name], {"reduce_op": op})
        self.stream.follow_current()
        self.stream.run(lambda: exchange.enqueue([source], [output]))
        compat.register_work(output, SideStreamWork(self.stream.record(), ()))
        return output


class SimulatedAllgather:
    """`mori.ccl.AllgatherSdma`: all ranks write to the buffers of each other, and copy their own
    buffer out once all parts have arrived. Nothing keeps a fast rank from writing the parts of its
    next call over those that a slow rank has not copied out yet.

    Args:
        device: the device of this rank.
        number: which handle it is, equal on all ranks.
        size: the number of ranks.
    """

    def __init__(self, device: SimulatedDevice, number: int, size: int) -> None:
        self._device, self._number, self._size, self._calls = device, number, size, 0

    def __call__(
        self, source: Tensor, target: Tensor, count: int, *, stream: int, capturing: bool
    ) -> bool:
        device, boxes, rank = self._device, self._device.schedule.mailboxes, self._device.rank
        self._calls += 1
        call, key = self._calls, ("handle", self._number)
        given, taken = device.memory([source, target])

        def buffer(of: int) -> dict[int, Any]:
            return boxes.setdefault((*key, of), {})

        def put(peer: int) -> None:
            buffer(peer)[rank] = call, given.clone()

        def arrived() -> bool:
            flags = [flag for flag, _ in buffer(rank).values()]
            return len(flags) == self._size and all(flag >= call for flag in flags)

        def copy_out() -> None:
            parts = buffer(rank)
            taken.copy_(torch.cat([parts[peer][1] for peer in range(self._size)]))

        with device.on(SimulatedStream.of(stream).name):
            for peer in range(self._size):
                device.enqueue(functools.partial(put, peer), [given], label="put")
            device.enqueue(copy_out, [taken], label="copy out", is_ready=arrived)
        return True
