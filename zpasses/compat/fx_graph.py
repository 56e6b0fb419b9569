"""FX graphs: copies, code generation with a boxed calling convention, operation counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen
from torch.utils import _pytree as pytree

__all__ = [
    "BOXED_CODEGEN",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "clone_graph_module",
    "flop_formula",
    "is_erased",
    "op_name",
    "pytree",
]


BOXED_CODEGEN = _BoxedCodeGen
"""Code generation whose function takes one list and empties it, so that inputs die at their last
use."""


OpOverload = torch._ops.OpOverload
"""The type of a call's target in an aten graph."""

HigherOrderOperator = torch._ops.HigherOrderOperator
"""The type of a call that takes subgraphs, such as a checkpoint."""

OpOverloadPacket = torch._ops.OpOverloadPacket
"""All overloads of one operator: the type of `torch.ops.aten.add`."""


def op_name(target: OpOverload) -> str:
    """Name of an operator without namespace and overload: "all_gather_into_tensor"."""
    return str(target._opname)


def is_erased(node: fx.Node) -> bool:
    """Whether a node was erased from its graph."""
    return bool(node._erased)


def flop_formula(target: object) -> Callable[..., int] | None:
    """How many floating-point operations a call of `target` takes, as torch counts them; None where
    it counts none."""
    from torch.utils.flop_counter import flop_registry

    packet = getattr(target, "overloadpacket", None)
    return cast("Callable[..., int] | None", flop_registry.get(packet))


def clone_graph_module(gm: fx.GraphModule, source: fx.Graph | None = None) -> fx.GraphModule:
    """A copy of the module's graph (or of `source`) that can be rewritten; attributes and metadata
    values are shared."""
    graph = fx.Graph()
    output = graph.graph_copy(source or gm.graph, {}, return_output_node=True)
    value, old = cast(tuple[Any, fx.Node], output)
    graph.output(value).meta = copy.copy(old.meta)
    clone = fx.GraphModule(gm, graph)
    clone.meta = copy.copy(gm.meta)
    return clone
