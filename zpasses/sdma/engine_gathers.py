"""Gathers that become copy-engine gathers, and why."""

from __future__ import annotations

from typing import Any

from torch import fx

from zpasses import compat
from zpasses.cost.time.step_time import is_copy_engine_collective
from zpasses.graph.queries import collective_of, named_arguments, nbytes, value_of
from zpasses.graph.tags import Tag, add_tag, retag, tag_of
from zpasses.sdma.lifecycle import route_choice
from zpasses.sdma.ops import SDMA_ALL_GATHER, SDMA_ALL_GATHER_COALESCED, SDMA_ALL_GATHER_OUT

_SWAPS: dict[Any, compat.OpOverload] = {
    compat.functional.all_gather_into_tensor.default: SDMA_ALL_GATHER,
    compat.functional.all_gather_into_tensor_coalesced.default: SDMA_ALL_GATHER_COALESCED,
    compat.functional.all_gather_into_tensor_out.default: SDMA_ALL_GATHER_OUT,
}


def can_take_engine(node: fx.Node) -> bool:
    """Whether a node is a gather that has a copy-engine form."""
    return node.op == "call_function" and node.target in _SWAPS


def gather_by_engine(node: fx.Node, route: str) -> None:
    """Replaces the operator of a gather by its copy-engine form, which takes a route."""
    collective, arguments = collective_of(node), named_arguments(node, node.target)  # type: ignore[arg-type]
    assert collective is not None
    node.target = _SWAPS[node.target]
    names = [argument.name for argument in node.target._schema.arguments]
    first, size, _, *out = names
    node.args = (arguments[first], arguments[size], collective.group)
    node.kwargs = {name: arguments[name] for name in out if name != "route"} | {"route": route}
    if compat.is_inductor_lowering_loaded():
        compat.register_collective_lowerings()


def note_route(node: fx.Node, text: str, origin: str) -> None:
    """Writes why a gather takes its route into its tag. For a copy-engine gather, this includes
    what its group has chosen to run, if it has.
    """
    collective = collective_of(node)
    assert collective is not None
    by_engine = is_copy_engine_collective(collective)
    choice = (
        route_choice(collective.group, str(node.kwargs.get("route", ""))) if by_engine else None
    )
    if choice is not None and choice.reason:
        text += f"; runs by {choice.route} because {choice.reason}"
    if tag_of(node) is None:
        inputs = [value_of(each) for each in node.all_input_nodes]
        add_tag(node, Tag("gather", (), nbytes(inputs), origin=origin))
    retag(node, note=text)
