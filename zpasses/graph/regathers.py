"""Gathers of full parameters that only backward runs, from fewer ranks than those of forward.

The pass `reshard-after-forward` inserts them into the joint graph, and every reader reads them, so
that backward can gather again whatever it recomputes. Forward then reads what it gathered first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.queries import Editor, is_wait, nbytes, value_of
from zpasses.graph.tags import Tag, add_tag, tag_of, tagged

aten = torch.ops.aten


def insert_regathers(graph: fx.Graph, origin: str) -> set[fx.Node]:
    """Have a joint graph gather parameters again that have a group for it.

    Returns:
        The nodes that forward alone runs: the first gathers of these parameters with what prepares
        their inputs, and the parts that forward saves for backward.
    """
    only_forward: set[fx.Node] = set()
    for started, tag in list(tagged(graph, "gather")):
        if tag.reshard_group is None:
            continue
        (wait,) = started.users
        group, last = tag.reshard_group, tag_of(wait)
        size, rank = len(compat.group_ranks(group)), compat.process_group(group).rank()
        rows = value_of(wait).shape[0] // size
        edit = Editor(graph, wait.next, like=wait)
        part = edit.call(aten.slice.Tensor, wait, 0, rank * rows, (rank + 1) * rows)
        kept = edit.call(aten.clone.default, part)
        add_tag(kept, Tag("part", tag.params, origin=origin))
        compat.mark_saved(kept)
        again = edit.call(compat.functional.all_gather_into_tensor.default, kept, size, group)
        sent = nbytes(value_of(kept))
        add_tag(again, Tag("gather", tag.params, sent, origin=origin, encoding=tag.encoding))
        full = edit.call(compat.functional.wait_tensor.default, again)
        for reader in [each for each in wait.users if each is not part]:
            reader.replace_input_with(wait, full)
        if last is not None:
            add_tag(full, last)
        add_tag(wait, Tag("gathered", tag.params, origin=tag.origin))
        only_forward |= {kept, wait, started}
        source = started.all_input_nodes[0]
        while (before := tag_of(source)) is not None and before.role == "gather_input":
            only_forward.add(source)
            source = source.all_input_nodes[0]
    return only_forward


def drop_unread_parts(forward: fx.Graph, backward: fx.Graph) -> None:
    """Have forward save no part that backward does not read.

    The partitioner saves what is marked to be saved, whether backward reads it or not.
    """
    inputs = {
        node.name: node
        for node, _ in tagged(backward, "part")
        if node.op == "placeholder" and not node.users
    }
    unread = [
        node
        for node, _ in tagged(forward, "part")
        if node.op == "call_function" and node.name in inputs
    ]
    output = forward.output_node()
    values: Any = output.args[0]
    output.args = (type(values)(each for each in values if each not in unread),)
    for node in unread:
        backward.erase_node(inputs[node.name])


def remove_regathers(graph: fx.Graph) -> None:
    """Have a forward graph read what it gathered first, and gather nothing again.

    What it gathered first takes the name of what it gathered again, which is the name of the full
    parameter in backward: the backend finds by their names which parameters both graphs gather.
    """
    for again, _ in list(tagged(graph, "gather")):
        kept: Any = again.args[0]
        source = tag_of(kept)
        if kept.op != "call_function" or source is None or source.role != "part":
            continue
        wait = kept.all_input_nodes[0].all_input_nodes[0]
        (full,) = again.users
        assert is_wait(wait)
        assert is_wait(full)
        last = tag_of(full)
        if last is not None:
            add_tag(wait, last)
        full.replace_all_uses_with(wait)
        part = kept.all_input_nodes[0]
        for node in (full, again, kept, part):
            if not node.users:
                graph.erase_node(node)
        wait.name = full.name
