"""All-gathers and reduce-scatters over gloo: every rank exchanges its part with each other rank.

gloo's own algorithms cost more than the bytes they move. On two ranks, its all-gather takes twice
the time of an exchange of the same bytes by send and receive, and torch runs a reduce-scatter as an
all-reduce, which moves twice the bytes. torch's functional all-gathers are also unsafe: they run
`ProcessGroupGloo::allgather_coalesced`, which corrupts the heap if another collective is in flight
(torch 2.13; docs/measurements.md, "A fault of gloo"). So code that runs over gloo calls these ops
instead:

    zpasses::gloo_all_gather(input, group_size, group)
    zpasses::gloo_all_gather_coalesced(inputs, group_size, group)
    zpasses::gloo_reduce_scatter(input, reduce_op, group_size, group)
    zpasses::gloo_reduce_scatter_coalesced(inputs, reduce_op, group_size, group)

They return what the functional ops of the same names return. Sums are formed in the order of ranks.
The eager operators of the dialect, which read parameters outside of compiled code, call them, too.
In graphs, the replacement happens right before code generation. Passes, dumps and the agreement of
ranks see the functional ops.

The messages of one pair of ranks arrive in the order in which they were sent. All ranks start the
same exchanges in the same order, so a message needs no number of its own. If ranks do start others,
because their runs are not compared, no message is received for one of another size or kind: gloo
would end the process, or leave a part of the memory unwritten. The wait then gives up.
"""

from __future__ import annotations

import contextlib
import functools
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.memory.collective_memory import gloo_packs
from zpasses.graph.dialect import set_eager_collectives
from zpasses.graph.queries import collective_of, value_of
from zpasses.runtime.profiling import Watch, watch_if_profiling

_library = torch.library.Library("zpasses", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides)
_GROUP = "int group_size, str group_name"
for _schema in (
    f"gloo_all_gather(Tensor input, {_GROUP}) -> Tensor",
    f"gloo_all_gather_coalesced(Tensor[] inputs, {_GROUP}) -> Tensor[]",
    f"gloo_reduce_scatter(Tensor input, str reduce_op, {_GROUP}) -> Tensor",
    f"gloo_reduce_scatter_coalesced(Tensor[] inputs, str reduce_op, {_GROUP}) -> Tensor[]",
):
    _library.define(_schema, tags=_TAGS)

_functional, _ours = compat.functional, torch.ops.zpasses
_REPLACEMENTS: dict[Any, compat.OpOverload] = {
    _functional.all_gather_into_tensor.default: _ours.gloo_all_gather.default,
    _functional.all_gather_into_tensor_coalesced.default: _ours.gloo_all_gather_coalesced.default,
    _functional.reduce_scatter_tensor.default: _ours.gloo_reduce_scatter.default,
    _functional.reduce_scatter_tensor_coalesced.default: (
        _ours.gloo_reduce_scatter_coalesced.default
    ),
}


@functools.cache
def _tag(kind: str, nbytes: int) -> int:
    """Returns the tag of the messages of a size. Other senders of the group should not use it."""
    return zlib.crc32(f"zpasses {kind} {nbytes}".encode()) >> 1


@dataclass
class Started:
    """What this process has exchanged over gloo, which torch's flight recorder does not see."""

    calls: Counter[str] = field(default_factory=Counter)
    """ "all_gather" or "reduce_scatter" -> number of calls."""
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """The same -> bytes that this rank sent."""


STARTED = Started()


# --- the graph ------------------------------------------------------------------------------------
def replace_gloo_collectives(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace the all-gathers and reduce-scatters that run over gloo.

    Returns:
        The graph to generate code from: a changed copy of `gm`, or `gm` itself if there is none.
    """
    if not _replaceable(gm.graph):
        return gm
    gm = compat.clone_graph_module(gm)  # listeners and variants use the original graph
    for node in _replaceable(gm.graph):
        node.target = _REPLACEMENTS[node.target]
        *arguments, group = node.args
        node.args = (*arguments, compat.group_name(group))
    gm.recompile()
    return gm


def _replaceable(graph: fx.Graph) -> list[fx.Node]:
    nodes = [
        node
        for target in _REPLACEMENTS
        for node in graph.find_nodes(op="call_function", target=target)
    ]
    return [node for node in nodes if _is_over_gloo(node)]


def _is_over_gloo(node: fx.Node) -> bool:
    found, value = collective_of(node), value_of(node.all_input_nodes[0])
    return (
        found is not None
        and isinstance(value, Tensor)
        and (
            found.reduce_op is None
            or found.reduce_op == "sum"
            or (found.reduce_op == "avg" and value.is_floating_point())
        )
        and compat.is_gloo(found.group, value.device)
    )


def all_gather(inputs: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    """All-gather tensors over gloo. Asynchronous: pass each output to `wait_tensor` before use.

    Args:
        inputs: [rows, ...] each.

    Returns:
        One output per input, [group_size * rows, ...].
    """
    if len(inputs) == 1:
        return [torch.ops.zpasses.gloo_all_gather(inputs[0], group_size, group_name)]
    return list(torch.ops.zpasses.gloo_all_gather_coalesced(inputs, group_size, group_name))


def _eager_all_gather(block: Tensor, size: int, group_name: str) -> Tensor:
    ours = compat.is_gloo(group_name, block.device)
    gather = _ours.gloo_all_gather if ours else _functional.all_gather_into_tensor
    return cast(Tensor, gather(block, size, group_name))


def _eager_reduce_scatter(blocks: Tensor, reduce_op: str, size: int, group_name: str) -> Tensor:
    ours = compat.is_gloo(group_name, blocks.device) and blocks.is_floating_point()
    reduce = _ours.gloo_reduce_scatter if ours else _functional.reduce_scatter_tensor
    return cast(Tensor, reduce(blocks, reduce_op, size, group_name))


def use_exchanges_in_eager_code() -> None:
    """Lets eager reads of parameters, and their gradients, exchange parts where they run over
    gloo.
    """
    set_eager_collectives(_eager_all_gather, _eager_reduce_scatter)


# --- exchanges ------------------------------------------------------------------------------------
class _Exchange(compat.Work):  # type: ignore[misc]  # Work is Any to mypy
    """The messages of one collective, and what is left to do when they have arrived."""

    def __init__(self, group_name: str, kind: str) -> None:
        super().__init__()
        self._group_name, self._kind = group_name, kind
        self._group = compat.process_group(group_name)
        self._timeout = compat.collective_timeout(self._group)
        self.rank, self.size = self._group.rank(), self._group.size()
        self._messages: list[Any] = []
        self._finish: list[Callable[[], object]] = []
        self._held: list[Tensor] = []
        self._error: BaseException | None = None
        self._watch: Watch | None = None
        self.sent_bytes = 0

    def peers(self) -> list[int]:
        """Returns the ranks to send to, beginning after this one, so that no rank is everybody's
        first.
        """
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def send(self, tensor: Tensor, peer: int) -> None:
        """Starts to send a contiguous tensor, whose memory must not change until the wait."""
        if tensor.numel():
            self._held.append(tensor)
            self._messages.append(self._group.send([tensor], peer, _tag(self._kind, tensor.nbytes)))
            self.sent_bytes += tensor.nbytes

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Starts to receive into a contiguous tensor."""
        if tensor.numel():
            self._held.append(tensor)
            self._messages.append(self._group.recv([tensor], peer, _tag(self._kind, tensor.nbytes)))

    def at_end(self, action: Callable[[], object]) -> None:
        """Adds what the first wait does after all messages have arrived."""
        self._finish.append(action)

    def started(self, outputs: Sequence[Tensor]) -> None:
        """Counts the collective, and makes `wait_tensor` of an output wait for it."""
        kind = self._kind
        STARTED.calls[kind] += 1
        STARTED.sent_bytes[kind] += self.sent_bytes
        self._watch = watch_if_profiling(self._finish_messages)
        for output in outputs:
            compat.register_work(output, self)

    def wait(self, timeout: Any = None) -> bool:
        if self._error is not None:
            raise self._error
        watch = self._watch
        with watch.waiting() if watch is not None else contextlib.nullcontext():
            finish, self._finish = self._finish, []
            try:
                if watch is not None:
                    watch.join()
                self._finish_messages()
            except BaseException as error:
                self._error = error
                raise
            for action in finish:
                action()
            self._held.clear()
        return True

    def _finish_messages(self) -> None:
        messages, self._messages = self._messages, []
        deadline = time.monotonic() + self._timeout.total_seconds()
        for message in messages:
            left = max(deadline - time.monotonic(), 0.001)
            message.wait(timedelta(seconds=left))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def gathered_shape(shape: Sequence[int], group_size: int) -> tuple[int, ...]:
    """Shape of a gather's result: [group_size * rows, ...], or [group_size] for a scalar."""
    return (shape[0] * group_size, *shape[1:]) if len(shape) else (group_size,)


def scattered_shape(shape: Sequence[int], group_size: int) -> tuple[int, ...]:
    """Shape of a reduce-scatter's result."""
    return (shape[0] // group_size, *shape[1:])


def _gather_into(exchange: _Exchange, source: Tensor, output: Tensor) -> None:
    """Exchanges one contiguous tensor. `output` has one row per rank."""
    for peer in exchange.peers():
        exchange.send(source, peer)
    for peer in reversed(exchange.peers()):
        exchange.receive(output[peer], peer)
    output[exchange.rank].copy_(source)


def _gather_all(inputs: Sequence[Tensor], size: int, group_name: str) -> list[Tensor]:
    exchange = _Exchange(group_name, "all_gather")
    sources = [source.contiguous() for source in inputs]
    outputs = [source.new_empty(gathered_shape(source.shape, size)) for source in sources]
    packed = gloo_packs([source.nbytes for source in sources])
    for number, (source, output) in enumerate(zip(sources, outputs, strict=True)):
        if number not in packed:
            _gather_into(exchange, source.reshape(-1), output.view(size, -1))
    if packed:
        mine = torch.cat([_bytes(sources[number]) for number in packed])
        arrived = mine.new_empty(size, mine.numel())
        _gather_into(exchange, mine, arrived)

        def unpack() -> None:
            parts = arrived.split([sources[number].nbytes for number in packed], dim=1)
            for number, part in zip(packed, parts, strict=True):
                _bytes(outputs[number]).view(size, -1).copy_(part)

        exchange.at_end(unpack)
    exchange.started(outputs)
    return outputs


def _reduce_into(exchange: _Exchange, rows: Tensor, output: Tensor, *, average: bool) -> None:
    """Exchanges and sums rows. `rows` has one row per rank, which that rank needs."""
    rank, size = exchange.rank, exchange.size
    others = [peer for peer in range(size) if peer != rank]
    # The lowest rank's part arrives in the output. It is the first summand, or the second after
    # this rank's own, and the order of two summands does not change their sum.
    arrived = {
        peer: output if number == 0 else torch.empty_like(output)
        for number, peer in enumerate(others)
    }
    for peer in exchange.peers():
        exchange.send(rows[peer], peer)
    for peer in reversed(exchange.peers()):
        exchange.receive(arrived[peer], peer)

    def add() -> None:
        if not others:
            output.copy_(rows[rank])
        for peer in range(size):
            if others and peer != others[0]:
                output.add_(rows[rank] if peer == rank else arrived[peer])
        if average:
            output.div_(size)

    exchange.at_end(add)


def _reduce_all(
    inputs: Sequence[Tensor], reduce_op: str, size: int, group_name: str
) -> list[Tensor]:
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"gloo_reduce_scatter: got {reduce_op!r}; expected 'sum' or 'avg'.")
    exchange, average = _Exchange(group_name, "reduce_scatter"), reduce_op == "avg"
    sources = [source.contiguous() for source in inputs]
    outputs = [source.new_empty(scattered_shape(source.shape, size)) for source in sources]
    packed = gloo_packs([source.nbytes // size for source in sources])
    for number, (source, output) in enumerate(zip(sources, outputs, strict=True)):
        if number not in packed:
            _reduce_into(exchange, source.view(size, -1), output.view(-1), average=average)
    for dtype in dict.fromkeys(sources[number].dtype for number in packed):
        _reduce_packed(
            exchange,
            [sources[number] for number in packed if sources[number].dtype == dtype],
            [outputs[number] for number in packed if sources[number].dtype == dtype],
            average=average,
        )
    exchange.started(outputs)
    return outputs


def _reduce_packed(
    exchange: _Exchange, sources: Sequence[Tensor], outputs: Sequence[Tensor], *, average: bool
) -> None:
    rows = torch.cat([source.view(exchange.size, -1) for source in sources], dim=1)
    total = rows.new_empty(rows.shape[1])
    _reduce_into(exchange, rows, total, average=average)

    def unpack() -> None:
        parts = total.split([output.numel() for output in outputs])
        for output, part in zip(outputs, parts, strict=True):
            output.view(-1).copy_(part)

    exchange.at_end(unpack)


# --- operators ------------------------------------------------------------------------------------
def implement_collective(
    name: str,
    run: Callable[..., list[Tensor]],
    shape_of: Callable[[Sequence[int], int], tuple[int, ...]],
) -> None:
    """Implements an operator on one tensor, and that on a list of tensors, "NAME_coalesced".

    Args:
        run: takes a list of tensors, and the other arguments of the operator.
        shape_of: returns the shape of an output, of that of its input and the number of ranks.
    """

    def fake(source: Tensor, *rest: Any, **_: Any) -> Tensor:
        return source.new_empty(shape_of(source.shape, rest[-2]))

    several = f"{name}_coalesced"
    kind = "CompositeExplicitAutograd"
    _library.impl(name, lambda source, *rest, **named: run([source], *rest, **named)[0], kind)
    _library.impl(several, run, kind)
    register = functools.partial(torch.library.register_fake, lib=_library)
    register(f"zpasses::{name}", fake)
    register(
        f"zpasses::{several}", lambda sources, *rest, **_: [fake(each, *rest) for each in sources]
    )


implement_collective("gloo_all_gather", _gather_all, gathered_shape)
implement_collective("gloo_reduce_scatter", _reduce_all, scattered_shape)
for _op in _REPLACEMENTS.values():
    compat.declare_collective(_op)
