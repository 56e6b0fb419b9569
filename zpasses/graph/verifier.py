"""What must hold after every pass, whoever wrote it.

The runner takes a `Snapshot` before a pass and checks afterwards only what the pass touched, so the
cost grows with the change and not with the number of passes times the size of the graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zpasses import compat
from zpasses.errors import PassError
from zpasses.graph.nodes import collective_of, is_dialect, is_wait, propagate, value_of
from zpasses.graph.tags import tag_of

__all__ = ["Snapshot", "check", "check_unchanged"]


class Snapshot:
    """A graph's nodes as they were, for finding out later which ones changed."""

    def __init__(self, graph: fx.Graph) -> None:
        self._seen = {node: _fingerprint(node) for node in graph.nodes}

    def changed(self, graph: fx.Graph) -> list[fx.Node]:
        """Nodes that are new, or whose call, inputs or recorded value are different."""
        return [node for node in graph.nodes if self._seen.get(node) != _fingerprint(node)]

    def is_new(self, node: fx.Node) -> bool:
        return node not in self._seen


def _fingerprint(node: fx.Node) -> tuple[Any, ...]:
    # The values of the inputs belong to it: a wrong value upstream must be found where it is read
    # as well.
    return (node.op, node.target, node.args, node.kwargs, id(value_of(node)), len(node.users))


def check(graph: fx.Graph, before: Snapshot, pass_name: str) -> None:
    """Raise PassError, naming the pass and the node, unless the graph is right where it changed.

    Checked: `graph.lint()`; a fresh propagation of fake tensors agrees with the recorded values;
    every collective has exactly one wait, and nothing else reads what was started; every new
    collective and its wait is tagged."""
    try:
        graph.lint()
    except Exception as error:
        raise PassError(f"pass {pass_name!r} left a malformed graph: {error}") from error
    changed = before.changed(graph)
    known: dict[tuple[Any, str], list[Tensor]] = {}
    for node in changed:
        _check_value(node, pass_name, known)
        if before.is_new(node):
            _check_tag(node, pass_name)
    for touched in dict.fromkeys(each for node in changed for each in _with_what_it_reads(node)):
        _check_waits(touched, pass_name)


def _with_what_it_reads(node: fx.Node) -> Iterator[fx.Node]:
    """A collective may be untouched and yet have lost its wait to another reader; one of several
    outputs is read through getitem."""
    yield node
    for item in node.all_input_nodes:
        yield item.all_input_nodes[0] if item.target is operator.getitem else item


def check_unchanged(graph: fx.Graph, before: Snapshot, pass_name: str) -> None:
    """Raise PassError if a pass that reported no change made one, which nothing would have
    checked."""
    changed = before.changed(graph)
    if changed:
        raise PassError(
            f"pass {pass_name!r} returned 0 changes, but changed {changed[0].format_node()}. "
            "Return how much was changed."
        )


def _check_value(node: fx.Node, pass_name: str, known: dict[tuple[Any, str], list[Tensor]]) -> None:
    if node.op != "call_function":
        return
    recorded = value_of(node)
    if not _has_value(node):
        raise PassError(
            f"pass {pass_name!r} made node {node.format_node()} without meta['val']; build nodes "
            "with zpasses.graph.nodes.Editor."
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
    for ours, theirs in zip(fresh, _tensors(recorded), strict=False):
        difference = _difference(ours, theirs)
        if difference:
            raise PassError(
                f"pass {pass_name!r}: node {node.format_node()} computes {difference[0]}, but "
                f"meta['val'] says {difference[1]}. "
                "Record the value that the node really has."
            )


def _signature(node: fx.Node) -> tuple[Any, str]:
    """All that a call's fake value depends on. As text: equal numbers of different types promote
    differently."""
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


def _difference(ours: Tensor, theirs: Tensor) -> tuple[str, str] | None:
    if (
        ours.dtype != theirs.dtype
        or ours.device != theirs.device
        or ours.dim() != theirs.dim()
        or not _same_sizes(ours, theirs)
    ):
        return _describe(ours), _describe(theirs)
    return None


def _same_sizes(ours: Tensor, theirs: Tensor) -> bool:
    return all(
        bool(compat.statically_known_true(a == b)) or str(a) == str(b)
        for a, b in zip(ours.shape, theirs.shape, strict=True)
    )


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"


def _check_waits(node: fx.Node, pass_name: str) -> None:
    if is_dialect(node) or collective_of(node) is None or _is_in_place(node):
        return
    if isinstance(value_of(node), (list, tuple)):
        outputs: Iterable[fx.Node] = node.users
    else:
        outputs = [node]
    for output in outputs:
        readers = list(output.users)
        if len(readers) != 1 or not is_wait(readers[0]):
            names = ", ".join(reader.name for reader in readers) or "nobody"
            raise PassError(
                f"pass {pass_name!r}: collective {output.format_node()} must be read by exactly "
                f"one wait_tensor, but is read by {names}."
            )


def _is_in_place(node: fx.Node) -> bool:
    """In-place and out= forms are awaited through the tensor they write, whose aliases this check
    does not follow."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _check_tag(node: fx.Node, pass_name: str) -> None:
    if (collective_of(node) is not None or is_wait(node)) and tag_of(node) is None:
        raise PassError(
            f"pass {pass_name!r} made {node.format_node()} without a tag; use "
            "zpasses.graph.tags.add_tag where it is made."
        )
