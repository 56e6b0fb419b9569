"""The calling convention: inputs and outputs stay as they were, unless the pass says otherwise."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from zpasses.errors import PassError
from zpasses.graph.queries import value_of
from zpasses.graph.verifier.values import describe_difference
from zpasses.graph.verifier.versions import CurrentGraph, GraphVersion, PreviousGraph


def check_output_exists(graph: fx.Graph, before: PreviousGraph, pass_name: str) -> None:
    """Raise PassError if the pass removed the output node."""
    has = any(node.op == "output" for node in graph.nodes)
    if not has and any(before.record(node).op == "output" for node in before.nodes):
        raise PassError(
            f"pass {pass_name!r} removed the output node; the graph returned "
            f"{len(before.returned())} values, and must return as many."
        )


def check_inputs(now: CurrentGraph, before: PreviousGraph, pass_name: str) -> None:
    """Raise PassError unless the graph takes the same inputs in the same order."""
    ours, theirs = _placeholders(now), _placeholders(before)
    advice = "A pass that changes inputs declares `facts = Facts(changes_inputs=True)`."
    for added in set(ours) - set(theirs):
        raise PassError(f"pass {pass_name!r} added the graph input {added.name!r}. {advice}")
    for lost in set(theirs) - set(ours):
        raise PassError(f"pass {pass_name!r} removed the graph input {lost.name!r}. {advice}")
    for i, (got, wanted) in enumerate(zip(ours, theirs, strict=True)):
        if got is not wanted:
            raise PassError(
                f"pass {pass_name!r} reordered the graph's inputs: input {i} is {got.name!r}, "
                f"expected {wanted.name!r}. {advice}"
            )
    for node in ours:
        difference = _difference(value_of(node), before.record(node).value)
        if difference:
            raise PassError(
                f"pass {pass_name!r}: meta['val'] of the graph input {node.name!r} says "
                f"{difference[0]}, but callers pass {difference[1]}. {advice}"
            )


def _placeholders(version: GraphVersion) -> list[fx.Node]:
    return [node for node in version.nodes if version.record(node).op == "placeholder"]


def check_outputs(now: CurrentGraph, before: PreviousGraph, pass_name: str) -> None:
    """Raise PassError unless the graph returns as many values of the same kinds."""
    ours, theirs = now.returned(), before.returned()
    advice = "A pass that changes outputs declares `facts = Facts(changes_outputs=True)`."
    if len(ours) != len(theirs):
        raise PassError(
            f"pass {pass_name!r}: the graph returns {len(ours)} values, expected {len(theirs)}. "
            f"{advice}"
        )
    for i, (got, wanted) in enumerate(zip(ours, theirs, strict=True)):
        if got is wanted and isinstance(got, fx.Node) and value_of(got) is _value(before, wanted):
            continue
        difference = _output_difference(got, wanted, before)
        if difference:
            raise PassError(
                f"pass {pass_name!r}: output {i} is {difference[0]}, expected {difference[1]}. "
                f"{advice}"
            )
    _check_exchanged(ours, theirs, pass_name)


def _output_difference(got: Any, wanted: Any, before: PreviousGraph) -> tuple[str, str] | None:
    if isinstance(got, fx.Node) and isinstance(wanted, fx.Node):
        difference = _difference(value_of(got), _value(before, wanted))
        return difference and (f"{got.name}, {difference[0]}", f"{wanted.name}, {difference[1]}")
    if isinstance(got, fx.Node) or isinstance(wanted, fx.Node) or got != wanted:
        return _name(got), _name(wanted)
    return None


def _check_exchanged(ours: list[Any], theirs: list[Any], pass_name: str) -> None:
    """An output that another position returned, and returns no longer, is in the wrong place."""
    places: dict[Any, list[int]] = {}
    for i, wanted in enumerate(theirs):
        if isinstance(wanted, fx.Node):
            places.setdefault(wanted, []).append(i)
    for i, got in enumerate(ours):
        there = places.get(got, []) if isinstance(got, fx.Node) else []
        left = [j for j in there if ours[j] is not got]
        if there and i not in there and left:
            raise PassError(
                f"pass {pass_name!r}: output {i} is {got.name}, expected {_name(theirs[i])}; "
                f"{got.name} was output {left[0]}. Keep outputs in their order."
            )


def _value(before: PreviousGraph, node: fx.Node) -> Any:
    return before.record(node).value


def _name(value: Any) -> str:
    return value.name if isinstance(value, fx.Node) else repr(value)


def _difference(ours: Any, theirs: Any) -> tuple[str, str] | None:
    if ours is theirs:
        return None
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return describe_difference(ours, theirs)
    same = type(ours) is type(theirs) and (
        str(ours) == str(theirs) or isinstance(ours, (list, tuple))
    )
    return None if same else (str(ours), str(theirs))
