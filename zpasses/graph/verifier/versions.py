"""Two versions of one graph: before a pass and after it.

A `PreviousGraph` keeps a record per node, so that questions about the old graph can be answered
later, and only when a check asks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx
from torch.fx.node import map_arg

from zpasses import compat
from zpasses.graph.queries import value_of
from zpasses.graph.tags import Tag, tag_of


class NodeRecord(NamedTuple):
    """What a node is in one version of a graph."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    users: int
    tag: Tag | None

    def arguments(self) -> dict[str | int, Any]:
        """The arguments of the call, by position and, where there is a schema, by name."""
        found: dict[str | int, Any] = dict(enumerate(self.args))
        if isinstance(self.target, compat.OpOverload):
            names = [argument.name for argument in self.target._schema.arguments]
            found.update(zip(names, self.args, strict=False))
        found.update(self.kwargs)
        return found

    def nodes_at(self, names: Sequence[str | int]) -> list[fx.Node]:
        """The nodes in some arguments of the call."""
        arguments = self.arguments() if names else {}
        return nodes_in(tuple(arguments.get(name) for name in names))


def _record(node: fx.Node) -> NodeRecord:
    return NodeRecord(
        node.op,
        node.target,
        node.args,
        node.kwargs,
        value_of(node),
        len(node.users),
        tag_of(node),
    )


class GraphVersion:
    """The questions that checks ask about either version."""

    nodes: Sequence[fx.Node]

    def __contains__(self, node: fx.Node) -> bool:
        raise NotImplementedError

    def record(self, node: fx.Node) -> NodeRecord:
        raise NotImplementedError

    def users(self, node: fx.Node) -> Sequence[fx.Node]:
        raise NotImplementedError

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that a node reads, each once, in the order of its arguments."""
        record = self.record(node)
        return nodes_in((record.args, record.kwargs))

    def returned(self) -> list[Any]:
        """The values that the graph returns, flattened; empty without an output node."""
        last = self.nodes[-1] if self.nodes else None
        if last is None or self.record(last).op != "output":
            return []
        return compat.pytree.tree_leaves(self.record(last).args)


class CurrentGraph(GraphVersion):
    """The graph as it is. The graph must not change while this is in use."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = tuple(graph.nodes)
        self._graph = graph
        self._records: dict[fx.Node, NodeRecord] = {}

    def __contains__(self, node: fx.Node) -> bool:
        return node.graph is self._graph and not compat.is_erased(node)

    def record(self, node: fx.Node) -> NodeRecord:
        found = self._records.get(node)
        if found is None:
            found = self._records[node] = _record(node)
        return found

    def users(self, node: fx.Node) -> Sequence[fx.Node]:
        return list(node.users)


class PreviousGraph(GraphVersion):
    """A graph as it was, for finding out later what changed."""

    def __init__(self, graph: fx.Graph) -> None:
        self._seen = {node: _record(node) for node in graph.nodes}
        self.nodes = tuple(self._seen)
        self._users: dict[fx.Node, list[fx.Node]] | None = None

    def record(self, node: fx.Node) -> NodeRecord:
        return self._seen[node]

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._seen

    def is_new(self, node: fx.Node) -> bool:
        """Whether the graph did not have the node."""
        return node not in self._seen

    def users(self, node: fx.Node) -> Sequence[fx.Node]:
        if self._users is None:  # rarely asked for
            self._users = {each: [] for each in self.nodes}
            for each in self.nodes:
                for item in self.inputs(each):
                    self._users[item].append(each)
        return self._users[node]

    def changed(self, graph: fx.Graph) -> list[fx.Node]:
        """Nodes that are new, or whose call, number of users or recorded value is different."""
        return [node for node in graph.nodes if self._differs(node)]

    def retagged(self, graph: fx.Graph) -> list[fx.Node]:
        """Nodes that were there and have another tag."""
        return [
            node
            for node in graph.nodes
            if node in self._seen and self._seen[node].tag != tag_of(node)
        ]

    def same_call(self, node: fx.Node) -> bool:
        """Whether the node makes the same call on the same recorded values as before."""
        return not self._calls_differ(node) and all(
            item in self._seen and self._seen[item].value is value_of(item)
            for item in node.all_input_nodes
        )

    def moved(self, graph: fx.Graph) -> fx.Node | None:
        """The first node that is not where it was; None if the order is the same."""
        pairs = zip(graph.nodes, self.nodes, strict=False)
        return next((now for now, then in pairs if now is not then), None)

    def erased(self, graph: fx.Graph) -> list[fx.Node]:
        """Nodes that are no longer there."""
        left = set(graph.nodes)
        return [node for node in self.nodes if node not in left]

    def _differs(self, node: fx.Node) -> bool:
        return self._calls_differ(node) or self._seen[node].users != len(node.users)

    def _calls_differ(self, node: fx.Node) -> bool:
        was = self._seen.get(node)
        return (
            was is None
            or was.value is not value_of(node)
            or (was.op, was.target) != (node.op, node.target)
            or (was.args is not node.args and was.args != node.args)
            or (was.kwargs is not node.kwargs and was.kwargs != node.kwargs)
        )


def nodes_in(arguments: Any) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    map_arg(arguments, lambda node: found.setdefault(node))
    return list(found)
