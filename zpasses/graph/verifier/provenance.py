"""Follow values of one version of a graph back to where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.aliases import GETITEM
from zpasses.graph.queries import communicates, numel
from zpasses.graph.tags import SOURCE_ROLES, Role, Tag
from zpasses.graph.verifier.operators import Kind, is_link
from zpasses.graph.verifier.versions import GraphVersion
from zpasses.graph.walks import reachable

RESULT_ROLES: dict[Kind, tuple[Role, ...]] = {
    "gather": ("gathered", "full"),
    "reduce": ("reduced", "shard_grad"),
}


class Provenance:
    """Where values of one version of a graph come from.

    Args:
        version: the graph.
        through: nodes to follow values through whatever they compute.
    """

    def __init__(self, version: GraphVersion, through: Callable[[fx.Node], bool]) -> None:
        self.version, self._through = version, through
        self._labels: dict[fx.Node, frozenset[str]] = {}
        self._shards: dict[str, list[fx.Node]] | None = None

    def is_inserted(self, node: fx.Node) -> bool:
        """Whether values are followed through the node whatever it computes."""
        return self._through(node)

    def follows_through(self, node: fx.Node, kind: Kind) -> bool:
        target = self.version.record(node).target
        return not communicates(target) and (
            is_link(target, kind) or (self.is_inserted(node) and node.op.startswith("call_"))
        )

    def params(self, node: fx.Node) -> frozenset[str]:
        """Parameters whose gathered value a value is made of."""
        if node not in self._labels:
            self._labels[node] = frozenset(
                name for _, names in self.source_gathers(node) for name in names
            )
        return self._labels[node]

    def source_gathers(
        self, node: fx.Node, *, ignore_own_tag: bool = False
    ) -> Iterator[tuple[fx.Node, tuple[str, ...]]]:
        """The gathers that a value comes from, each with those of its parameters that the value
        holds. A graph input or an empty tensor may take the place of a gather.

        A result's tag narrows down the parameters of a gather of several.
        """
        first = _Step(node, None, None, numel(self.version.record(node).value))
        queue, seen = [first], {first}
        while queue:
            step = queue.pop()
            record = self.version.record(step.node)
            tag = record.tag if not (ignore_own_tag and step.node is node) else None
            if tag is not None and tag.role in RESULT_ROLES["gather"] and step.claim is None:
                step = step._replace(claim=tag.params, numel=numel(record.value))
            if communicates(record.target):
                if tag is not None and tag.role == "gather":
                    yield step.node, _narrowed(tag.params, record.value, step)
            elif record.op == "placeholder":
                whole = numel(record.value) == step.numel
                if tag is not None and (tag.role in RESULT_ROLES["gather"] or whole):
                    yield step.node, tag.params
            elif step.numel == 0 and step.claim is not None:
                yield step.node, step.claim
            elif self.follows_through(step.node, "gather"):
                item = record.args[1] if record.target is GETITEM else None
                for each in self.version.inputs(step.node):
                    after = step._replace(node=each, item=item if isinstance(item, int) else None)
                    if after not in seen:
                        seen.add(after)
                        queue.append(after)

    def inputs_by_param(self, node: fx.Node, params: tuple[str, ...]) -> list[fx.Node]:
        """The input of a collective for each of its parameters, or one input for all of them; empty
        where that is unclear.
        """
        record = self.version.record(node)
        given = record.arguments()[record.target._schema.arguments[0].name]
        if isinstance(given, fx.Node) and len(params) > 1:
            at = given
            while self.follows_through(at, "gather") and len(self.version.inputs(at)) == 1:
                at = self.version.inputs(at)[0]
            packed = next(iter(self.version.record(at).args), None)
            given = packed if isinstance(packed, (list, tuple)) else given
        members = list(given) if isinstance(given, (list, tuple)) else [given]
        known = len(members) in (1, len(params))
        return members if known and all(isinstance(each, fx.Node) for each in members) else []

    def reads_shard(self, node: fx.Node, param: str) -> bool | None:
        """Whether the gather of a parameter reads its shard; None if the node is no such gather."""
        record = self.version.record(node)
        tag = record.tag
        if not (tag and tag.role == "gather" and communicates(record.target)):
            return None
        if param not in tag.params:
            return None
        members = self.inputs_by_param(node, tag.params)
        return any(param in self.shard_params(each) for each in members)

    def shard_params(self, node: fx.Node) -> set[str]:
        """The parameters of whose shards a value is made."""
        found = set[str]()
        for end in self.source_shards(node):
            names = names_of(self.version.record(end).tag)
            found |= set(names) if end.op == "placeholder" else self.params(end) & set(names)
        return found

    def skip_links(self, node: fx.Node) -> fx.Node:
        """The value that a chain of links passes on."""
        while True:
            inputs = self.version.inputs(node)
            if not is_link(self.version.record(node).target, "gather") or len(inputs) != 1:
                return node
            if communicates(self.version.record(inputs[0]).target):
                return node
            node = inputs[0]

    def source_shards(self, node: fx.Node) -> set[fx.Node]:
        """The graph inputs that a value comes from, or the parts that a pass cut out of full
        parameters to gather them again.
        """

        def is_source(at: fx.Node) -> bool:
            record = self.version.record(at)
            is_part = record.tag is not None and record.tag.role == "part"
            return record.op == "placeholder" or is_part

        def inputs(at: fx.Node) -> list[fx.Node]:
            follows = not is_source(at) and self.follows_through(at, "gather")
            return self.version.inputs(at) if follows else []

        return set(filter(is_source, reachable([node], inputs)))

    def shards(self, param: str) -> list[fx.Node]:
        """The graph inputs that hold the shard of a parameter."""
        if self._shards is None:
            self._shards = {}
            for node in self.version.nodes:
                record = self.version.record(node)
                if record.op == "placeholder" and record.tag and record.tag.role in SOURCE_ROLES:
                    for name in record.tag.params:
                        self._shards.setdefault(name, []).append(node)
        return self._shards.get(param, [])


class _Step(NamedTuple):
    """A node on the way back from a value to its collectives."""

    node: fx.Node
    claim: tuple[str, ...] | None
    """Parameters of the first result tag on the way."""
    item: int | None
    """Which output of the node the way takes."""
    numel: int
    """Elements of the value, or of the first tagged result on the way."""


def _narrowed(params: tuple[str, ...], value: Any, step: _Step) -> tuple[str, ...]:
    """The parameters of a collective that a value holds, as far as they are known."""
    several = isinstance(value, (list, tuple)) and len(value) == len(params)
    if step.item is not None and several:
        return params[step.item : step.item + 1]
    return tuple(name for name in step.claim or () if name in params) or params


def names_of(tag: Tag | None) -> tuple[str, ...]:
    return tag.params if tag is not None else ()


def has_one_rank(group: object) -> bool:
    """Whether a process group of this process has no other ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    name = compat.group_name(group)
    return name in compat.group_names() and compat.process_group(name).size() == 1


def computes_the_same(version: GraphVersion, a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes make the same calls on the same values, as merged subexpressions do."""
    queue, seen = [(a, b)], set[tuple[fx.Node, fx.Node]]()
    while queue:
        pair = queue.pop()
        if pair[0] is pair[1] or pair in seen:
            continue
        seen.add(pair)
        ours, theirs = version.record(pair[0]), version.record(pair[1])
        inputs = version.inputs(pair[0]), version.inputs(pair[1])
        if (
            ours.op == "placeholder"
            or (ours.op, ours.target) != (theirs.op, theirs.target)
            or len(inputs[0]) != len(inputs[1])
            or _constants(ours) != _constants(theirs)
        ):
            return False
        queue += zip(*inputs, strict=True)
    return True


def _constants(record: Any) -> str:
    return repr(torch.fx.node.map_arg((record.args, record.kwargs), lambda _: None))
