"""Code without a compiler, and the calling convention that all generated code has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.cost.memory import reinplaceable_all_reduces

__all__ = ["boxed", "eager_codegen"]


def boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A function that torch knows to take one list of inputs, which it may empty."""

    def run(args: list[Any]) -> Any:
        return fn(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def eager_codegen(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Run the graph node by node, freeing inputs at their last use, and all-reducing in place where
    compiled code does."""
    gm = compat.clone_graph_module(gm)  # others look at the graph as the passes left it
    for node in reinplaceable_all_reduces(gm.graph):
        node.target = _IN_PLACE[node.target]
    gm.graph.set_codegen(compat.BOXED_CODEGEN())
    gm.recompile()
    return boxed(gm.forward)


_IN_PLACE: dict[Any, Any] = {
    compat.functional.all_reduce.default: compat.functional.all_reduce_.default,
    compat.functional.all_reduce_coalesced.default: compat.functional.all_reduce_coalesced_.default,
}
