"""Saved values that leave the device for the host until backward needs them.

    zpasses::offload(Tensor value) -> Tensor
    zpasses::offload_wait(Tensor ticket, Tensor value) -> Tensor
    zpasses::reload(Tensor host, Device device) -> Tensor
    zpasses::reload_wait(Tensor ticket, Tensor host, Device device) -> Tensor
    zpasses::from_host(Tensor host, Device device) -> Tensor

A start returns a ticket, int64[1] on the host, and its wait the copy. No result shares memory with
an argument, and a wait frees nothing. It takes the source as an argument, so whatever runs the
graph keeps the source until the copy has ended. `zpasses.host.host_memory` runs them.

`from_host` is the copy of a shard that rests on the host, and `to_host`, of the dialect, that of
its gradient. Each ends before what follows starts, until `schedule` splits it into a start and a
wait. The wait of a gradient frees its source, but the CPU has to `settle` before it reads the copy.

Forward and backward are rewritten together, after the partition: backward may recompute values from
saved ones, so in a joint graph it is not known yet which reads are those of backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.aliases import view_base, written_arguments
from zpasses.graph.dialect import AVERAGE_GRAD, TO_HOST
from zpasses.graph.padding import rounded_up
from zpasses.graph.queries import (
    Editor,
    calls,
    nbytes,
    replace_node,
    returned_values,
    value_of,
)
from zpasses.graph.tags import Tag, add_tag, tag_of

LIBRARY = torch.library.Library("zpasses", "FRAGMENT")
for _schema in (
    "offload(Tensor value) -> Tensor",
    "offload_wait(Tensor ticket, Tensor value) -> Tensor",
    "reload(Tensor host, Device device) -> Tensor",
    "reload_wait(Tensor ticket, Tensor host, Device device) -> Tensor",
    "from_host(Tensor host, Device device) -> Tensor",
    "settle(Tensor host) -> ()",
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))

OFFLOAD: compat.OpOverload = torch.ops.zpasses.offload.default
OFFLOAD_WAIT: compat.OpOverload = torch.ops.zpasses.offload_wait.default
RELOAD: compat.OpOverload = torch.ops.zpasses.reload.default
RELOAD_WAIT: compat.OpOverload = torch.ops.zpasses.reload_wait.default
FROM_HOST: compat.OpOverload = torch.ops.zpasses.from_host.default
SETTLE: compat.OpOverload = torch.ops.zpasses.settle.default
"""Makes the CPU wait until the copies to the host have ended. Graphs do not have it."""

HOST_STARTS = frozenset({OFFLOAD, RELOAD})
HOST_WAITS = frozenset({OFFLOAD_WAIT, RELOAD_WAIT})

LEAST_BYTES = 64 << 10
"""Smaller values stay: a copy of one takes as long as its start."""


def empty_like_on(value: Tensor, device: torch.device | str) -> Tensor:
    """Returns an uninitialised tensor with the shape, strides and dtype of another."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _ticket(value: Tensor, *rest: object) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


for _name, _fake in (
    ("offload", _ticket),
    ("offload_wait", lambda ticket, value: empty_like_on(value, "cpu")),
    ("reload", _ticket),
    ("reload_wait", lambda ticket, host, device: empty_like_on(host, device)),
    ("from_host", empty_like_on),
    ("settle", lambda host: None),
):
    torch.library.register_fake(f"zpasses::{_name}", _fake, lib=LIBRARY)

LIBRARY.impl(
    "from_host",
    lambda host, device: empty_like_on(host, device).copy_(host, non_blocking=True),
    "CompositeExplicitAutograd",
)


@dataclass(frozen=True)
class HostCopy:
    """The start of a copy to or from the host."""

    direction: Literal["out", "in"]
    nbytes: int


def host_copy_of(node: fx.Node) -> HostCopy | None:
    """Describes the copy that a node starts; None if it starts none."""
    if node.target not in HOST_STARTS:
        return None
    direction: Literal["out", "in"] = "out" if node.target is OFFLOAD else "in"
    return HostCopy(direction, nbytes(value_of(node.all_input_nodes[0])))


@dataclass(frozen=True)
class HostNeed:
    """What a run of a graph puts on the host."""

    values: Mapping[Any, int]
    """Bytes of a value -> number of values. Bytes are an expression where sizes are dynamic."""
    symbols: Mapping[Any, SizePlace]
    """Where each dynamic size is found."""
    device: torch.device
    """The device from which they leave."""

    def nbytes(self, inputs: Sequence[Any]) -> int:
        """Returns the bytes of all values, each `aligned`, for the inputs of a run."""
        known = sizes_of(inputs, self.symbols)
        return sum(
            count * aligned(compat.evaluated(size, known)) for size, count in self.values.items()
        )


SizePlace = tuple[int, int | None]
"""An input that has a dynamic size, and which of its dimensions; None if the input is the size."""


def size_places(graph: fx.Graph) -> dict[Any, SizePlace]:
    """Returns where each dynamic size is found among the inputs of a run of a graph."""
    found: dict[Any, SizePlace] = {}
    for at, node in enumerate(graph.find_nodes(op="placeholder")):
        value = value_of(node)
        named = enumerate(value.shape) if isinstance(value, Tensor) else [(None, value)]
        for dim, size in named:
            if isinstance(size, torch.SymInt):
                symbol = compat.expression(size)
                if compat.symbols_of(symbol) == {symbol}:
                    found.setdefault(symbol, (at, dim))
    return found


def sizes_of(inputs: Sequence[Any], places: Mapping[Any, SizePlace]) -> dict[Any, int]:
    """Returns the dynamic sizes of a run."""
    return {
        symbol: int(inputs[at] if dim is None else inputs[at].shape[dim])
        for symbol, (at, dim) in places.items()
    }


def aligned(size: int) -> int:
    """Returns the bytes that a value of `size` bytes takes of an arena."""
    return rounded_up(size, _ALIGNMENT)


_ALIGNMENT = 64
"""Bytes of a cache line."""


def host_need(graph: fx.Graph) -> HostNeed | None:
    """Returns what a run of a graph puts on the host; None if nothing."""
    sources = [value_of(node.all_input_nodes[0]) for node in calls(graph, OFFLOAD, TO_HOST)]
    if not sources:
        return None
    sizes = Counter(
        compat.expression(each.numel() * each.element_size())  # not `nbytes`: of this run
        for each in sources
    )
    needed = {symbol for size in sizes for symbol in compat.symbols_of(size)}
    symbols = {symbol: at for symbol, at in size_places(graph).items() if symbol in needed}
    return HostNeed(dict(sizes), symbols, sources[0].device)


def is_host_wait(node: fx.Node) -> bool:
    """Whether a node awaits a copy to or from the host, which its first argument starts."""
    return node.target in HOST_WAITS


def is_on_host(node: fx.Node) -> bool:
    """Whether the value of a node takes no memory of the device: a value on the host, or a ticket.

    On CPUs, the device of a value does not tell.
    """
    if node.op == "placeholder":
        return bool(node.users) and all(user.target in (RELOAD, RELOAD_WAIT) for user in node.users)
    return node.target in (OFFLOAD, OFFLOAD_WAIT, RELOAD, TO_HOST)


def offloadable_values(
    forward: fx.Graph,
    backward: fx.Graph,
    user_outputs: int,
    least_bytes: int = LEAST_BYTES,
) -> list[fx.Node]:
    """Returns the values of a forward graph that may rest on the host until backward, in the order
    in which forward returns them.

    These are dense floating-point tensors that forward computes, and whose memory nothing else has
    that outlives forward. Sizes may be dynamic, but must not depend on data. Full parameters and
    parts of them stay.

    Args:
        forward, backward: the two graphs of a partition.
        user_outputs: how many values forward returns before those that it saves.
        least_bytes: smaller values stay.
    """
    returned = returned_values(forward)
    owners: dict[int, list[object]] = {}
    inputs = [node for node in forward.nodes if node.op == "placeholder"]
    for each in (*returned, *inputs):
        if isinstance(each, fx.Node) and isinstance(value_of(each), Tensor):
            key = _storage(value_of(each))
            if key is not None:
                owners.setdefault(key, []).append(each)
    read = {node.name for node in backward.nodes if node.op == "placeholder" and node.users}
    return [
        node
        for node in returned[user_outputs:]
        if isinstance(node, fx.Node)
        and node.op == "call_function"
        and tag_of(view_base(node)) is None
        and node.name in read
        and _is_movable(value_of(node), least_bytes)
        and len(owners.get(_storage(value_of(node)) or 0, ())) == 1
    ]


def offloadable_inputs(
    forward: fx.Graph,
    backward: fx.Graph,
    user_outputs: int,
    least_bytes: int = LEAST_BYTES,
) -> list[fx.Node]:
    """Returns the inputs of a forward graph that it saves for backward, and that may rest on the
    host in between, as `offloadable_values`. Whoever else holds one decides whether that frees its
    memory.

    Shards stay, and so do arguments of operators that write to some argument.
    """
    returned = returned_values(forward)
    saved = returned[user_outputs:]
    others = [each for each in returned if isinstance(each, fx.Node) and each.op != "placeholder"]
    taken = {_storage(value_of(each)) for each in others if isinstance(value_of(each), Tensor)}
    read = {node.name for node in backward.nodes if node.op == "placeholder" and node.users}
    return [
        node
        for node in forward.find_nodes(op="placeholder")
        if tag_of(node) is None
        and node.name in read
        and saved.count(node) == returned.count(node) == 1
        and _is_movable(value_of(node), least_bytes)
        and _storage(value_of(node)) not in taken
        and not any(written_arguments(user.target) for user in node.users)
    ]


def _storage(value: Tensor) -> int | None:
    return compat.storage_id(value) if value.layout is torch.strided else None


def _is_movable(value: object, least_bytes: int) -> bool:
    if not isinstance(value, Tensor) or type(value) is not compat.FakeTensor:
        return False
    return (
        value.layout is torch.strided
        and value.is_floating_point()
        and not compat.has_unbacked_size(value)
        and nbytes(value) >= least_bytes
        and fills_its_storage(value)
    )


def fills_its_storage(value: Tensor) -> bool:
    """Whether a tensor has all elements of its storage, once each, whatever its dynamic sizes are.
    Asks without a guard.
    """
    expected, offset = 1, value.storage_offset()
    dims = [each for each in zip(value.shape, value.stride(), strict=True) if not _is(each[0], 1)]
    for size, stride in sorted(dims, key=lambda each: compat.size_hint(each[1])):
        if not _is(stride, expected):
            return False
        expected = expected * size
    return _is(offset, 0) and _is(value.untyped_storage().nbytes(), expected * value.element_size())


def _is(size: Any, other: Any) -> bool:
    return bool(compat.expression(size) == compat.expression(other))


def offload_saved(
    forward: fx.Graph, backward: fx.Graph, names: Collection[str], origin: str
) -> list[str]:
    """Has values rest on the host from their last use in forward to their first use in backward.

    Each copy starts and is awaited where nothing waits for another: out after the last reader, and
    in before the first. A pass may move them (`schedule`).

    Args:
        forward, backward: the two graphs of a partition, which are changed.
        names: of nodes among `offloadable_values`; others are ignored.
        origin: of the tags.

    Returns:
        The names of the values that move.
    """
    output = forward.output_node()
    returned = returned_values(forward)
    inputs = {node.name: node for node in backward.nodes if node.op == "placeholder"}
    moved = []
    for at, node in enumerate(returned):
        if not isinstance(node, fx.Node) or node.name not in names or node.name not in inputs:
            continue
        returned[at] = _copied_out(forward, node, origin)
        _copy_in(backward, inputs[node.name], returned[at], origin)
        moved.append(node.name)
    values: Any = output.args[0]
    output.args = (type(values)(returned),)
    return moved


def _copied_out(graph: fx.Graph, value: fx.Node, origin: str) -> fx.Node:
    edit = Editor(graph, _after_last(graph, value), like=value)
    started = edit.call(OFFLOAD, value)
    add_tag(started, Tag("offload", (), nbytes(value_of(value)), origin=origin))
    return edit.call(OFFLOAD_WAIT, started, value)


def _after_last(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Returns the node after the last one that reads a value or a view of it."""
    position = {node: at for at, node in enumerate(graph.nodes)}
    storage = _storage(value_of(value))
    last, pending = value, [value]
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                continue
            if position[user] > position[last]:
                last = user
            found = value_of(user)
            if isinstance(found, Tensor) and _storage(found) == storage:
                pending.append(user)
    following: fx.Node = last.next
    return following


def _copy_in(graph: fx.Graph, saved: fx.Node, host: fx.Node, origin: str) -> None:
    """Makes an input of a backward graph a host tensor, and has its readers read a copy of it."""
    readers = list(saved.users)
    device = value_of(saved).device
    saved.meta = {**saved.meta, "val": value_of(host)}
    saved.meta.pop("tensor_meta", None)
    first: fx.Node = next(node for node in graph.nodes if node in saved.users)
    edit = Editor(graph, first, like=first)
    started = edit.call(RELOAD, saved, device)
    add_tag(started, Tag("reload", (), nbytes(value_of(saved)), origin=origin))
    awaited = edit.call(RELOAD_WAIT, started, saved, device)
    for reader in readers:
        reader.replace_input_with(saved, awaited)


def split_shard_copies(graph: fx.Graph, origin: str) -> list[fx.Node]:
    """Has copies of shards from the host, and of their gradients to the host, start and end in
    separate calls, which may move. Gradients that the graph reads on the host, to sum them, stay as
    they are, and so do those whose average over replicas is still to be inserted.

    Args:
        origin: of the tags.

    Returns:
        The nodes that start them.
    """
    gradients = [
        node
        for node in calls(graph, TO_HOST)
        if is_only_returned(node) and on_device(node).target is not AVERAGE_GRAD
    ]
    return [split_copy(node, origin) for node in (*calls(graph, FROM_HOST), *gradients)]


def is_only_returned(node: fx.Node) -> bool:
    """Whether nothing but the output of the graph reads a value."""
    return all(user.op == "output" for user in node.users)


def split_copy(node: fx.Node, origin: str) -> fx.Node:
    """Has one copy of a shard or gradient start and end in separate calls; returns the first."""
    role: Literal["offload", "reload"] = "offload" if node.target is TO_HOST else "reload"
    start, wait = (OFFLOAD, OFFLOAD_WAIT) if role == "offload" else (RELOAD, RELOAD_WAIT)
    edit, tag = Editor(node.graph, node), tag_of(node)
    started = edit.call(start, *node.args)
    awaited = edit.call(wait, started, *node.args)
    if tag is not None:
        sized = tag_of(on_device(node)) or tag
        size = sized.block_bytes or nbytes(value_of(node))  # one rank holds all, and has no block
        add_tag(started, Tag(role, tag.params, size, origin=origin))
        add_tag(awaited, tag)
    replace_node(node, awaited)
    return started


def on_device(grad: fx.Node) -> fx.Node:
    """Returns the value that a gradient on the host is a copy of, or the gradient itself."""
    if grad.target in (TO_HOST, OFFLOAD_WAIT):
        return grad.all_input_nodes[-1]
    return grad
