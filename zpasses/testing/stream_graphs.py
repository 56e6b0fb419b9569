"""Graphs on simulated asynchronous devices, one per rank, with collectives between them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zpasses import compat
from zpasses.graph.aliases import written_arguments
from zpasses.graph.dialect import DIALECT, is_local_call
from zpasses.graph.host_copies import HOST_STARTS, HOST_WAITS
from zpasses.graph.queries import WAIT, saved_inputs
from zpasses.graph.verifier.operators import awaits_each_output, is_launch, keeps_arguments
from zpasses.graph.verifier.order import StreamOf, own_stream
from zpasses.graph.verifier.versions import CurrentGraph
from zpasses.sdma.routes import SideStreamWork
from zpasses.simulate.semantics import SEMANTICS, Semantics, reduce
from zpasses.simulate.simulator import (
    SimulationError,
    base_name,
    last_uses,
    members_of,
    take_tensors,
)
from zpasses.testing.simulated_device import Operator, SimulatedDevice, poison
from zpasses.testing.stream_schedule import StreamSchedule


def record_streams(
    graphs: fx.GraphModule | Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Any]],
    groups: Mapping[str, Sequence[int]] | None = None,
    *,
    stream_of: StreamOf = own_stream,
) -> StreamSchedule:
    """Record what the host of each rank enqueues when it runs its graph on an asynchronous device.

    Compute runs on one stream, and each launch on the stream that `stream_of` names, as for
    `zpasses.graph.verifier.order.find_races`. Values are freed after their last reader, and
    launches keep what they use until they are awaited. Then the caller reads the outputs, and
    overwrites the inputs and outputs.

    Args:
        graphs: one graph for all ranks, or one per rank.
        inputs: one list of inputs per rank. They stay as they are.
        groups: process group -> its ranks, as `simulate` takes them.
        stream_of: the stream of each launch.

    Returns:
        The schedule. `run(seed)` returns the outputs in an order that the device may choose, and
        `first_difference(seeds)` looks for an order in which some operator finds other bytes.

    Raises:
        SimulationError: if a graph calls an operator that is not simulated, or that needs values on
            the host.
    """
    per_rank = [graphs] * len(inputs) if isinstance(graphs, fx.GraphModule) else list(graphs)
    schedule = StreamSchedule()
    with torch.no_grad():
        for rank, (gm, values) in enumerate(zip(per_rank, inputs, strict=True)):
            _Host(rank, gm, groups, len(per_rank), schedule, stream_of).run(values)
    return schedule


class _Host:
    """Enqueues the graph of one rank."""

    def __init__(
        self,
        rank: int,
        gm: fx.GraphModule,
        groups: Mapping[str, Sequence[int]] | None,
        size: int,
        schedule: StreamSchedule,
        stream_of: StreamOf,
    ) -> None:
        self._gm, self._groups, self._size = gm, groups, size
        self._version, self._stream_of = CurrentGraph(gm.graph), stream_of
        self._started: dict[str, int] = {}
        self._copies: dict[int, tuple[Tensor, Any]] = {}
        """Ticket of a copy to the host or back, by its memory -> the result and the event."""
        self._node = gm.graph.output_node()
        self._device = SimulatedDevice(rank, schedule, self._simulated)

    def run(self, inputs: Sequence[Any]) -> None:
        dying, left = last_uses(self._gm.graph), list(inputs)[::-1]
        donated = saved_inputs(self._gm.graph.nodes)
        values: dict[fx.Node, Any] = {}
        callers: list[Any] = []
        for node in self._gm.graph.nodes:
            self._node, self._device.label = node, node.name
            if node.op == "placeholder":
                given = left.pop()
                values[node] = self._device.put(given) if isinstance(given, Tensor) else given
                callers += [] if node in donated else [values[node]]
            elif node.op == "output":
                returned = compat.pytree.tree_leaves(map_arg(node.args, values.__getitem__))
                self._device.returns(returned, callers)
            else:
                values[node] = self._call(node, values)
            for dead in dying.get(node, ()):
                values.pop(dead, None)

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return functools.reduce(getattr, str(node.target).split("."), self._gm)
        if node.op != "call_function":
            raise SimulationError(f"{node.format_node()}: only call_function is simulated.")
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        with self._device:
            return node.target(*args, **kwargs)  # type: ignore[operator]

    # --- collectives ------------------------------------------------------------------------------
    def _simulated(self, target: Any) -> Operator | None:
        if target in HOST_STARTS:
            return functools.partial(self._copy, target)
        if target in HOST_WAITS:
            return self._await_copy
        if is_launch(target):
            return functools.partial(self._launch, target)
        return functools.partial(self._run_dialect, target) if target in DIALECT else None

    def _copy(
        self, target: Any, device: SimulatedDevice, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        source, ticket = args[0], device.allocate((1,), (1,), torch.int64)
        result = device.allocate(source.shape, source.stride(), source.dtype)
        stream = device.stream(self._stream_of(self._node, self._version.record(self._node), 0))
        stream.follow_current()
        into, out_of = device.memory(result), device.memory(source)
        with device.on(stream.name):
            device.enqueue(lambda: poison(into), [into])
            device.enqueue(lambda: into.copy_(out_of), [into, out_of])
        self._copies[ticket.data_ptr()] = result, stream.record()
        return ticket

    def _await_copy(
        self, device: SimulatedDevice, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        result, event = self._copies.pop(args[0].data_ptr())
        event.wait()
        return result

    def _run_dialect(
        self, target: Any, device: SimulatedDevice, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        names = [argument.name for argument in target._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        source = arguments.pop(names[0])
        if is_local_call(target, source, arguments.get("rows")):
            return device.compute(target, *args, **kwargs)
        return WAIT(self._launch(target, device, args, kwargs))

    def _launch(
        self, target: Any, device: SimulatedDevice, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        names = [argument.name for argument in target._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        outputs = None if written_arguments(target) else device.outputs_of(target, args, kwargs)
        given, inputs, into = take_tensors(target, arguments)
        written = into if into is not None else _as_list(outputs)
        semantics = _semantics_of(target)
        group = compat.group_name(arguments["group_name"])
        members = list(members_of(group, self._size, self._groups))
        arguments.setdefault("group_size", len(members))
        record = self._version.record(self._node)
        each_output = [(i,) for i in range(len(inputs))]
        all_outputs = [tuple(range(len(inputs)))]
        for places in each_output if awaits_each_output(target) else all_outputs:
            stream = device.stream(self._stream_of(self._node, record, places[0]))
            stream.follow_current()
            number = self._started[group] = self._started.get(group, 0) + 1
            exchange = Exchange(device, (group, number), members, semantics, arguments)
            with device.on(stream.name):
                exchange.enqueue([inputs[i] for i in places], [written[i] for i in places])
            needs = [*inputs, *written] if keeps_arguments(target) else []
            work = SideStreamWork(stream.record(), needs)
            for i in places:
                compat.register_work(written[i], work)
        return written if isinstance(given, (list, tuple)) else written[0]


class Exchange:
    """One rank's part of one collective: it sends, and receives once all ranks have sent."""

    def __init__(
        self,
        device: SimulatedDevice,
        key: tuple[str, int],
        members: Sequence[int],
        semantics: Semantics,
        arguments: Mapping[str, Any],
    ) -> None:
        self._device, self._key, self._members = device, key, members
        self._semantics, self._arguments = semantics, arguments

    def enqueue(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        sources, targets = self._device.memory(list(inputs)), self._device.memory(list(outputs))
        boxes, rank = self._device.schedule.mailboxes, self._device.rank

        def send() -> None:
            box = boxes.setdefault(self._key, {})
            box[rank] = [each.clone() for each in sources], self._arguments
            for target in targets:  # nothing is known about it before all of it has arrived
                poison(target)

        def receive() -> None:
            box = [boxes[self._key][member] for member in self._members]
            calls = [arguments for _, arguments in box]
            for i, target in enumerate(targets):
                results = self._semantics([sent[i] for sent, _ in box], calls)
                target.copy_(results[list(self._members).index(rank)].view_as(target))

        self._device.enqueue(send, [*sources, *targets])
        self._device.enqueue(
            receive,
            targets,
            is_ready=lambda: len(boxes.get(self._key, ())) == len(self._members),
        )


def _as_list(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _semantics_of(target: Any) -> Semantics:
    name = base_name(compat.op_name(target))
    found = {**SEMANTICS, **LOW_CONTENTION}.get(name)
    if found is None:
        raise SimulationError(f"collective {target} is not simulated.")
    return found


def _scatter(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    total = reduce(inputs, str(calls[0]["reduce_op"]))
    return [part.clone() for part in total.chunk(len(inputs))]


LOW_CONTENTION: Mapping[str, Semantics] = {
    "_low_contention_all_gather": lambda inputs, calls: [torch.cat(list(inputs)) for _ in inputs],
    "_low_contention_reduce_scatter": _scatter,
}
