"""torch.distributed.pipelining: what its schedules do with gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def call_when_gradients_are_scaled(scale: Callable[[Iterable[Tensor], float], None]) -> None:
    """Has `scale` called with the parameters of a stage, and the divisor, whenever a schedule
    divides their gradients by the number of micro-batches.

    torch has no hook for it, so this wraps the method of its stages. Further calls do nothing, and
    so do calls before the program has imported torch's pipelines.
    """
    module: Any = sys.modules.get("torch.distributed.pipelining.stage")
    stage: Any = getattr(module, "_PipelineStageBase", None)
    original = getattr(stage, "scale_grads", None)
    if original is None or hasattr(original, "_zpasses_scales"):
        return

    @functools.wraps(original)
    def scale_grads(self: Any, grad_scale_factor: int) -> None:
        if grad_scale_factor != 1:
            scale(self.submod.parameters(), grad_scale_factor)
        original(self, grad_scale_factor)

    scale_grads._zpasses_scales = True  # type: ignore[attr-defined]
    stage.scale_grads = scale_grads
