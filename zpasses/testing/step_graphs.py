"""Capture graphs to test passes on: those of a model's training step through the backend, or that
of a plain function without Dynamo.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zpasses import compat
from zpasses.backend.captured import tag_joint
from zpasses.backend.per_block import compile_blocks
from zpasses.cost.time.target import Target, use_target
from zpasses.graph.dialect import UNSHARD
from zpasses.graph.queries import copy_graph
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.events import ObservedGraph, observe_graphs
from zpasses.pipeline.pipeline import Pipeline
from zpasses.pipeline.runner import PassRecord
from zpasses.ranks.agree import simulated_answers
from zpasses.runtime.block_schedule import own_block_schedule
from zpasses.sharding.shard import shard as shard_model
from zpasses.testing.worlds import fake_world


@dataclass(frozen=True)
class StepGraphs:
    """The graphs of one training step, or of one call without gradients; None for graphs that do
    not exist.
    """

    captured: fx.GraphModule
    """Dynamo's graph, with sharded parameters as local shards."""
    joint: fx.GraphModule | None = None
    """Forward and backward together, before partitioning."""
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    inference: fx.GraphModule | None = None
    """The only graph of a call without gradients."""


@dataclass(frozen=True)
class StepCapture:
    """What one rank's backend compiled. The graphs are copies and may be rewritten."""

    rank: int
    world_size: int
    groups: Mapping[str, tuple[int, ...]]
    """Process group -> its ranks, in the form that `simulate` takes, for all groups that this rank
    knows.
    """
    before: StepGraphs
    """Each graph before the passes of its level. The joint graph is the unlowered reference,
    with what passes declare to change of its values.
    Forward and backward come from the joint graph after the joint passes.
    """
    after: StepGraphs
    """Each graph after the passes of its level."""
    records: tuple[PassRecord, ...]
    """Every pass that ran, in order."""


def capture_graphs(
    model: nn.Module | Callable[..., Any],
    inputs: Sequence[Any],
    *,
    world_size: int | None = None,
    rank: int = 0,
    pipeline: Pipeline | str = "",
    shard: Callable[[Any, DeviceMesh], object] | Mapping[str, Any] | None = None,
    train: bool = True,
    dynamic: bool | None = False,
    options: Mapping[str, Any] | None = None,
) -> StepCapture:
    """Compile a model as one rank of a fake world, and return its graphs before and after the
    passes.

    The model is copied, sharded, compiled with `torch.compile(fullgraph=True, backend="zpasses")`
    and called once, with a backward of every output. Inside `fake_world`, the call uses that world,
    which stays for further rewriting. Otherwise it makes a world for the call. Dynamo's caches are
    cleared.

    Args:
        model: an unsharded module, or a function (which is compiled as it is).
        inputs: positional arguments. Only their shapes and dtypes matter.
        world_size: ranks of the fake world to make; leave it out inside `fake_world`.
        rank: which of the ranks to be.
        pipeline: passes to run; "" runs none and leaves the dialect unlowered.
        shard: how to shard: keyword arguments for `zpasses.shard`, or a function that is called
            with the model and the mesh of all ranks. None calls `zpasses.shard(model, mesh=mesh)`.
        train: whether to capture forward and backward. False captures under no_grad.
        dynamic: as in torch.compile.
        options: further options of the backend, such as {"memory_budget": "10%"}.

    Raises:
        ValueError: if there is no world, or both `fake_world` and `world_size`.
        RuntimeError: as torch.compile does, if the model is not captured as one graph.
    """
    if (world_size is None) != dist.is_initialized():
        raise ValueError(
            "capture_graphs: call it inside fake_world, or outside with world_size=..."
        )
    with contextlib.nullcontext() if world_size is None else fake_world(world_size, rank):
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        step = _sharded_copy(model, mesh, shard)
        parsed = Pipeline.parse(pipeline) if isinstance(pipeline, str) else pipeline
        probes = {level: GraphProbe(level) for level in Level}
        seen: dict[str, fx.GraphModule] = {}
        records: list[PassRecord] = []

        def observe(log: ObservedGraph) -> None:
            seen[log.kind] = copy_graph(log.graph)
            records.extend(record for record in log.records if record.name != GraphProbe.name)

        given: dict[str, Any] = {
            "codegen": "eager",
            **(options or {}),
            "pipeline": Pipeline((*probes.values(), *parsed.passes)),
        }
        copies = [_detached_copy(each) if isinstance(each, Tensor) else each for each in inputs]
        with observe_graphs(observe):
            capture_step(step, copies, options=given, train=train, fullgraph=True, dynamic=dynamic)
        return StepCapture(
            rank=dist.get_rank(),
            world_size=size,
            groups={name: tuple(compat.group_ranks(name)) for name in compat.group_backends()},
            before=_graphs_before(probes, seen, parsed, given.get("target")),
            after=StepGraphs(**seen),
            records=tuple(records),
        )


def capture_step(
    model: Callable[..., Any],
    inputs: Any,
    *,
    options: Mapping[str, Any],
    loss: Callable[[Any], Any] | None = None,
    train: bool = True,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    blocks: str | None = None,
    steps: int = 1,
) -> list[Tensor]:
    """Compile a step with `backend="zpasses"` and run it: forward, and backward of its result.

    Call it in `fake_world`, and under a fake tensor mode if it should allocate and compute nothing.
    Fake tensors need no code, so none is generated for them. Ranks do not compare their graphs.
    Whoever observes (`observe_graphs`, the option `dump`) gets them. Dynamo's caches are cleared.

    Args:
        model: a sharded module, or a function.
        inputs: a tensor, positional arguments, or a mapping of keyword arguments.
        options: options of the backend.
        loss: maps the result to what is differentiated. None takes the result.
        train: whether to run backward. False runs under no_grad.
        fullgraph: as in torch.compile.
        dynamic: as in torch.compile.
        blocks: compile these modules one by one, as `zpasses.compile_blocks` does.
        steps: how often to run the step. No optimizer runs between.

    Returns:
        The tensors that were differentiated: all that require gradients.
    """
    torch.compiler.reset()
    given: dict[str, Any] = {"agreement": False, **options}
    compiled = model
    if blocks is not None:
        assert isinstance(model, nn.Module)
        compile_blocks(model, blocks, **given)
    else:
        compiled = torch.compile(
            model, backend="zpasses", fullgraph=fullgraph, dynamic=dynamic, options=given
        )
    ends: list[Tensor] = []
    with (
        torch.set_grad_enabled(train),
        own_block_schedule(),
        compat.no_collection_after_compiles(),
    ):
        for number in range(steps):
            if number and isinstance(model, nn.Module):
                model.zero_grad(set_to_none=True)
            if isinstance(inputs, Mapping):
                result = compiled(**inputs)
            else:
                result = compiled(*([inputs] if isinstance(inputs, Tensor) else inputs))
            given_loss = result if loss is None or not train else loss(result)
            leaves = compat.pytree.tree_leaves(given_loss)
            ends = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            if ends and train:
                torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    torch.compiler.reset()
    return ends


@dataclass(frozen=True)
class GraphProbe(Pass):
    """Copies the graph before the passes of one level."""

    name: ClassVar[str] = "probe"

    level: Level = Level.JOINT  # type: ignore[misc]
    seen: list[fx.GraphModule] = field(default_factory=list)

    def rewrite(self, graph: fx.Graph) -> int:
        self.seen.append(copy_graph(graph))
        return 0


def capture_ranks(
    model: nn.Module | Callable[..., Any], inputs: Sequence[Any], *, world_size: int, **options: Any
) -> list[StepCapture]:
    """Run `capture_graphs` as each of `world_size` ranks in turn, with the same options.

    What ranks vote on is decided by rank 0. For `simulate`:
    `[each.after.joint for each in capture_ranks(...)]`.
    """
    with simulated_answers():
        return [
            capture_graphs(model, inputs, world_size=world_size, rank=rank, **options)
            for rank in range(world_size)
        ]


def trace_joint(
    fn: Callable[..., Any], inputs: Sequence[Any], shards: Mapping[int, str] | None = None
) -> fx.GraphModule:
    """Trace the joint graph of a plain function, in the form that the backend's joint passes see:
    tagged, with common subexpressions merged.

    It is ten times as fast as `capture_graphs`, because it does not use Dynamo, so it suits tests
    with many random graphs. Groups that `fn` names must exist: call it inside `fake_world`.

    Args:
        fn: takes tensors, returns a tensor or a tuple, and reads its parameters through
            `torch.ops.zpasses.unshard`.
        inputs: its arguments; those that require gradients get gradients.
        shards: position of each input that is a shard -> name of the parameter.

    Returns:
        The joint graph. Its inputs are those of `fn`, then one gradient ("tangents") for each
        output that depends on a differentiable input. Its outputs are those of `fn`, then one
        gradient or None for each input.

    Raises:
        ValueError: if no output depends on an input that requires gradients.
    """
    return trace_partitionable(fn, inputs, shards).joint


@dataclass(frozen=True)
class TracedJoint:
    """A traced joint graph, and what the partitioner needs to split it."""

    joint: fx.GraphModule
    inputs: Sequence[Any] = field(repr=False)
    """Fake tensors like the graph's inputs."""
    options: Mapping[str, Any] = field(repr=False)
    """AOTAutograd's arguments of the partitioner."""

    @property
    def outputs(self) -> int:
        """Number of the outputs of the function that was traced."""
        return int(self.options["num_fwd_outputs"])

    def partition(self, joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph of the joint graph, or of a rewritten copy of it,
        which is changed. The forward graph returns its own outputs and then what backward needs.
        """
        return compat.partition(joint, self.inputs, **self.options)


def trace_partitionable(
    fn: Callable[..., Any], inputs: Sequence[Any], shards: Mapping[int, str] | None = None
) -> TracedJoint:
    """As `trace_joint`, for graphs that are then partitioned."""
    traced: list[TracedJoint] = []

    def partition(gm: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
        traced.append(TracedJoint(gm, joint_inputs, options))
        raise _Traced

    with contextlib.suppress(_Traced):
        compat.aot_compile(_AsModule(fn), list(inputs), None, None, _no_gradients, partition)  # type: ignore[arg-type]
    (found,) = traced
    gm = found.joint
    compat.eliminate_common_subexpressions(
        gm,
        [node for node in gm.graph.nodes if node.op == "call_function" and node.target is UNSHARD],
    )
    tag_joint(gm.graph, dict(shards or {}))
    gm.recompile()
    return found


class _Traced(BaseException):
    """Aborts AOTAutograd after it has made the joint graph."""


class _AsModule(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self._fn = fn

    def forward(self, *args: Any) -> tuple[Any, ...]:
        output = self._fn(*args)
        return tuple(output) if isinstance(output, (list, tuple)) else (output,)


def _no_gradients(*_: Any) -> Any:
    raise ValueError(
        "trace_joint: no output depends on an input that requires gradients, so there is no joint "
        "graph."
    )


def _sharded_copy(
    model: Any,
    mesh: DeviceMesh,
    shard: Callable[[Any, DeviceMesh], object] | Mapping[str, Any] | None,
) -> Any:
    if not isinstance(model, nn.Module):
        return model
    model = copy.deepcopy(
        model, {id(group): group for group in compat.process_groups()}
    )  # groups cannot be copied
    if callable(shard):
        shard(model, mesh)
    else:
        shard_model(model, mesh=mesh, **(shard or {}))
    return model


def _detached_copy(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


def _graphs_before(
    probes: Mapping[Level, GraphProbe],
    seen: Mapping[str, fx.GraphModule],
    pipeline: Pipeline,
    target: str | None,
) -> StepGraphs:
    first = {level: probe.seen[0] if probe.seen else None for level, probe in probes.items()}
    if (joint := first[Level.JOINT]) is not None:
        with use_target(Target.parse(target)) if target else contextlib.nullcontext():
            pipeline.changes_values(joint.graph)
    (captured,) = probes[Level.CAPTURED].seen
    if "inference" in seen:
        return StepGraphs(captured, inference=first[Level.JOINT])
    return StepGraphs(captured, first[Level.JOINT], first[Level.FORWARD], first[Level.BACKWARD])
