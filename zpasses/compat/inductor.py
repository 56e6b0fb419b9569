"""Inductor: compile with its passes, generate code for one graph, and lower our collectives."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.utils import _pytree as pytree

from zpasses.compat.fake import fake_mode_of

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "declare_collective",
    "inductor_codegen",
    "inductor_codegen_alone",
    "inductor_compile",
    "inductor_is_lowering",
    "inductor_option_names",
    "inductor_patches",
    "lower_own_collectives",
    "pin_output_strides",
]


_ONE_SCHEDULER = {
    # Passes of Inductor that reorder or merge collectives after ours: one scheduler owns the order.
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "_fuse_ddp_communication": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    # A replayed CUDA graph owns its outputs; carried values must outlive the replay.
    "triton.cudagraphs": False,
    # Orders nodes by what surrounds them, which may differ between ranks (padding).
    "reorder_for_locality": False,
    # Moves waits to where their memory is needed or free, and so undoes what runs beside compute.
    "reorder_for_peak_memory": False,
}


def inductor_patches(partitioner: CustomPartitionerFn, extra: dict[str, Any]) -> dict[str, Any]:
    """Inductor options of one compile: ours, then the user's. Options that this torch does not have
    are left out."""
    known = inductor_option_names()
    ours = {key: value for key, value in _ONE_SCHEDULER.items() if key in known}
    return {**ours, "custom_partitioner_fn": partitioner, **extra}


def inductor_option_names() -> frozenset[str]:
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def inductor_compile(
    gm: fx.GraphModule, inputs: Sequence[Any], inner: Callable[..., Any], patches: dict[str, Any]
) -> Any:
    """`torch._inductor.compile_fx` with all of Inductor's own passes and `inner` in place of its
    last step.

    AOTAutograd's own cache is off: a hit would skip `inner`. The cache of compiled kernels stays
    on; it keys on the rewritten graph."""
    from torch._inductor.compile_fx import compile_fx

    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(gm, cast(Any, inputs), inner_compile=inner, config_patches=patches)


def pin_output_strides(output: fx.Node) -> None:
    """Keep Inductor from choosing the strides of what a graph returns: all variants of it must
    return alike, and take what they return."""
    output.meta["user_visible_output_idxs"] = list(range(len(cast(Sequence[Any], output.args[0]))))


def inductor_codegen(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Generate and load code for one graph; the result takes one list of inputs."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    lower_own_collectives()
    _decompose_casts(gm)
    with config.patch(patches):
        return cast(Callable[..., Any], compile_fx_inner(gm, cast(Any, inputs), **kwargs))


_own_collectives: dict[torch._ops.OpOverload, bool] = {}


def declare_collective(op: torch._ops.OpOverload, *, writes_out: bool = False) -> None:
    """Say that an operator of ours returns at once and is awaited by `wait_tensor`, as the
    functional collectives are.

    Args:
        writes_out: it has an argument `out`, which it returns.
    """
    _own_collectives[op] = writes_out


def lower_own_collectives() -> None:
    """Teach Inductor the declared collectives: what they read and write stays untouched, and is not
    freed, until it is awaited.

    An operator that Inductor does not know becomes a plain call, after which it reuses the memory
    of the arguments."""
    from torch._inductor import ir
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, lowerings
    from torch._inductor.virtualized import V

    kernel: Any = cast(Any, ir)._CollectiveKernel

    def out_of_place(op: torch._ops.OpOverload) -> Callable[..., Any]:
        return lambda inputs, *args: pytree.tree_map(
            ir.TensorBox.create, kernel.create_out_of_place(op, inputs, *args)
        )

    def into_given(op: torch._ops.OpOverload) -> Callable[..., Any]:
        def lower(source: Any, *args: Any, out: Any) -> Any:
            kernel.create_inplace(op, source, *args, out=out)
            # The wait will be of `out` alone: Inductor may let go of the input before, which the op
            # keeps alive, but not write to it.
            V.graph.never_reuse_buffers.add(source.get_name())
            return out

        return lower

    for op, writes_out in _own_collectives.items():
        if op not in lowerings:
            add_layout_constraint(op, constrain_to_fx_strides)
            # Past `register_lowering`, which takes no op with an argument `out` but torch's own.
            lowerings[op] = (into_given if writes_out else out_of_place)(op)


def inductor_is_lowering() -> bool:
    """Whether a pass runs inside a compile by Inductor that zpasses did not start (a hook of
    Inductor), or may do so."""
    return "torch._inductor.lowering" in sys.modules


def _decompose_casts(gm: fx.GraphModule) -> None:
    """Casts that passes inserted, in Inductor's own words: it knows `_to_copy` only as something
    that was decomposed before."""
    for node in list(
        gm.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    ):
        if not node.kwargs.keys() <= {"dtype", "memory_format"}:
            continue
        source, dtype = node.args[0], node.kwargs.get("dtype")
        with gm.graph.inserting_before(node):
            cast = (
                gm.graph.call_function(
                    torch.ops.prims.convert_element_type.default, (source, dtype)
                )
                if dtype
                else source
            )
            cast = cast if cast is source else _described(cast, node)
            if cast is source or "memory_format" in node.kwargs:
                cast = _described(
                    gm.graph.call_function(torch.ops.aten.clone.default, (cast,), _format(node)),
                    node,
                )
        node.replace_all_uses_with(cast)
        gm.graph.erase_node(node)
    gm.recompile()


def _described(node: fx.Node, like: fx.Node) -> fx.Node:
    node.meta = copy.copy(like.meta)
    return node


def _format(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.kwargs.items() if key == "memory_format"}


def inductor_codegen_alone(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]
) -> Callable[..., Any]:
    """As `inductor_codegen`, for a graph without gradients that no compile of torch is behind."""
    from torch._inductor.virtualized import V

    mode = fake_mode_of(inputs)
    with V.set_fake_mode(mode), tracing(TracingContext(mode)):
        return inductor_codegen(
            gm, inputs, patches, {"is_inference": True, "static_input_idxs": ()}
        )
