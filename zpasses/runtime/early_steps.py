"""Steps of an optimizer on parameters whose gradients have arrived, while the backward still runs.
`zpasses.step_in_backward` says when it serves.

A parameter may step when no gradient of it is still to come. Each call that reads it in forward
expects one, and its backward brings it. Where a gradient comes that nobody expected, such as in a
second backward before `optimizer.step()`, the parameter has stepped already: that is an error, also
if the program has dropped all gradients in order to skip a step.

Until the program drops it (`zero_grad()`), such a parameter's gradient is a `SteppedGrad`, which no
operator takes. So clipping and gradient scaling, which would come too late, say so, and so does
what would use the gradient again: the next backward, which adds to it, or a second step.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zpasses import compat
from zpasses.errors import ZpassesError
from zpasses.runtime.param_value import drop_cached
from zpasses.runtime.partial_step import PartialStep
from zpasses.runtime.watched import WatchedShard

log = logging.getLogger("zpasses")

_ATTRIBUTE = "_zpasses_early_step"
"""Attribute of a parameter that may step in backward."""


class SteppedGrad(WatchedShard):
    """Stands for a gradient with which a parameter has stepped, and which is freed.

    Of an operator on gradients of several classes, torch asks a subclass first.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a disabled C function in DTensor's stub
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise _freed(func.name())

    def to_local(self, **kwargs: Any) -> Any:
        raise _freed("to_local")

    @classmethod
    def of(cls, param: DTensor) -> SteppedGrad:
        """Returns one of the parameter's shape, which takes no memory."""
        local = compat.local_of(param).detach()
        nothing = local.new_full((), float("nan")).expand(local.shape)
        return cast(SteppedGrad, compat.wrap_local(nothing, compat.spec_of(param), cls))


def _freed(what: str) -> ZpassesError:
    return ZpassesError(
        f"{what}: a parameter has stepped in backward (zpasses.step_in_backward), and its gradient "
        "is freed. What changes or reads gradients before the step, such as clipping, gradient "
        "scaling, a penalty of parameters that eager code adds to the loss, or "
        "zero_grad(set_to_none=False), needs an optimizer that steps when step() is called. After "
        "step(), drop gradients by zero_grad(): they cannot add up to those of the next backward."
    )


def check_is_there(grad: Tensor) -> None:
    """Raises ZpassesError for the gradient of a parameter that has stepped in backward."""
    if type(grad) is SteppedGrad:
        raise _freed("a gradient is read")


def has_stepped(param: Tensor) -> bool:
    """Whether a parameter has stepped in backward, since the last `optimizer.step()`."""
    found = _expected(param)
    return found is not None and found.has_stepped


def forget_steps(params: Iterable[Tensor]) -> None:
    """Parameters have the values and states of a checkpoint, so none has stepped in backward."""
    for param in params:
        if (found := _expected(param)) is not None:
            found.gradients, found.has_stepped = 0, False
            found.step.forget()
        if type(param.grad) is SteppedGrad:
            param.grad = None


class EarlyStep:
    """The steps of one optimizer in backward."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._partial: PartialStep | None = None
        self._settings: list[dict[str, Any]] = []
        self._stepped: list[DTensor] = []
        self.has_stepped = False
        """Whether any parameter has ever stepped in backward."""
        self._warned = False

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer exists. Otherwise its parameters have gradients like others."""
        return self._optimizer() is not None

    def run(self, params: Sequence[DTensor]) -> None:
        """Step parameters that have their gradients, and free these."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if self._partial is None:
            self._partial, self._settings = PartialStep(optimizer), settings_of(optimizer)
        number = {
            param: at
            for at, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        part = defaultdict[int, list[Tensor]](list)
        for param in params:
            part[number[param]].append(param)
        self._stepped += params
        self.has_stepped = True
        for param in params:
            _expected(param).has_stepped = True  # type: ignore[union-attr]
        try:
            self._partial.run(part)
        finally:
            for param in params:
                param.grad = SteppedGrad.of(param)

    def finish(self, optimizer: Optimizer) -> PartialStep:
        """The program calls `optimizer.step()`. Returns what steps the other parameters.

        Raises:
            ZpassesError: if the settings have changed since the first step in backward, or if
                parameters have the gradients of an earlier step.
        """
        partial = self._partial or PartialStep(optimizer)
        if self._partial is not None and settings_of(optimizer) != self._settings:
            raise ZpassesError(
                f"{type(optimizer).__name__}.step(): its settings have changed since the backward, "
                "in which parameters have stepped with the ones before (step_in_backward). Change "
                "them, as by a scheduler, after step() and before the next backward."
            )
        params = [param for group in optimizer.param_groups for param in group["params"]]
        now = set(map(id, self._stepped))
        if any(type(param.grad) is SteppedGrad and id(param) not in now for param in params):
            raise ZpassesError(
                f"{type(optimizer).__name__}.step(): parameters have stepped in backward already "
                "(step_in_backward), and no other gradient of them has come since. Call step() "
                "once after each backward, and zero_grad() after step()."
            )
        has_grads = any(param.grad is not None for param in params)
        if has_grads and not self.has_stepped and not self._warned:
            self._warned = True
            log.warning(
                "step_in_backward: no parameter of this %s has stepped in backward. Only those of "
                "compiled code do that have no hooks, and whose whole gradient one call brings and "
                "reduces. A window must know its last backward (backwards=N, or last()).",
                type(optimizer).__name__,
            )
        dropped = sum(type(param.grad) is not SteppedGrad for param in self._stepped)
        if dropped:
            log.warning(
                "step_in_backward: gradients of %d parameters were dropped or replaced between "
                "backward and %s.step(), but these have stepped with them. A step cannot be "
                "skipped.",
                dropped,
                type(optimizer).__name__,
            )
        self.forget()
        for param in params:
            if (found := _expected(param)) is not None:
                # Calls may have expected gradients whose backward did not run.
                found.gradients, found.has_stepped = 0, False
        return partial

    def forget(self) -> None:
        """No parameter has stepped since the last `optimizer.step()`."""
        self._partial = None
        self._stepped.clear()


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the settings of the groups, as plain numbers where they are tensors."""
    return [
        {
            name: value.item() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


class _Expected:
    """What a parameter waits for."""

    __slots__ = ("gradients", "has_stepped", "last_run", "step")

    def __init__(self, step: EarlyStep) -> None:
        self.step = step
        self.last_run = -1
        """Number of the last run of the autograd engine in which a backward has brought one."""
        self.gradients = 0
        """How many backwards will still bring one."""
        self.has_stepped = False
        """Since the last `optimizer.step()`, also if the program has dropped its gradient."""


def step_early(params: Iterable[DTensor], step: EarlyStep) -> None:
    """Let parameters step in backward."""
    global _any
    _any = True
    for param in params:
        if early_step_of(param) is not step:
            setattr(param, _ATTRIBUTE, _Expected(step))


_any = False
"""Whether any parameter of this process steps early. Calls need not look before."""


def _expected(param: Any) -> _Expected | None:
    found: _Expected | None = getattr(param, _ATTRIBUTE, None) if _any else None
    return found if found is not None and found.step.is_alive else None


def early_step_of(param: Any) -> EarlyStep | None:
    """Returns what steps a parameter in backward; None if nothing does."""
    found = _expected(param)
    return None if found is None else found.step


def expect_gradients(params: Iterable[Any]) -> None:
    """A call reads parameters, and its backward will bring their gradients.

    Raises:
        ZpassesError: if one has stepped since the last `optimizer.step()`.
    """
    if not _any or compat.in_backward():  # a checkpoint, whose first call has said so
        return
    for param in params:
        found = _expected(param)
        if found is not None and param.requires_grad:
            if found.has_stepped:
                raise _too_late("this call reads it again for a backward")
            found.gradients += 1


def gradients_came(params: Iterable[Any]) -> None:
    """A backward has brought the gradients that a call expects, or they are in flight."""
    if not _any:
        return
    for param in params:
        if (found := _expected(param)) is not None:
            found.gradients = max(0, found.gradients - 1)
            found.last_run = compat.current_graph_task_id()


def is_complete(param: Any, grad: Tensor) -> bool:
    """Whether a parameter steps now, with this gradient of its shard.

    Raises:
        ZpassesError: if it has stepped already.
    """
    found = _not_stepped(param)
    if found is None:
        return False
    return found.gradients == 0 and param.grad is None and not grad.requires_grad


def brings_all(param: Any) -> bool:
    """Whether the backward of a call, which begins now, brings the whole gradient of a parameter
    that steps in backward.

    Raises:
        ZpassesError: if it has stepped already.
    """
    found = _not_stepped(param)
    if found is None:
        return False
    # What another backward of this run has brought is not in `param.grad` yet.
    is_first = found.last_run != compat.current_graph_task_id()
    return found.gradients == 1 and is_first and param.grad is None


def _not_stepped(param: Any) -> _Expected | None:
    """Returns what a parameter waits for; None if nothing steps it in backward.

    Raises:
        ZpassesError: if it has stepped already.
    """
    found = _expected(param)
    if found is not None and found.has_stepped:
        raise _too_late("another gradient of it arrives")
    return found


def _too_late(what: str) -> ZpassesError:
    return ZpassesError(
        f"a parameter has stepped in backward (zpasses.step_in_backward), and {what} before "
        "optimizer.step(). To accumulate gradients over several backwards, open "
        "zpasses.coalesce_grad_reduction or give backwards_per_step. A step cannot be skipped. The "
        "parameters that have stepped keep their new values: start again from a checkpoint."
    )


def run_early_steps(params: Sequence[DTensor], grads: Sequence[DTensor]) -> None:
    """Step parameters that are complete, each with its gradient."""
    by_step = defaultdict[EarlyStep, list[DTensor]](list)
    for param, grad in zip(params, grads, strict=True):
        drop_cached(param)
        param.grad = grad
        step = early_step_of(param)
        assert step is not None
        by_step[step].append(param)
    for step, own in by_step.items():
        step.run(own)
