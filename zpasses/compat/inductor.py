"""Inductor: full compiles, code generation for one graph, and lowerings of zpasses collectives."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch.utils import _pytree as pytree

from zpasses.compat.fake import fake_mode_of

_CONFIG_PATCHES = {
    # Passes of zpasses order and merge collectives, so the same passes of Inductor are disabled.
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "_fuse_ddp_communication": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    # A replayed CUDA graph owns its outputs, but values that later calls read must outlive it.
    "triton.cudagraphs": False,
    # Orders nodes by their neighbours, which may differ between ranks (padding).
    "reorder_for_locality": False,
    # Moves waits for the sake of memory, which undoes overlap with compute.
    "reorder_for_peak_memory": False,
    # Keeps a dead buffer for one to come if that raises no peak. The lifetimes that it asks for are
    # known only to the passes above that order nodes, and no part of Inductor knows of memory that
    # a copy from the host takes before its wait. A caching allocator reuses memory anyway.
    "allow_buffer_reuse": False,
}


class _Decompositions(dict[Any, Callable[..., Any]]):
    """Pickled by name, since Inductor's caches pickle it and some of its functions cannot be."""

    def __reduce__(self) -> tuple[Any, ...]:
        return inductor_decompositions, ()


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns the decompositions that Inductor expects to be done in the graphs that it lowers,
    except those of products of matrices.

    These depend on whether a size is 1. The partitioner saves products and may compute again what
    they are decomposed into, from parameters that backward then gathers: on the ranks whose batch
    has one row, and not on the others. Inductor lowers products, too.
    """
    from torch._inductor.decomposition import select_decomp_table

    aten = torch.ops.aten
    products = {
        getattr(packet, name)
        for packet in (aten.mm, aten.addmm, aten.bmm)
        for name in packet.overloads()
    }
    kept = {op: how for op, how in select_decomp_table().items() if op not in products}
    return _Decompositions(kept)


def inductor_config_patches(
    partitioner: CustomPartitionerFn, extra: dict[str, Any]
) -> dict[str, Any]:
    """Returns the Inductor options of one compile: those of zpasses, overridden by the user's.

    Options of zpasses that this torch does not have are omitted.
    """
    known = inductor_option_names()
    ours = {key: value for key, value in _CONFIG_PATCHES.items() if key in known}
    return {**ours, "custom_partitioner_fn": partitioner, **extra}


def within_planned_peak(
    chosen: Mapping[str, Any], workspace_of: Callable[[fx.Node], int] = lambda call: 0
) -> dict[str, Any]:
    """Returns the Inductor options with which kernels are not fused where that raises the peak. A
    pass of the user in the same place runs before.

    Args:
        chosen: the user's options, which are kept. None in this place has all kernels fused.
        workspace_of: returns the bytes that a call takes besides its inputs and outputs, until its
            waits if there are some, and those of an input that live for this graph alone.
    """
    from torch._inductor import config

    from zpasses.compat.inductor_fused_order import fused_within_peak
    from zpasses.compat.inductor_fusion import fusion_within_peak

    name, after = "_pre_fusion_custom_pass", "_post_fusion_custom_pass"
    if name in chosen and chosen[name] is None:
        return dict(chosen)
    before = chosen.get(name, getattr(config, name))
    return {
        **chosen,
        name: fusion_within_peak(before, workspace_of),
        after: fused_within_peak(chosen.get(after, getattr(config, after)), workspace_of),
    }


def inductor_option_names() -> frozenset[str]:
    """Returns the names of all Inductor options of this torch."""
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def inductor_compile(
    gm: fx.GraphModule, inputs: Sequence[Any], inner: Callable[..., Any], patches: dict[str, Any]
) -> Any:
    """Runs `torch._inductor.compile_fx` with all Inductor passes and `inner` as its
    `inner_compile`.

    AOTAutograd's cache is disabled, because a hit would skip `inner`. The cache of compiled kernels
    stays enabled; its keys include the rewritten graph.
    """
    from torch._inductor.compile_fx import compile_fx

    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(
            gm,
            cast(Any, inputs),
            inner_compile=inner,
            config_patches=patches,
            decompositions=inductor_decompositions(),
        )


def pin_output_strides(output: fx.Node, strides: Mapping[int, tuple[int, ...]]) -> None:
    """Keeps Inductor from choosing the strides of these outputs of a graph.

    Args:
        output: the graph's output node.
        strides: position of an output -> its strides, in elements. All variants of one graph must
            return the same strides, because one backward reads what each of them saves.
    """
    output.meta[_PINNED] = {**output.meta.get(_PINNED, {}), **strides}


_PINNED = "zpasses_output_strides"
_RECORDED = "original_output_strides"
"""Per output of a graph, the strides that it has in the trace. From torch 2.15 on, an inference
graph has them before the passes of zpasses run.
"""


def _pin_outputs(gm: fx.GraphModule) -> None:
    """Inserts what `pin_output_strides` asked for.

    Inductor computes the strides of all values again, from those of the inputs, and may lay out
    values of three and more dimensions differently. So these get an operator that demands the
    strides. It makes no copy where they are as demanded.
    """
    output = gm.graph.output_node()
    pinned: dict[int, tuple[int, ...]] = output.meta.pop(_PINNED, {})
    values = list(cast(Sequence[Any], output.args[0]))
    for position, strides in pinned.items():
        node = values[position]
        if node.op == "placeholder" and node.meta["val"].stride() == strides:
            continue
        static = all(isinstance(each, int) for each in strides)
        if len(strides) < 3 or not static or not _repeats_statically(node, strides):
            continue
        with gm.graph.inserting_before(output):
            values[position] = _pinned(gm.graph, node, strides)
    output.args = (tuple(values),)
    if _RECORDED in output.meta:
        recorded = {**dict(enumerate(output.meta[_RECORDED])), **pinned}
        output.meta[_RECORDED] = [recorded.get(position) for position in range(len(values))]
    # Inductor asks each of them for its operator. A variant returns None for a gradient that it
    # keeps.
    visible = {*output.meta.get("user_visible_output_idxs", ()), *pinned}
    output.meta["user_visible_output_idxs"] = sorted(
        position for position in visible if isinstance(values[position], fx.Node)
    )
    gm.recompile()


def _pinned(graph: fx.Graph, node: fx.Node, strides: tuple[int, ...]) -> fx.Node:
    """Inserts a node that has the value of another, and these strides."""
    from torch._inductor.inductor_prims import force_stride_order

    def call(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta["val"] = target(args[0].meta["val"], *args[1:])
        return made

    aten, repeated = torch.ops.aten, _repeated_sizes(node, strides)
    for dim in repeated:  # an operator that writes cannot take a tensor that repeats its memory
        node = call(aten.slice.Tensor, node, dim, 0, 1)
    forced = graph.call_function(force_stride_order, (node, list(strides)))
    val = node.meta["val"]
    forced.meta["val"] = val.new_empty_strided(val.shape, strides)
    if not repeated:
        return forced
    return call(aten.expand.default, forced, [repeated.get(dim, -1) for dim in range(val.dim())])


def _repeated_sizes(node: fx.Node, strides: tuple[int, ...]) -> dict[int, Any]:
    """Returns dimension -> size, for those along which all elements are one."""
    sizes = enumerate(node.meta["val"].shape)
    return {dim: size for dim, size in sizes if strides[dim] == 0 and size != 1}


def _repeats_statically(node: fx.Node, strides: tuple[int, ...]) -> bool:
    return all(isinstance(size, int) for size in _repeated_sizes(node, strides).values())


def prefers_channels_last(graph: fx.Graph) -> bool:
    """Whether Inductor lays out the convolutions of a graph channels last.

    For a backward graph, it is the answer for the forward graph.
    """
    from torch._inductor.graph import GraphLowering

    aten = torch.ops.aten
    nodes: list[Any] = []
    for node in graph.nodes:
        args = node.args
        if node.target is aten.convolution_backward.default:
            args = (*args[1:3], args[9])
        elif node.target is not aten.convolution.default:
            nodes.append(node)
            continue
        nodes.append(SimpleNamespace(target=aten.convolution.default, args=args))
    gm: Any = SimpleNamespace(graph=SimpleNamespace(nodes=nodes))
    return GraphLowering.decide_layout_opt(gm, is_inference=False)


def lays_out_backwards(graph: fx.Graph) -> bool | None:
    """Whether Inductor has all backwards of convolutions of a graph run channels last, as some
    forward convolutions that it computes again do. If it does not, the operands get the layouts
    that eager code would give the gradients. None: they have those that the graph shows.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.kernel import conv

    if not hasattr(conv, "convolution_backward_lowering"):
        return None
    gm: Any = SimpleNamespace(graph=graph)
    return GraphLowering.decide_layout_opt(gm, is_inference=False)


def makes_indices_of_pool(node: fx.Node) -> bool:
    """Whether a call makes indices for the gradient of max pooling."""
    return str(node.target) == "prims._low_memory_max_pool_offsets_to_indices.default"


def makes_random_numbers(call: object) -> bool:
    """Whether a call makes random numbers, as Inductor's kernels do, once for all readers."""
    return str(call) == "prims.inductor_random.default"


_INDEX_PUTS = (torch.ops.aten._unsafe_index_put.default, torch.ops.aten.index_put.default)


def scatters_by_operator(node: fx.Node) -> bool:
    """Whether Inductor calls an operator for a `scatter` or an `index_put`, which reads its values
    from memory: for sums of some dtypes, masks, and on several threads of a CPU.
    """
    from torch._inductor.utils import (
        needs_fallback_due_to_atomic_add_limitations,
        use_scatter_fallback,
    )

    value, args, call = node.meta["val"], node.args, node.target
    dtype = value.dtype
    if call in _INDEX_PUTS:
        masks = (torch.bool, torch.uint8)
        indices = [each for each in args[1] if each is not None]  # type: ignore[union-attr]
        adds = bool(args[3] if len(args) > 3 else node.kwargs.get("accumulate"))
        return (
            torch.are_deterministic_algorithms_enabled()
            or any(each.meta["val"].dtype in masks for each in indices)  # type: ignore[union-attr]
            or (adds and needs_fallback_due_to_atomic_add_limitations(dtype))
        )
    if call is torch.ops.aten._unsafe_masked_index_put_accumulate.default:
        return bool(needs_fallback_due_to_atomic_add_limitations(dtype))
    reduced: Any = None
    if call is torch.ops.aten.scatter_add.default:
        reduced = "sum"
    elif call is torch.ops.aten.scatter_reduce.two:
        reduced = args[4]
    into = torch.ops.aten.scatter_.src if reduced is None else torch.ops.aten.scatter_reduce_.two
    return use_scatter_fallback(into, reduced, dtype, dtype, value.device.type, True)


def kept_strides(graph: fx.Graph) -> set[str]:
    """Returns the names of the outputs of a forward graph that Inductor computes with the strides
    that the graph shows, although it lays out convolutions channels last: those after the last
    convolution.
    """
    from torch._inductor.graph import GraphLowering

    if not graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        return set()
    if not prefers_channels_last(graph):
        return set()
    lowering: Any = SimpleNamespace(module=SimpleNamespace(graph=graph))
    last = GraphLowering.find_nodes_prefer_channels_last(lowering)
    outputs: Any = graph.output_node().all_input_nodes
    return {each.name for each in outputs if each.op == "call_function" and each not in last}


def report_output_strides(strides: Sequence[tuple[int, ...] | None]) -> None:
    """Tells AOTAutograd the strides that a forward graph returns.

    Its backward is compiled for inputs with these strides.

    Args:
        strides: per output of the graph; None if it is no tensor, or has the strides of the trace.
    """
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides[:] = strides


def inductor_codegen(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Generates and loads code for one graph. The returned function takes one list of inputs."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    register_collective_lowerings()
    _decompose_casts(gm)
    _reduce_views_of_awaited(gm)
    _pin_outputs(gm)
    with config.patch(patches):
        return cast(Callable[..., Any], compile_fx_inner(gm, cast(Any, inputs), **kwargs))


_declared_collectives: dict[torch._ops.OpOverload, bool] = {}


def declare_collective(op: torch._ops.OpOverload, *, writes_out: bool = False) -> None:
    """Declares a custom operator that, like a functional collective, returns at once and is
    completed by `wait_tensor`.

    Args:
        op: the operator.
        writes_out: whether it has an argument `out`, which it returns.
    """
    _declared_collectives[op] = writes_out


def register_collective_lowerings() -> None:
    """Registers Inductor lowerings for the declared collectives.

    Inductor turns an operator that it does not know into a plain call, and reuses the memory of its
    arguments after the call. With these lowerings, the buffers that a collective reads and writes
    are neither changed nor freed before the wait.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, lowerings
    from torch._inductor.virtualized import V

    kernel: Any = cast(Any, ir)._CollectiveKernel

    def out_of_place(op: torch._ops.OpOverload) -> Callable[..., Any]:
        return lambda inputs, *args, **named: pytree.tree_map(
            ir.TensorBox.create, kernel.create_out_of_place(op, inputs, *args, **named)
        )

    def in_place(op: torch._ops.OpOverload) -> Callable[..., Any]:
        def lower(source: Any, *args: Any, out: Any, **named: Any) -> Any:
            kernel.create_inplace(op, source, *args, out=out, **named)
            # Only `out` is awaited. Inductor may free the input before the wait, because the op
            # keeps it alive, but must not reuse its memory.
            V.graph.never_reuse_buffers.add(source.get_name())
            return out

        return lower

    for op, writes_out in _declared_collectives.items():
        if op not in lowerings:
            add_layout_constraint(op, constrain_to_fx_strides)
            # `register_lowering` rejects ops with an argument `out` that are not torch's own.
            lowerings[op] = (in_place if writes_out else out_of_place)(op)


def is_inductor_lowering_loaded() -> bool:
    """Whether Inductor's lowerings are imported.

    If so, a pass may run in a hook of an Inductor compile that zpasses did not start.
    """
    return "torch._inductor.lowering" in sys.modules


def _decompose_casts(gm: fx.GraphModule) -> None:
    """Replaces `_to_copy` casts that passes inserted by ops that Inductor can lower.

    Inductor decomposes `_to_copy` before zpasses runs, so it has no lowering for it here.
    """
    for node in list(
        gm.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    ):
        if not node.kwargs.keys() <= {"dtype", "memory_format"}:
            continue
        source, dtype = node.args[0], node.kwargs.get("dtype")
        with gm.graph.inserting_before(node):
            new = source
            if dtype:
                convert = torch.ops.prims.convert_element_type.default
                new = _copy_meta(gm.graph.call_function(convert, (source, dtype)), node)
            if new is source or "memory_format" in node.kwargs:
                clone = torch.ops.aten.clone.default
                new = _copy_meta(gm.graph.call_function(clone, (new,), _memory_format(node)), node)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    gm.recompile()


def _reduce_views_of_awaited(gm: fx.GraphModule) -> None:
    """Has every all-reduce of an awaited tensor reduce a view of it.

    Inductor reduces in place, so both collectives return the same buffer. It keeps the input of a
    collective whose output is awaited until the last wait for that buffer: a full gradient would
    stay until the average over replicas has arrived, not only until its reduce-scatter has.
    Inductor does not follow views there (`_WaitKernel.get_volatile_reads`).
    """
    c10d = torch.ops._c10d_functional
    for target in (c10d.all_reduce.default, c10d.all_reduce_coalesced.default):
        for started in gm.graph.find_nodes(op="call_function", target=target):
            given: Any = started.args[0]
            single = isinstance(given, fx.Node)
            results = [started] if single else list(started.users)
            waits = [user for result in results for user in result.users]
            awaited = [given] if single else list(given)
            if all(each.target is c10d.wait_tensor.default for each in (*awaited, *waits)):
                views = [_view_before(started, source) for source in awaited]
                started.update_arg(0, views[0] if single else views)
                for node in dict.fromkeys((started, *results)):
                    node.meta["val"] = pytree.tree_map(_with_leading_one, node.meta["val"])
                for node in waits:
                    _view_back(node)
    gm.recompile()


def _with_leading_one(value: torch.Tensor) -> torch.Tensor:
    return value.unsqueeze(0)


def _view_before(node: fx.Node, source: fx.Node) -> fx.Node:
    with node.graph.inserting_before(node):
        view = node.graph.call_function(torch.ops.aten.unsqueeze.default, (source, 0))
    view.meta["val"] = _with_leading_one(source.meta["val"])
    return view


def _view_back(wait: fx.Node) -> None:
    with wait.graph.inserting_after(wait):
        view = wait.graph.call_function(torch.ops.aten.squeeze.dim, (wait, 0))
    view.meta["val"] = wait.meta["val"]
    wait.meta["val"] = _with_leading_one(wait.meta["val"])
    wait.replace_all_uses_with(view, delete_user_cb=lambda user: user is not view)


def _copy_meta(node: fx.Node, source: fx.Node) -> fx.Node:
    node.meta = copy.copy(source.meta)
    return node


def _memory_format(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.kwargs.items() if key == "memory_format"}


def inductor_codegen_standalone(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]
) -> Callable[..., Any]:
    """Like `inductor_codegen`, for an inference graph outside any torch compile."""
    from torch._inductor.virtualized import V

    mode = fake_mode_of(inputs)
    with V.set_fake_mode(mode), tracing(TracingContext(mode)):
        return inductor_codegen(
            gm, inputs, patches, {"is_inference": True, "static_input_idxs": ()}
        )
