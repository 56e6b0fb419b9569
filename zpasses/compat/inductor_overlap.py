"""Inductor's own schedulers of collectives, as peers to compare with."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import fx


def schedule_by_inductor(
    gm: fx.GraphModule, node_ms: Callable[[fx.Node], float], more_memory_gib: float
) -> fx.GraphModule:
    """Merges and moves collectives with `schedule_overlap_bucketing`.

    Args:
        gm: the graph, which is rewritten in place.
        node_ms: duration of a node by itself, in milliseconds.
        more_memory_gib: how far the peak may rise, in GiB. Inductor allows at least 5 % of it.

    Returns:
        The rewritten graph.
    """
    from torch._inductor.fx_passes import overlap_scheduling

    def estimate(node: fx.Node, override_bytes: int | None = None) -> float:
        return node_ms(node)

    # Its own roofline asks triton for the device, which a machine without one cannot answer.
    with patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", node_ms):
        return overlap_scheduling.schedule_overlap_bucketing(
            gm,
            collective_bucketing=True,
            custom_runtime_estimation=estimate,
            compute_estimator="analytical",
            max_memory_increase_gb=more_memory_gib,
            max_in_flight_gb=max(5.0, more_memory_gib),
        )


def schedule_blocks_by_inductor(
    gm: fx.GraphModule, blocks: Sequence[list[str] | str]
) -> fx.GraphModule:
    """Merges the collectives of each block of modules and prefetches one block ahead, with
    `manual_overlap_bucketing`, as torchtitan does.

    Args:
        gm: the graph, which is rewritten in place.
        blocks: names of modules; those in one list share their collectives.

    Returns:
        The rewritten graph.

    Raises:
        ValueError: if no call of the graph belongs to any of the modules.
    """
    from torch._inductor.fx_passes import overlap_manual_scheduling, overlap_scheduling

    paths = {path for node in gm.graph.nodes for path, _ in _module_stack(node)}
    named = [path for block in blocks for path in ([block] if isinstance(block, str) else block)]
    if paths.isdisjoint(named):
        raise ValueError(f"no call belongs to {named[0]}; the graph has {sorted(paths)[:4]}")
    with patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", lambda node: 0.0):
        return overlap_manual_scheduling.manual_overlap_bucketing(
            gm, list(blocks), insert_overlap_deps=False, module_stack_fn=_module_stack
        )


def _module_stack(node: fx.Node) -> list[tuple[str, type[Any]]]:
    """Returns path and class of each module around a node. Inductor's own function knows the paths
    of `L['self']` alone, and not those of an argument, as in a model that calls itself wrapped.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [(re.sub(r"^L(\[[^]]*\])+\.?", "", name), kind) for name, kind in stack.values()]


def inductor_node_ms(node: fx.Node, tflops: float, memory_gb_s: float) -> float:
    """Estimates a node's duration in milliseconds as Inductor's scheduler does by default.

    Args:
        node: a call of an ATen operator or of a functional collective.
        tflops: what Inductor would read from the device, in 10^12 operations per second.
        memory_gb_s: bandwidth of the device's memory, in GB/s.
    """
    from torch._inductor import comm_analysis
    from torch._inductor.fx_passes import overlap_scheduling
    from torch._inductor.fx_passes.bucketing import _resolve_group_name
    from torch.utils import _runtime_estimation

    target: Any = node.target
    if getattr(target, "namespace", "") == "_c10d_functional":
        arguments = {each.name: at for at, each in enumerate(target._schema.arguments)}
        if "group_name" not in arguments:
            return 0.0
        group = _resolve_group_name(node.args[arguments["group_name"]])
        sent = [each for each in node.all_input_nodes if each is not node.kwargs.get("out")]
        return float(
            comm_analysis.estimate_nccl_collective_runtime_impl(
                _tensor_bytes(node) + sum(map(_tensor_bytes, sent)),
                dist.distributed_c10d._get_group_size_by_name(group),
                comm_analysis.get_collective_type_from_kernel_name(target.name()),
            )
        )
    # The second name is that of torch < 2.15, whose functions take no device.
    bandwidth = ("get_device_dram_gbps", "get_gpu_dram_gbps")
    name = next(each for each in bandwidth if hasattr(_runtime_estimation, each))
    with (
        patch.object(_runtime_estimation, "get_device_tflops", lambda *args, **kwargs: tflops),
        patch.object(_runtime_estimation, name, lambda *args: memory_gb_s),
    ):
        return float(overlap_scheduling.estimate_roofline_runtime_ms(node))


def _tensor_bytes(node: fx.Node) -> int:
    values = node.meta.get("val")
    return sum(
        each.numel() * each.element_size()
        for each in (values if isinstance(values, (list, tuple)) else [values])
        if isinstance(each, torch.Tensor)
    )
