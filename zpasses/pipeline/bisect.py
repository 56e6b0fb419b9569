"""Trial runs: what `zpasses bisect` asks of a program through the environment variable
ZPASSES_BISECT.

A trial runs the first passes of every pipeline alone, and writes down what compiled calls return,
as a few numbers a tensor. Nothing of this is loaded by a program that is not on trial."""

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
from zpasses.errors import OptionError
from zpasses.pipeline.pipeline import Level, Pass, Pipeline

__all__ = ["ENVIRONMENT_VARIABLE", "Trial", "in_running_order"]

ENVIRONMENT_VARIABLE = "ZPASSES_BISECT"
_ORDER = (Level.CAPTURED, Level.JOINT)


def in_running_order(pipeline: Pipeline) -> list[Pass]:
    """The passes level by level, as they run; forward's and backward's stay as the pipeline has
    them."""
    return sorted(
        pipeline, key=lambda each: _ORDER.index(each.level) if each.level in _ORDER else len(_ORDER)
    )


@dataclass(frozen=True)
class Trial:
    """What this process was asked for."""

    passes: int | None
    """How many passes to run; None is all."""
    folder: Path
    """Where to write what came out, a file a rank."""
    calls: int
    """How many calls to write down."""

    @classmethod
    @functools.cache
    def current(cls) -> Trial:
        """The trial of this process.

        Raises:
            OptionError: when the environment variable holds something else.
        """
        text = os.environ[ENVIRONMENT_VARIABLE]
        try:
            given = json.loads(text)
            return cls(given["passes"], Path(given["folder"]), int(given["calls"]))
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(
                f"{ENVIRONMENT_VARIABLE}={text!r} is not what `zpasses bisect` sets; unset it."
            ) from error

    def prefix(self, pipeline: Pipeline, name: str) -> Pipeline:
        """The passes that may run; writes down all that there are."""
        passes = in_running_order(pipeline)
        self._write({"compile": name, "pipeline": [str(each) for each in passes]})
        return pipeline if self.passes is None else Pipeline(tuple(passes[: self.passes]))

    def recorded(self, fn: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`fn`, with what it returns written down."""

        @functools.wraps(fn)
        def run(*args: Any) -> Any:
            result = fn(*args)
            with _lock:
                if _written[0] < self.calls:
                    _written[0] += 1
                    self._write({"call": name, "values": _digests(result)})
            return result

        return compat.dynamo_disable(run)

    def _write(self, record: dict[str, Any]) -> None:
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        with (self.folder / f"rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


_lock = threading.RLock()
_written = [0]  # calls of this process, whichever graph they are of


def _digests(result: Any) -> list[dict[str, Any] | None]:
    with torch.no_grad():
        values: Sequence[Any] = compat.pytree.tree_leaves(result)
        return [_digest(value) if isinstance(value, Tensor) else None for value in values]


def _digest(value: Tensor) -> dict[str, Any]:
    """A few numbers that are near each other where tensors are."""
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
