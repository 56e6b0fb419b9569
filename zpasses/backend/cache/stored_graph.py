"""Takes the code of a compile from the compile cache."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.backend.cache.entry import GraphArtifacts
from zpasses.backend.cache.graph_text import NotCacheableError
from zpasses.backend.cache.key import graph_key, refusal, refusal_here
from zpasses.backend.cache.lookup import decline_artifacts, find_artifacts
from zpasses.backend.compile_job import Compiled, CompileJob, CompileState
from zpasses.backend.partitioner import inductor_patches
from zpasses.backend.variant_code import (
    Template,
    agree_on,
    backward_code,
    forward_code,
    preload,
)
from zpasses.ranks.new_groups import restore_node_groups
from zpasses.runtime.codegen import boxed
from zpasses.runtime.forward import first_variant
from zpasses.runtime.forward_variants import ForwardVariant

log = logging.getLogger("zpasses")


def from_cache(
    job: CompileJob, example_inputs: Sequence[Any]
) -> tuple[CompileJob, Callable[..., Any] | None]:
    """Look for the code of a compile in the compile cache. All ranks take it, or none does.

    Args:
        example_inputs: the inputs that Dynamo gave.

    Returns:
        The compile, and its code. If the graph must be compiled, the code is None, and the
        compile's `artifacts` take what is compiled, unless the graph cannot be stored.

    Raises:
        AgreementError: when another rank failed, or does not come in time.
    """
    started = time.perf_counter()
    groups = job.captured.groups
    reason = refusal(job.captured, job.options, job.cache_pipeline)
    try:
        if reason is None:
            key = graph_key(job.captured, example_inputs, job.options, job.cache_pipeline)
            reason = refusal_here(job.options, recorded=bool(job.listeners))
            if reason is not None:  # a dump, for example, is often that of one rank
                decline_artifacts(key, groups)
    except NotCacheableError as error:
        reason = str(error)
    if reason is not None:
        log.info("graph %s: without the compile cache: %s", job.name, reason)
        return job, None
    graphs: list[_StoredGraph] = []
    found = find_artifacts(
        key, groups, job.free_bytes, lambda each: graphs.append(_StoredGraph(_loading(job, each)))
    )
    if isinstance(found, str):
        log.info("graph %s: not in the compile cache: %s", job.name, found)
        artifacts = GraphArtifacts.new(key.digest, job.name)
        artifacts.entry.free_bytes = job.free_bytes
        return replace(job, artifacts=artifacts), None
    (graph,) = graphs
    restore_node_groups(found.entry.answers)
    graph.finish()
    taken = time.perf_counter() - started
    log.info("graph %s: from the compile cache, in %.2f s", job.name, taken)
    return graph.job, graph.compiled


def _loading(job: CompileJob, artifacts: GraphArtifacts) -> CompileJob:
    """Returns the compile with the decisions of the compile that was stored."""
    entry, pipeline = artifacts.entry, job.state.pipeline
    if entry.memory_budget is not None:
        pipeline = pipeline.with_memory_budget(entry.memory_budget)
    caches_params = entry.forward is not None and bool(entry.forward.slots)
    state = CompileState(
        pipeline,
        caches_params=caches_params,
        output_strides=entry.output_strides,
        movable=entry.forward.movable if entry.forward is not None else (),
    )
    return replace(job, artifacts=artifacts, state=state)


class _StoredGraph:
    """Code of a graph, which can be called after `finish`.

    Nothing here asks other ranks until `finish`.

    Args:
        job: the compile, with what was read as its artifacts.

    Raises:
        Exception: any kind, from damaged files, and from sizes that the graph was not made for.
    """

    def __init__(self, job: CompileJob) -> None:
        assert job.artifacts is not None
        entry, inputs = job.artifacts.entry, job.captured.inputs
        mode = compat.fake_mode_of(inputs)
        assert entry.result is not None
        assert entry.forward is not None
        assert mode is not None
        self.job, self._artifacts = job, job.artifacts
        self._mode, self._forward = mode, entry.forward
        self._code: dict[str, Compiled] = {}
        self.compiled = compat.unpack_result(entry.result, inputs, self._late)
        """Takes the inputs of the captured graph."""
        self._template = self._template_of(self._forward.kind)
        with self._template.state.restored():
            preload(job, self._forward.kind, self._first_variant())

    def _first_variant(self) -> ForwardVariant | None:
        facts = self._forward
        return first_variant(facts.slots) if facts.slots else None

    def finish(self) -> None:
        """Compares collectives with the other ranks, and makes the forward ready to run.

        Raises:
            AgreementError: on every rank, if they differ.
        """
        agree_on(self.job, self._forward.sequences)
        self._code[self._forward.kind] = forward_code(self.job, self._template, self._forward)

    def _late(self, kind: str) -> Compiled:
        def run(args: list[Any]) -> Any:
            code = self._code.get(kind)
            if code is None:  # the first backward
                with self.job.compiling_late():
                    code = self._code[kind] = self._backward()
            return code(args)

        return boxed(run)

    def _backward(self) -> Compiled:
        facts = self._artifacts.entry.backward
        assert facts is not None
        agree_on(self.job, facts.sequences)
        return backward_code(self.job, self._template_of("backward"), facts)

    def _template_of(self, kind: str) -> Template:
        graph = functools.cache(lambda: self._artifacts.template(kind, self._mode))
        settings = {
            "is_backward": kind == "backward",
            "is_inference": kind == "inference",
            "static_input_idxs": tuple(self._artifacts.entry.static_inputs[kind]),
        }
        facts = self._artifacts.entry.backward
        saved = facts.saved if facts is not None and kind == "backward" else {}
        patches = inductor_patches(self.job)

        def codegen(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
            return compat.inductor_codegen(gm, inputs, patches, dict(settings))

        return Template(
            kind,
            graph,
            lambda: [node.meta["val"] for node in graph().graph.find_nodes(op="placeholder")],
            codegen,
            compat.CompilerState(self._mode),
            saved,
        )
