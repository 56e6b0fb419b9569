"""Code generation without a compiler (`codegen="eager"`), and the calling convention of generated
code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.memory.collective_memory import reinplaceable_all_reduces
from zpasses.graph.queries import returned_values, value_of


def boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as boxed: torch calls it with one list of inputs, which it may clear."""

    def run(args: list[Any]) -> Any:
        return fn(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def eager_codegen(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Return a function that runs the graph node by node.

    It frees inputs at their last use, and all-reduces in place where Inductor's code does. For
    fake inputs, it returns fake outputs with the shapes and strides of the graph's metadata,
    without running the nodes, which would take as long as tracing them.
    """
    module = eager_module(gm)
    outputs = _static_outputs(module.graph)
    compiled: list[Callable[[list[Any]], Any]] = []

    def run(args: list[Any]) -> Any:
        fake = next((each for each in args if isinstance(each, compat.FakeTensor)), None)
        if outputs is not None and fake is not None:
            given = list(args)
            args.clear()
            with fake.fake_mode:
                return [given[each] if isinstance(each, int) else each() for each in outputs]
        if not compiled:
            compiled.append(compat.compiled_forward(module))
        return compiled[0](args)

    return boxed(run)


def eager_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph, as it runs without a compiler."""
    gm = compat.clone_graph_module(gm)  # listeners and variants use the original graph
    for node in reinplaceable_all_reduces(gm.graph):
        node.target = _IN_PLACE[node.target]
    gm.graph.set_codegen(compat.BOXED_CODEGEN())
    return gm


def _static_outputs(graph: fx.Graph) -> list[int | Callable[[], Tensor | None]] | None:
    """Returns for each output of a graph the position of the input that it is, or what makes a new
    tensor like it.

    Returns None if the metadata does not tell: for dynamic shapes, and values that are no tensors.
    """
    position = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    found: list[int | Callable[[], Tensor | None]] = []
    for item in returned_values(graph):
        if item is None:
            found.append(_nothing)
            continue
        if item in position:
            found.append(position[item])
            continue
        value = value_of(item) if isinstance(item, fx.Node) else None
        if not isinstance(value, compat.FakeTensor) or not all(
            type(size) is int for size in (*value.shape, *value.stride())
        ):
            return None
        found.append(_maker(value))
    return found


def _nothing() -> None:
    return None


def _maker(value: Tensor) -> Callable[[], Tensor]:
    """Returns a function that makes a tensor with the shape, strides, dtype and device of another.
    In a fake tensor mode, it takes 50 us, and a method of a tensor of another mode 200 us.
    """
    shape, stride, dtype, device = value.shape, value.stride(), value.dtype, value.device
    if torch.empty(shape, device="meta").stride() == stride:
        return lambda: torch.empty(shape, dtype=dtype, device=device)
    return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)


_IN_PLACE: dict[Any, Any] = {
    compat.functional.all_reduce.default: compat.functional.all_reduce_.default,
    compat.functional.all_reduce_coalesced.default: compat.functional.all_reduce_coalesced_.default,
}
