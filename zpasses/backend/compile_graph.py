"""Compiles a captured graph through AOTAutograd, into eager code or with Inductor."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.backend.compile_job import Codegen, Compiled, CompileJob
from zpasses.backend.graph_facts import backward_facts, forward_facts
from zpasses.backend.inference_chunks import chunk_within_budget
from zpasses.backend.levels import run_level
from zpasses.backend.partitioner import inductor_patches, partition_joint
from zpasses.backend.variant_code import (
    Template,
    agree,
    backward_code,
    forward_code,
)
from zpasses.garbage import no_garbage_collection
from zpasses.graph.cached_params import is_cached_param
from zpasses.graph.encoding import expand_encodings
from zpasses.graph.host_copies import OFFLOAD_WAIT
from zpasses.graph.queries import returned_values
from zpasses.graph.regathers import remove_regathers
from zpasses.pipeline.base_pass import Level
from zpasses.runtime.codegen import boxed, eager_codegen
from zpasses.runtime.forward_variants import saved_params, unmark_returned
from zpasses.runtime.gloo import replace_gloo_collectives

log = logging.getLogger("zpasses")


def compile_captured(job: CompileJob) -> Callable[..., Any]:
    """Run all passes on the captured graph and make code of it, for the inputs of the graph."""
    job.state.in_call = True
    try:
        with job.compiling():
            return compat.call_with_stack_room(lambda: _compile(job))
    finally:
        job.state.in_call = False


def _compile(job: CompileJob) -> Callable[..., Any]:
    with job.recording_answers():
        run_level(job, job.captured.gm, Level.CAPTURED, "captured")
        if job.options.codegen == "eager":
            return _compile_eager(job)
        compiled, result = _compile_with_inductor(job)
    if job.artifacts is not None:
        if result is None:
            job.artifacts.give_up("torch cannot store what AOTAutograd made of it")
        job.artifacts.entry.result = result
        job.artifacts.write_if_complete()
    return compiled


def _compile_eager(job: CompileJob) -> Callable[..., Any]:
    compiled: Callable[..., Any] = compat.aot_compile(
        job.captured.gm,
        job.captured.inputs,
        functools.partial(_forward, job, eager_codegen),
        functools.partial(_backward, job, eager_codegen),
        functools.partial(_forward, job, eager_codegen, inference=True),
        functools.partial(partition_joint, job),
    )
    return compiled


def _compile_with_inductor(job: CompileJob) -> tuple[Callable[..., Any], bytes | None]:
    """Returns the code, and what AOTAutograd made of the graph for the compile cache."""
    patches = inductor_patches(job)

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        def codegen(graph: fx.GraphModule, values: Sequence[Any]) -> Compiled:
            if job.captured.is_fake:
                return eager_codegen(graph, values)
            return compat.inductor_codegen(graph, values, patches, copy.copy(kwargs))

        if job.artifacts is not None:
            kind = compat.kind_of_inner_compile(kwargs)
            static = kwargs.get("static_input_idxs") or ()
            job.artifacts.entry.static_inputs[kind] = list(static)
        if kwargs.get("is_backward"):
            return _backward(job, codegen, gm, inputs)
        return _forward(job, codegen, gm, inputs, inference=bool(kwargs.get("is_inference")))

    gm, inputs = job.captured.gm, job.captured.inputs
    if job.artifacts is None:
        return compat.inductor_compile(gm, inputs, inner, patches), None
    return compat.inductor_compile_packed(gm, inputs, inner, patches)


# --- the compilers of AOTAutograd -----------------------------------------------------------------
def _forward(
    job: CompileJob,
    codegen: Codegen,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    inference: bool = False,
) -> Compiled:
    kind = "inference" if inference else "forward"
    if inference:
        run_level(job, gm, Level.JOINT, kind)
        remove_regathers(gm.graph)
        gm = chunk_within_budget(job, gm)
        gm.recompile()
    run_level(job, gm, Level.FORWARD, kind)
    agree(job, gm, kind)
    values = returned_values(gm.graph)
    unmark_returned(gm.graph, compat.user_outputs(values))
    if any(map(compat.is_subgraph_call, gm.graph.nodes)):
        # Inductor would let subgraphs overwrite inputs, by the positions of the outer graph's
        # saved values: a caller then reuses memory that a subgraph has returned.
        compat.undonate_saved(values, lambda value: True)
    compat.undonate_saved(values, lambda value: value.target is OFFLOAD_WAIT)
    facts = forward_facts(gm, kind, job.state.movable)
    job.state.saved_params = saved_params(gm.graph)
    if job.artifacts is not None:
        job.artifacts.set_forward(facts, gm, inputs)
    if facts.slots:
        job.state.caches_params = True
        compat.undonate_saved(values, is_cached_param(gm.graph))
        gm = compat.clone_graph_module(gm)
    code = forward_code(job, Template.of(kind, gm, inputs, codegen), facts)
    compat.report_output_strides(job.state.output_strides)
    return code


def _backward(
    job: CompileJob, codegen: Codegen, gm: fx.GraphModule, inputs: Sequence[Any]
) -> Compiled:
    if not job.state.in_call:
        with no_garbage_collection(), job.compiling_late():
            return _compile_backward(job, codegen, gm, inputs)
    # With the compile cache, torch hands over every backward in the call of the backend; without
    # it, only those of dynamic shapes, and others when they first run. Ranks may hold one of each,
    # but must vote in one order: all compile when the backward first runs. The forward may itself
    # run in a backward, of a checkpoint or of a hook.
    state, compiled = compat.CompilerState(), list[Compiled]()
    # A compile that failed may run again, and must not find its own changes. AOTAutograd clears
    # the metadata of `gm` where it stores it.
    original = compat.clone_graph_module(gm)
    _guard_sizes(job, gm)

    def run(args: list[Any]) -> Any:
        if not compiled:
            copied = compat.clone_graph_module(original)
            compile_it = functools.partial(_compile_backward, job, codegen, copied, inputs)
            with no_garbage_collection(), state.restored(), job.compiling_late():
                compiled.append(compat.call_with_stack_room(compile_it))
        return compiled[0](args)

    return boxed(run)


def _guard_sizes(job: CompileJob, gm: fx.GraphModule) -> None:
    """Guards the sizes that the code of a backward will depend on, such as those of images. When
    the backward first runs, guards are made already, and the code of other sizes would fail.
    """
    if job.options.codegen != "inductor" or not compat.has_symbols(gm):
        return
    whole = expand_encodings(replace_gloo_collectives(compat.clone_graph_module(gm)))
    try:
        compat.guard_sizes(whole, inductor_patches(job))
    except Exception as error:  # the compile shows it, if it fails there, too
        log.info("graph %s: sizes of its backward are not guarded: %s", job.name, error)


def _compile_backward(
    job: CompileJob, codegen: Codegen, gm: fx.GraphModule, inputs: Sequence[Any]
) -> Compiled:
    with job.recording_answers():
        run_level(job, gm, Level.BACKWARD, "backward")
    facts = backward_facts(gm, job.order, job.state.saved_params)
    if job.artifacts is not None:
        job.artifacts.set_backward(facts, gm, inputs)
    if facts.slots:
        gm = compat.clone_graph_module(gm)
    else:
        agree(job, gm, "backward")
    template = Template.of("backward", gm, inputs, codegen, facts.saved)
    compiled = backward_code(job, template, facts)
    if job.artifacts is not None:
        job.artifacts.write_if_complete()
    return compiled
