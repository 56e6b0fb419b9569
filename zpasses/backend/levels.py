"""Runs the passes of one level on a graph of a compile."""

from __future__ import annotations

import logging

from torch import fx

from zpasses.backend.captured import tag_joint
from zpasses.backend.compile_job import CompileJob
from zpasses.graph.queries import put_inputs_first
from zpasses.pipeline.base_pass import Level
from zpasses.pipeline.events import ObservedGraph, run_reported_passes

log = logging.getLogger("zpasses")


def run_level(job: CompileJob, gm: fx.GraphModule, level: Level, kind: str) -> None:
    """Run the passes of a level on a graph in place.

    Args:
        kind: name of the graph in records: "captured", "joint", "forward", "backward" or
            "inference".
    """
    put_inputs_first(gm.graph)
    if level is Level.JOINT:
        tag_joint(gm.graph, job.captured.shards)
    with job.planning():
        passes = job.state.pipeline.at(level)
        records = run_reported_passes(
            job.listeners, kind, level.value, gm.graph, passes, verify=job.options.verify
        )
    gm.recompile()
    name = f"{job.name} {kind}"
    for record in records:
        cost = f"{record.time_us:.0f} us, checks {record.check_us:.0f} us"
        log.debug("graph %s: %s changed %d, %s", name, record.text, record.changes, cost)
    job.listeners.send(ObservedGraph(name, kind, gm.graph, records))
