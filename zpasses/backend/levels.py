"""Runs the passes of one level on a graph of a compile."""

from __future__ import annotations

import logging

from torch import fx

from zpasses.backend.capture import tag_joint
from zpasses.backend.compile import Compile
from zpasses.graph.nodes import put_inputs_first
from zpasses.pipeline.observers import ObservedGraph, notify_observers
from zpasses.pipeline.passes import Level
from zpasses.pipeline.prediction import Predictor
from zpasses.pipeline.recorder import run_recorded_passes

__all__ = ["run_level"]

log = logging.getLogger("zpasses")


def run_level(job: Compile, gm: fx.GraphModule, level: Level, kind: str) -> None:
    """Run the passes of a level on a graph in place.

    Args:
        kind: name of the graph in records: "captured", "joint", "forward", "backward" or
            "inference".
    """
    put_inputs_first(gm.graph)
    if level is Level.JOINT:
        tag_joint(gm.graph, job.captured.shards)
    with job.planning():
        passes = job.decided.pipeline.at(level)
        predictor = None
        if job.recorder.take_predictions() and level in (Level.FORWARD, Level.BACKWARD):
            predictor = Predictor(passes, job.target)  # takes time, so only for a dump
        records = run_recorded_passes(
            job.recorder.with_recorder(predictor),
            kind,
            level.value,
            gm.graph,
            passes,
            verify=job.options.verify,
        )
        found = predictor.predicted(gm.graph) if predictor is not None else None
        if found is not None:
            log.info("graph %s %s: %s", job.name, kind, found)
            job.recorder.prediction(kind, found)
    gm.recompile()
    name = f"{job.name} {kind}"
    for record in records:
        cost = f"{record.time_us:.0f} us, checks {record.check_us:.0f} us"
        log.debug("graph %s: %s changed %d, %s", name, record.text, record.changes, cost)
    notify_observers(ObservedGraph(name, kind, gm.graph, records))
