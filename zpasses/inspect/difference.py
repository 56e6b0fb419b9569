"""The changes between two graphs, by node and not by line.

Nodes of one compile are the same if their ids are equal. Nodes of different compiles, ranks or
dumps are paired by `pairing.py`. Among the common nodes, as few as possible are reported as moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zpasses.dumps.nodes import Argument, Items, Node, RecomputeMark, Ref, Snapshot
from zpasses.errors import some_of
from zpasses.inspect.listing import argument_text, op_text, value_text
from zpasses.inspect.units import count, cut

KINDS = (
    "inserted",
    "removed",
    "moved",
    "rewired",
    "retagged",
    "recompute-changed",
    "retyped",
    "renamed",
)
"""Kinds of changes.

inserted, removed: the node is only in one of the graphs. moved: its position among the common nodes
differs. rewired: another op or other arguments. retagged: another tag or other parameters.
recompute-changed: another recompute mark for the partitioner. retyped: another shape, dtype or
device. renamed: another name.
"""


@dataclass(frozen=True)
class Change:
    """One change. A node may have several, unless it was inserted or removed."""

    kind: str
    before: Node | None
    """The node in the first graph; None if it was inserted."""
    after: Node | None
    """The node in the second graph; None if it was removed."""
    detail: str = ""
    """A description of the change."""

    @property
    def node(self) -> Node:
        """The node in the second graph, or in the first if it was removed."""
        found = self.after or self.before
        assert found is not None
        return found


@dataclass(frozen=True)
class Difference:
    """All changes from one graph to another, in the order of `KINDS`, and in graph order within
    each kind.
    """

    before: Snapshot
    after: Snapshot
    changes: tuple[Change, ...]
    pairs: Mapping[int, int]
    """Id in the first graph -> id of the same node in the second."""

    def __bool__(self) -> bool:
        """Whether there is any change."""
        return bool(self.changes)

    def of_kind(self, kind: str) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.kind == kind)

    @property
    def counts(self) -> dict[str, int]:
        """Kind -> number of changes, without kinds of 0 changes."""
        found = {kind: len(self.of_kind(kind)) for kind in KINDS}
        return {kind: count for kind, count in found.items() if count}

    @property
    def changed_nodes(self) -> int:
        """Nodes of both graphs that were moved or changed otherwise. A node counts once, however
        many changes it has. The page shows it as "~".
        """
        return len({each.node.id for each in self.changes if each.before and each.after})

    @property
    def summary(self) -> str:
        """ "12 inserted, 3 removed, 5 moved, 2 rewired (~6 nodes)", or "no change".

        The number of nodes is there if it is not the sum of the kinds.
        """
        text = ", ".join(f"{size:,} {kind}" for kind, size in self.counts.items())
        kinds = sum(count for kind, count in self.counts.items() if kind not in KINDS[:2])
        if kinds != self.changed_nodes:
            text += f" (~{count(self.changed_nodes, 'node')})"
        return text or "no change"


def compare(
    before: Snapshot, after: Snapshot, pairs: Mapping[int, int] | None = None
) -> Difference:
    """The changes from one graph to another.

    Args:
        pairs: id in `before` -> id in `after` of nodes that are the same. None pairs equal ids,
            which is right within one compile. For graphs of different compiles, use
            `zpasses.inspect.pairing.pair_nodes`. Names that differ only in their number then count
            as equal, because every compile numbers its nodes.
    """
    numbered = pairs is None
    if pairs is None:
        pairs = {key: key for key in before.by_id if key in after.by_id}
    backward = {new: old for old, new in pairs.items()}
    fresh = [node for node in after.nodes if node.id not in backward]
    gone = [node for node in before.nodes if node.id not in pairs]
    found = [Change("inserted", None, node, _place(after, node)) for node in fresh]
    found += [Change("removed", node, None, _use(before, node)) for node in gone]
    common = [
        (before.by_id[backward[node.id]], node) for node in after.nodes if node.id in backward
    ]
    found += _moves(before, after, common)
    names = (
        {node.id: node.name for node in before.nodes},
        {node.id: node.name for node in after.nodes},
    )
    kept: dict[str, list[Change]] = {kind: [] for kind in KINDS}
    for old, new in common:
        if old is not new:
            for kind, detail in _edits(old, new, pairs, *names):
                if kind == "renamed" and not numbered and _stem(old.name) == _stem(new.name):
                    continue
                kept[kind].append(Change(kind, old, new, detail))
    return Difference(
        before, after, (*found, *(change for kind in KINDS for change in kept[kind])), pairs
    )


def _stem(name: str) -> str:
    return name.rstrip("0123456789").rstrip("_")


def _edits(
    old: Node,
    new: Node,
    pairs: Mapping[int, int],
    old_names: Mapping[int, str],
    new_names: Mapping[int, str],
) -> Iterator[Any]:
    """(kind, detail) of each change of one node."""
    wiring = []
    if (old.op, old.target) != (new.op, new.target) and not (
        old.op == new.op == "placeholder" and old.name != new.name
    ):
        wiring.append(f"{op_text(old.target)} -> {op_text(new.target)}")
    for place, before, after in _arguments(old, new):
        if before is _MISSING or after is _MISSING or not _same(before, after, pairs):
            was = "nothing" if before is _MISSING else argument_text(before, old_names)
            now = "nothing" if after is _MISSING else argument_text(after, new_names)
            text = f"another {cut(now, _WIDTH)}" if was == now else _texts_change(was, now)
            wiring.append(f"{place}: {text}")
    if wiring:
        yield "rewired", "; ".join(wiring)
    if old.tag != new.tag or (old.params != new.params and new.tag is None):
        yield "retagged", _tag_change(old, new)
    if old.mark != new.mark:
        yield "recompute-changed", _mark_change(old.mark, new.mark)
    if [(each.shape, each.dtype, each.device) for each in old.vals] != [
        (each.shape, each.dtype, each.device) for each in new.vals
    ]:
        was, now = (value_text(each.vals) or "nothing" for each in (old, new))
        yield "retyped", f"{was} -> {now}" if was != now else f"{now} on another device"
    if old.name != new.name:
        yield "renamed", f"{old.name} -> {new.name}"


_MISSING: Any = object()


def _arguments(old: Node, new: Node) -> Iterator[tuple[str, Argument, Argument]]:
    """(name, before, after) of every argument of either node. The arguments of an output are listed
    one by one.
    """
    both = itertools.zip_longest(_spread(old), _spread(new), fillvalue=_MISSING)
    for at, (before, after) in enumerate(both):
        yield f"args[{at}]", before, after
    for key in dict.fromkeys((*old.kwargs, *new.kwargs)):
        yield key, old.kwargs.get(key, _MISSING), new.kwargs.get(key, _MISSING)


def _spread(node: Node) -> tuple[Argument, ...]:
    only = node.args[0] if node.op == "output" and len(node.args) == 1 else None
    return only if isinstance(only, tuple) else node.args


def _same(before: Argument, after: Argument, pairs: Mapping[int, int]) -> bool:
    if isinstance(before, Ref):
        return isinstance(after, Ref) and pairs.get(before.node) == after.node
    if isinstance(before, tuple):
        return (
            isinstance(after, tuple)
            and len(before) == len(after)
            and all(_same(a, b, pairs) for a, b in zip(before, after, strict=True))
        )
    if isinstance(before, Items):
        return (
            isinstance(after, Items)
            and before.items.keys() == after.items.keys()
            and all(_same(before.items[key], after.items[key], pairs) for key in before.items)
        )
    # Two NaNs count as equal.
    return type(before) is type(after) and (before == after or before != before)


def _tag_change(old: Node, new: Node) -> str:
    if old.tag is None or new.tag is None:
        was, now = (each.tag.role if each.tag else "no tag" for each in (old, new))
        if was != now:
            return f"{was} -> {now}"
        return f"parameters {_values_change(old.params, new.params)}"
    parts = []
    for name in new.tag.__struct_fields__:
        was, now = getattr(old.tag, name), getattr(new.tag, name)
        if was != now:
            parts.append(f"{name}: {_values_change(was, now)}")
    return "; ".join(parts)


def _mark_change(old: RecomputeMark | None, new: RecomputeMark | None) -> str:
    was, now = (each.text if each is not None else "no mark" for each in (old, new))
    if was == now and old is not None and new is not None:
        return f"{now}, in region {old.region} -> {new.region}"
    return f"{was} -> {now}"


def _values_change(was: Any, now: Any) -> str:
    """ "was -> now" of two different values. Long lists are shown by the items that differ."""
    old, new = (
        ", ".join(each) if isinstance(each, tuple) else "" if each is None else str(each)
        for each in (was, now)
    )
    if isinstance(was, tuple) and isinstance(now, tuple) and max(map(len, (old, new))) > _WIDTH:
        return _items_change(was, now)
    return _texts_change(old or "none", new or "none")


def _items_change(was: Sequence[str], now: Sequence[str]) -> str:
    """ "14 -> 15: with b.weight and 2 more, without a.weight"."""
    old, new = set(was), set(now)
    parts = []
    for word, own, others in (("with", now, old), ("without", was, new)):
        if only := [each for each in own if each not in others]:
            parts.append(f"{word} {some_of([cut(only[0], 2 * _WIDTH), *only[1:]])}")
    if not parts and len(was) == len(now):
        at = next(at for at, pair in enumerate(zip(was, now, strict=True)) if pair[0] != pair[1])
        change = _texts_change(was[at], now[at])
        return f"{len(now):,} in another order, from the {at + 1}. on: {change}"
    return f"{len(was):,} -> {len(now):,}" + (f": {', '.join(parts)}" if parts else "")


def _texts_change(was: str, now: str) -> str:
    """ "was -> now" of two different texts. What long texts have in common is cut."""
    if max(len(was), len(now)) > _WIDTH:
        pairs = enumerate(zip(was, now, strict=False))
        first = next((at for at, (a, b) in pairs if a != b), min(len(was), len(now)))
        start = first - _CONTEXT
        if start > 3:
            was, now = (f"...{each[start:]}" for each in (was, now))
    return f"{cut(was, _WIDTH)} -> {cut(now, _WIDTH)}"


_WIDTH = 60
"""Characters of a text that are shown."""
_CONTEXT = 16
"""Characters before the first difference that are shown."""


def _place(snapshot: Snapshot, node: Node) -> str:
    at = snapshot.position[node.id]
    return f"after {snapshot.nodes[at - 1].name}" if at else "first"


def _use(snapshot: Snapshot, node: Node) -> str:
    users = snapshot.users[node.id]
    if not users:
        return "had no users"
    return f"was used by {some_of([snapshot.by_id[each].name for each in users])}"


# --- moves ----------------------------------------------------------------------------------------
def _moves(before: Snapshot, after: Snapshot, common: Sequence[tuple[Node, Node]]) -> list[Change]:
    places = [before.position[old.id] for old, _ in common]
    # If either of two nodes may have moved, report the communication: passes move communication.
    stayed = _longest_rising(places, [0 if _communicates(new) else 1 for _, new in common])
    moved = []
    for at, (old, new) in enumerate(common):
        if at not in stayed:
            steps = after.position[new.id] - before.position[old.id]
            far = f" ({steps:+,d})" if steps else ""
            moved.append(Change("moved", old, new, f"{_place(after, new)}{far}"))
    return moved


def _communicates(node: Node) -> bool:
    return (
        node.collective is not None
        or "wait_tensor" in node.target
        or (node.tag is not None and "_input" in node.tag.role)
    )


def _longest_rising(places: Sequence[int], preference: Sequence[int]) -> set[int]:
    """Indices of a longest increasing subsequence. Among subsequences of equal length, one with the
    largest sum of preferences (0 or 1) is taken.
    """
    if all(a < b for a, b in itertools.pairwise(places)):
        return set(range(len(places)))
    rank = {place: at + 1 for at, place in enumerate(sorted(places))}
    size = len(places)
    # A Fenwick tree of (best score of a prefix, index that it ends with).
    tree: list[tuple[int, int]] = [(0, -1)] * (size + 1)
    link = []
    for at, place in enumerate(places):
        best, key = (0, -1), rank[place] - 1
        while key:
            best, key = max(best, tree[key]), key & (key - 1)
        link.append(best[1])
        entry, key = (best[0] + size + 1 + preference[at], at), rank[place]
        while key <= size:
            tree[key], key = max(tree[key], entry), key + (key & -key)
    kept: set[int] = set()
    best, key = (0, -1), size
    while key:
        best, key = max(best, tree[key]), key & (key - 1)
    end = best[1]
    while end >= 0:
        kept.add(end)
        end = link[end]
    return kept
