"""Values that blocks save for backward, and that rest on the host until then.

The compiled code of a block stays as it is. When its forward has returned, the copies out of what
it saved start, and autograd saves the copies in place of the values. The next forward ends these
copies, and only then the device frees the values. In backward, the copies back start while the
backward before computes, and end before the own one runs.

So each call decides by itself what moves (`BlockSchedule.moved_by`), although all calls of equal
blocks share their code. Nothing here decides about the order of collectives, so ranks need not move
the same.

A block also saves what it got from code before it. The device frees that only if nothing else holds
it when the copy out has ended. The first step, in which everything moves, finds out, and the plan
counts and moves only what was freed. `zpasses plan` finds out with stand-ins for the copies.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from zpasses import compat
from zpasses.errors import MemoryBudgetError, ZpassesError
from zpasses.graph.host_copies import (
    OFFLOAD,
    OFFLOAD_WAIT,
    RELOAD,
    RELOAD_WAIT,
    aligned,
    fills_its_storage,
)
from zpasses.host.host_memory import result_of
from zpasses.host.saved_arenas import HostFullError, SavedArenas
from zpasses.runtime.backward_checks import values_used
from zpasses.runtime.block_schedule import block_schedule, place_of_call
from zpasses.runtime.param_conversion import current_backward, current_params, whose_call
from zpasses.runtime.planned_blocks import Forward, values_may_move

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

    def move_out(
        self,
        values: list[Any],
        positions: Sequence[int],
        notes: Mapping[int, Callable[[bool], None]],
    ) -> None:
        """Starts the copies of these values, and puts the copies in their place.

        Args:
            notes: as in `_Leaving`.
        """
        for at in positions:
            value = values[at]
            self._device, ticket = value.device, OFFLOAD(value)
            # Autograd would count the copy as a change of what it saves, if that comes later.
            copied: Any = result_of(ticket).data
            copied.zpasses_call = self
            ref = weakref.ref(copied)
            self._resting.append(ref)
            _moves.leaving.append(_Leaving(value, ticket, ref, _version(value), notes.get(at)))
            values[at] = copied

    def stand_in(
        self,
        values: list[Any],
        positions: Sequence[int],
        notes: Mapping[int, Callable[[bool], None]],
    ) -> None:
        """Puts other tensors without memory in the place of these, to find out whether something
        else holds them.
        """
        for at in positions:
            value = values[at]
            values[at] = value.new_empty_strided(value.shape, value.stride())
            ref, version = weakref.ref(values[at]), _version(value)
            _moves.leaving.append(_Leaving(value, None, ref, version, notes.get(at)))

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
        if hasattr(copied, "zpasses_changed"):
            raise ZpassesError(
                f"an input {list(copied.shape)} of a block was modified in place after the block's "
                "forward, which saved it for backward. Write to a copy: x = x.clone()."
            )
        if ticket is None:
            ticket = self._start(copied)
        return cast(Tensor, RELOAD_WAIT(ticket, copied, self._device))

    def _start(self, copied: Tensor) -> Tensor:
        # Another tensor of the same memory: a copy in flight must not keep this object, which
        # holds its ticket. So the copy is given up with the autograd graph.
        return cast(Tensor, RELOAD(copied.data, self._device))


@dataclass(eq=False)
class _Leaving:
    """A copy out that has not ended. The device holds its source."""

    source: Tensor | None
    ticket: Tensor | None
    """None for a stand-in."""
    copied: weakref.ref[Tensor]
    version: int | None
    """Of the source, when the copy started."""
    note: Callable[[bool], None] | None = None
    """Told whether the device has freed the source, if it is an input."""

    def end(self, *, observed: bool) -> None:
        source, self.source = self.source, None
        assert source is not None
        if self.ticket is not None:
            OFFLOAD_WAIT(self.ticket, source)
        copied: Any = self.copied()
        if copied is not None and _version(source) != self.version:
            copied.zpasses_changed = True  # which of its elements were copied before is not known
        if observed and self.note is not None:
            is_freed = compat.storage_freed_check(source)
            del source
            self.note(is_freed())


@dataclass(eq=False)
class _Memory:
    """Memory of what forwards of blocks return and get."""

    is_freed: Callable[[], bool]
    is_counted: bool = False
    """Whether a forward returned it, so it is part of what that one saves."""
    saved_by: Callable[[bool], None] | None = None
    """Notes whether it is freed, for the forward that saves it as an input."""


_Returned = tuple[_Memory, Callable[[bool], None]]

_NEXT_BUT_ONE = 2


def _version(value: Tensor) -> int | None:
    return None if value.is_inference() else value._version


class _Moves:
    """What moves in this process."""

    def __init__(self) -> None:
        self.leaving: list[_Leaving] = []
        self.returned: list[list[_Returned]] = []
        """What each of the last two forwards returned."""
        self._known: dict[int, _Memory] = {}
        self._place: object = None
        """The call of the model that the last forward belongs to."""
        self.calls: weakref.WeakKeyDictionary[object, _Call] = weakref.WeakKeyDictionary()
        """What is alive as long as a backward may run -> its forward."""
        self.expected: _Call | None = None
        """The forward whose backward comes next, as far as it is known."""
        self.lock = threading.RLock()  # backwards of accelerators run in threads of their own
        self._is_refused = False

    def memory_of(self, value: Tensor) -> _Memory:
        """What is known of the memory of a tensor in this call of the model."""
        key = compat.storage_id(value)
        found = self._known.get(key)
        if found is None or found.is_freed():  # another tensor had the id
            found = self._known[key] = _Memory(compat.storage_freed_check(value))
        return found

    def begin_forward(self, place: object) -> list[_Returned]:
        """A forward has run. Note what the last but one before it returned and was freed, although
        no other forward saves it.

        Args:
            place: the call of the model that it belongs to.

        Returns:
            A list for what it returned.
        """
        if place is None or place != self._place:
            self.forget()  # what another call of the model returned is freed by now
        self._place = place
        if len(self.returned) == _NEXT_BUT_ONE:
            for memory, note in self.returned.pop(0):
                note(memory.is_freed() and memory.saved_by is None)
        self.returned.append([])
        return self.returned[-1]

    def forget(self) -> None:
        """The call of the model has ended."""
        self.returned.clear()
        self._known.clear()

    def warn_of_refusal(self, error: MemoryBudgetError) -> None:
        """Warns once that there is less memory on the host than `host_memory` promises."""
        if not self._is_refused:
            self._is_refused = True
            log.warning(
                "values that forwards of blocks save stay on the device, although host_memory has "
                "room for them: %s",
                error,
            )


_moves = _Moves()


def end_copies_out(*, observed: bool = True) -> None:
    """Has the device wait until the copies out have ended, and free what they copied.

    Args:
        observed: whether to note what else holds it. An exception holds everything.
    """
    with _moves.lock:
        while _moves.leaving:
            _moves.leaving.pop(0).end(observed=observed)


class _ValuesOut:
    """Code of a forward or inference graph. It moves to the host what its plan says: everything
    until there is a plan. What finds no memory there stays.

    Args:
        kind: "forward" or "inference", which saves nothing.
        movable: positions of the outputs that may rest there, in the order in which they are
            chosen.
        inputs: positions of the outputs that are inputs.
        arenas: where they rest; None for values that have no memory.
    """

    def __init__(
        self,
        code: _Code,
        kind: str,
        movable: Sequence[int],
        inputs: Sequence[int],
        arenas: SavedArenas | None,
    ) -> None:
        self._code, self._movable, self._inputs = code, movable, frozenset(inputs)
        self._kind, self._arenas, self._had_plan = kind, arenas, False

    def __call__(self, args: list[Any]) -> Any:
        values = self._code(args)
        fake = any(isinstance(each, compat.FakeTensor) for each in values)
        if compat.in_backward() or fake != (self._arenas is None):
            return values
        with _moves.lock:
            end_copies_out()
            place = place_of_call()
            returned = _moves.begin_forward(place)
            if self._kind == "inference":
                return values
            values = list(values)
            call = _moves.expected = _Call(place, _moves.expected)
            backward = current_backward()
            if backward is not None and (held := backward()) is not None:
                _moves.calls[held] = call
            plans = block_schedule().plans
            forward = plans.forward_of(whose_call(current_params()))
            planned = plans.moved_by(forward)
            if planned is not None and not self._had_plan and self._arenas is not None:
                self._arenas.release()  # those that hold everything
            self._had_plan = planned is not None
            notes: Mapping[int, Callable[[bool], None]] = {}
            if forward is not None and values_may_move():
                notes = self._observed(values, forward, returned)
            if planned is not None:
                notes = dict.fromkeys(notes, _warn_if_held)
            self._move(call, forward, values, planned, notes)
        return values

    def _observed(
        self, values: Sequence[Any], forward: Forward, returned: list[_Returned]
    ) -> dict[int, Callable[[bool], None]]:
        """Notes what becomes of what forwards returned, and returns for each input what notes
        whether the device has freed it.
        """
        plans = block_schedule().plans
        for at, value in enumerate(values):
            if isinstance(value, Tensor) and at not in self._inputs and at not in self._movable:
                memory = _moves.memory_of(value)
                memory.is_counted = True
                note = functools.partial(plans.note_returned, forward, at)
                returned.append((memory, note))
        notes: dict[int, Callable[[bool], None]] = {}
        for number, at in enumerate(each for each in self._movable if each in self._inputs):
            memory = _moves.memory_of(values[at])
            counted = memory.is_counted
            note = functools.partial(plans.note_input, forward, number, counted=counted)
            if memory.saved_by is not None:  # as long as one of both does not move it, it stays
                memory.saved_by(False)
                note(False)
            memory.saved_by = notes[at] = note
        return notes

    def _move(
        self,
        call: _Call,
        forward: Forward | None,
        values: list[Any],
        planned: Collection[int] | None,
        notes: Mapping[int, Callable[[bool], None]],
    ) -> None:
        chosen = [
            at
            for at in self._movable
            if (planned is None or at in planned)
            and values_may_move()
            and fills_its_storage(values[at])
        ]
        if self._arenas is None:
            call.stand_in(values, [at for at in chosen if at in self._inputs], notes)
        elif chosen:
            size = sum(aligned(values[at].nbytes) for at in chosen)
            try:
                with self._arenas.run(size, values[chosen[0]].device):
                    call.move_out(values, chosen, notes)
            except HostFullError:
                if block_schedule().plans.is_planned(forward):  # the first step moves all it can
                    _warn_of_full()
            except MemoryBudgetError as error:
                _moves.warn_of_refusal(error)


def with_values_out(
    code: _Code,
    kind: str,
    movable: Sequence[int],
    inputs: Sequence[int],
    arenas: SavedArenas | None,
) -> _Code:
    """Returns the code of a forward graph that moves values to the host; see `_ValuesOut`."""
    return _ValuesOut(code, kind, movable, inputs, arenas)


@functools.cache
def _warn_once_of_held() -> None:
    log.warning(
        "what a block gets from code before it rests on the host until backward, but was not freed "
        "on the device, because something else holds it in this step, such as a list of hidden "
        "states. The step takes more memory than planned."
    )


def _warn_if_held(freed: bool) -> None:
    if not freed:
        _warn_once_of_held()


@functools.cache
def _warn_of_full() -> None:
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
            # Several forwards may have run before a backward: the last one need not come next.
            call = _moves.calls.get(values_used(), _moves.expected)
            if resting:
                call = args[resting[0]].zpasses_call
            _moves.expected = None if call is None else call.before
            _moves.forget()
            for each in (call, _moves.expected):
                if each is not None:
                    each.start_back()
            for at in resting:
                assert call is not None
                args[at] = call.back(args[at])
        return code(args)

    return run
