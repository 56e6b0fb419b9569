"""Recorded values: `meta["val"]` of a node is what a fresh propagation gives, strides included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zpasses import compat
from zpasses.errors import PassError
from zpasses.graph.queries import propagate, value_of
from zpasses.graph.verifier.versions import PreviousGraph


def check_values(changed: list[fx.Node], before: PreviousGraph, pass_name: str) -> None:
    """Propagate the changed calls and the readers of changed values."""
    known: dict[tuple[Any, str], list[Tensor]] = {}
    revalued = [
        node
        for node in changed
        if not before.is_new(node) and before.record(node).value is not value_of(node)
    ]
    readers = [user for node in revalued for user in node.users]
    for node in dict.fromkeys([*changed, *readers]):
        if node.op == "call_function" and not before.same_call(node):
            _check_value(node, pass_name, known)


def _check_value(node: fx.Node, pass_name: str, known: dict[tuple[Any, str], list[Tensor]]) -> None:
    recorded = value_of(node)
    if not _has_value(node):
        raise PassError(
            f"pass {pass_name!r} made node {node.format_node()} without meta['val']; build nodes "
            "with zpasses.graph.queries.Editor."
        )
    if not all(_has_value(item) for item in node.all_input_nodes) or compat.has_unbacked_size(
        recorded
    ):
        return  # subgraphs carry no value; data-dependent sizes get a new name at each propagation
    # Layers are alike: a call that was propagated once need not be again.
    signature = _signature(node)
    try:
        fresh = known[signature] if signature in known else _tensors(propagate(node))
    except Exception as error:
        raise PassError(
            f"pass {pass_name!r}: node {node.format_node()} does not run on its inputs: {error}"
        ) from error
    known[signature] = fresh
    ours = _tensors(recorded)
    if len(fresh) != len(ours):
        raise PassError(
            f"pass {pass_name!r}: node {node.format_node()} computes {len(fresh)} tensors, but "
            f"meta['val'] has {len(ours)}. Record the value that the node really has."
        )
    for computed, stated in zip(fresh, ours, strict=True):
        difference = describe_difference(computed, stated)
        if difference:
            raise PassError(
                f"pass {pass_name!r}: node {node.format_node()} computes {difference[0]}, but "
                f"meta['val'] says {difference[1]}. "
                "Record the value that the node really has."
            )


def _signature(node: fx.Node) -> tuple[Any, str]:
    """All that a call's fake value depends on. As text: equal numbers of different types promote
    differently.
    """
    return node.target, repr(map_arg((node.args, node.kwargs), _input_signature))


def _input_signature(node: fx.Node) -> Any:
    return compat.pytree.tree_map_only(Tensor, _tensor_signature, value_of(node))


def _tensor_signature(value: Tensor) -> tuple[Any, ...]:
    strides = (value.stride(), value.storage_offset()) if value.layout is torch.strided else None
    return value.dtype, value.device, value.layout, tuple(value.shape), strides


def _has_value(node: fx.Node) -> bool:
    return "val" in node.meta or "example_value" in node.meta


def _tensors(value: object) -> list[Tensor]:
    return [item for item in compat.pytree.tree_leaves(value) if isinstance(item, Tensor)]


def describe_difference(ours: Tensor, theirs: Tensor) -> tuple[str, str] | None:
    """Describe both tensors where their dtype, device, shape or strides differ, else None."""
    if (
        ours.dtype != theirs.dtype
        or ours.device != theirs.device
        or ours.dim() != theirs.dim()
        or not _all_equal(ours.shape, theirs.shape)
    ):
        return _describe(ours), _describe(theirs)
    if not _same_strides(ours, theirs):
        return _describe_strides(ours), _describe_strides(theirs)
    return None


def _all_equal(ours: Any, theirs: Any) -> bool:
    return all(_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _equal(a: Any, b: Any) -> bool:
    return bool(compat.statically_known_true(a == b)) or str(a) == str(b)


def _same_strides(ours: Tensor, theirs: Tensor) -> bool:
    """Whether all strides that matter are equal: those of dimensions with several elements."""
    if ours.layout is not torch.strided or theirs.layout is not torch.strided:
        return ours.layout is theirs.layout
    if any(_equal(size, 0) for size in ours.shape):
        return True
    return all(
        _equal(size, 1) or _equal(a, b)
        for size, a, b in zip(ours.shape, ours.stride(), theirs.stride(), strict=True)
    )


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"


def _describe_strides(value: Tensor) -> str:
    strides = list(value.stride()) if value.layout is torch.strided else value.layout
    return f"{_describe(value)} with strides {strides}"
