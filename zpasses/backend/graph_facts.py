"""What the runtime needs to know of a graph besides its code. The compile cache stores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from zpasses.cost.memory.liveness import liveness
from zpasses.graph.cached_params import ParamSlot, param_slots
from zpasses.graph.error_feedback import Residual
from zpasses.graph.host_copies import HostNeed, host_need
from zpasses.graph.queries import returned_values
from zpasses.ranks.compared_collectives import Sequences, call_sequences
from zpasses.ranks.run_order import RunEvent
from zpasses.runtime.forward_variants import gather_ids
from zpasses.runtime.grad_slots import GradSlot, always_reduced, grad_slots
from zpasses.runtime.overflows import EncodedGrad


@dataclass(frozen=True)
class ForwardFacts:
    """What the runtime needs to know of a forward or inference graph, besides its code."""

    kind: str
    """"forward" or "inference"."""
    outputs: int
    slots: Sequence[ParamSlot]
    gather_ids: Sequence[int]
    sequences: Sequences
    host: HostNeed | None
    """What a run puts on the host."""
    peak_bytes: int
    """The most that a run takes above what rests."""
    movable: tuple[int, ...] = ()
    """As `CompileState.movable`."""
    returned_inputs: tuple[int, ...] = ()
    """Positions of the outputs that are inputs."""


@dataclass(frozen=True)
class BackwardFacts:
    """The same of a backward graph."""

    outputs: int
    slots: Sequence[GradSlot]
    """Empty if no reduction can be deferred."""
    always_reduced: Sequence[str]
    """Parameters whose gradients are reduced in every backward."""
    sequences: Sequences
    """Of a graph without slots. Variants have their own."""
    saved: Mapping[str, Sequence[str]]
    """Name of an input that the graph uses -> the parameters whose shard or full value it is."""
    peak_bytes: int
    host: HostNeed | None = None
    """What a run puts on the host: gradients."""


@dataclass(frozen=True)
class VariantFacts:
    """The same of one variant of a graph."""

    events: Mapping[str, RunEvent]
    """Process group -> the event that a run is."""
    collectives: tuple[str, ...]
    """Names of the collectives of its graph."""
    sequences: Sequences
    """Of a variant of a backward graph, for the compile cache."""
    residuals: Sequence[Residual]
    """What its code takes as last inputs."""
    encoded_grads: Sequence[EncodedGrad]
    """What its code returns of encoded reductions."""


def forward_facts(gm: fx.GraphModule, kind: str, movable: tuple[int, ...]) -> ForwardFacts:
    """Describes a forward or inference graph after its passes.

    Args:
        movable: as `CompileState.movable`.
    """
    slots = param_slots(gm.graph)
    ids = gather_ids(gm.graph) if slots else []
    returned, sequences = returned_values(gm.graph), call_sequences(gm.graph)
    nodes = [(at, each) for at, each in enumerate(returned) if isinstance(each, fx.Node)]
    inputs = tuple(at for at, node in nodes if node.op == "placeholder")
    peak = liveness(gm.graph).peak_bytes
    host = host_need(gm.graph)
    return ForwardFacts(kind, len(returned), slots, ids, sequences, host, peak, movable, inputs)


def backward_facts(
    gm: fx.GraphModule, order: Mapping[str, int], saved: Mapping[str, tuple[str, ...]]
) -> BackwardFacts:
    """Describes a backward graph after its passes.

    Args:
        order: name of a sharded input -> its position among the sharded inputs of the call.
        saved: from `saved_params` of the forward graph.
    """
    left = [name for name in always_reduced(gm.graph) if name in order]
    slots = grad_slots(gm.graph)
    if not all(slot.param in order and slot.reduction for slot in slots):
        slots = []
    sequences = {} if slots else call_sequences(gm.graph)
    # A gather whose result is not used was erased, but its shard is still an input.
    used = {node.name for node in gm.graph.find_nodes(op="placeholder") if node.users}
    read = {name: params for name, params in saved.items() if name in used}
    outputs, host = len(returned_values(gm.graph)), host_need(gm.graph)
    peak = liveness(gm.graph).peak_bytes
    return BackwardFacts(outputs, slots, left, sequences, read, peak, host)
