"""Code generation without a compiler (`codegen="eager"`), and the calling convention of generated
code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.cost.memory import reinplaceable_all_reduces

__all__ = ["boxed", "eager_codegen"]


def boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as boxed: torch calls it with one list of inputs, which it may clear."""

    def run(args: list[Any]) -> Any:
        return fn(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def eager_codegen(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Return a function that runs the graph node by node.

    It frees inputs at their last use, and all-reduces in place where Inductor's code does.
    """
    gm = compat.clone_graph_module(gm)  # observers and variants use the original graph
    for node in reinplaceable_all_reduces(gm.graph):
        node.target = _IN_PLACE[node.target]
    gm.graph.set_codegen(compat.BOXED_CODEGEN())
    return boxed(compat.compiled_forward(gm))


_IN_PLACE: dict[Any, Any] = {
    compat.functional.all_reduce.default: compat.functional.all_reduce_.default,
    compat.functional.all_reduce_coalesced.default: compat.functional.all_reduce_coalesced_.default,
}
