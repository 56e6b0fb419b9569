"""Small joint graphs to test passes on, made from descriptions of parameters.

Every parameter is multiplied with an input of its own shape, so that any shape works and all values
stay small integers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zpasses import compat
from zpasses.graph.dialect import rows_per_rank
from zpasses.pipeline.base_pass import Pass
from zpasses.pipeline.pipeline import Pipeline
from zpasses.testing.step_graphs import TracedJoint, trace_partitionable
from zpasses.testing.steps import run_pipeline
from zpasses.testing.worlds import fake_world


@dataclass(frozen=True)
class ParamSpec:
    """A sharded parameter, and how a graph reads it."""

    shape: tuple[int, ...]
    """The shape of the full parameter. Dimension 0 is split over the ranks."""
    dtype: torch.dtype = torch.float32
    """The dtype of the shard."""
    param_dtype: torch.dtype | None = None
    """The dtype of the gathered parameter; None for that of the shard."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which its gradient is reduced; None for that of the gradient."""
    frozen: bool = False
    """Whether it gets no gradient."""
    on_host: bool = False
    """Whether its shard rests on the host. Then it must be frozen."""
    reads: int = 1
    """How many times the graph reads it."""
    group: str = "0"
    """The process group over which it is sharded."""
    replicate_group: str | None = None
    """The process group of the ranks with equal shards, over which its gradient is averaged; None
    without replicas."""

    def shard(self, rank: int, world_size: int) -> Tensor:
        """The zeros that stand for one rank's shard when a graph is traced."""
        if not self.shape:
            return torch.zeros((), dtype=self.dtype, requires_grad=not self.frozen)
        block = rows_per_rank(self.shape[0], world_size)
        rows = max(0, min(block, self.shape[0] - rank * block))
        return torch.zeros((rows, *self.shape[1:]), dtype=self.dtype, requires_grad=not self.frozen)

    def read(self, shard: Tensor) -> Tensor:
        """The full parameter, in the dialect."""
        rows = self.shape[0] if self.shape else 0
        groups = (self.group, *([] if self.replicate_group is None else [self.replicate_group]))
        device = {"device": shard.device} if self.on_host else {}
        full: Tensor = torch.ops.zpasses.unshard(
            shard, rows, self.param_dtype, self.reduce_dtype, *groups, **device
        )
        return full


def joint_graph(
    params: Sequence[ParamSpec],
    rank: int | None = None,
    world_size: int | None = None,
    *,
    interleaved: bool = False,
    chained: bool = False,
) -> fx.GraphModule:
    """Trace the joint graph of one rank, in the form that the joint passes see. It takes some ten
    milliseconds. Call it inside `fake_world`.

    The graph's inputs are, for each parameter, the shard and an input of the full shape. Its
    outputs are their products, one per read. Parameter i is called "p{i}".

    Args:
        params: the parameters.
        rank: the rank that the graph is for; None for that of the world.
        world_size: the number of ranks; None for that of the world.
        interleaved: whether the reads of one parameter alternate with those of the others. By
            default they follow each other.
        chained: whether each output also depends on the one before it.

    Raises:
        ValueError: if there is no world, or all parameters and inputs are frozen.
    """
    return _traced(params, rank, world_size, interleaved, chained).joint


def _traced(
    params: Sequence[ParamSpec],
    rank: int | None,
    world_size: int | None,
    interleaved: bool,
    chained: bool,
) -> TracedJoint:
    own = dist.get_rank() if rank is None else rank
    size = dist.get_world_size() if world_size is None else world_size
    inputs: list[Tensor] = []
    shards = {}
    for i, param in enumerate(params):
        shards[2 * i] = f"p{i}"
        dtype = param.param_dtype or param.dtype
        inputs += [
            param.shard(own, size),
            torch.zeros(param.shape, dtype=dtype, requires_grad=param.frozen),
        ]

    def fn(*values: Tensor) -> tuple[Tensor, ...]:
        order = [(i, turn) for i, param in enumerate(params) for turn in range(param.reads)]
        if interleaved:
            order.sort(key=lambda pair: pair[1])
        outputs: list[Tensor] = []
        for i, turn in order:
            output = params[i].read(values[2 * i]) * values[2 * i + 1]
            output = output * (turn + 1) if turn else output
            if chained and outputs:
                output = output + outputs[-1].sum().to(output.dtype)
            outputs.append(output)
        return tuple(outputs)

    return trace_partitionable(fn, inputs, shards)


@dataclass(frozen=True)
class JointRecipe:
    """Describes the joint graphs of all ranks of a world. Its `repr` makes them again."""

    params: tuple[ParamSpec, ...]
    world_size: int
    interleaved: bool = False
    """As for `joint_graph`."""
    replicas: int = 1
    """Number of replicas. Each is sharded over world_size / replicas consecutive ranks."""
    chained: bool = False
    """As for `joint_graph`."""

    def graphs(self) -> list[fx.GraphModule]:
        """Trace the graph of each rank. Call it outside of any world."""
        return [each.joint for each in self.traced()]

    def traced(self) -> list[TracedJoint]:
        """As `graphs`, for graphs that are then partitioned."""
        found = []
        for rank in range(self.world_size):
            with self.world(rank) as mesh:
                found.append(self._traced(mesh))
        return found

    @contextlib.contextmanager
    def world(self, rank: int) -> Iterator[DeviceMesh]:
        """Act as one of the ranks, with the process groups that the graphs name. Yields the mesh of
        replicas and shards.
        """
        with fake_world(self.world_size, rank) as mesh:
            shape = (self.replicas, self.world_size // self.replicas)
            names = ("replicate", "shard")
            yield init_device_mesh("cpu", shape, mesh_dim_names=names) if shape[0] > 1 else mesh

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Process group -> its ranks, as `simulate` and `assert_equal_bits` take them. Call it
        outside of any world.
        """
        found = {"0": tuple(range(self.world_size))}
        for rank in range(self.world_size if self.replicas > 1 else 0):
            with self.world(rank) as mesh:
                for name in _group_names(mesh):
                    found[name] = tuple(compat.group_ranks(name))
        return found

    def _traced(self, mesh: DeviceMesh) -> TracedJoint:
        """Trace the graph of the rank of this world."""
        params: Sequence[ParamSpec] = self.params
        if self.replicas > 1:
            across, inside = _group_names(mesh)
            params = [replace(param, group=inside, replicate_group=across) for param in params]
        rank, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        return _traced(params, rank, size, self.interleaved, self.chained)

    def run_pipeline(
        self, pipeline: Pipeline | Pass | str
    ) -> tuple[list[fx.GraphModule], list[fx.GraphModule]]:
        """Trace the graph of each rank, and run a pipeline on a copy of it, as that rank. Call it
        outside of any world.

        Returns:
            The graphs before and after, for `assert_equal_bits`. Those before have what the passes
            declare to change of the values.

        Raises:
            PassError: if a pass raises or leaves an invalid graph.
            OptionError: if the text is not a pipeline.
        """
        before, after = [], []
        parsed = Pipeline.parse(pipeline) if isinstance(pipeline, str) else pipeline
        passes = Pipeline((parsed,)) if isinstance(parsed, Pass) else parsed
        for rank in range(self.world_size):
            with self.world(rank) as mesh:
                before.append(self._traced(mesh).joint)
                after.append(run_pipeline(before[-1], passes).graph)
                passes.changes_values(before[-1].graph)
        return before, after


def _group_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Names of this rank's process groups, by dimension of the mesh."""
    return tuple(compat.group_name(mesh.get_group(dim)) for dim in range(mesh.ndim))
