"""Collectives: each output is fetched and awaited once, groups and reduce ops exist, and every new
collective has a tag.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import fx

from zpasses import compat
from zpasses.errors import PassError
from zpasses.graph.aliases import GETITEM, written_arguments
from zpasses.graph.dialect import DIALECT
from zpasses.graph.queries import WAIT, communicates
from zpasses.graph.verifier.operators import REDUCE_OPS
from zpasses.graph.verifier.versions import CurrentGraph, GraphVersion, PreviousGraph


def check_collectives(
    changed: list[fx.Node], now: CurrentGraph, before: PreviousGraph, pass_name: str
) -> None:
    """Check the changed collectives, and those that a changed node reads or has read."""
    known = compat.group_names() if dist.is_available() and dist.is_initialized() else None
    for node in changed:
        if before.is_new(node):
            _check_tag(node, now, pass_name)
        if communicates(node.target) and not before.same_call(node):
            _check_arguments(node, now, before, known, pass_name)
    for node in dict.fromkeys(started for each in changed for started in _started_by(each)):
        found = _waiting_error(now, node)
        if found and not (node in before and _waiting_error(before, node)):
            raise PassError(f"pass {pass_name!r}: collective {node.format_node()} {found}")


def _started_by(node: fx.Node) -> Iterator[fx.Node]:
    """The node and what it reads: a collective may be untouched and yet have lost its wait to
    another reader. One of several outputs is read through getitem.
    """
    for each in (node, *node.all_input_nodes):
        source = each.all_input_nodes[0] if each.target is GETITEM else each
        if communicates(source.target):
            yield source


def _waiting_error(version: GraphVersion, node: fx.Node) -> str | None:
    """What is wrong with the waits of a collective. In-place and out= forms are awaited through the
    tensor that they write; `zpasses.graph.verifier.shared_memory` looks at them.
    """
    record = version.record(node)
    if record.target in DIALECT or written_arguments(record.target):
        return None
    readers = list(version.users(node))
    if not isinstance(record.value, (list, tuple)):
        return _reading_error(version, node, "")
    fetched = [each for each in readers if version.record(each).target is GETITEM]
    for reader in readers:
        if reader not in fetched:
            return _must_be_awaited(reader.name, "")
    places = [version.record(each).args[1] for each in fetched]
    for i in range(len(record.value)):
        if places.count(i) != 1:
            names = ", ".join(
                each.name for each, place in zip(fetched, places, strict=True) if place == i
            )
            return (
                f"has {len(record.value)} outputs, and each must be fetched by exactly one "
                f"getitem, but output {i} is fetched by {names or 'nobody'}."
            )
    errors = (
        _reading_error(version, each, f"output {place} ")
        for each, place in zip(fetched, places, strict=True)
    )
    return next((error for error in errors if error), None)


def _reading_error(version: GraphVersion, output: fx.Node, which: str) -> str | None:
    readers = version.users(output)
    if len(readers) == 1 and version.record(readers[0]).target is WAIT:
        return None
    return _must_be_awaited(", ".join(reader.name for reader in readers) or "nobody", which)


def _must_be_awaited(names: str, which: str) -> str:
    if which:
        return (
            f"must have each output read by exactly one wait_tensor, but {which}is read by {names}."
        )
    return f"must be read by exactly one wait_tensor, but is read by {names}."


def _check_tag(node: fx.Node, now: CurrentGraph, pass_name: str) -> None:
    if (communicates(node.target) or node.target is WAIT) and now.record(node).tag is None:
        raise PassError(
            f"pass {pass_name!r} made {node.format_node()} without a tag; use "
            "zpasses.graph.tags.add_tag where it is made."
        )


def _check_arguments(
    node: fx.Node, now: CurrentGraph, before: PreviousGraph, known: list[str] | None, pass_name: str
) -> None:
    arguments = now.record(node).arguments()
    was = before.record(node).arguments() if node in before else {}

    def differs(name: str) -> bool:
        return name in arguments and arguments[name] != was.get(name)

    if differs("group_name") and known is not None:
        group = compat.group_name(arguments["group_name"])
        if group not in known:
            raise PassError(
                f"pass {pass_name!r}: {node.format_node()} communicates on group {group!r}, but "
                f"this process is in {', '.join(map(repr, known))}."
            )
    if differs("group_size") and known is not None:
        size = compat.process_group(compat.group_name(arguments["group_name"])).size()
        if arguments["group_size"] != size:
            raise PassError(
                f"pass {pass_name!r}: {node.format_node()} has group_size="
                f"{arguments['group_size']}, but its group has {size} ranks."
            )
    if differs("reduce_op"):
        reduce_op = arguments["reduce_op"]
        if isinstance(reduce_op, str) and reduce_op.lower() not in REDUCE_OPS:
            raise PassError(
                f"pass {pass_name!r}: {node.format_node()} reduces by {reduce_op!r}; expected one "
                f"of {', '.join(sorted(REDUCE_OPS))}."
            )
