"""Values that blocks save for backward, and that rest on the host until then.

The compiled code of a block stays as it is. When its forward has returned, the copies out of what
it saved start, and autograd saves the copies in place of the values. The next forward ends these
copies, and only then the device frees the values. In backward, the copies back start while the
backward before computes, and end before the own one runs.

So each call decides by itself what moves (`BlockSchedule.moved_by`), although all calls of equal
blocks share their code. Nothing here decides about the order of collectives, so ranks need not move
the same.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from zpasses import compat
from zpasses.errors import MemoryBudgetError
from zpasses.graph.host_copies import (
    OFFLOAD,
    OFFLOAD_WAIT,
    RELOAD,
    RELOAD_WAIT,
    aligned,
    fills_its_storage,
)
from zpasses.runtime.block_schedule import block_schedule, place_of_call, values_may_move
from zpasses.runtime.local_shards import current_params, whose_call
from zpasses.sdma.host_memory import result_of
from zpasses.sdma.saved_arenas import SavedArenas

log = logging.getLogger("zpasses")

_Code = Callable[[list[Any]], Any]


class _Call:
    """One forward, and its values on the host.

    Args:
        place: the call of the model that it belongs to.
        before: the forward before it. Its backward comes next after the own one.
    """

    def __init__(self, place: object, before: _Call | None) -> None:
        self.place = place
        same = place is not None and before is not None and before.place == place
        self.before = before if same else None
        self._device = torch.device("cpu")
        self._resting: list[weakref.ref[Tensor]] = []

    def move_out(self, values: list[Any], positions: Sequence[int]) -> None:
        """Starts the copies of these values, and puts the copies in their place."""
        for at in positions:
            value = values[at]
            self._device, ticket = value.device, OFFLOAD(value)
            # Autograd would count the copy as a change of what it saves, if that comes later.
            copied: Any = result_of(ticket).data
            copied.zpasses_call = self
            self._resting.append(weakref.ref(copied))
            _moves.leaving.append((ticket, value))
            values[at] = copied

    def start_back(self) -> None:
        """Starts the copies back, unless they have started."""
        resting, self._resting = self._resting, []
        for ref in resting:
            copied: Any = ref()
            if copied is not None:  # else its autograd graph is gone
                copied.zpasses_ticket = self._start(copied)

    def back(self, copied: Any) -> Tensor:
        """Ends the copy back of a value. A second backward of one forward starts it here."""
        ticket = vars(copied).pop("zpasses_ticket", None)
        if ticket is None:
            ticket = self._start(copied)
        return cast(Tensor, RELOAD_WAIT(ticket, copied, self._device))

    def _start(self, copied: Tensor) -> Tensor:
        # Another tensor of the same memory: a copy in flight must not keep this object, which
        # holds its ticket. So the copy is given up with the autograd graph.
        return cast(Tensor, RELOAD(copied.data, self._device))


class _Moves:
    """What moves in this process."""

    def __init__(self) -> None:
        self.leaving: list[tuple[Tensor, Tensor]] = []
        """Ticket and source of each copy out that has not ended. The device holds the source."""
        self.expected: _Call | None = None
        """The forward whose backward comes next, as far as it is known."""
        self.lock = threading.RLock()  # backwards of accelerators run in threads of their own


_moves = _Moves()


def end_copies_out() -> None:
    """Has the device wait until the copies out have ended, and free what they copied."""
    with _moves.lock:
        while _moves.leaving:
            OFFLOAD_WAIT(*_moves.leaving.pop(0))


def with_values_out(code: _Code, movable: Sequence[int], arenas: SavedArenas) -> _Code:
    """Returns the code of a forward graph that moves to the host what its plan says: everything
    until there is a plan. What finds no memory there stays.

    Args:
        movable: positions of the outputs that may rest there, in the order in which they are
            chosen.
        arenas: where they rest.
    """
    planned: int | None = None

    def run(args: list[Any]) -> Any:
        nonlocal planned
        values = code(args)
        if compat.in_backward() or any(isinstance(each, compat.FakeTensor) for each in values):
            return values
        values = list(values)
        with _moves.lock:
            end_copies_out()
            call = _moves.expected = _Call(place_of_call(), _moves.expected)
            count = block_schedule().moved_by(whose_call(current_params()))
            if count is not None and planned is None:
                arenas.release()  # those that hold everything
            planned = count
            chosen = movable[:count] if values_may_move() else ()
            chosen = [at for at in chosen if fills_its_storage(values[at])]
            size = sum(aligned(values[at].nbytes) for at in chosen)
            if not chosen:
                return values
            try:
                with arenas.run(size, values[chosen[0]].device):
                    call.move_out(values, chosen)
            except MemoryBudgetError:
                if count is not None:
                    _warn()
        return values

    return run


@functools.cache
def _warn() -> None:
    log.warning(
        "values that forwards of blocks save stay on the device, because those of earlier forwards "
        "take all of host_memory. Run backward before the next forward, or raise host_memory."
    )


def with_values_back(code: _Code) -> _Code:
    """Returns the code of a backward graph, whose inputs may rest on the host."""

    def run(args: list[Any]) -> Any:
        if any(isinstance(each, compat.FakeTensor) for each in args):
            return code(args)
        with _moves.lock:
            end_copies_out()
            resting = [at for at, each in enumerate(args) if hasattr(each, "zpasses_call")]
            call: _Call | None = args[resting[0]].zpasses_call if resting else _moves.expected
            _moves.expected = None if call is None else call.before
            for each in (call, _moves.expected):
                if each is not None:
                    each.start_back()
            for at in resting:
                assert call is not None
                args[at] = call.back(args[at])
        return code(args)

    return run
