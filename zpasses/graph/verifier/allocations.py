"""Which allocations the values of a graph lie in, through views, lists and waits."""

from __future__ import annotations

from torch import fx

from zpasses.graph.aliases import GETITEM, shared_arguments, written_arguments
from zpasses.graph.verifier.versions import GraphVersion, nodes_in

Root = tuple[fx.Node, int]
"""One allocation: the node that made it, and which of its outputs it is."""


class Aliases:
    """Which allocations the value of each node lies in."""

    def __init__(self, version: GraphVersion) -> None:
        self._version = version
        self._known: dict[tuple[fx.Node, int | None], frozenset[Root]] = {}

    def roots(self, node: fx.Node, item: int | None = None) -> frozenset[Root]:
        """The allocations of a node's value, or of one item of its list."""
        # Chains of views are as long as graphs are deep, so this does not recurse.
        todo = [(node, item)]
        while todo:
            key = todo[-1]
            missing = [each for each in self._next(*key) if each not in self._known]
            if missing and key not in self._known:
                todo += missing
                continue
            todo.pop()
            if key not in self._known:
                self._known[key] = self._combine(*key)
        return self._known[node, item]

    def _next(self, node: fx.Node, item: int | None) -> list[tuple[fx.Node, int | None]]:
        record = self._version.record(node)
        if record.op in ("placeholder", "output", "get_attr"):
            return []
        if record.target is GETITEM:
            place = record.args[1]
            return [(record.args[0], place if isinstance(place, int) else None)]
        arguments = record.arguments()
        shared = [arguments.get(name) for name in shared_arguments(record.target)]
        if item is not None and len(shared) == 1 and isinstance(shared[0], (list, tuple)):
            shared = [shared[0][item]] if item < len(shared[0]) else []
        return [(each, None) for each in nodes_in(tuple(shared))]

    def _combine(self, node: fx.Node, item: int | None) -> frozenset[Root]:
        below = self._next(node, item)
        if below:
            return frozenset[Root]().union(*(self._known[each] for each in below))
        value = self._version.record(node).value
        if item is None and isinstance(value, (list, tuple)):
            return frozenset((node, i) for i in range(len(value)))
        return frozenset({(node, item or 0)})

    def written(self, node: fx.Node) -> frozenset[Root]:
        """The allocations that a node writes to."""
        record = self._version.record(node)
        names = written_arguments(record.target) if record.op.startswith("call_") else ()
        return frozenset[Root]().union(*map(self.roots, record.nodes_at(names)))
