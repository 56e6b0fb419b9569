"""Memory that several nodes share: collectives in flight, writes to what others own, and
uninitialised memory.

What the graph before the pass did already is no error of the pass. A functional graph writes
nothing, so there is nothing to look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from zpasses.errors import PassError
from zpasses.graph.nodes import nbytes
from zpasses.graph.ops import DIALECT
from zpasses.graph.verifier.operators import (
    GETITEM,
    WAIT,
    is_collective,
    is_factory_of_uninitialised,
    is_link,
    shared_arguments,
    written_arguments,
)
from zpasses.graph.verifier.versions import (
    CurrentGraph,
    GraphVersion,
    NodeRecord,
    PreviousGraph,
    nodes_in,
)

__all__ = ["check_initialised", "check_memory"]

Root = tuple[fx.Node, int]
"""One allocation: the node that made it, and which of its outputs it is."""


@dataclass(frozen=True)
class _Hazard:
    node: fx.Node
    other: fx.Node
    text: str


def check_memory(
    now: CurrentGraph, before: PreviousGraph, pass_name: str, *, may_write_inputs: bool
) -> None:
    """Raise PassError for accesses that race with a collective, and for writes to inputs and to
    gathered parameters.
    """
    found = [
        each
        for each in _hazards(now)
        if not (may_write_inputs and now.record(each.other).op == "placeholder")
    ]
    known = set(_hazards(before)) if found else set()
    for each in found:
        if each not in known:
            where = each.node.format_node() or "the output"
            raise PassError(f"pass {pass_name!r}: {where} {each.text}")


def check_initialised(
    affected: list[fx.Node], now: CurrentGraph, before: PreviousGraph, pass_name: str
) -> None:
    """Raise PassError if a collective or the output reads memory that nothing has written."""
    touched = set(affected)
    for node in affected:
        if not is_collective(node.target) and node.op != "output":
            continue
        read = _read_by(now, node)
        if node.op == "output":
            read = [each for each in read if each in touched]
        found = dict(_uninitialised(now, node, read))
        if found and node in before:
            for old in dict(_uninitialised(before, node, _read_by(before, node))):
                found.pop(old, None)
        for origin, through in found.items():
            what = f"{node.format_node()} reads" if node.op != "output" else "the graph returns"
            raise PassError(
                f"pass {pass_name!r}: {what} {through.name}, but nothing has written all of the "
                f"uninitialised memory of {origin.format_node()}. Fill it, or use zeros."
            )


class _Aliases:
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
        if not names:
            return frozenset()
        arguments = record.arguments()
        targets = nodes_in(tuple(arguments.get(name) for name in names))
        return frozenset[Root]().union(*map(self.roots, targets))


def _hazards(version: GraphVersion) -> Iterator[_Hazard]:
    if not any(written_arguments(version.record(node).target) for node in version.nodes):
        return
    aliases = _Aliases(version)
    writing: dict[Root, fx.Node] = {}
    reading: dict[fx.Node, frozenset[Root]] = {}
    gathered: dict[Root, fx.Node] = {}
    for node in version.nodes:
        record = version.record(node)
        written = aliases.written(node)
        yield from _conflicts(version, aliases, node, written, writing, reading)
        for root in written:
            if version.record(root[0]).op == "placeholder":
                text = (
                    f"writes to the graph input {root[0].name}. Write to a copy, or declare "
                    "`changes_inputs: ClassVar[bool] = True`."
                )
                yield _Hazard(node, root[0], text)
            if root in gathered and not is_collective(record.target):
                owner = gathered[root]
                text = (
                    f"writes to the gathered parameter {owner.name}, which other nodes may read. "
                    "Write to a copy."
                )
                yield _Hazard(node, owner, text)
        if record.target is WAIT:
            _finish(aliases.roots(node), writing, reading)
        elif is_collective(record.target) and record.target not in DIALECT:
            outputs = written or aliases.roots(node)
            writing.update(dict.fromkeys(outputs, node))
            reads = frozenset[Root]().union(*map(aliases.roots, version.inputs(node)))
            reading[node] = reads - written
        if record.tag is not None and record.tag.role in ("gathered", "full"):
            gathered.update(dict.fromkeys(aliases.roots(node), node))
    for started in dict.fromkeys(writing.values()):
        if written_arguments(version.record(started).target):
            yield _Hazard(started, started, "writes to its arguments and is never awaited.")


def _conflicts(
    version: GraphVersion,
    aliases: _Aliases,
    node: fx.Node,
    written: frozenset[Root],
    writing: dict[Root, fx.Node],
    reading: dict[fx.Node, frozenset[Root]],
) -> Iterator[_Hazard]:
    if not writing:
        return
    record = version.record(node)
    passive = record.target is WAIT or record.target is GETITEM
    is_view = record.op != "output" and bool(shared_arguments(record.target)) and not written
    if not passive and not is_view:
        for root in (root for item in version.inputs(node) for root in aliases.roots(item)):
            if root in writing:
                name = writing[root].name
                text = f"reads or writes what the collective {name} is writing; wait_tensor first."
                yield _Hazard(node, writing[root], text)
    for started, roots in reading.items():
        if written & roots:
            text = (
                f"writes to the input of the collective {started.name}, which is still running; "
                "wait_tensor first."
            )
            yield _Hazard(node, started, text)


def _finish(
    awaited: frozenset[Root],
    writing: dict[Root, fx.Node],
    reading: dict[fx.Node, frozenset[Root]],
) -> None:
    ended = {writing.pop(root) for root in awaited if root in writing}
    for started in ended - set(writing.values()):
        reading.pop(started, None)


# --- uninitialised memory -------------------------------------------------------------------------
def _uninitialised(
    version: GraphVersion, reader: fx.Node, read: list[fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(factory, the value of it that is read) of memory that nothing has filled before `reader`."""
    aliases = _Aliases(version)
    queue = [(node, node) for node in read]
    seen = set(queue)
    while queue:
        node, view = queue.pop()
        record = version.record(node)
        if is_factory_of_uninitialised(record.target):
            filled = sum(
                _written_elements(version, aliases, writer, node)
                for writer in _writers_before(version, reader)
            )
            if filled < _numel(version.record(view).value):
                yield node, view
            continue
        shared = _shared_inputs(record)
        if record.op != "call_function" or not (shared or is_link(record.target, "gather")):
            continue
        for item in version.inputs(node):
            state = (item, view if item in shared else item)
            if state not in seen:
                seen.add(state)
                queue.append(state)


def _shared_inputs(record: NodeRecord) -> list[fx.Node]:
    if record.target is GETITEM:
        return nodes_in(record.args[0])
    arguments = record.arguments()
    return nodes_in(tuple(arguments.get(name) for name in shared_arguments(record.target)))


def _read_by(version: GraphVersion, reader: fx.Node) -> list[fx.Node]:
    """The inputs of a node without those that it only writes."""
    record = version.record(reader)
    if "out" not in record.kwargs:
        return version.inputs(reader)
    rest = {name: value for name, value in record.kwargs.items() if name != "out"}
    return nodes_in((record.args, rest))


def _writers_before(version: GraphVersion, reader: fx.Node) -> list[fx.Node]:
    found = []
    for node in version.nodes:
        if node is reader:
            break
        if written_arguments(version.record(node).target):
            found.append(node)
    return found


def _written_elements(
    version: GraphVersion, aliases: _Aliases, writer: fx.Node, factory: fx.Node
) -> int:
    record = version.record(writer)
    arguments = record.arguments()
    targets = nodes_in(tuple(arguments.get(name) for name in written_arguments(record.target)))
    return sum(
        _numel(version.record(target).value)
        for target in targets
        if (factory, 0) in aliases.roots(target)
    )


def _numel(value: Any) -> int:
    return nbytes(value) // value.element_size() if isinstance(value, Tensor) else 0
