"""Reductions of a backward that stay in flight while the next backwards of one run of the autograd
engine compute.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses.runtime.early_steps import is_complete, run_early_steps
from zpasses.runtime.param_conversion import accumulate_grads, wrap_shard_grad
from zpasses.runtime.windows import EngineRun

log = logging.getLogger("zpasses")


@dataclass
class Reducing:
    """Reductions of one backward that have started."""

    finish: Callable[[], list[Tensor]]
    """Awaits them. Returns the gradient of the shard of each parameter."""
    params: list[DTensor]
    limits: Callable[[], AbstractContextManager[None]]
    """Context in which the reductions give up in time."""


@dataclass
class _Pending:
    """What one run of the autograd engine has not yet added to gradients."""

    reducing: list[Reducing] = field(default_factory=list)
    params: list[DTensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    ahead: int = 1
    """For how many graphs ahead the last backward started gathers."""

    def finish(self, left: int) -> None:
        """Await all but the last `left` reductions."""
        while len(self.reducing) > max(0, left):
            first = self.reducing.pop(0)
            with first.limits():
                grads = first.finish()
            self._add(first.params, grads)

    def _add(self, params: Sequence[DTensor], grads: Sequence[Tensor]) -> None:
        parts = set(map(id, self.params))  # of which another part of the gradient has come
        now: list[tuple[DTensor, Tensor]] = []
        for param, grad in zip(params, grads, strict=True):
            if is_complete(param, grad) and id(param) not in parts:
                now.append((param, grad))
            else:
                self.params.append(param)
                self.grads.append(grad)
        wrapped = [wrap_shard_grad(grad, param, stored=False) for param, grad in now]
        run_early_steps([param for param, _ in now], wrapped)

    def drop(self) -> None:
        """Await the reductions of a run that failed. Until then torch holds them, and they write to
        their memory.
        """
        reducing, self.reducing, self.params, self.grads = self.reducing, [], [], []
        for each in reducing:
            try:
                with each.limits():
                    each.finish()
            except Exception as error:  # nobody misses the gradients
                log.warning("reductions of a backward that failed did not end: %s", error)

    def close(self) -> None:
        self.finish(0)
        params, grads = self.params, self.grads
        self.params, self.grads = [], []
        if params:
            accumulate_grads(params, grads)


class LateReductions:
    """What the runs of the autograd engine have in flight."""

    def __init__(self) -> None:
        self._pending: weakref.WeakKeyDictionary[EngineRun, _Pending] = weakref.WeakKeyDictionary()
        self._ended: list[_Pending] = []
        """What runs of the engine left that have ended, some of them by an exception."""

    @property
    def in_flight(self) -> int:
        """Number of graphs whose reductions have not been awaited. For tests."""
        return sum(len(each.reducing) for each in self._pending.values())

    def add(self, reducing: Reducing, ahead: int) -> None:
        """Await reductions when `ahead` more backwards have started theirs, or when the last of
        these comes to its turning point. Add the gradients when the run of the autograd engine
        ends.
        """
        run = EngineRun.current()
        pending = self._pending.get(run)
        if pending is None:
            pending = self._pending[run] = _Pending()
            run.at_end(pending.close)
            # A run that fails calls nothing at its end. Nobody may wait for other ranks where it is
            # freed, so the next graph does.
            weakref.finalize(run, self._ended.append, pending).atexit = False
        pending.reducing.append(reducing)
        pending.ahead = ahead
        pending.finish(max(1, ahead))

    def drop_failed(self) -> None:
        """Await what runs that failed have left in flight."""
        while self._ended:
            self._ended.pop().drop()

    def turn(self) -> None:
        """A backward has come to its turning point: await the reductions whose gradients need not
        stay in memory until it ends.
        """
        pending = self._pending.get(EngineRun.current())
        if pending is not None:
            pending.finish(pending.ahead - 1)
