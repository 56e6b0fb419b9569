"""The part of `zpasses bisect` that runs inside the program under test.

`zpasses bisect` runs the program several times, with fewer or more passes. Each run is a trial. It
records the results of compiled calls, as a few numbers per tensor.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zpasses import compat
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.pipeline import Pipeline
from zpasses.probe import BisectTrial, requested

ResultHook = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""Wraps a compiled function so that its results are recorded. The second argument says what the
results are, such as "outputs"."""

_ORDER = (Level.CAPTURED, Level.JOINT)


def in_execution_order(pipeline: Pipeline) -> list[Pass]:
    """Return the passes in the order in which they run: level by level.

    Passes on partitioned graphs keep the order of the pipeline.
    """
    return sorted(
        pipeline, key=lambda each: _ORDER.index(each.level) if each.level in _ORDER else len(_ORDER)
    )


@dataclass(frozen=True)
class Trial:
    """One trial in this process."""

    folder: Path
    """Where to write the results, one file per rank."""
    request: BisectTrial

    @classmethod
    def current(cls) -> Trial | None:
        """Returns the trial of this process, if `zpasses bisect` runs it."""
        found = requested(BisectTrial)
        return None if found is None else cls(*found)

    def limit_passes(self, pipeline: Pipeline, name: str) -> Pipeline:
        """Return the passes that may run in this trial. Records the whole pipeline.

        Args:
            name: name of the compile, for the record.
        """
        passes = in_execution_order(pipeline)
        self._write({"compile": name, "pipeline": [str(each) for each in passes]})
        return (
            pipeline
            if self.request.passes is None
            else Pipeline(tuple(passes[: self.request.passes]))
        )

    def record_results(self, fn: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap `fn` so that the results of its calls are recorded under `name`."""

        @functools.wraps(fn)
        def run(*args: Any) -> Any:
            result = fn(*args)
            with _lock:
                if _written[0] < self.request.calls:
                    _written[0] += 1
                    self._write({"call": name, "values": _digests(result)})
            return result

        return compat.dynamo_disable(run)

    def _write(self, record: dict[str, Any]) -> None:
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        with (self.folder / f"rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def apply_bisect_limits(pipeline: Pipeline, compile_name: str) -> tuple[Pipeline, ResultHook]:
    """Return the passes that may run and the hook for results.

    Outside of `zpasses bisect`, these are the whole pipeline and a hook that does nothing.
    """
    trial = Trial.current()
    if trial is None:
        return pipeline, lambda fn, _: fn
    return trial.limit_passes(pipeline, compile_name), lambda fn, what: trial.record_results(
        fn, f"{compile_name} {what}"
    )


_lock = threading.RLock()
_written = [0]  # recorded calls of this process, over all graphs


def _digests(result: Any) -> list[dict[str, Any] | None]:
    with torch.no_grad():
        values: Sequence[Any] = compat.pytree.tree_leaves(result)
        return [_digest(value) if isinstance(value, Tensor) else None for value in values]


def _digest(value: Tensor) -> dict[str, Any]:
    """Summarise a tensor by a few numbers, which are close for close tensors."""
    flat = value.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    exact = flat.to(torch.float64)
    finite = torch.isfinite(exact)
    exact = torch.where(finite, exact, torch.zeros_like(exact))
    weights = (
        torch.frac(
            torch.arange(exact.numel(), dtype=torch.float64, device=exact.device)
            * 0.6180339887498949
        )
        - 0.5
    )
    return {
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "norm": float(exact.norm()),
        "weighted": float((exact * weights).sum()),
        "not_finite": int((~finite).sum()),
    }
