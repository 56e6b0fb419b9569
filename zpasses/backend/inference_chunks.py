"""Chunks of the loss in graphs without a backward.

Partitioning chooses them for a step, and an evaluation is not partitioned. It may hold its logits
only in chunks, too, where the step does.
"""

from __future__ import annotations

import logging

from torch import fx

from zpasses import compat
from zpasses.backend.compile_job import CompileJob
from zpasses.backend.step_trials import CHUNKS
from zpasses.cost.memory.liveness import liveness
from zpasses.graph.cached_params import mark_held
from zpasses.graph.loss_chunks import chunk_regions
from zpasses.graph.loss_regions import find_regions
from zpasses.graph.queries import collectives_by_group
from zpasses.option_values import parse_budget

log = logging.getLogger("zpasses")


def chunk_within_budget(job: CompileJob, gm: fx.GraphModule) -> fx.GraphModule:
    """Returns an inference graph in the fewest chunks that fit the memory budget, or in those that
    exceed it least: the graph itself if chunks may not be taken, or save nothing.

    Ranks need not take the same number, because the collectives stay as they are.

    Args:
        gm: the graph after all passes at the joint level.
    """
    gradients = next(
        (each.facts.chunks_loss for each in job.state.pipeline if each.facts.chunks_loss), None
    )
    if job.budget is None or gradients is None:
        return gm
    if any(each.facts.caches_params for each in job.state.pipeline):
        mark_held(gm.graph)
    with job.planning():
        best, least, notes = gm, liveness(gm.graph).peak_bytes, tuple[str, ...]()
        limit = parse_budget(job.budget, "option 'memory_budget'").limit_bytes(least)
        rows = max((each.rows for each in find_regions(gm.graph)[0]), default=0)
        for chunks in CHUNKS:
            if least <= limit or chunks > rows:
                break
            found = compat.clone_graph_module(gm)
            made = chunk_regions(found.graph, chunks, gradients)
            if collectives_by_group(found.graph) != collectives_by_group(gm.graph):
                break
            peak = liveness(found.graph).peak_bytes
            if peak < least:
                best, least, notes = found, peak, made.notes
    if notes:
        log.info("graph %s: computes the loss of an evaluation: %s", job.name, ", ".join(notes))
    return best
