"""Pairs the nodes of two graphs without equal ids: graphs of two dumps, two ranks, or two
compiles."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping

from zpasses.dumps.format import Argument, Node, Ref, Repr, Snapshot

__all__ = ["pair_nodes"]


def pair_nodes(before: Snapshot, after: Snapshot) -> dict[int, int]:
    """Id in `before` -> id in `after`.

    The function has four rounds, and each round pairs nodes that the earlier rounds left.

    1. Nodes that compute the same from the same inputs. Equal computations are paired by name, then
    in order.
    2. Nodes with the same op, values, parameters and line of the model, if both graphs have equally
    many of them, in order.
    3. Nodes with the same op, values and name.
    4. In graph order, nodes with the same op that read a paired node as the same input.
    """
    pairs: dict[int, int] = {}
    old, new = _expressions(before), _expressions(after)
    _match(before, after, pairs, lambda node, side: (old if side == 0 else new)[node.id])
    _match(before, after, pairs, lambda node, _: _place(node), only_equal_counts=True)
    _match(
        before,
        after,
        pairs,
        lambda node, _: (node.op, node.name, "" if node.op == "placeholder" else node.target),
    )
    _match_by_inputs(before, after, pairs)
    return pairs


def _place(node: Node) -> Hashable:
    """Where a node stands in the model, without its number among similar nodes."""
    values = tuple((each.shape, each.dtype) for each in node.vals)
    source = node.source
    line = None if source is None else (source.file, source.line, source.module)
    target = input_kind(node) if node.op == "placeholder" else node.target
    return (node.op, target, values, node.params, line)


def _match(
    before: Snapshot,
    after: Snapshot,
    pairs: dict[int, int],
    key: Callable[[Node, int], Hashable],
    *,
    only_equal_counts: bool = False,
) -> None:
    taken = set(pairs.values())
    free: dict[Hashable, list[Node]] = defaultdict(list)
    for node in after.nodes:
        if node.id not in taken:
            free[key(node, 1)].append(node)
    left: dict[Hashable, list[Node]] = defaultdict(list)
    for node in before.nodes:
        if node.id not in pairs:
            left[key(node, 0)].append(node)
    for same, nodes in left.items():
        if only_equal_counts:
            if len(nodes) == len(free.get(same, ())):
                for one, other in zip(nodes, free[same], strict=True):
                    pairs[one.id] = other.id
            continue
        candidates = {node.name: node for node in free.get(same, ())}
        named = [(node, candidates.pop(node.name)) for node in nodes if node.name in candidates]
        matched = {each.name for each, _ in named}
        rest = [node for node in nodes if node.name not in matched]
        for one, other in (*named, *zip(rest, candidates.values(), strict=False)):
            pairs[one.id] = other.id


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
    if isinstance(argument, Mapping):
        return tuple((key, _expression(item, found)) for key, item in sorted(argument.items()))
    return (type(argument).__name__, argument.text if isinstance(argument, Repr) else argument)


def _match_by_inputs(before: Snapshot, after: Snapshot, pairs: dict[int, int]) -> None:
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
            if users:
                found = users.popleft()
                pairs[node.id] = found.id
                taken.add(found.id)
                break
