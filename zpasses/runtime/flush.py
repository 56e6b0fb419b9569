"""The flush of a window: reduce its pending gradients outside of any backward.

A flush runs a separate small graph, over a set of gradients that the ranks agree on. Ranks may hold
different pending gradients, because a parameter may receive a gradient on some ranks only. The
ranks exchange their sets through the store. Every gradient that is pending on any rank is reduced,
with zeros from the other ranks.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.cost.time.target import Target, current_target, use_target
from zpasses.errors import AgreementError, OptionError, ZpassesError
from zpasses.graph.dialect import reduction_calls
from zpasses.graph.encoding import expand_encodings
from zpasses.graph.error_feedback import Residual, add_residual_inputs, residual_inputs
from zpasses.graph.queries import nbytes, value_of
from zpasses.graph.tags import Reduction, Tag, add_tag
from zpasses.pipeline.base_pass import Level
from zpasses.pipeline.events import Events, run_reported_passes
from zpasses.pipeline.pipeline import Pipeline
from zpasses.pipeline.runner import Verify
from zpasses.ranks.compared_collectives import compare_collectives
from zpasses.ranks.failures import is_reported, post_failure, report_failure
from zpasses.ranks.vote import (
    COMPILE_TIMEOUT,
    WINDOW_TIMEOUT,
    TimeLimit,
    vote,
    vote_timeout,
)
from zpasses.runtime.codegen import eager_codegen
from zpasses.runtime.gloo import replace_gloo_collectives
from zpasses.runtime.grad_slots import pending_key
from zpasses.runtime.layout import layout_of, rows_of
from zpasses.runtime.overflows import OverflowWatch, encoded_grads
from zpasses.runtime.param_conversion import accumulate_grads
from zpasses.runtime.param_value import param_value_of
from zpasses.runtime.profiling import collective_names, with_profiler_range
from zpasses.runtime.residuals import residual_of
from zpasses.runtime.run_checks import limited_collectives, timeout_of
from zpasses.runtime.windows import Lowering, Window, grad_state_of

_MAX_CACHED_GRAPHS = 8
"""Number of flush graphs whose code is cached, one per set of gradients."""

_TIMEOUT_OPTION = f"{WINDOW_TIMEOUT} or {COMPILE_TIMEOUT}"

_TARGET = "\ntarget "
"""Stands between the pipeline and the target in the text of a lowering."""


@dataclass(frozen=True)
class FlushEntry:
    """One gradient to reduce, as ranks describe it to each other."""

    param_index: int
    """Index of the parameter in its window."""
    dtype: torch.dtype
    """Dtype of the gradient."""
    total_dtype: torch.dtype
    """Dtype of the pending sum."""
    shape: tuple[int, ...]
    reduction: Reduction

    def to_json(self) -> list[Any]:
        how = self.reduction
        return [
            self.param_index,
            _name(self.dtype),
            _name(self.total_dtype),
            list(self.shape),
            how.rows,
            _name(how.dtype),
            _name(how.reduce_dtype),
            how.group is None,
            how.to_host,
        ]

    @staticmethod
    def from_json(values: Sequence[Any], window: Window, group: str) -> FlushEntry:
        """Read an entry of another rank of `group`. Its other groups are those of this rank."""
        param_index, dtype, total_dtype, shape, rows, shard_dtype, reduce_dtype, *flags = values
        of_shard, to_host = flags
        param = window.params[param_index]
        groups = layout_of(param).sharding_groups if isinstance(param, DTensor) else (group,)
        inside = None if of_shard else groups[0]
        reduction = Reduction(
            rows,
            _dtype(shard_dtype),
            _dtype(reduce_dtype) if reduce_dtype else None,
            inside,
            groups[1] if len(groups) > 1 else None,
            to_host,
        )
        return FlushEntry(param_index, _dtype(dtype), _dtype(total_dtype), tuple(shape), reduction)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which the gradient is communicated.

        It does not depend on the accumulation dtype: a sum in a wider dtype is reduced in the dtype
        in which a single gradient would be.
        """
        return self.reduction.reduce_dtype or self.dtype

    def calls(self, shard_rows: int) -> list[tuple[compat.OpOverload, tuple[Any, ...]]]:
        """Return the dialect's operators that reduce the gradient, as `reduction_calls` does."""
        how = replace(self.reduction, reduce_dtype=self.reduce_dtype)
        return reduction_calls(how, shard_rows, self.total_dtype)


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class GraphLowering:
    """Lowers a flush with the pipeline and the code generation of one compiled graph.

    Args:
        target: text of the target that the graph was planned for; None for that of the process.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        codegen: Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]],
        events: Events | None = None,
        *,
        verify: Verify = "static",
        target: str | None = None,
    ) -> None:
        self._pipeline, self._codegen, self._events = pipeline, codegen, events or Events()
        self._target = Target.parse(target) if target else None
        self._verify: Verify = verify
        self._code: dict[Any, tuple[Callable[[list[Any]], Any], list[Residual]]] = {}
        try:
            known = Pipeline.parse(str(pipeline)) == pipeline
        except OptionError:
            known = False
        # Other ranks rebuild the passes from this text, if they can.
        self.text = f"{pipeline}{_TARGET}{target or ''}" if known else ""

    @classmethod
    def of(cls, text: str) -> GraphLowering:
        """Returns the lowering of another rank's graph, with eager code."""
        pipeline, _, target = text.partition(_TARGET)
        return cls(Pipeline.parse(pipeline), eager_codegen, target=target or None)

    def code(
        self,
        entries: Sequence[FlushEntry],
        totals: Sequence[Tensor],
        shard_rows: Sequence[int],
        params: Sequence[Any],
        *,
        compares: bool,
    ) -> Callable[[list[Any]], Any]:
        """Compile the reduction of these gradients, or return it from the cache.

        Args:
            compares: whether the ranks compare the collectives of a graph that is compiled.
        """
        key = (tuple(entries), tuple(shard_rows))
        if key not in self._code:
            if len(self._code) >= _MAX_CACHED_GRAPHS:
                self._code.clear()
            gm, fakes = flush_graph(entries, totals, shard_rows)
            for level in (Level.JOINT, Level.BACKWARD):
                with use_target(self._target or current_target()):
                    run_reported_passes(
                        self._events,
                        "flush",
                        level.value,
                        gm.graph,
                        self._pipeline.at(level),
                        verify=self._verify,
                    )
            gm.recompile()
            whole, residuals = add_residual_inputs(gm)
            fakes += map(value_of, residual_inputs(whole.graph))
            code = self._codegen(expand_encodings(replace_gloo_collectives(whole)), fakes)
            code = with_profiler_range(code, collective_names(gm.graph), "", "flush")
            if compares:
                compare_collectives(gm.graph, "of the end of a window")
            self._events.collectives_compared("flush", gm.graph, compares)
            encoded = [
                replace(each, param=_path_of(each.param, params))
                for each in encoded_grads(gm.graph)
            ]
            code = OverflowWatch().watching(code, encoded, "the end of a window")
            self._code[key] = code, residuals
        code, residuals = self._code[key]
        owners = {_input_name(entry.param_index): params[entry.param_index] for entry in entries}
        held = [residual_of(owners[each.param], each) for each in residuals]

        def run(inputs: list[Any]) -> Any:
            inputs += held  # the code clears the list, so that totals are freed early
            return code(inputs)

        return run if held else code


def _input_name(param_index: int | str) -> str:
    """Returns the name that a parameter of a window has in the tags of a flush graph."""
    return f"pending_{param_index}"


def _path_of(name: str, params: Sequence[Any]) -> str:
    """Returns the path of a parameter in its model, of a name that `_input_name` has made."""
    param = params[int(name.removeprefix(_input_name("")))]
    return param_value_of(param).identity.partition(":")[2]


def flush(window: Window, timeout_s: float | None, failure: str | None = None) -> None:
    """Average the pending gradients of a window over ranks and add them to `param.grad`.

    The window has no pending gradients afterwards, also if this function raises.

    Args:
        timeout_s: seconds to wait for the other ranks; None does not exchange anything with them.
        failure: why this rank cannot take part. The other ranks get it as an error, and nothing is
            reduced.

    Raises:
        AgreementError: if another rank failed or did not respond in time. Nothing is reduced on any
            rank.
        ZpassesError: if a parameter that has a pending gradient on another rank no longer exists
            on this one.
    """
    try:
        entries, text = _agree_on_entries(window, _pending_entries(window), timeout_s, failure)
        if entries and failure is None:
            _reduce(window, entries, text, timeout_s)
    finally:
        window.discard_pending()


def _pending_entries(window: Window) -> dict[FlushEntry, str]:
    """Return the pending gradients of this rank, each with the text of the pipeline that lowers
    it.
    """
    held = {}
    for param_index, param in enumerate(window.params):
        for (dtype, _), part in (
            sorted(grad_state_of(param).pending.items(), key=lambda item: str(item[0]))
            if param is not None
            else ()
        ):
            entry = FlushEntry(
                param_index, dtype, part.total.dtype, tuple(part.total.shape), part.reduction
            )
            held[entry] = part.lowering.text if part.lowering is not None else ""
    return held


def _agree_on_entries(
    window: Window, held: dict[FlushEntry, str], timeout_s: float | None, failure: str | None
) -> tuple[list[FlushEntry], str]:
    if timeout_s is None:
        return sorted(held, key=_order), _common_pipeline(held.values())
    # A gradient that is pending on one rank is reduced in its replica, and then in all replicas:
    # each group votes on what the groups before it have found.
    entries = dict.fromkeys(held)
    texts = set(held.values())
    error: AgreementError | None = None
    for group in groups_of(window):
        mine = [entry for entry in entries if group in _groups(entry.reduction)]
        ballot = {
            "entries": [json.dumps(entry.to_json()) for entry in mine],
            "texts": sorted(texts) if mine else [],
        }
        if failure or error:
            post_failure(group, f"rank {compat.global_rank()} {failure or error}")
            continue
        try:
            decision = vote(
                group,
                "the end of a window",
                ballot,
                _union,
                TimeLimit(timeout_s, _TIMEOUT_OPTION),
            )
        except AgreementError as caught:
            error = error or caught
            continue
        for entry in decision["entries"]:
            entries[FlushEntry.from_json(json.loads(entry), window, group)] = None
        texts.update(decision["texts"])
    if error is not None:
        raise error
    return sorted(entries, key=_order), _common_pipeline(texts)


def _order(entry: FlushEntry) -> tuple[int, str, bool]:
    return entry.param_index, str(entry.dtype), entry.reduction.group is None


def _common_pipeline(texts: Any) -> str:
    # Gradients of eager code have no pipeline; the pipeline of a graph serves them as well.
    known = {text for text in texts if text}
    return known.pop() if len(known) == 1 else ""


def _union(ballots: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: sorted({value for ballot in ballots for value in ballot[key]})
        for key in ("entries", "texts")
    }


def _groups(reduction: Reduction) -> tuple[str, ...]:
    return tuple(name for name in (reduction.group, reduction.replicate_group) if name is not None)


def groups_of(window: Window) -> list[str]:
    """Return the names of the process groups over which a window's parameters are sharded, then
    those of their replicas, in the same order on every rank.
    """
    found = [
        layout_of(param).sharding_groups for param in window.params if isinstance(param, DTensor)
    ]
    ordered = [groups[0] for groups in found] + [name for groups in found for name in groups[1:]]
    return list(dict.fromkeys(ordered))


# --- reducing -------------------------------------------------------------------------------------
def _reduce(
    window: Window, entries: Sequence[FlushEntry], text: str, timeout_s: float | None
) -> None:
    params, groups = window.params, groups_of(window)
    with vote_timeout(timeout_of(groups, timeout_s)):  # of passes, and about routes
        with _reporting_failures(groups, timeout_s):
            code, totals = _prepared(params, entries, text, compares=timeout_s is not None)
        if timeout_s is None:
            grads = code(totals)
        else:
            name = "the reduction of a window"
            with limited_collectives(groups, name, TimeLimit(timeout_s, _TIMEOUT_OPTION)):
                grads = code(totals)
    accumulate_grads([params[entry.param_index] for entry in entries], grads)


@contextlib.contextmanager
def _reporting_failures(groups: Sequence[str], timeout_s: float | None) -> Iterator[None]:
    """Context of what a rank does by itself while the others may wait in a collective."""
    try:
        yield
    except BaseException as error:  # interrupts, too
        if timeout_s is not None and not is_reported(error):
            report_failure(groups, error, "ending a window", recoverable=False)
        raise


def _prepared(
    params: Sequence[Any], entries: Sequence[FlushEntry], text: str, *, compares: bool
) -> tuple[Callable[[list[Any]], Any], list[Tensor]]:
    """Returns code that reduces the pending gradients, and these. Parameters give them up."""
    lowering = _lowering(params, text)
    totals, shard_rows = [], []
    for entry in entries:
        param = params[entry.param_index]
        if param is None:
            raise ZpassesError(
                f"parameter {entry.param_index} of the window no longer exists on this rank, but "
                "other ranks hold a gradient of it. Keep the model until the window has ended on "
                "every rank."
            )
        shard = rows_of(param)
        key = pending_key(entry.dtype, entry.reduction)
        grad = grad_state_of(param).pending.pop(key, None)
        totals.append(
            grad.total
            if grad is not None
            else torch.zeros(
                entry.shape, dtype=entry.total_dtype, device=layout_of(param).mesh.device_type
            )
        )
        shard_rows.append(shard.shape[0] if shard.dim() else 0)
    if lowering is None:
        return functools.partial(_reduce_with_dialect, entries, shard_rows), totals
    return lowering.code(entries, totals, shard_rows, params, compares=compares), totals


def _lowering(params: Sequence[Any], text: str) -> Lowering | None:
    """Choose how to lower a flush.

    Returns:
        The lowering of a pending gradient whose graph has this pipeline. A rank without one runs
        the pipeline with eager code. None, if `text` is empty: the dialect's ops run unlowered.
    """
    if not text:
        return None
    parts = (
        part
        for param in params
        if param is not None
        for part in grad_state_of(param).pending.values()
    )
    own = next(
        (
            part.lowering
            for part in parts
            if part.lowering is not None and part.lowering.text == text
        ),
        None,
    )
    return own or GraphLowering.of(text)


def _reduce_with_dialect(
    entries: Sequence[FlushEntry], shard_rows: Sequence[int], totals: list[Tensor]
) -> list[Tensor]:
    grads = []
    for entry, rows in zip(entries, shard_rows, strict=True):
        grad = totals.pop(0)  # so that it is freed
        for operator, arguments in entry.calls(rows):
            grad = operator(grad, *arguments)
        grads.append(grad)
    return grads


def flush_graph(
    entries: Sequence[FlushEntry], totals: Sequence[Tensor], shard_rows: Sequence[int]
) -> tuple[fx.GraphModule, list[Any]]:
    """Build the graph that reduces these gradients with the dialect's `reduce_grad`.

    Returns:
        The graph, and the fake values of its inputs.
    """
    graph = fx.Graph()
    mode = compat.FakeTensorMode()
    fakes = [mode.from_tensor(total, static_shapes=True) for total in totals]
    inputs = []
    for i, fake in enumerate(fakes):
        inputs.append(graph.placeholder(f"pending_{i}"))
        inputs[-1].meta["val"] = fake
    outputs = []
    for node, fake, entry, rows in zip(inputs, fakes, entries, shard_rows, strict=True):
        reduced, name = node, _input_name(entry.param_index)
        for operator, arguments in entry.calls(rows):
            sent = fake
            with mode:
                fake = operator(fake, *arguments)
            reduced = graph.call_function(operator, (reduced, *arguments))
            reduced.meta["val"] = fake
            add_tag(reduced, Tag("reduce", (name,), nbytes(sent), origin="flush"))
        outputs.append(reduced)
    graph.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), graph), fakes
