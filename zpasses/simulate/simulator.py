"""Run the graphs of several ranks in one process, in lockstep, on real tensors.

Each rank's graph runs node by node until it has to wait for other ranks. If ranks disagree on a
collective, or some never start it, the simulation raises. Real ranks would hang or corrupt memory.
"""

from __future__ import annotations

import operator
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zpasses import compat
from zpasses.errors import ZpassesError
from zpasses.graph.aliases import written_arguments
from zpasses.graph.dialect import DIALECT, is_local_call
from zpasses.graph.queries import Collective, named_arguments
from zpasses.simulate.semantics import SEMANTICS, Semantics


class SimulationError(ZpassesError):
    """Graphs that would hang, race or fail on real ranks. The message names ranks and nodes."""


@dataclass(frozen=True)
class RankRun:
    """The results of one simulated rank."""

    outputs: tuple[Any, ...]
    """The graph's outputs, flattened."""
    collectives: tuple[Collective, ...]
    """Its collectives, in the order in which they started."""

    @property
    def nbytes(self) -> int:
        """Bytes that it sent into its collectives."""
        return sum(each.nbytes for each in self.collectives)


def simulate(
    graphs: fx.GraphModule | Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Any]],
    groups: Mapping[str, Sequence[int]] | None = None,
    *,
    semantics: Mapping[Any, Semantics] | None = None,
    seed: int = 0,
) -> list[RankRun]:
    """Run one graph per rank, all in this process, with real collectives between them.

    The simulator supports the functional collectives (plain, coalesced, in place and `out=`) and
    the dialect's operators, so a graph can run before and after it is lowered.
    Reductions add in rank order; "avg" divides after the sum. Collectives are asynchronous: before
    `wait_tensor`, nothing may read what a collective writes or write what it reads. Values are
    freed at their last use. No process group is needed.

    Args:
        graphs: one graph for all ranks, or one per rank. They run without autograd.
        inputs: one list of inputs per rank. The graph may write to them, as it may on a device.
        groups: process group -> its ranks, in group order; the second group that a pass makes of
            one has the same ranks. None: every group holds all ranks.
        semantics: reference implementations of further collectives, by operator
            (`torch.ops.mine.all_gather.default`). Such an operator has an argument `group_name`,
            and its first argument is what it sends.
        seed: rank r draws random numbers from seed + r.

    Returns:
        The results, one per rank.

    Raises:
        SimulationError: if ranks start different collectives on a group, or one rank ends or waits
            while others expect it; if a value is read too early, or a collective is never awaited;
            if a node fails.
        ValueError: if the number of graphs differs from the number of inputs.
    """
    per_rank = [graphs] * len(inputs) if isinstance(graphs, fx.GraphModule) else list(graphs)
    if len(per_rank) != len(inputs):
        raise ValueError(
            f"simulate: got {len(per_rank)} graphs and the inputs of {len(inputs)} ranks; expected "
            "one list of inputs per graph."
        )
    board = _CollectiveMatcher(len(per_rank), groups)
    custom = dict(semantics or {})
    ranks = [
        _Rank(rank, graph, list(values), board, custom)
        for rank, (graph, values) in enumerate(zip(per_rank, inputs, strict=True))
    ]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for each in ranks:
            torch.manual_seed(seed + each.rank)
            each.rng = torch.get_rng_state()
        _run(ranks, board)
    return [
        RankRun(tuple(compat.pytree.tree_leaves(each.output)), tuple(each.log)) for each in ranks
    ]


def _run(ranks: Sequence[_Rank], board: _CollectiveMatcher) -> None:
    running = list(ranks)
    while running:
        moved = [each for each in running if each.blocked_by is None or each.blocked_by.done]
        if not moved:
            break
        for each in moved:
            each.advance()
        running = [each for each in running if not each.ended]
    board.check_complete(ranks)


# --- matching -------------------------------------------------------------------------------------
@dataclass
class _Call:
    """One rank's part of one collective."""

    rank: int
    node: fx.Node
    name: str
    """Name of the op without the suffixes `_coalesced`, `_out` and `_`."""
    collective: Collective
    semantics: Semantics
    arguments: dict[str, Any]
    inputs: list[Tensor]
    into: list[Tensor] | None
    """Tensors that in-place and `out=` forms write to."""
    number: int = -1
    """How many collectives this rank started on the group earlier."""
    done: bool = False
    results: list[Tensor] = field(default_factory=list)


class _CollectiveMatcher:
    """Matches the collectives that ranks start. The last rank of a group to start one runs it for
    all.
    """

    def __init__(self, size: int, groups: Mapping[str, Sequence[int]] | None) -> None:
        self._size, self._groups = size, groups
        self._posted: dict[tuple[str, int], int] = {}
        self._open: dict[tuple[str, int], dict[int, _Call]] = {}

    def members(self, group: str) -> Sequence[int]:
        return members_of(group, self._size, self._groups)

    def post(self, call: _Call) -> None:
        group, members = call.collective.group, self.members(call.collective.group)
        if call.rank not in members:
            raise SimulationError(
                f"rank {call.rank}, node {call.node.name}: starts {call.name} on group {group!r}, "
                f"whose ranks are {list(members)}."
            )
        call.number = self._posted.get((group, call.rank), 0)
        self._posted[group, call.rank] = call.number + 1
        calls = self._open.setdefault((group, call.number), {})
        for other in calls.values():
            _check_match(other, call)
        calls[call.rank] = call
        if len(calls) == len(members):
            del self._open[group, call.number]
            _execute([calls[rank] for rank in members])

    def check_complete(self, ranks: Sequence[_Rank]) -> None:
        """Raise if some rank never started a collective that others started."""
        for (group, number), calls in self._open.items():
            first = next(iter(calls.values()))
            missing = [rank for rank in self.members(group) if rank not in calls]
            started = ", ".join(f"rank {call.rank} ({call.node.name})" for call in calls.values())
            raise SimulationError(
                f"the ranks would hang. Collective {number} on group {group!r}, "
                f"{_describe(first)}, was started by {started}, but not by "
                + ", ".join(
                    f"rank {rank}, which {ranks[rank].describe_state()}" for rank in missing
                )
                + "."
            )


def members_of(group: str, size: int, groups: Mapping[str, Sequence[int]] | None) -> Sequence[int]:
    """The ranks of a group among `size` simulated ranks, as `simulate` takes groups."""
    if groups is None:
        return range(size)
    for name in (group, compat.parent_group(group)):
        if name in groups:
            return groups[name]
    raise SimulationError(
        f"a graph communicates on group {group!r}; the groups given are "
        f"{', '.join(map(repr, groups))}."
    )


def _check_match(a: _Call, b: _Call) -> None:
    # Ranks may hold different numbers of rows, so a dialect op is described by its full parameter.
    # The splits of an uneven all-to-all, or its marks, are compared when it runs.
    shapes = a.name.startswith("all_to_all") or a.collective.shapes == b.collective.shapes
    same = (
        a.name == b.name
        and shapes
        and a.collective.dtypes == b.collective.dtypes
        and a.collective.reduce_op == b.collective.reduce_op
    )
    if not (
        same
        and all(
            a.arguments.get(key) == b.arguments.get(key)
            for key in ("src", "rows", "dtype", "param_dtype", "reduce_dtype", "encoding")
        )
    ):
        raise SimulationError(
            f"ranks disagree on group {a.collective.group!r}: collective {a.number} is "
            f"{_describe(a)} on rank {a.rank} (node {a.node.name}), but "
            f"{_describe(b)} on rank {b.rank} (node {b.node.name})."
        )


def _describe(call: _Call) -> str:
    tensors = [
        f"{dtype}{list(shape)}"
        for dtype, shape in zip(call.collective.dtypes, call.collective.shapes, strict=True)
    ]
    details = [
        f"{key}={call.arguments[key]}"
        for key in ("reduce_op", "src", "rows", "dtype", "param_dtype", "reduce_dtype", "encoding")
        if key in call.arguments
    ]
    return f"{call.name}({', '.join(tensors + details)})"


def _execute(calls: Sequence[_Call]) -> None:
    arguments = [call.arguments for call in calls]
    for i in range(len(calls[0].inputs)):
        try:
            outputs = calls[0].semantics([call.inputs[i] for call in calls], arguments)
        except Exception as error:
            nodes = ", ".join(f"{call.node.name} on rank {call.rank}" for call in calls)
            raise SimulationError(
                f"{_describe(calls[0])} on group {calls[0].collective.group!r} ({nodes}) failed: "
                f"{error}."
            ) from error
        for call, output in zip(calls, outputs, strict=True):
            call.results.append(output)
    for call in calls:
        if call.into is not None:
            for target, result in zip(call.into, call.results, strict=True):
                if target.shape != result.shape or target.dtype != result.dtype:
                    raise SimulationError(
                        f"rank {call.rank}, node {call.node.name}: writes "
                        f"{_format_tensor(result)} into a tensor that is {_format_tensor(target)}."
                    )
                target.copy_(result)
            call.results = call.into
        call.inputs, call.done = [], True


def _format_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# --- one rank -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Started:
    """One output of a collective in flight. Only `wait_tensor` may read it."""

    call: _Call
    index: int
    source: Tensor
    """The tensor that the collective reads."""

    @property
    def target(self) -> Tensor | None:
        """The tensor of the graph that it writes; None if it allocates its result."""
        return None if self.call.into is None else self.call.into[self.index]


class _Rank:
    """Interprets one rank's graph, and stops when it has to wait for other ranks."""

    def __init__(
        self,
        rank: int,
        gm: fx.GraphModule,
        inputs: list[Any],
        board: _CollectiveMatcher,
        custom: Mapping[Any, Semantics],
    ) -> None:
        self.rank, self.output, self.ended = rank, None, False
        self.log: list[Collective] = []
        self.blocked_by: _Call | None = None
        self.rng = torch.get_rng_state()
        self._gm, self._board, self._custom = gm, board, custom
        self._inputs = inputs[::-1]
        self._node = next(iter(gm.graph.nodes))
        self._in_flight: list[_Started] = []
        self._steps = self._interpret()

    def advance(self) -> None:
        """Run until a collective needs other ranks, or to the end."""
        torch.set_rng_state(self.rng)
        try:
            self.blocked_by = next(self._steps)
        except StopIteration:
            self.ended, self.blocked_by = True, None
        self.rng = torch.get_rng_state()

    def describe_state(self) -> str:
        """What the rank is doing, for an error message."""
        if self.blocked_by is None:
            return "ended"
        other, group = self.blocked_by.node.name, self.blocked_by.collective.group
        return f"waits at node {self._node.name} for {other} on group {group!r}"

    def _interpret(self) -> Generator[_Call, None, None]:
        values: dict[fx.Node, Any] = {}
        dying = last_uses(self._gm.graph)
        for node in self._gm.graph.nodes:
            self._node = node
            if _is_call_of(node, compat.functional.wait_tensor):
                values[node] = yield from self._wait(values[node.args[0]])
            elif (semantics := self._semantics_of(node)) is not None:
                values[node] = yield from self._start(node, semantics, values)
            else:
                values[node] = self._run_locally(node, values)
            for dead in dying.get(node, ()):
                del values[dead]
        if self._in_flight:
            names = ", ".join(dict.fromkeys(started.call.node.name for started in self._in_flight))
            raise SimulationError(
                f"rank {self.rank}: {names} is never awaited; end each collective with wait_tensor."
            )

    # --- collectives ------------------------------------------------------------------------------
    def _semantics_of(self, node: fx.Node) -> Semantics | None:
        target = _overload(node)
        if target in self._custom:
            return self._custom[target]
        if _is_collective(target):
            name = base_name(compat.op_name(target))
            if name in SEMANTICS:
                return SEMANTICS[name]
            if name != "_wrap_tensor_autograd":
                self._fail(
                    f"collective {target} is not simulated; pass its implementation as "
                    f"semantics={{{target}: ...}}"
                )
        return None

    def _start(
        self, node: fx.Node, semantics: Semantics, values: Mapping[fx.Node, Any]
    ) -> Generator[_Call, None, Any]:
        target = _overload(node)
        arguments = {
            name: self._fetch(node, value, values)
            for name, value in named_arguments(node, target).items()
        }
        given, inputs, into = take_tensors(target, arguments)
        self._check_access(inputs, into or [])
        if is_local_call(target, inputs[0], arguments.get("rows")):
            return target(inputs[0], **arguments)
        name = base_name(compat.op_name(target))
        what = _collective(name, inputs, arguments)
        call = _Call(self.rank, node, name, what, semantics, arguments, inputs, into)
        self.log.append(what)
        self._board.post(call)
        started = [_Started(call, i, source) for i, source in enumerate(inputs)]
        self._in_flight.extend(started)
        if target in DIALECT:
            return (yield from self._wait(started[0]))
        return started if isinstance(given, (list, tuple)) else started[0]

    def _wait(self, value: Any) -> Generator[_Call, None, Any]:
        if isinstance(value, _Started):
            awaited = [value]
        else:
            awaited = [started for started in self._in_flight if _overlap(value, started.target)]
        for started in awaited:
            while not started.call.done:
                yield started.call
            self._in_flight = [other for other in self._in_flight if other is not started]
        return value.call.results[value.index] if isinstance(value, _Started) else value

    # --- everything else --------------------------------------------------------------------------
    def _run_locally(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if node.op == "placeholder":
            return self._next_input(node)
        if node.op == "get_attr":
            return _attribute(self._gm, str(node.target))
        if node.target is operator.getitem and isinstance(values.get(node.args[0]), list):  # type: ignore[arg-type]
            return values[node.args[0]][node.args[1]]  # type: ignore[index]
        args = self._fetch(node, node.args, values)
        kwargs = self._fetch(node, node.kwargs, values)
        if node.op == "output":
            self._check_access(
                [leaf for leaf in compat.pytree.tree_leaves(args) if isinstance(leaf, Tensor)], []
            )
            self.output = args[0]
            return None
        self._check_access(*_accesses(node, args, kwargs))
        try:
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            target = (
                self._gm.get_submodule(str(node.target))
                if node.op == "call_module"
                else node.target
            )
            return target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}", error)

    def _next_input(self, node: fx.Node) -> Any:
        if self._inputs:
            return self._inputs.pop()
        if node.args:
            return node.args[0]
        return self._fail("the graph takes more inputs than were given")

    def _fetch(self, node: fx.Node, arguments: Any, values: Mapping[fx.Node, Any]) -> Any:
        def value_of(item: fx.Node) -> Any:
            value = values[item]
            for leaf in value if isinstance(value, list) else [value]:
                if isinstance(leaf, _Started):
                    self._fail(
                        f"reads {item.name} before wait_tensor; the collective "
                        f"{leaf.call.node.name} is still running"
                    )
            if isinstance(value, fx.GraphModule) and any(
                _communicates(inner) for inner in value.graph.nodes
            ):
                self._fail(
                    f"calls the subgraph {item.target}, which communicates; simulate the joint or "
                    "a partitioned graph instead"
                )
            return value

        return map_arg(arguments, value_of)

    def _check_access(self, read: Sequence[Any], written: Sequence[Any]) -> None:
        for started in self._in_flight:
            name = started.call.node.name
            if any(_overlap(tensor, started.target) for tensor in (*read, *written)):
                self._fail(
                    f"reads or writes what the collective {name} is writing; wait_tensor first"
                )
            if any(_overlap(tensor, started.source) for tensor in written):
                self._fail(
                    f"writes to the input of the collective {name}, which is still running; "
                    "wait_tensor first"
                )

    def _fail(self, reason: str, cause: BaseException | None = None) -> Any:
        raise SimulationError(
            f"rank {self.rank}, node {self._node.format_node()}: {reason}."
        ) from cause


def take_tensors(
    target: Any, arguments: dict[str, Any]
) -> tuple[Any, list[Tensor], list[Tensor] | None]:
    """Take what a collective sends and writes out of its arguments, by name.

    Returns:
        The first argument, the tensors that are sent, and those that in-place and `out=` forms
        write to.
    """
    schema = target._schema
    given = arguments.pop(schema.arguments[0].name)
    inputs = list(given) if isinstance(given, (list, tuple)) else [given]
    into = inputs if schema.arguments[0].alias_info is not None and schema.is_mutable else None
    if "out" in arguments:
        out = arguments.pop("out")
        into = list(out) if isinstance(out, (list, tuple)) else [out]
    return given, inputs, into


def _overload(node: fx.Node) -> Any:
    """The operator that a node calls. Graphs from Dynamo may hold an overload packet instead of an
    overload.
    """
    if node.op != "call_function":
        return None
    return (
        node.target.default
        if isinstance(node.target, compat.OpOverloadPacket) and "default" in node.target.overloads()
        else node.target
    )


def _is_call_of(node: fx.Node, packet: Any) -> bool:
    return node.op == "call_function" and node.target in (packet, packet.default)


def _communicates(node: fx.Node) -> bool:
    return _is_collective(_overload(node))


def _is_collective(target: Any) -> bool:
    namespace = getattr(target, "namespace", "")
    return namespace in ("_c10d_functional", "_c10d_functional_autograd") or (
        namespace == "zpasses" and "group_name" in str(target._schema)
    )


def base_name(name: str) -> str:
    return name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")


def _collective(name: str, inputs: Sequence[Tensor], arguments: Mapping[str, Any]) -> Collective:
    """Describe a call. `unshard` is described by its full parameter, so that ranks with fewer rows
    have the same description.
    """
    tensors = list(inputs)
    if name == "unshard":
        (shard,) = inputs
        dtype = arguments["param_dtype"] or shard.dtype
        tensors = [torch.empty((arguments["rows"], *shard.shape[1:]), dtype=dtype, device="meta")]
    reduce_op = arguments.get("reduce_op")
    return Collective(
        op=name,
        group=compat.group_name(arguments["group_name"]),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        reduce_op=reduce_op if isinstance(reduce_op, str) else None,
        nbytes=sum(tensor.nbytes for tensor in tensors),
    )


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> values that no later node reads."""
    seen: set[fx.Node] = set()
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for item in (*node.all_input_nodes, node):
            if item not in seen:
                seen.add(item)
                dying.setdefault(node, []).append(item)
    return dying


def _attribute(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = getattr(root, part)
    return root


# --- memory ---------------------------------------------------------------------------------------
def _accesses(node: fx.Node, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """The tensors that a call reads, and those that its schema says it writes."""
    read = compat.pytree.tree_leaves((args, kwargs))
    schema = getattr(_overload(node), "_schema", None)
    if schema is None or not schema.is_mutable:
        return read, []
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(
        kwargs
    )
    written = written_arguments(_overload(node))
    return read, compat.pytree.tree_leaves([named.get(name) for name in written])


def _overlap(a: Any, b: Any) -> bool:
    """Whether two tensors may share bytes: the ranges from first to last element overlap."""
    ranges = [_byte_range(item) for item in (a, b) if isinstance(item, Tensor)]
    return len(ranges) == 2 and max(start for start, _ in ranges) < min(end for _, end in ranges)


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
