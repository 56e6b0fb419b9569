"""Residuals of error feedback: what encoded reductions have lost of a parameter's gradients so far.

Before                                        After
  grad = mm(xt, gy)                             grad = mm(xt, gy)
  records = encode(grad, 24, 4, "int8/128/feedback")
                                                records = encode_with_feedback(
                                                    grad, residual_0, 24, 4, "int8/128")
  arrived = wait(all_to_all_single(records))    arrived = wait(all_to_all_single(records))

Passes see the form on the left, in which every residual counts as zero. So they need no state, and
simulated ranks check them as without feedback. Right before code generation, after a variant of a
backward graph or the graph of a window's end is built, the residuals become further inputs. The
operator writes them in place. zpasses.runtime.residuals holds them.

A residual is no pending gradient: nothing waits for it, so windows and optimizer steps do not ask
for it, and ranks do not vote on it. If a graph encodes two gradients of one parameter, each has a
residual of its own: Inductor may misorder a second write to one input (see `_encoded_with_feedback`
in zpasses.graph.encoding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.dialect import AVERAGE_GRAD, group_size
from zpasses.graph.encoding import ENCODE, ENCODE_WITH_FEEDBACK, Encoding
from zpasses.graph.queries import (
    Editor,
    append_placeholder,
    calls,
    named_arguments,
    replace_node,
    value_of,
)
from zpasses.graph.tags import Tag, add_tag, tag_of


@dataclass(frozen=True)
class Residual:
    """What error feedback keeps on each rank for one parameter."""

    param: str
    """Name of the parameter."""
    shape: tuple[int, ...]
    """[ranks, blocks, values per block]: the full gradient, padded as its blocks are. Of a
    reduction in two hops, [nodes, ...]: what the first hop leaves to the rank."""
    number: int = 0
    """Of the gradients of the parameter that the graph encodes, which one it is for."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * torch.float32.itemsize


def residuals_of(graph: fx.Graph) -> list[Residual]:
    """Returns the residuals that a graph without them as inputs needs, one for each gradient that
    it encodes, in its order.
    """
    found: list[Residual] = []
    for node in _encodes(graph):
        _, count, parts, how = _arguments(node)
        _append(found, _tag(node).params[0], how.residual_shape(count, parts))
    return found


def planned_residuals(graph: fx.Graph) -> list[Residual]:
    """Returns the residuals that a graph will need, also for averages that a later pass encodes."""
    found: list[Residual] = residuals_of(graph)
    for node in calls(graph, AVERAGE_GRAD):
        given = named_arguments(node, AVERAGE_GRAD)
        if (encoding := given.get("encoding")) and (how := Encoding.parse(encoding)).feedback:
            parts = group_size(compat.group_name(given["group_name"]))
            count = value_of(node.all_input_nodes[0]).numel() // parts
            _append(found, _tag(node).params[0], how.residual_shape(count, parts))
    return found


def _append(found: list[Residual], param: str, shape: tuple[int, ...]) -> None:
    found.append(Residual(param, shape, sum(each.param == param for each in found)))


def residual_bytes(graph: fx.Graph) -> int:
    """Returns the bytes that error feedback of a graph holds on each rank, also between steps."""
    return sum(each.nbytes for each in planned_residuals(graph))


def add_residual_inputs(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[Residual]]:
    """Make the residuals of a graph its last inputs, in the order of `residuals_of`.

    Returns:
        A changed copy of `gm`, or `gm` itself if it has none.
    """
    residuals = residuals_of(gm.graph)
    if not residuals:
        return gm, []
    gm = compat.clone_graph_module(gm)
    for number, (node, residual) in enumerate(zip(_encodes(gm.graph), residuals, strict=True)):
        value, count, parts, how = _arguments(node)
        own, like = append_placeholder(gm.graph, f"residual_{number}"), value_of(node)
        with compat.fake_mode_of([like]) or torch.device(like.device):
            own.meta["val"] = torch.empty(residual.shape, dtype=torch.float32, device=like.device)
        edit, plain = Editor(gm.graph, before=node), str(Encoding(how.format, how.block))
        made = edit.call(ENCODE_WITH_FEEDBACK, value, own, count, parts, plain)
        add_tag(made, _tag(node))
        replace_node(node, made)
    gm.graph.lint()
    gm.recompile()
    return gm, residuals


def residual_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Returns the residuals among the inputs of a graph that `add_residual_inputs` has changed."""
    return [node.all_input_nodes[1] for node in calls(graph, ENCODE_WITH_FEEDBACK)]


def _encodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in calls(graph, ENCODE) if _arguments(node)[3].feedback]


def _arguments(encode: fx.Node) -> tuple[fx.Node, int, int, Encoding]:
    value, count, parts, encoding = encode.args
    assert isinstance(value, fx.Node)
    return value, int(count), int(parts), Encoding.parse(str(encoding))  # type: ignore[arg-type]


def _tag(encode: fx.Node) -> Tag:
    tag = tag_of(encode)
    assert tag is not None, f"{encode.name} does not say whose gradient it encodes"
    return tag
