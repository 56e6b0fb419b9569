"""Makes snapshots of graphs: each node's metadata, and its memory and time by the models, as plain
data.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.memory.liveness import Liveness, liveness
from zpasses.cost.time.fused_kernels import FusedKernels
from zpasses.cost.time.roofline import compute_us
from zpasses.cost.time.step_time import (
    Timeline,
    collective_timing,
    host_copy_timing,
    route_named,
)
from zpasses.cost.time.target import Target
from zpasses.dumps import nodes as data
from zpasses.dumps.buffer_kinds import Contents, buffer_contents, output_contents
from zpasses.dumps.sources import SourceTable
from zpasses.graph.dialect import UNSHARD
from zpasses.graph.groups import label_of
from zpasses.graph.host_copies import host_copy_of, is_host_wait
from zpasses.graph.queries import (
    Collective,
    collective_of,
    input_nbytes,
    is_wait,
    nbytes,
    value_of,
)
from zpasses.graph.tags import Tag, tag_of

_PARTITIONED = ("forward", "backward")
"""Graphs, with their variants, whose recompute marks are only copies: the partitioner has applied
them.
"""
_LONGEST = 400
"""Maximum length of the text of an argument that JSON cannot express."""

log = logging.getLogger("zpasses")


class Describer:
    """Describes the graphs of one compile, and assigns ids to nodes.

    A node has the same id in all passes of its graph. A node of a graph that was made from another
    has the id of the other graph's node with the same name.

    Args:
        target: the hardware of the memory and cost models.
        labels: process group -> its label (`zpasses.graph.groups.group_labels`).
    """

    def __init__(self, target: Target, labels: Mapping[str, str] | None = None) -> None:
        self.target, self.sources = target, SourceTable()
        self.labels = labels or {}
        """Process group -> its label."""
        self._next = 0
        self._numbers: dict[str, dict[str, int]] = {}
        self._group_ranks: dict[str, tuple[int, ...]] = {}
        self._compute_us: dict[tuple[Any, ...], tuple[Any, float]] = {}
        """Target, id of the value and bytes moved -> the value, and the time of the call."""
        self._param_sources: dict[str, data.Source | None] = {}
        """Parameter -> source of the line that reads it."""
        self.saved: dict[str, Contents] = {}
        """What the values hold that the forward graph saved for backward, by name."""

    def graph(
        self, graph: str, parent: str | None = None, *, modelled: bool = True
    ) -> GraphDescriber:
        """Start or continue the description of a graph.

        Args:
            graph: its name.
            parent: name of the graph that it was made from. Ignored if the graph itself was
                described before.
            modelled: whether the memory and cost models cover its ops. They cover aten, and not the
                ops that Dynamo captures.
        """
        return GraphDescriber(
            self, graph, self._numbers.get(graph) or self._numbers.get(parent or "", {}), modelled
        )

    def new_id(self) -> int:
        self._next += 1
        return self._next - 1

    def remember(self, graph: str, numbers: dict[str, int]) -> None:
        self._numbers[graph] = numbers

    def source(self, node: fx.Node, tag: Tag | None) -> data.Source | None:
        """The line of the model that a node comes from.

        A pass that makes a bucket copies the metadata of one member to all of its nodes. A node of
        one parameter has the source of that parameter instead, and a node of several has none.
        """
        if tag is None or not tag.params:
            return self.sources.of(node)
        if len(tag.params) > 1:
            return None
        name = tag.params[0]
        if tag.bucket is not None:
            return self._param_sources.get(name)
        found = self.sources.of(node)
        if found is not None:
            self._param_sources.setdefault(name, found)
        return found

    def compute_us(self, node: fx.Node, kernels: FusedKernels) -> float:
        """Time of a call that does not communicate. Copies of a node in other graphs share its
        value, so their time is known if they are fused likewise.
        """
        value = value_of(node)
        key = node.target, id(value), kernels.moved_bytes(node)
        if key not in self._compute_us:
            self._compute_us[key] = value, round(compute_us(node, self.target, kernels), 3)
        return self._compute_us[key][1]

    def group_ranks(self, name: str) -> tuple[int, ...]:
        if name not in self._group_ranks:
            try:
                self._group_ranks[name] = tuple(compat.group_ranks(name))
            except (RuntimeError, ValueError, KeyError):  # this process does not know the group
                self._group_ranks[name] = (0,)
        return self._group_ranks[name]

    def label(self, group: str) -> str:
        """Label of a process group, also of one that was made after the compile started."""
        return self.labels.get(group) or label_of(group, self.labels)


class GraphDescriber:
    """Describes one graph while passes run on it."""

    def __init__(
        self, describer: Describer, graph: str, inherited: Mapping[str, int], modelled: bool
    ) -> None:
        self._describer, self._graph, self._inherited, self._modelled = (
            describer,
            graph,
            inherited,
            modelled,
        )
        self._marked = not graph.startswith(_PARTITIONED)
        self._numbers: dict[fx.Node, int] = {}
        self._known: dict[fx.Node, tuple[tuple[Any, ...], data.Node]] = {}
        self._kernels = FusedKernels()

    def snapshot(self, graph: fx.Graph, number: int) -> data.Snapshot:
        """The graph in its current state. `number` becomes the number of the snapshot."""
        nodes = tuple(graph.nodes)
        taken = set(self._numbers.values())
        for node in nodes:
            if node not in self._numbers:
                inherited = None if self._known else self._inherited.get(node.name)
                fresh = (
                    self._describer.new_id()
                    if inherited is None or inherited in taken
                    else inherited
                )
                self._numbers[node] = fresh
        self._describer.remember(self._graph, {node.name: self._numbers[node] for node in nodes})
        self._kernels = FusedKernels()
        memory = Liveness(nodes, (0,) * len(nodes), ())
        if self._modelled:
            memory = liveness(graph, kernels=self._kernels)
        buffers = self._buffers(nodes, memory)
        kind, _, part = self._graph.partition(".")
        if self._modelled and kind == "forward" and not part.startswith("block"):
            self._describer.saved = output_contents(graph)
        described = tuple(self._node(node, buffers.get(node, ())) for node in nodes)
        return data.Snapshot(number, described, memory.live_bytes, self._spans(graph))

    def _spans(self, graph: fx.Graph) -> tuple[tuple[float, float], ...]:
        """Start and end of each node; zeros for a graph that the cost model does not cover."""
        try:
            spans = []
            if self._modelled:
                line = Timeline(graph, self._describer.target, kernels=self._kernels)
                spans = line.spans()
        except (RuntimeError, ValueError, KeyError) as error:
            # This process does not know a group, or a failed pass left a malformed graph.
            log.warning("the dump has no times for a graph: %s: %s", type(error).__name__, error)
            spans = []
        if not spans:
            return ((0.0, 0.0),) * len(graph.nodes)
        return tuple((round(start, 3), round(end, 3)) for start, end in spans)

    # --- memory -----------------------------------------------------------------------------------
    def _buffers(
        self, nodes: tuple[fx.Node, ...], memory: Liveness
    ) -> dict[fx.Node, tuple[data.Buffer, ...]]:
        found: dict[fx.Node, list[data.Buffer]] = {}
        contents = buffer_contents(nodes, memory.buffers, self._describer.saved)
        for each, (kind, params) in zip(memory.buffers, contents, strict=True):
            first, last = (self._numbers[nodes[at]] for at in (each.first, each.last))
            buffer = data.Buffer(each.nbytes, first, last, kind, params)
            found.setdefault(each.node, []).append(buffer)
        return {node: tuple(buffers) for node, buffers in found.items()}

    # --- nodes ------------------------------------------------------------------------------------
    def _node(self, node: fx.Node, buffers: tuple[data.Buffer, ...]) -> data.Node:
        value, tag = value_of(node), tag_of(node)
        waiting = _waits(node) if _may_communicate(node) else ()
        waits = tuple(self._numbers[each] for each in waiting)
        mark = compat.recompute_policy(node) if self._marked else None
        moved = self._kernels.moved_bytes(node) if self._modelled else None
        called = (node.name, node.op, node.target, node.args, node.kwargs)
        key = (called, id(value), tag, mark, waits, buffers, moved)
        known = self._known.get(node)
        if known is not None and known[0] == key:
            return known[1]
        args = tuple(self._argument(item) for item in node.args)
        kwargs = {str(name): self._argument(item) for name, item in node.kwargs.items()}
        collective = None
        communicates = collective_of(node) if _may_communicate(node) else None
        if communicates is not None:
            ranks = len(self._describer.group_ranks(communicates.group))
            gathers = "gather" in communicates.op or node.target is UNSHARD
            full = nbytes(value) if gathers else communicates.nbytes
            sizes = (ranks, input_nbytes(node, communicates), full)
            said = (self._route(node, communicates, tag), tag.note if tag is not None else "")
            label = self._describer.label(communicates.group)
            about = (communicates.op, communicates.group)
            collective = data.Collective(*about, *sizes, waits, *said, label)
        copy = host_copy_of(node)
        if copy is not None:
            queue, moved = f"host-{copy.direction}", copy.nbytes
            op = "offload" if copy.direction == "out" else "reload"
            collective = data.Collective(op, queue, 1, moved, moved, waits, "", "", "")
        cost_us, stream = self._cost(node, communicates)
        described = data.Node(
            id=self._numbers[node],
            name=node.name,
            op=node.op,
            target=target_text(node.target),
            args=args,
            kwargs=kwargs,
            vals=_values(value),
            params=tag.params if tag is not None else (),
            tag=_tag(tag),
            mark=None if mark is None else data.RecomputeMark(*mark),
            source=self._describer.source(node, tag),
            buffers=buffers,
            cost_us=cost_us,
            stream=stream,
            collective=collective,
        )
        self._known[node] = (key, described)
        return described

    def _route(self, node: fx.Node, communicates: Collective, tag: Tag | None) -> str:
        flat = "flat" if tag is not None and tag.bucket is not None else ""
        packed = "coalesced" if "coalesced" in communicates.op else flat
        route = route_named(node, communicates, self._describer.target)
        return " ".join(each for each in (route, packed) if each and each != "c10d")

    def _cost(
        self, node: fx.Node, communicates: Collective | None
    ) -> tuple[float, Literal["compute", "communication"] | None]:
        if not self._modelled:
            return 0.0, None
        if communicates is not None:
            took = 0.0  # also if this process does not know the group
            if len(self._describer.group_ranks(communicates.group)) > 1:
                took = collective_timing(node, communicates, self._describer.target).duration_us
            return round(took, 3), "communication"
        copy = host_copy_of(node)
        if copy is not None:
            timing = host_copy_timing(copy, self._describer.target)
            return round(timing.duration_us + timing.issue_us, 3), "communication"
        cost_us = self._describer.compute_us(node, self._kernels)
        return cost_us, "compute" if cost_us else None

    def _argument(self, value: Any) -> data.Argument:
        if isinstance(value, fx.Node):
            # A failed pass may leave a node that reads an erased one.
            return (
                data.Ref(self._numbers[value])
                if value in self._numbers and not compat.is_erased(value)
                else data.Repr(f"erased {value.name}")
            )
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(item) for item in value)
        if isinstance(value, Mapping):
            return data.Items({str(key): self._argument(item) for key, item in value.items()})
        if isinstance(value, slice):
            parts = {"start": value.start, "stop": value.stop, "step": value.step}
            return self._argument(parts)
        return plain_argument(value)


def plain_argument(value: Any) -> bool | int | float | str | data.Repr | None:
    """The value itself if JSON can express it, otherwise its text as a `Repr`."""
    if value is None or type(value) in (bool, str):
        return value  # type: ignore[no-any-return]
    if type(value) is int and abs(value) < 1 << 62:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if hasattr(value, "group_name") and not isinstance(value, type):
        return compat.group_name(value)
    text = (
        repr(value)
        if not isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format))
        else str(value)
    )
    return data.Repr(text if len(text) <= _LONGEST else text[:_LONGEST] + "...")


@functools.lru_cache(maxsize=1 << 12)
def target_text(target: Any) -> str:
    """The target of a node as text: "aten.mm.default", "operator.getitem", or the name of an
    input."""
    if isinstance(
        target, (str, compat.OpOverload, compat.OpOverloadPacket, compat.HigherOrderOperator)
    ):
        return str(target)
    module = (
        str(getattr(target, "__module__", "") or "")
        .removeprefix("_")
        .replace("torch._C.", "torch.")
    )
    name = str(getattr(target, "__qualname__", getattr(target, "__name__", repr(target))))
    return f"{module}.{name}" if module else name


def _may_communicate(node: fx.Node) -> bool:
    """A cheap filter: False only for nodes that `collective_of` maps to None."""
    return isinstance(node.target, compat.OpOverload) and node.target.namespace != "aten"


def _values(value: Any) -> tuple[data.Value, ...]:
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(each for item in value for each in _values(item))
    if not isinstance(value, Tensor):
        return (data.Value((), type(value).__name__, "", 0),)
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return (
        data.Value(
            shape, str(value.dtype).removeprefix("torch."), str(value.device), nbytes(value)
        ),
    )


def _tag(tag: Tag | None) -> data.Tag | None:
    return None if tag is None else data.Tag(**{name: getattr(tag, name) for name in _TAG})


_TAG = data.Tag.__struct_fields__


def _waits(node: fx.Node) -> list[fx.Node]:
    found = [user for user in node.users if is_wait(user) or is_host_wait(user)]
    for part in node.users:
        if part.target is operator.getitem:
            found += [user for user in part.users if is_wait(user)]
    return found
