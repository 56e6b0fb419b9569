"""Runs copies to and from the host (`zpasses.graph.host_copies`).

On accelerators, a copy runs on a stream for its direction, which first waits for the current
stream; its wait makes the current stream wait for its end. So host memory may be written again
although the CPU has run ahead: the current stream has awaited the copy that read it. On CPUs, a
copy has ended when it returns.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zpasses.errors import ZpassesError
from zpasses.graph.host_copies import LIBRARY, empty_like_on
from zpasses.host.saved_arenas import like_on_host, loose_gradients
from zpasses.runtime.platform import Platform, SideStream, platform_of


@dataclass(eq=False)
class _Copy:
    """A copy that has started."""

    source: Tensor
    result: Tensor
    event: Any
    """None if the copy has ended."""


_started: dict[int, _Copy] = {}
_numbers = itertools.count()
_streams: dict[tuple[Platform, str, str], SideStream] = {}


def _stream(device: torch.device, direction: str) -> SideStream | None:
    platform = platform_of(device.type)
    if platform is None:
        return None
    key = platform, str(device), direction
    if key not in _streams:
        _streams[key] = platform.side_stream()
    return _streams[key]


def _start(source: Tensor, result: Tensor, device: torch.device, direction: str) -> Tensor:
    """Starts a copy, and returns its ticket. A copy whose ticket is freed without a wait, because
    the graph failed, is forgotten.
    """
    stream = _stream(device, direction)
    event = None
    if stream is None:
        result.copy_(source)
    else:
        stream.follow_current()
        stream.run(lambda: result.copy_(source, non_blocking=True))
        event = stream.record()
    number = next(_numbers)
    _started[number] = _Copy(source, result, event)
    ticket = torch.tensor([number])
    weakref.finalize(ticket, _forget, number).atexit = False
    return ticket


def _forget(number: int) -> None:
    left = _started.pop(number, None)
    if left is not None and left.event is not None:
        for stream in _streams.values():
            stream.synchronize()  # both tensors are freed now


def result_of(ticket: Tensor) -> Tensor:
    """Returns the tensor that a copy in flight writes. It may be read after its wait."""
    return _started[int(ticket.item())].result


def _wait(ticket: Tensor) -> Tensor:
    copy = _started.pop(int(ticket.item()), None)
    if copy is None:
        raise ZpassesError("a copy to or from the host was awaited twice, or never started.")
    if copy.event is not None:
        copy.event.wait()
    return copy.result


def _offload(value: Tensor) -> Tensor:
    return _start(value, like_on_host(value), value.device, "out")


def _offload_wait(ticket: Tensor, value: Tensor) -> Tensor:
    return _wait(ticket)


def _reload(host: Tensor, device: torch.device) -> Tensor:
    return _start(host, empty_like_on(host, device), device, "in")


def _reload_wait(ticket: Tensor, host: Tensor, device: torch.device) -> Tensor:
    return _wait(ticket)


def _to_host(grad: Tensor) -> Tensor:
    return like_on_host(grad, loose_gradients).copy_(grad)


def _settle(host: Tensor) -> None:
    for (_, _, direction), stream in _streams.items():
        if direction == "out":
            stream.synchronize()


for _name, _run in (
    ("offload", _offload),
    ("offload_wait", _offload_wait),
    ("reload", _reload),
    ("reload_wait", _reload_wait),
    ("to_host", _to_host),
    ("settle", _settle),
):
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
