"""Pairs the nodes of two graphs without equal ids: graphs of two dumps, two ranks, or two
compiles."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from zpasses.dumps.nodes import Argument, Items, Node, Ref, Repr, Snapshot


def pair_nodes(before: Snapshot, after: Snapshot) -> dict[int, int]:
    """Id in `before` -> id in `after`.

    The function has seven rounds, and each round pairs nodes that the earlier rounds left. A place
    is an op, values, parameters, and a line of the model by its module and text. Nodes of different
    parameters are not pairs, unless no parameter of either is in both graphs: it may have another
    name in the other graph.

    1. Nodes that compute the same from the same inputs, at equal places. Those of equal names are
    paired first, and the others in order.
    2. Nodes at equal places with a parameter or a line, if both graphs have equally many of them,
    in order.
    3. Nodes that compute the same from the same inputs, anywhere, as in the first round.
    4. Nodes at equal places without either, if both graphs have equally many of them, in order.
    5. Nodes with the same op, role and parameters, if both graphs have equally many of them.
    6. Nodes with the same op and name.
    7. In graph order, nodes with the same op that read a paired node as the same input.
    """
    pairs: dict[int, int] = {}
    old, new = _expressions(before), _expressions(after)
    differ = _DifferentParams(before, after)

    def expression(node: Node, side: int) -> Hashable:
        return (old if side == 0 else new)[node.id]

    match = functools.partial(_match, before, after, pairs, differ)
    match(lambda node, side: (expression(node, side), _place(node)))
    match(
        lambda node, _: _place(node) if node.params or node.source else None, only_equal_counts=True
    )
    match(expression)
    match(lambda node, _: _place(node), only_equal_counts=True)
    match(lambda node, _: _role(node) if node.params else None, only_equal_counts=True)
    match(lambda node, _: (node.op, node.name, "" if node.op == "placeholder" else node.target))
    _match_by_inputs(before, after, pairs, differ)
    return pairs


class _DifferentParams:
    """Whether two nodes work for different parameters that both graphs could have."""

    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        old, new = (
            {name for node in each.nodes for name in node.params} for each in (before, after)
        )
        self._common = old & new

    def __call__(self, one: Node, other: Node) -> bool:
        if not one.params or not other.params or one.params == other.params:
            return False
        own, its = set(one.params), set(other.params)
        return own.isdisjoint(its) and not self._common.isdisjoint(own | its)


def _place(node: Node) -> Hashable:
    """Where a node stands in the model, without its number among similar nodes."""
    values = tuple((each.shape, each.dtype) for each in node.vals)
    line = None if node.source is None else (node.source.module, node.source.text)
    return (*_role(node), values, line)


def _role(node: Node) -> tuple[Hashable, ...]:
    """What a node does for which parameters."""
    target = input_kind(node) if node.op == "placeholder" else node.target
    return (node.op, target, node.params, "" if node.tag is None else node.tag.role)


def _match(
    before: Snapshot,
    after: Snapshot,
    pairs: dict[int, int],
    differ: _DifferentParams,
    key: Callable[[Node, int], Hashable | None],
    *,
    only_equal_counts: bool = False,
) -> None:
    """Pairs free nodes of equal keys. Nodes whose key is None stay free."""
    taken = set(pairs.values())
    free: dict[Hashable, list[Node]] = defaultdict(list)
    for node in after.nodes:
        if node.id not in taken and (found := key(node, 1)) is not None:
            free[found].append(node)
    left: dict[Hashable, list[Node]] = defaultdict(list)
    for node in before.nodes:
        if node.id not in pairs and (found := key(node, 0)) is not None:
            left[found].append(node)
    for same, nodes in left.items():
        candidates = free.get(same, [])
        if only_equal_counts:
            equal = len(nodes) == len(candidates)
            couples = zip(nodes, candidates, strict=True) if equal else iter(())
        else:
            couples = _named_then_in_order(nodes, candidates)
        for one, other in couples:
            if not differ(one, other):
                pairs[one.id] = other.id


def _named_then_in_order(
    nodes: Sequence[Node], others: Sequence[Node]
) -> Iterator[tuple[Node, Node]]:
    candidates = {node.name: node for node in others}
    rest = []
    for node in nodes:
        if node.name in candidates:
            yield node, candidates.pop(node.name)
        else:
            rest.append(node)
    yield from zip(rest, candidates.values(), strict=False)


def _expressions(snapshot: Snapshot) -> dict[int, int]:
    """Id -> a number that equal computations share. It depends on op, arguments and values,
    recursively up to the graph's inputs.
    """
    found: dict[int, int] = {}
    inputs: dict[Hashable, int] = defaultdict(int)
    for node in snapshot.nodes:
        start: Hashable = node.target
        if node.op in ("placeholder", "get_attr"):
            # The parameter identifies an input. Other inputs have numbers as names, which shift if
            # a parameter is added before them, so they are numbered among those of their shape.
            shapes = tuple((each.shape, each.dtype) for each in node.vals)
            kind = (input_kind(node), shapes)
            start = node.params or (kind, inputs[kind])
            inputs[kind] += not node.params
        values = tuple((each.shape, each.dtype) for each in node.vals)
        args = tuple(_expression(argument, found) for argument in node.args)
        kwargs = tuple(
            (key, _expression(argument, found)) for key, argument in sorted(node.kwargs.items())
        )
        found[node.id] = hash((node.op, start, values, args, kwargs))
    return found


def input_kind(node: Node) -> str:
    """The name of an input without its number: "primals_12" -> "primals"."""
    return node.target.rstrip("0123456789").rstrip("_") if node.op == "placeholder" else node.target


def _expression(argument: Argument, found: Mapping[int, int]) -> Hashable:
    if isinstance(argument, Ref):
        return ("node", found.get(argument.node))
    if isinstance(argument, tuple):
        return tuple(_expression(item, found) for item in argument)
    if isinstance(argument, Items):
        items = sorted(argument.items.items())
        return tuple((key, _expression(item, found)) for key, item in items)
    return (type(argument).__name__, argument.text if isinstance(argument, Repr) else argument)


def _match_by_inputs(
    before: Snapshot, after: Snapshot, pairs: dict[int, int], differ: _DifferentParams
) -> None:
    taken = set(pairs.values())
    free: dict[Hashable, deque[Node]] = defaultdict(deque)
    """(id, place, op and target) -> unpaired nodes of `after` that read that node at that place."""
    for node in after.nodes:
        if node.id not in taken:
            for place, read in enumerate(node.inputs):
                free[read, place, node.op, node.target].append(node)
    for node in before.nodes:
        if node.id in pairs:
            continue
        for place, read in enumerate(node.inputs):
            users = free.get((pairs.get(read, -1), place, node.op, node.target), deque())
            while users and users[0].id in taken:
                users.popleft()
            first = [user for user in itertools.islice(users, _USERS) if user.id not in taken]
            found = next((user for user in first if not differ(node, user)), None)
            if found is not None:
                pairs[node.id] = found.id
                taken.add(found.id)
                break


_USERS = 8
"""How many free readers of a node the last round looks at, which bounds its work."""
