"""Memory that several nodes share: races with collectives in flight
(`zpasses.graph.verifier.order`), writes to what others own, and uninitialised memory.

What the graph before the pass did already is no error of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from zpasses.errors import PassError
from zpasses.graph.aliases import GETITEM, shared_arguments, written_arguments
from zpasses.graph.queries import WAIT, communicates, numel
from zpasses.graph.verifier.allocations import Aliases, Root
from zpasses.graph.verifier.operators import (
    is_factory_of_uninitialised,
    is_launch,
    is_link,
)
from zpasses.graph.verifier.order import may_race, races_in
from zpasses.graph.verifier.versions import (
    CurrentGraph,
    GraphVersion,
    NodeRecord,
    PreviousGraph,
    nodes_in,
)


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
        if not communicates(node.target) and node.op != "output":
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


def _hazards(version: GraphVersion) -> Iterator[_Hazard]:
    if not may_race(version):
        return
    for race in races_in(version):
        yield _Hazard(race.node, race.launch, race.text)
    aliases = Aliases(version)
    gathered: dict[Root, fx.Node] = {}
    running: dict[Root, fx.Node] = {}
    for node in version.nodes:
        record = version.record(node)
        written = aliases.written(node)
        for root in written:
            if version.record(root[0]).op == "placeholder":
                text = (
                    f"writes to the graph input {root[0].name}. Write to a copy, or declare "
                    "`facts = Facts(changes_inputs=True)`."
                )
                yield _Hazard(node, root[0], text)
            if root in gathered and not communicates(record.target):
                owner = gathered[root]
                text = (
                    f"writes to the gathered parameter {owner.name}, which other nodes may read. "
                    "Write to a copy."
                )
                yield _Hazard(node, owner, text)
        if is_launch(record.target):
            running.update(dict.fromkeys(written, node))
        elif record.target is WAIT:
            for root in aliases.roots(node):
                running.pop(root, None)
        if record.tag is not None and record.tag.role in ("gathered", "full"):
            gathered.update(dict.fromkeys(aliases.roots(node), node))
    for started in dict.fromkeys(running.values()):
        yield _Hazard(started, started, "writes to its arguments and is never awaited.")


# --- uninitialised memory -------------------------------------------------------------------------
def _uninitialised(
    version: GraphVersion, reader: fx.Node, read: list[fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(factory, the value of it that is read) of memory that nothing has filled before `reader`."""
    aliases = Aliases(version)
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
            if filled < numel(version.record(view).value):
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
    return record.nodes_at(shared_arguments(record.target))


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
    version: GraphVersion, aliases: Aliases, writer: fx.Node, factory: fx.Node
) -> int:
    record = version.record(writer)
    return sum(
        numel(version.record(target).value)
        for target in record.nodes_at(written_arguments(record.target))
        if (factory, 0) in aliases.roots(target)
    )
