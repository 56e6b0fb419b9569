"""Splits a joint graph into forward and backward: the partitioner of a compile."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.backend.compile_job import CompileJob
from zpasses.backend.counted_peaks import bytes_added
from zpasses.backend.levels import run_level
from zpasses.backend.partition_choice import partition_step
from zpasses.backend.partition_plan import PartitionPolicy
from zpasses.cost.memory.liveness import bytes_within
from zpasses.cost.plan.kept_params import Repetition
from zpasses.graph.dialect import UNSHARD
from zpasses.graph.host_copies import offloadable_inputs, offloadable_values
from zpasses.graph.queries import nbytes, returned_values, value_of
from zpasses.graph.subgraphs import read_subgraph_inputs_directly
from zpasses.pipeline.base_pass import Level
from zpasses.pipeline.events import RuntimeNote

log = logging.getLogger("zpasses")


def inductor_patches(job: CompileJob) -> dict[str, Any]:
    """Returns the settings of Inductor for a compile, with the partitioner among them."""
    run = functools.partial(partition_joint, job)
    partitioner = _InductorPartitioner(run, job.state.pipeline.digest())
    extra = job.options.inductor
    if job.options.memory_budget is not None:
        extra = compat.within_planned_peak(extra, bytes_within)
    return compat.inductor_config_patches(partitioner, extra)


def partition_joint(
    job: CompileJob, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Run the joint passes on a joint graph and partition it: torch's partitioner for a compile.

    Args:
        joint_inputs: inputs of the joint graph.
        kwargs: further arguments of torch's partitioner.

    Raises:
        MemoryBudgetError: if the step does not fit the memory budget.
    """
    options = job.options
    if compat.is_joint_of_subgraph(gm):
        recompute = options.recomputes_elementwise()
        return compat.partition(gm, joint_inputs, recompute_elementwise=recompute, **kwargs)
    read_subgraph_inputs_directly(gm)
    reads = [
        node for node in gm.graph.nodes if node.op == "call_function" and node.target is UNSHARD
    ]
    compat.eliminate_common_subexpressions(gm, reads)
    run_level(job, gm, Level.JOINT, "joint")
    pipeline = job.state.pipeline
    policy = PartitionPolicy(
        job.budget,
        pipeline.memory_budget,
        job.captured.share,
        any(each.facts.keeps_params for each in pipeline),
        job.captured.groups,
        options.recomputes_elementwise(),
        Repetition(options.backwards_per_step, job.captured.frozen),
        job.host_bytes,
        # Blocks that are compiled one by one have one count of these for all.
        any(each.facts.caches_params for each in pipeline) and not options.prefetch,
        next((each.facts.chunks_loss for each in pipeline if each.facts.chunks_loss), None),
    )
    count_added = None
    if options.codegen == "inductor" and not job.captured.is_fake:
        count_added = functools.partial(bytes_added, patches=inductor_patches(job))
    with job.planning():
        partitioned = partition_step(
            gm,
            joint_inputs,
            policy,
            events=job.listeners,
            copy_engines=pipeline.uses_engines,
            count_added=count_added,
            **kwargs,
        )
    if (budget := partitioned.memory_budget) is not None:
        job.state.pipeline = pipeline.with_memory_budget(budget)
        if job.artifacts is not None:
            job.artifacts.entry.memory_budget = budget
    if options.prefetch:
        job.state.movable = _movable(partitioned.graphs, int(kwargs["num_fwd_outputs"]))
    if partitioned.note:
        log.info("graph %s: %s", job.name, partitioned.note)
        for each in pipeline:
            if each.facts.regathers or each.facts.chunks_loss:
                job.listeners.send(RuntimeNote(each.name, partitioned.note))
    return partitioned.graphs


def _movable(graphs: Sequence[fx.GraphModule], user_outputs: int) -> tuple[int, ...]:
    """Positions of what forward returns and may rest on the host, the smallest first: so each call
    can move as much as its neighbours cover. Inputs are among them.
    """
    forward, backward = (each.graph for each in graphs)
    found = {
        *offloadable_values(forward, backward, user_outputs),
        *offloadable_inputs(forward, backward, user_outputs),
    }
    sizes = [
        (nbytes(value_of(node)), at)
        for at, node in enumerate(returned_values(forward))
        if node in found
    ]
    return tuple(at for _, at in sorted(sizes))


class _InductorPartitioner(compat.CustomPartitionerFn):
    def __init__(self, run: Callable[..., Any], uuid: str) -> None:
        self._run, self._uuid = run, uuid

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        result: tuple[fx.GraphModule, fx.GraphModule] = self._run(gm, joint_inputs, **kwargs)
        return result

    def uuid(self) -> str:
        return self._uuid

    def __deepcopy__(self, memo: dict[int, Any]) -> _InductorPartitioner:
        return self  # Inductor copies its configuration, which contains this object

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self._uuid,)  # Inductor pickles its configuration for its cache key
