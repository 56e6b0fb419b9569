"""Counts the memory of the code that Inductor would make of a forward and its backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing

from zpasses.compat.dtensor import storage_id
from zpasses.compat.fake import fake_mode_of
from zpasses.compat.fx_graph import clone_graph_module, pytree, subgraph_of
from zpasses.compat.inductor import inductor_codegen, inductor_option_names

_BEFORE_FUSION = "_pre_fusion_custom_pass"
_AFTER_FUSION = "_post_fusion_custom_pass"
_BENCHMARKS = ("max_autotune", "max_autotune_gemm", "distributed_max_autotune_gemm")
"""Options of Inductor that run kernels, or collectives, while it lowers a graph."""


class CodeStep(NamedTuple):
    """A kernel, or a call of an operator, in generated code."""

    call: str
    """Name of the node of the graph that it computes, the last one if it computes several; "" if
    none is known."""
    is_kernel: bool
    live_bytes: int
    """Bytes that live while it runs, without what collectives, and copies from and to the host,
    make and take."""


class StepCode(NamedTuple):
    """What code runs, in order."""

    unfused: list[CodeStep]
    """Before kernels are fused that may stay apart."""
    fused: list[CodeStep]


def code_of_step(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    model_outputs: int,
    patches: Mapping[str, Any],
    workspace_of: Callable[[fx.Node], int],
) -> tuple[StepCode, StepCode] | None:
    """Returns what the code of each graph would run. Inductor lowers copies of the graphs
    and fuses their kernels; no code is made.

    Args:
        forward: the graph that returns what the model returns, and what backward reads.
        backward: the graph whose inputs have the names of what forward saves.
        model_outputs: how many outputs of forward are those of the model.
        patches: options of Inductor.
        workspace_of: as of `within_planned_peak`.

    Returns:
        None if a graph calls subgraphs, or has sizes that change: each lowering guards some.

    Raises:
        Exception: any kind, if Inductor does not lower a graph.
    """
    nodes = [node for gm in (forward, backward) for node in gm.graph.nodes]
    if any(subgraph_of(node) is not None or _has_symbols(node) for node in nodes):
        return None
    visible, donated = list(range(model_outputs)), _donated(forward, backward, model_outputs)
    ahead = _lowered(clone_graph_module(forward), visible, [], patches, workspace_of)
    reader = clone_graph_module(backward)
    _take_strides(reader, dict(zip(_names(forward), ahead.output_strides, strict=True)))
    back = _lowered(reader, [], donated, patches, workspace_of, is_backward=True)
    assert ahead.found is not None
    assert back.found is not None
    return ahead.found, back.found


def guard_sizes(backward: fx.GraphModule, patches: Mapping[str, Any]) -> None:
    """Has Inductor lower a copy of a backward graph, which guards the sizes that its code will
    depend on. No code is made.

    Raises:
        Exception: any kind, if Inductor does not lower the graph.
    """

    lowered = []

    def stop(nodes: list[Any]) -> list[Any]:
        lowered.append(True)
        _forget(nodes)
        raise _LoweredError

    try:
        copied = clone_graph_module(backward)
        _lower(copied, [], {**patches, _BEFORE_FUSION: stop}, is_backward=True)
    except Exception:
        if not lowered:
            raise


def has_symbols(gm: fx.GraphModule) -> bool:
    """Whether sizes of a graph may change."""
    return any(map(_has_symbols, gm.graph.nodes))


def _has_symbols(node: fx.Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("val"))
    return any(
        isinstance(each, torch.SymInt)
        or (isinstance(each, torch.Tensor) and each._has_symbolic_sizes_strides)
        for each in values
    )


class _LoweredError(Exception):
    """Ends the compile once all that is asked for is known."""


def _forget(nodes: list[Any]) -> None:
    """Ends the cycles of the scheduler, which otherwise stay until garbage is collected."""
    if nodes:
        nodes[0].scheduler.__dict__.clear()


class _Count:
    """Counts what the kernels and operators of a graph take, before and after kernels are fused."""

    def __init__(self, passes: Mapping[str, Any], workspace_of: Callable[[fx.Node], int]) -> None:
        self._passes = passes
        self._workspace_of = workspace_of
        self._unfused: list[CodeStep] = []
        self.found: StepCode | None = None
        self.output_strides: list[tuple[int, ...] | None] = []

    def before_fusion(self, nodes: list[Any]) -> list[Any]:
        from zpasses.compat.inductor_fusion import with_only_readers

        nodes = self._run(_BEFORE_FUSION, nodes)
        self._unfused = self._steps(with_only_readers(nodes))
        return nodes

    def after_fusion(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor.virtualized import V

        nodes = self._run(_AFTER_FUSION, nodes)
        self.output_strides = [_strides(each) for each in V.graph.graph_outputs]
        fused = self._steps(nodes)
        # Without a pass that keeps fusion within the peak, what it adds counts as it is.
        keeps = self._passes.get(_BEFORE_FUSION) is not None
        self.found = StepCode(self._unfused if keeps else fused, fused)
        _forget(nodes)
        raise _LoweredError

    def _run(self, name: str, nodes: list[Any]) -> list[Any]:
        own = self._passes.get(name)
        return nodes if own is None else list(own(nodes))

    def _steps(self, nodes: list[Any]) -> list[CodeStep]:
        from zpasses.compat.inductor_memory import NodeMemory
        from zpasses.compat.inductor_nodes import is_kernel, last_calls

        if not nodes:
            return []
        live = NodeMemory(nodes, self._workspace_of).without_collectives()
        return [
            CodeStep(call, is_kernel(node), size)
            for node, call, size in zip(nodes, last_calls(nodes), live, strict=True)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Count:
        return self  # Inductor copies its configuration, which contains this object


def _lowered(
    gm: fx.GraphModule,
    visible: list[int],
    donated: list[int],
    patches: Mapping[str, Any],
    workspace_of: Callable[[fx.Node], int],
    *,
    is_backward: bool = False,
) -> _Count:
    gm.graph.output_node().meta["user_visible_output_idxs"] = visible
    count = _Count(patches, workspace_of)
    passes = {_BEFORE_FUSION: count.before_fusion, _AFTER_FUSION: count.after_fusion}
    try:
        _lower(gm, donated, {**patches, **passes}, is_backward=is_backward)
    except Exception:
        if count.found is None:
            raise
    return count


def _lower(
    gm: fx.GraphModule, donated: list[int], patches: Mapping[str, Any], *, is_backward: bool
) -> None:
    """Lowers a graph, which is changed, by itself: nothing is cached or run."""
    from torch._inductor.virtualized import V

    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    options = {
        **patches,
        "fx_graph_cache": False,
        **{name: False for name in _BENCHMARKS if name in inductor_option_names()},
    }
    ambient = TracingContext.try_get()
    mode = fake_mode_of(inputs)
    context = TracingContext(mode)
    known = None if ambient is None else ambient.fw_metadata
    meta: Any = SimpleNamespace() if known is None else copy.copy(known)
    meta.bw_donated_idxs = donated
    context.fw_metadata = meta
    with V.set_fake_mode(mode), tracing(context):
        inductor_codegen(gm, inputs, options, {"is_backward": is_backward})


def _donated(forward: fx.GraphModule, backward: fx.GraphModule, model_outputs: int) -> list[int]:
    """Returns the positions of the inputs of a backward that it may write over: saved values that
    share no memory with inputs or outputs of the model or with gradients.
    """

    def storages(nodes: Sequence[Any]) -> set[int]:
        values = [node.meta.get("val") for node in nodes if isinstance(node, fx.Node)]
        return {storage_id(each) for each in values if isinstance(each, torch.Tensor)}

    if not functorch_config.donated_buffer:
        return []
    returned = cast(Sequence[Any], forward.graph.output_node().args[0])
    gradients = cast(Sequence[Any], backward.graph.output_node().args[0])
    held = storages(forward.graph.find_nodes(op="placeholder"))
    held |= storages(returned[:model_outputs]) | storages(gradients)
    saved = {
        node.name
        for node in returned[model_outputs:]
        if isinstance(node, fx.Node) and not _rests_on_host(node)
    }
    return [
        at
        for at, node in enumerate(backward.graph.find_nodes(op="placeholder"))
        if node.name in saved and storages([node]) and not storages([node]) & held
    ]


def _names(gm: fx.GraphModule) -> list[str]:
    """Returns the names that a backward has for what a forward returns."""
    returned = cast(Sequence[Any], gm.graph.output_node().args[0])
    values = [each.args[1] if _rests_on_host(each) else each for each in returned]
    return [each.name if isinstance(each, fx.Node) else "" for each in values]


def _rests_on_host(output: Any) -> bool:
    return str(getattr(output, "target", "")) == "zpasses.offload_wait.default"


def _strides(output: Any) -> tuple[int, ...] | None:
    layout = output.maybe_get_layout() if hasattr(output, "maybe_get_layout") else None
    strides = getattr(layout, "stride", None)
    if strides is None or not all(getattr(each, "is_number", True) for each in strides):
        return None
    return tuple(int(each) for each in strides)


def _take_strides(gm: fx.GraphModule, strides: Mapping[str, tuple[int, ...] | None]) -> None:
    """Gives the inputs of a backward the strides with which forward returns them."""
    for node in gm.graph.find_nodes(op="placeholder"):
        value, found = node.meta["val"], strides.get(node.name)
        if found is None or not isinstance(value, torch.Tensor) or value.stride() == found:
            continue
        node.meta = {**node.meta, "val": value.new_empty_strided(value.shape, found)}
