"""FX graphs: copies, boxed code generation, operator names, FLOP counts and calls of subgraphs."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, fx
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._prims.rng_prims import (
    graphsafe_run_with_rng_state,
    run_and_save_rng_state,
    run_with_rng_state,
)
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.graph import _BoxedCodeGen
from torch.utils import _pytree

pytree = _pytree

BOXED_CODEGEN = _BoxedCodeGen
"""Code generation for a function that takes one list of inputs and empties it.

Each input is therefore freed at its last use.
"""


OpOverload = torch._ops.OpOverload
"""Type of a call's target in an aten graph."""

HigherOrderOperator = torch._ops.HigherOrderOperator
"""Type of an operator that takes subgraphs, such as a checkpoint."""

OpOverloadPacket = torch._ops.OpOverloadPacket
"""Type of `torch.ops.aten.add`: all overloads of one operator."""


SUBGRAPH_CALL: Callable[..., Any] = invoke_subgraph
"""The operator that calls a subgraph: (subgraph, its name, inputs...) -> tuple of results."""


HELD = "zpasses_held"
"""Key of the metadata of inputs that stay in memory to the end of a graph, whatever reads them, and
of an output, with the bytes of what else does."""

MOVED_NAMESPACES = ("_c10d_functional", "zpasses")
"""Namespaces of the operators that passes move: collectives, and copies from and to the host."""


def op_name(target: OpOverload) -> str:
    """Returns the name of an operator without namespace and overload: "all_gather_into_tensor"."""
    return str(target._opname)


def is_erased(node: fx.Node) -> bool:
    """Whether a node was erased from its graph."""
    return bool(node._erased)


def operator_call(node: fx.Node) -> tuple[object, tuple[Any, ...]]:
    """Returns the operator that a node runs, and its arguments.

    They are the node's own, unless a recomputed operator is wrapped because it may draw random
    numbers, as attention with dropout does. Wrappers for accelerators also have the keyword
    `rng_state`.
    """
    if node.target in (run_and_save_rng_state, graphsafe_run_with_rng_state):
        return node.args[0], node.args[1:]
    if node.target is run_with_rng_state:
        return node.args[1], node.args[2:]
    return node.target, node.args


def flop_formula(target: object) -> Callable[..., int] | None:
    """Returns a formula for the floating-point operations of a call; None if it has none.

    It is torch's, or ours for operators that torch's counter leaves out: attention as the CPU runs
    it, which a step has that is captured for another device, and products of stacked experts.
    """
    from torch.utils.flop_counter import flop_registry

    packet = getattr(target, "overloadpacket", None)
    packet = _COUNTED_AS.get(packet, packet)
    if packet is torch.ops.aten._grouped_mm and packet not in flop_registry:
        return _grouped_flops
    return cast("Callable[..., int] | None", flop_registry.get(packet))


_COUNTED_AS: dict[object, object] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operator -> the one that does the same on another device."""


def _grouped_flops(left: Tensor, right: Tensor, *args: object, **kwargs: object) -> int:
    """Operations of `aten._grouped_mm`: each row of `left` meets one group of `right`, or each
    group of rows of both makes a product.
    """
    stacked = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * stacked * left.shape[-2] * left.shape[-1] * right.shape[-1]


def clone_graph_module(gm: fx.GraphModule, source: fx.Graph | None = None) -> fx.GraphModule:
    """Returns a copy of a module with a copy of its graph (or of `source`), to be rewritten.

    Attributes and metadata values are shared with the original. The copy generates its Python code
    when it is first called or printed: most copies are neither.
    """
    graph = fx.Graph()
    output = graph.graph_copy(source or gm.graph, {}, return_output_node=True)
    value, old = cast(tuple[Any, fx.Node], output)
    graph.output(value).meta = copy.copy(old.meta)
    clone = _LazyGraphModule(gm, graph)
    clone.meta = copy.copy(gm.meta)
    return clone


def lazy_recompiles() -> AbstractContextManager[None]:
    """Context manager: graph modules that torch makes inside it generate their Python code when
    they are first called or printed.
    """
    return _use_lazy_graph_module(True)


@contextlib.contextmanager
def no_recompiles() -> Iterator[None]:
    """Context manager: this thread generates no Python code for the graph modules that it makes or
    changes. It must not call them before `lazy_module` made others of them.
    """
    thread = threading.get_ident()
    with _NO_RECOMPILES:  # or a thread would restore what another one has replaced
        generate = fx.GraphModule.recompile

        def recompile(gm: fx.GraphModule) -> Any:
            return generate(gm) if threading.get_ident() != thread else None

        with mock.patch.object(fx.GraphModule, "recompile", recompile):
            yield


_NO_RECOMPILES = threading.RLock()


def lazy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a module with the same graph that generates its Python code when it is first called
    or printed. The given one is of no use any more.
    """
    if isinstance(gm, _LazyGraphModule):
        return gm
    made = _LazyGraphModule(gm, gm.graph)
    made.meta = gm.meta
    return made


def compiled_forward(gm: fx.GraphModule) -> Callable[..., Any]:
    """Returns the function that runs a graph, of its current nodes."""
    gm.recompile()
    _LazyGraphModule.force_recompile(gm)
    return gm.forward


def is_subgraph_call(node: fx.Node) -> bool:
    """Whether a node calls a subgraph."""
    return node.op == "call_function" and node.target is invoke_subgraph


def subgraph_of(node: fx.Node) -> fx.GraphModule | None:
    """Returns the graph that a subgraph call runs; None if it is not known."""
    if not is_subgraph_call(node):
        return None
    body: Any = node.args[0]
    found = getattr(node.graph.owning_module, str(body.target), None)
    return found if isinstance(found, fx.GraphModule) else None
