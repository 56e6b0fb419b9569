"""Reduce what is pending, outside of any backward: a small graph of its own, over a set of
gradients that the ranks agreed on.

Ranks may hold different pending gradients, because a parameter got a gradient on some of them only.
They exchange what they hold through the store; what any of them holds is reduced, with zeros from
those that hold nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import AgreementError, OptionError, ZpassesError
from zpasses.graph.nodes import nbytes
from zpasses.graph.ops import REDUCE_GRAD
from zpasses.graph.tags import Reduction, Tag, add_tag
from zpasses.pipeline.pipeline import Level, Pipeline
from zpasses.pipeline.recorder import Recorders, recorded_passes
from zpasses.ranks.agreement import agree
from zpasses.ranks.vote import is_reported, report_failure, vote
from zpasses.runtime.codegen import eager_codegen
from zpasses.runtime.local_shards import arriving_gradient
from zpasses.runtime.param_cache import drop_cached
from zpasses.runtime.windows import Lowering, Window, pending_of

__all__ = ["GraphLowering", "flush"]

_MAX_FLUSHES = 8
"""Sets of gradients whose graphs are kept."""


@dataclass(frozen=True)
class FlushEntry:
    """One gradient to reduce, as ranks tell each other."""

    place: int
    """Number of the parameter in its window."""
    dtype: torch.dtype
    """Dtype of the gradient, which names the part."""
    total_dtype: torch.dtype
    """Dtype of the pending sum."""
    shape: tuple[int, ...]
    reduction: Reduction

    def pack(self) -> list[Any]:
        how = self.reduction
        return [
            self.place,
            _name(self.dtype),
            _name(self.total_dtype),
            list(self.shape),
            how.rows,
            _name(how.dtype),
            _name(how.reduce_dtype),
        ]

    @staticmethod
    def unpack(packed: Sequence[Any], group: str) -> FlushEntry:
        place, dtype, total_dtype, shape, rows, shard_dtype, reduce_dtype = packed
        reduction = Reduction(
            rows, _dtype(shard_dtype), _dtype(reduce_dtype) if reduce_dtype else None, group
        )
        return FlushEntry(place, _dtype(dtype), _dtype(total_dtype), tuple(shape), reduction)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What is communicated: a sum in a wider dtype is reduced in the dtype that the gradient
        itself would have been."""
        return self.reduction.reduce_dtype or self.dtype


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class GraphLowering:
    """How the backend that made a graph lowers a flush: with the same passes and the same code
    generation."""

    def __init__(
        self,
        pipeline: Pipeline,
        codegen: Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]],
        recorder: Recorders | None = None,
    ) -> None:
        self._pipeline, self._codegen, self._recorder = pipeline, codegen, recorder or Recorders()
        self._code: dict[Any, Callable[[list[Any]], Any]] = {}
        try:
            self.text = str(pipeline) if Pipeline.parse(str(pipeline)) == pipeline else ""
        except OptionError:
            self.text = ""  # passes that other ranks cannot be told by name

    def code(
        self,
        items: Sequence[FlushEntry],
        totals: Sequence[Tensor],
        shard_rows: Sequence[int],
        timeout_s: float | None,
    ) -> Callable[[list[Any]], Any]:
        """What reduces these gradients; the ranks compare its collectives the first time."""
        key = (tuple(items), tuple(shard_rows))
        if key not in self._code:
            if len(self._code) >= _MAX_FLUSHES:
                self._code.clear()
            gm, fakes = flush_graph(items, totals, shard_rows)
            for level in (Level.JOINT, Level.BACKWARD):
                recorded_passes(
                    self._recorder, "flush", level.value, gm.graph, self._pipeline.at(level)
                )
            gm.recompile()
            code = self._codegen(gm, fakes)
            if timeout_s is not None:
                agree(gm.graph, "of the end of a window", timeout_s)
            self._recorder.agreed("flush", gm.graph, timeout_s is not None)
            self._code[key] = code
        return self._code[key]


def flush(window: Window, timeout_s: float | None, failure: str | None = None) -> None:
    """Average what is pending in a window over the ranks and add it to `param.grad`; what was
    pending is gone in any case.

    Args:
        timeout_s: seconds to wait for the other ranks; None does not ask them.
        failure: why this rank cannot take part, for the others; nothing is reduced then.

    Raises:
        AgreementError: when another rank failed, or did not come in time. Nothing is reduced on any
            rank.
    """
    try:
        items, text = _agreed(window, _held(window), timeout_s, failure)
        if items and failure is None:
            _reduce(window, items, text, timeout_s)
    finally:
        window.drop()


def _held(window: Window) -> dict[FlushEntry, str]:
    """What this rank holds, with the pipeline that lowers it."""
    held = {}
    for place, param in enumerate(window.params):
        for dtype, part in (
            sorted(pending_of(param).parts.items(), key=str) if param is not None else ()
        ):
            item = FlushEntry(
                place, dtype, part.total.dtype, tuple(part.total.shape), part.reduction
            )
            held[item] = part.lowering.text if part.lowering is not None else ""
    return held


def _agreed(
    window: Window, held: dict[FlushEntry, str], timeout_s: float | None, failure: str | None
) -> tuple[list[FlushEntry], str]:
    if timeout_s is None:
        return sorted(held, key=_order), _common(held.values())
    items: list[FlushEntry] = []
    texts: set[str] = set()
    error: AgreementError | None = None
    for group in groups_of(window):
        mine = {
            json.dumps(item.pack()): text
            for item, text in held.items()
            if item.reduction.group == group
        }
        ballot = {"items": list(mine), "texts": sorted(set(mine.values()))}
        try:
            why = failure or (str(error) if error else None)
            verdict = vote(group, "the end of a window", ballot, _unite, timeout_s, failure=why)
        except AgreementError as caught:
            error = error or caught
            continue
        items += [FlushEntry.unpack(json.loads(item), group) for item in verdict["items"]]
        texts.update(verdict["texts"])
    if error is not None:
        raise error
    return sorted(items, key=_order), _common(texts)


def _order(item: FlushEntry) -> tuple[int, str]:
    return item.place, str(item.dtype)


def _common(texts: Any) -> str:
    known = {
        text for text in texts if text
    }  # eager code has no passes; those of a graph are as good for it
    return known.pop() if len(known) == 1 else ""


def _unite(ballots: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: sorted({value for ballot in ballots for value in ballot[key]})
        for key in ("items", "texts")
    }


def groups_of(window: Window) -> list[str]:
    """Names of the process groups over which a window's parameters are sharded, in an order that
    ranks share."""
    names = (
        compat.group_name(param.device_mesh.get_group())
        for param in window.params
        if isinstance(param, DTensor)
    )
    return list(dict.fromkeys(names))


# --- reducing -------------------------------------------------------------------------------------
def _reduce(
    window: Window, items: Sequence[FlushEntry], text: str, timeout_s: float | None
) -> None:
    params = window.params
    lowering = _lowering(params, text)
    totals, shard_rows = [], []
    for item in items:
        param = params[item.place]
        if param is None:
            raise ZpassesError(
                f"parameter {item.place} of the window is gone on this rank, but other ranks hold "
                "a gradient of it."
            )
        shard = compat.local_of(param)
        part = pending_of(param).parts.pop(item.dtype, None)
        totals.append(
            part.total
            if part is not None
            else torch.zeros(item.shape, dtype=item.total_dtype, device=shard.device)
        )
        shard_rows.append(shard.shape[0] if shard.dim() else 0)
    if lowering is None:
        grads: Any = [
            _by_dialect(item, totals.pop(0), rows)
            for item, rows in zip(items, shard_rows, strict=True)
        ]
    else:
        try:
            code = lowering.code(items, totals, shard_rows, timeout_s)
        except Exception as error:
            if timeout_s is not None and not is_reported(error):
                report_failure(groups_of(window), "of the end of a window", error)
            raise
        grads = code(totals)
    _deliver([params[item.place] for item in items], grads)


def _lowering(params: Sequence[Any], text: str) -> Lowering | None:
    """Of the graphs that left gradients: one with these passes. A rank that has none runs them
    uncompiled; without text, the dialect."""
    if not text:
        return None
    parts = (
        part for param in params if param is not None for part in pending_of(param).parts.values()
    )
    own = next(
        (
            part.lowering
            for part in parts
            if part.lowering is not None and part.lowering.text == text
        ),
        None,
    )
    return own or GraphLowering(Pipeline.parse(text), eager_codegen)


def _by_dialect(item: FlushEntry, total: Tensor, shard_rows: int) -> Tensor:
    how = item.reduction
    mine: Tensor = REDUCE_GRAD(total, how.rows, shard_rows, how.dtype, item.reduce_dtype, how.group)
    return mine


def _deliver(params: Sequence[Any], grads: Sequence[Tensor]) -> None:
    """Hand gradients to the parameters as a backward would: added to what is there, with all
    hooks."""
    arriving = [
        arriving_gradient(grad, compat.spec_of(param))
        for param, grad in zip(params, grads, strict=True)
    ]
    for param in params:
        drop_cached(param)  # a step is due, as after every reduction
    torch.autograd.backward(list(params), arriving)


def flush_graph(
    items: Sequence[FlushEntry], totals: Sequence[Tensor], shard_rows: Sequence[int]
) -> tuple[fx.GraphModule, list[Any]]:
    """The dialect's reductions of these gradients as a graph, and the fake values of its inputs."""
    graph = fx.Graph()
    mode = compat.FakeTensorMode()
    fakes = [mode.from_tensor(total, static_shapes=True) for total in totals]
    inputs = []
    for i, fake in enumerate(fakes):
        inputs.append(graph.placeholder(f"pending_{i}"))
        inputs[-1].meta["val"] = fake
    outputs = []
    for node, fake, item, rows in zip(inputs, fakes, items, shard_rows, strict=True):
        how = item.reduction
        reduced = graph.call_function(
            REDUCE_GRAD, (node, how.rows, rows, how.dtype, item.reduce_dtype, how.group)
        )
        with mode:
            reduced.meta["val"] = REDUCE_GRAD(
                fake, how.rows, rows, how.dtype, item.reduce_dtype, how.group
            )
        add_tag(reduced, Tag("reduce", (f"pending_{item.place}",), nbytes(fake), origin="flush"))
        outputs.append(reduced)
    graph.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), graph), fakes
