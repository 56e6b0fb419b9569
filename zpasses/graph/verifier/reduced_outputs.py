"""Reduced gradients: outputs stay reduced, and keep coming from the same gradients.

Tags cannot tell this. Parameters with equal gradients share a reduction, whose tag names one of
them. The check therefore compares values: each gradient that reached an output through a reduction
before the pass still does, or what it was computed from does.

The check gives up in favour of the pass where it does not know: several gradients lie in one flat
buffer whose parts have no tags, memory is written in place, or much was rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch import fx

from zpasses.errors import PassError
from zpasses.graph.aliases import GETITEM, shared_arguments, written_arguments
from zpasses.graph.queries import communicates, numel
from zpasses.graph.verifier.operators import is_factory_of_uninitialised
from zpasses.graph.verifier.provenance import (
    RESULT_ROLES,
    Provenance,
    computes_the_same,
    has_one_rank,
)
from zpasses.graph.walks import reachable

_MOST_NODES = 2000
"""The check follows an output through as many nodes. Beyond, it gives up."""


def check_reduced_outputs(
    touched: set[fx.Node], new: Provenance, old: Provenance, pass_name: str
) -> None:
    """Raise PassError if an affected output was a reduced gradient and comes from another one."""
    pairs = zip(new.version.returned(), old.version.returned(), strict=False)
    for i, (got, wanted) in enumerate(pairs):
        if not isinstance(wanted, fx.Node) or (got is wanted and got not in touched):
            continue
        expected = _reduced_gradients(old, wanted)
        if not expected:
            continue
        found = _Origin(new, got) if isinstance(got, fx.Node) else None
        if found is None or not found.is_communicated():
            raise PassError(
                f"pass {pass_name!r}: output {i} must be reduced over ranks, as {wanted.name} was "
                f"before the pass, but {_name(got)} comes from no collective."
            )
        for each in expected:
            if not any(found.has(value, old) for value in each.values):
                names = " or ".join(gradient.name for gradient in each.gradients[:3])
                raise PassError(
                    f"pass {pass_name!r}: output {i} must be reduced from the gradient {names}, as "
                    f"{wanted.name} was before the pass, but {_name(got)} comes from "
                    f"{', '.join(found.gradients()) or 'no reduction'}."
                )


def _name(value: Any) -> str:
    return value.name if isinstance(value, fx.Node) else repr(value)


# --- before the pass ------------------------------------------------------------------------------
class _Expected(NamedTuple):
    """What an output comes from."""

    gradients: list[fx.Node]
    """Inputs of a reduction: one, or several where the part of a flat buffer is unknown."""
    values: list[fx.Node]
    """A value that the gradient is computed from by sums, casts and copies; several where it is
    unknown which."""


def _reduced_gradients(old: Provenance, output: fx.Node) -> list[_Expected]:
    found: list[_Expected] = []
    if numel(old.version.record(output).value) == 0:
        return found
    for step in _Origin(old, output, beyond_collectives=False).steps:
        if not _is_reduction(old, step.node):
            continue
        members, are_known = _members(old, step)
        leaves = list(dict.fromkeys(leaf for each in members for leaf in _leaves(old, each)))
        values = [[leaf] for leaf in leaves] if are_known else [leaves]
        found += [_Expected(members, each) for each in values]
    return [each for each in found if not any(_is_constant(old, value) for value in each.values)]


def _leaves(old: Provenance, member: fx.Node) -> Iterator[fx.Node]:
    """The values that a gradient is the sum of, or the gradient itself."""

    def inputs(node: fx.Node) -> list[fx.Node]:
        return old.version.inputs(node) if old.follows_through(node, "reduce") else []

    for node in reachable([member], inputs):
        if not old.follows_through(node, "reduce"):
            yield node


def _is_constant(old: Provenance, node: fx.Node) -> bool:
    """Whether a value depends on no input of the graph: a pass may compute it by itself."""
    walk = enumerate(reachable([node], old.version.inputs), 1)
    return not any(
        number >= _MOST_NODES or old.version.record(each).op == "placeholder"
        for number, each in walk
    )


# --- walking back ---------------------------------------------------------------------------------
class _Step(NamedTuple):
    """A node on the way back from an output."""

    node: fx.Node
    params: tuple[str, ...] | None = None
    """Parameters of the first result tag on the way, up to the next collective."""
    item: int | None = None
    """Which output of the node the way takes."""


class _Origin:
    """What an output comes from: nodes that pass values on, nodes that the pass inserted, and what
    these read.

    Args:
        beyond_collectives: also follow what reductions and inserted collectives read.
    """

    def __init__(
        self, provenance: Provenance, output: fx.Node, *, beyond_collectives: bool = True
    ) -> None:
        self._provenance, self._version = provenance, provenance.version
        self._beyond_collectives = beyond_collectives
        self.steps = list(islice(reachable([_Step(output)], self._following), _MOST_NODES))
        self._is_complete = len(self.steps) < _MOST_NODES
        self._nodes = {step.node for step in self.steps}

    def _following(self, step: _Step) -> list[_Step]:
        record = self._version.record(step.node)
        if communicates(record.target):
            if not self._beyond_collectives:
                return []
            if _is_reduction(self._provenance, step.node):
                return [_Step(each) for each in _members(self._provenance, step)[0]]
            is_new = self._provenance.is_inserted(step.node)
            return [_Step(each) for each in self._version.inputs(step.node)] if is_new else []
        if not self._provenance.follows_through(step.node, "reduce"):
            return []
        params, item = step.params, None
        if params is None and record.tag is not None and record.tag.role in RESULT_ROLES["reduce"]:
            params = record.tag.params
        if record.target is GETITEM and isinstance(record.args[1], int):
            item = record.args[1]
        return [_Step(each, params, item) for each in self._version.inputs(step.node)]

    def is_communicated(self) -> bool:
        """Whether the way passes a collective, as far as known."""
        return not self._is_complete or any(
            communicates(self._version.record(node).target) for node in self._nodes
        )

    def gradients(self) -> list[str]:
        """Names of what the reductions on the way read, for errors."""
        found = [
            each.name
            for step in self.steps
            if _is_reduction(self._provenance, step.node)
            for each in _members(self._provenance, step)[0]
        ]
        return list(dict.fromkeys(found))[:3]

    def has(self, gradient: fx.Node, old: Provenance) -> bool:
        """Whether a value of the graph before the pass is on the way, as far as known."""
        if gradient in self._nodes or not self._is_complete:
            return True
        return (
            any(
                computes_the_same(old.version, gradient, node)
                for node in self._nodes
                if node in old.version
            )
            or self._is_recomputed(gradient, old)
            or self._reads_written_memory()
        )

    def _is_recomputed(self, gradient: fx.Node, old: Provenance) -> bool:
        """Whether the way has what a value was computed from: all of it, or some of it if nothing
        reads the value any more.
        """
        known: dict[fx.Node, bool] = {}
        queue = [gradient]
        while queue:
            node = queue[-1]
            inputs = old.version.inputs(node)
            missing = [each for each in inputs if each not in known]
            if node in self._nodes or old.version.record(node).op == "placeholder":
                known[node] = node in self._nodes
            elif missing:
                if len(known) + len(queue) > _MOST_NODES:
                    return True
                queue += missing
                continue
            else:
                is_read = node in self._version and bool(self._version.users(node))
                enough = all if is_read else any
                known[node] = not inputs or enough(known[each] for each in inputs)
            queue.pop()
        return known[gradient]

    def _reads_written_memory(self) -> bool:
        """Whether something on the way is filled in place, by values that are not on the way."""

        def target(node: fx.Node) -> Any:
            return self._version.record(node).target

        def sharers(node: fx.Node) -> list[fx.Node]:
            return [each for each in self._version.users(node) if shared_arguments(target(each))]

        return any(
            is_factory_of_uninitialised(target(node))
            or any(
                written_arguments(target(user)) and not communicates(target(user))
                for user in self._version.users(node)
            )
            for node in reachable(self._nodes, sharers)
        )


def _is_reduction(provenance: Provenance, node: fx.Node) -> bool:
    record = provenance.version.record(node)
    return (
        communicates(record.target)
        and record.tag is not None
        and record.tag.role == "reduce"
        and not has_one_rank(record.arguments().get("group_name"))
    )


def _members(provenance: Provenance, step: _Step) -> tuple[list[fx.Node], bool]:
    """The inputs of a reduction that a step takes its output from, and whether that is sure."""
    record = provenance.version.record(step.node)
    params = record.tag.params if record.tag is not None else ()
    members = provenance.inputs_by_param(step.node, params)
    if len(members) != len(params):
        return members or provenance.version.inputs(step.node), False
    if step.item is not None and isinstance(record.value, (list, tuple)):
        return members[step.item : step.item + 1], len(record.value) == len(members)
    named = [
        each for each, name in zip(members, params, strict=True) if name in (step.params or params)
    ]
    return named or members, len(named or members) == 1
