"""Makes code of the graphs of one compile, from rewritten graphs or from the compile cache.

A graph whose calls differ (cached parameters, deferred reductions) becomes a dispatcher, which
compiles a variant when it first runs. A graph or variant that the compile cache has is loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import fx

import zpasses.runtime.exchanged_rows  # noqa: F401  (the operators)
from zpasses import compat
from zpasses.backend.block_runs import (
    BlockStep,
    add_turning_point,
    agreed_prefetch,
    graph_cost,
    turn_order,
    turn_text,
)
from zpasses.backend.cache.entry import (
    BackwardFacts,
    ForwardFacts,
)
from zpasses.backend.compile_job import Codegen, Compiled, CompileJob
from zpasses.backend.partitioner import inductor_patches
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.plan.prefetch import GraphRun, StepCost
from zpasses.graph.encoding import expand_encodings
from zpasses.graph.error_feedback import Residual, add_residual_inputs, residual_inputs
from zpasses.graph.hoisting import HoistedGraph, hoist_collectives
from zpasses.graph.host_copies import HostNeed, host_need
from zpasses.graph.queries import collectives, returned_values, value_of
from zpasses.host.saved_arenas import SavedArenas, gradients, with_arenas
from zpasses.host.saved_values import with_values_back, with_values_out
from zpasses.pipeline.events import VariantBuilt
from zpasses.ranks.compared_collectives import (
    Sequences,
    call_sequences,
    compare_collectives,
    compare_sequences,
    run_events,
)
from zpasses.ranks.run_order import RunEvent
from zpasses.ranks.vote import has_other_ranks
from zpasses.runtime.backward import BackwardDispatch, warn_if_always_reduced
from zpasses.runtime.backward_checks import with_value_check
from zpasses.runtime.backward_variants import BackwardVariant, build_backward_variant
from zpasses.runtime.codegen import boxed, eager_codegen
from zpasses.runtime.flush import GraphLowering
from zpasses.runtime.forward import ForwardDispatch
from zpasses.runtime.forward_variants import (
    ForwardVariant,
    OutputStrides,
    build_forward_variant,
    gather_ids,
    param_slots,
    pin_shards,
)
from zpasses.runtime.free_memory import note_planned_peak
from zpasses.runtime.gloo import replace_gloo_collectives
from zpasses.runtime.grad_slots import always_reduced, grad_slots, returned_gradients
from zpasses.runtime.hoisted import HoistedCode, Surroundings
from zpasses.runtime.overflows import EncodedGrad, encoded_grads
from zpasses.runtime.profiling import collective_names, with_part_range, with_profiler_range
from zpasses.runtime.residuals import with_residuals
from zpasses.runtime.run_checks import limited_run, with_run_check, with_vote_limit
from zpasses.runtime.windows import Lowering

log = logging.getLogger("zpasses")


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


@dataclasses.dataclass(frozen=True)
class Template:
    """A graph after its passes, of which variants are compiled."""

    kind: str
    """"forward", "inference" or "backward"."""
    graph: Callable[[], fx.GraphModule]
    """Returns the graph, which stays as it is."""
    inputs: Callable[[], list[Any]]
    """Returns its fake inputs."""
    codegen: Codegen
    state: compat.CompilerState
    saved: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Of a backward graph, as in its facts."""

    @classmethod
    def of(
        cls,
        kind: str,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        codegen: Codegen,
        saved: Mapping[str, Sequence[str]] = {},
    ) -> Template:
        return cls(kind, lambda: gm, lambda: list(inputs), codegen, compat.CompilerState(), saved)


# --- graphs ---------------------------------------------------------------------------------------
def forward_code(job: CompileJob, template: Template, facts: ForwardFacts) -> Compiled:
    """Returns the code of a forward or inference graph whose collectives ranks agreed on."""
    code, fake = _forward_code(job, template, facts), job.captured.is_fake
    note_planned_peak(code, facts.peak_bytes)
    if job.options.prefetch and (job.host_bytes or fake):
        arenas = None if fake else SavedArenas(job.host_bytes)
        places = facts.movable, facts.returned_inputs
        code = boxed(with_values_out(code, facts.kind, *places, arenas))
    if facts.host is None:
        return code
    return boxed(with_arenas(code, facts.host, SavedArenas(job.host_bytes), job.report))


def _forward_code(job: CompileJob, template: Template, facts: ForwardFacts) -> Compiled:
    if not facts.slots:
        return _variant(job, template, None)

    def compile_variant(variant: ForwardVariant) -> Compiled:
        with job.compiling_late():
            return _variant(job, template, variant)

    return boxed(
        ForwardDispatch(facts.slots, facts.gather_ids, facts.outputs, job.bound, compile_variant)
    )


def backward_code(job: CompileJob, template: Template, facts: BackwardFacts) -> Compiled:
    """Returns the code of a backward graph.

    The collectives of a graph without deferrable gradients have been agreed on. Variants are
    agreed on here, because another rank may defer other gradients.
    """
    order = job.order

    def compile_variant(variant: BackwardVariant) -> Compiled:
        with job.compiling_late():
            return _variant(job, template, variant)

    if facts.slots:
        # With blocks, reductions end after the graph, and parameters step then.
        steps = not job.options.prefetch
        code = boxed(
            BackwardDispatch(
                facts.slots, facts.outputs, order, _lowering(job), compile_variant, steps=steps
            )
        )
    else:
        code = _variant(job, template, None)
    note_planned_peak(code, facts.peak_bytes)
    if job.options.prefetch and job.host_bytes:
        code = boxed(with_values_back(code))
    if not job.options.prefetch:  # else reductions have arenas of their own, after the graph
        code = _with_grad_arenas(job, code, facts.host)
    code = boxed(job.result_hook(code, "gradients"))
    read = dict.fromkeys(name for params in facts.saved.values() for name in params)
    positions = {name: order[name] for name in read if name in order}
    if positions:
        code = boxed(with_value_check(code, positions))
    left = facts.always_reduced
    return boxed(warn_if_always_reduced(code, job.name, left, order)) if left else code


def _with_grad_arenas(job: CompileJob, code: Compiled, need: HostNeed | None) -> Compiled:
    arenas = SavedArenas(pool=gradients)
    return code if need is None else boxed(with_arenas(code, need, arenas, job.report))


def agree(job: CompileJob, gm: fx.GraphModule, kind: str) -> None:
    """Compares what a graph communicates with the other ranks.

    Raises:
        AgreementError: on every rank, if they differ.
    """
    asks = _asks(job)
    if asks:
        with job.listeners.report_errors("agreement"):
            compare_collectives(gm.graph, job.name)
    job.listeners.collectives_compared(kind, gm.graph, asks)


def agree_on(job: CompileJob, sequences: Sequences) -> None:
    """The same for a graph of the compile cache."""
    if _asks(job):
        compare_sequences(sequences, job.name)


def preload(job: CompileJob, kind: str, variant: ForwardVariant | None) -> None:
    """Loads the code of a variant from the compile cache, if it is stored.

    Raises:
        Exception: any kind, from damaged files.
    """
    assert job.artifacts is not None
    stored = job.artifacts.variant(kind, variant)
    if stored is not None:
        code = compat.unpack_code(stored.code, is_backward=False)
        job.state.preloaded = repr((kind, variant)), stored, code


def _asks(job: CompileJob) -> bool:
    return bool(job.options.agreement) and dist.is_initialized()


def _lowering(job: CompileJob) -> Lowering:
    """Returns how reductions that a backward deferred are run."""
    codegen: Codegen = eager_codegen
    if job.options.codegen == "inductor" and not job.captured.is_fake:
        patches = inductor_patches(job)
        codegen = functools.partial(compat.inductor_codegen_standalone, patches=patches)

    def with_arenas_of_grads(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        return _with_grad_arenas(job, codegen(gm, inputs), host_need(gm.graph))

    pipeline, verify = job.state.pipeline, job.options.verify
    target = job.options.target
    return GraphLowering(
        pipeline, with_arenas_of_grads, job.listeners, verify=verify, target=target
    )


# --- variants -------------------------------------------------------------------------------------
def _variant(
    job: CompileJob, template: Template, variant: ForwardVariant | BackwardVariant | None
) -> Compiled:
    loaded = _load(job, template, variant)
    if loaded is not None:
        return loaded
    gm, extra, residuals = _built(template, variant, job.state.output_strides)
    sequences: Sequences = {}
    what = f"code of {template.kind}"
    if variant is not None:
        what = f"code of a variant of {template.kind}"
        done = variant.kept if isinstance(variant, ForwardVariant) else variant.deferred
        log.debug("graph %s %s: %s", job.name, template.kind, variant)
        slots = param_slots if isinstance(variant, ForwardVariant) else grad_slots
        params = [slot.param for slot in slots(template.graph().graph)]
        stepped = variant.stepped if isinstance(variant, BackwardVariant) else frozenset[int]()
        given, kept, steps = (
            [params[i] for i in sorted(each)] for each in (variant.given, done, stepped)
        )
        job.listeners.send(VariantBuilt(template.kind, given, kept, steps, gm.graph))
        if isinstance(variant, BackwardVariant):
            agree(job, gm, template.kind)
            sequences = call_sequences(gm.graph) if job.artifacts is not None else {}
    inputs = [*template.inputs(), *extra]
    events = run_events(gm.graph, f"{job.name} {template.kind}")
    hoisted = _hoist(job, gm, template.kind, variant)
    encoded = encoded_grads(gm.graph) if template.kind == "backward" else []
    whole = expand_encodings(replace_gloo_collectives(gm))
    strides: list[tuple[int, ...] | None] = []
    with template.state.restored(strides), job.listeners.report_errors(what):
        if hoisted is None:
            code = template.codegen(whole, inputs)
        else:
            body = expand_encodings(replace_gloo_collectives(hoisted.body))
            code = template.codegen(body, [*inputs, *hoisted.extra_inputs])
    _keep_output_strides(job, template, strides)
    names = collective_names(gm.graph)
    if job.artifacts is not None:
        job.artifacts.add_code(
            template.kind, variant, code, events, names, sequences, residuals, encoded
        )
    code = _checked(job, code, events, names, template, hoisted, encoded)
    return _with_residuals(job, code, residuals)


def _keep_output_strides(
    job: CompileJob, template: Template, strides: Sequence[tuple[int, ...] | None]
) -> None:
    """The first variant of a forward graph chooses the strides that all return."""
    if template.kind == "backward" or job.state.output_strides:
        return
    outputs = returned_values(template.graph().graph)
    job.state.output_strides = tuple(strides[: len(outputs)])
    if job.artifacts is not None:
        job.artifacts.entry.output_strides = job.state.output_strides


def _load(
    job: CompileJob, template: Template, variant: ForwardVariant | BackwardVariant | None
) -> Compiled | None:
    if job.artifacts is None or not job.artifacts.loaded:
        return None
    kind = template.kind
    if job.state.preloaded is not None and job.state.preloaded[0] == repr((kind, variant)):
        (_, stored, code), job.state.preloaded = job.state.preloaded, None
    else:
        found = job.artifacts.variant(kind, variant)
        if found is None:
            return None
        stored = found
        try:
            with template.state.restored():
                code = compat.unpack_code(stored.code, is_backward=kind == "backward")
        except Exception as error:  # compiled from the graph instead
            log.warning("compile cache: code of graph %s is not used: %s", job.name, error)
            return None
    if isinstance(variant, BackwardVariant):
        agree_on(job, stored.sequences)
    old, new = f"graph {job.artifacts.entry.name} ", f"graph {job.name} "
    events = {
        group: dataclasses.replace(event, text=event.text.replace(old, new, 1))
        for group, event in stored.events.items()
    }
    hoisted = None
    if job.options.prefetch:
        gm, *_ = _built(template, variant, job.state.output_strides)
        hoisted = _hoist(job, gm, kind, variant)
    code = _checked(job, code, events, stored.collectives, template, hoisted, stored.encoded_grads)
    return _with_residuals(job, code, stored.residuals)


def _hoist(
    job: CompileJob,
    gm: fx.GraphModule,
    kind: str,
    variant: ForwardVariant | BackwardVariant | None,
) -> HoistedGraph | None:
    """Returns the parts of a graph whose collectives may leave it. One rank has none, and its
    graphs are parts of the schedule if it says what rests on the host. A variant of a step that has
    none is silent: it takes all parameters from the cache, or leaves all gradients pending.
    """
    if not job.options.prefetch:
        return None
    is_backward = kind == "backward"
    hoisted = hoist_collectives(gm, returned_gradients(gm.graph) if is_backward else None)
    if any(map(has_other_ranks, job.captured.groups)):
        is_part = variant is not None and kind != "inference" and not any(collectives(gm.graph))
    else:
        is_part = bool(job.host_bytes)
    if hoisted is None and is_part:
        return HoistedGraph(gm, [], len(returned_values(gm.graph)), None, None)
    if hoisted is None or not all(param in job.order for param in hoisted.params()):
        return None
    add_turning_point(hoisted, job.target)
    return hoisted


def _checked(
    job: CompileJob,
    code: Compiled,
    events: Mapping[str, RunEvent],
    names: Sequence[str],
    template: Template,
    hoisted: HoistedGraph | None,
    encoded: Sequence[EncodedGrad],
) -> Compiled:
    options, kind = job.options, template.kind
    name = f"{job.name} {kind}"
    timeout_s = options.agreement_timeout_s
    code = job.overflows.watching(code, encoded, f"graph {name}")
    if hoisted is not None:
        # Ranks that start gathers elsewhere start collectives in another order.
        movable = job.state.movable if kind == "forward" else ()
        outputs = len(returned_values(template.graph().graph))

        def described(sizes: Mapping[Any, int]) -> GraphRun:
            with job.planning(), compat.planned_for(sizes):
                return graph_cost(hoisted, kind, job.target, movable, outputs)

        cost = described({})
        leaves = f"{hoisted.summary()}, {job.options.prefetch} ahead"
        ordered, shown = turn_order(hoisted), turn_text(hoisted, cost)
        events = {
            group: dataclasses.replace(
                event,
                digest=f"{event.digest} {leaves}{ordered}",
                text=f"{event.text} ({leaves}{shown})",
            )
            for group, event in events.items()
        }
        limits = functools.partial(
            limited_run, events, f"graph {name}", timeout_s, checked=bool(options.agreement)
        )
        surroundings = Surroundings(
            job.order,
            None if options.prefetch == "auto" else options.prefetch,
            lambda runs, ahead: _plan_prefetch(job, runs, ahead, sorted(events)),
            limits,
            lambda gm: _part(job, gm, names, kind, _ended(hoisted, gm, encoded)),
            described,
            is_silent=not names and any(map(has_other_ranks, job.captured.groups)),
        )
        communicated = [event.digest for event in events.values()] or [job.name]
        digests = " ".join([kind, *communicated])
        code = boxed(HoistedCode(hoisted, code, digests, cost, surroundings))
    body = None if hoisted is None else collective_names(hoisted.body.graph)
    code = with_profiler_range(code, names, job.name, kind, body=body)
    if not job.options.agreement:
        return with_vote_limit(code, events, timeout_s)
    every_run = job.options.agreement != "first"
    return with_run_check(code, events, name, timeout_s, every_run=every_run, report=job.report)


def _with_residuals(job: CompileJob, code: Compiled, residuals: Sequence[Residual]) -> Compiled:
    return boxed(with_residuals(code, residuals, job.order)) if residuals else code


def _ended(
    hoisted: HoistedGraph, part: fx.GraphModule, encoded: Sequence[EncodedGrad]
) -> list[EncodedGrad]:
    """Returns the gradients of encoded reductions that a part of a graph returns."""
    if hoisted.reductions is None or part is not hoisted.reductions.end:
        return []
    at = {position: place for place, position in enumerate(hoisted.reductions.gradients)}
    return [
        dataclasses.replace(each, position=at[each.position])
        for each in encoded
        if each.position in at
    ]


def _part(
    job: CompileJob,
    gm: fx.GraphModule,
    names: Sequence[str],
    kind: str,
    encoded: Sequence[EncodedGrad],
) -> Compiled:
    """Returns code of gathers before a graph, or of reductions after it."""
    code = eager_codegen(replace_gloo_collectives(gm), ())
    code = job.overflows.watching(code, encoded, f"graph {job.name} {kind}")
    code = _with_grad_arenas(job, code, host_need(gm.graph))
    return with_part_range(code, names, collective_names(gm.graph), job.name, kind)


def _plan_prefetch(
    job: CompileJob, runs: Sequence[GraphRun], ahead: int | None, groups: Sequence[str]
) -> StepCost:
    options, step = job.options, BlockStep(runs, job.options.zero_stage, job.host_bytes)
    job.listeners.send(step)
    with job.listeners.report_errors("prefetch"):
        chosen = agreed_prefetch(
            step, options.memory_budget, job.free_bytes, groups, options.agreement_timeout_s, ahead
        )
    note_planned_peak(job.captured.gm, chosen.peak_bytes - chosen.residual_bytes)
    return chosen


def _built(
    template: Template,
    variant: ForwardVariant | BackwardVariant | None,
    output_strides: OutputStrides,
) -> tuple[fx.GraphModule, list[Any], list[Residual]]:
    """Returns the graph of a variant (None: the graph itself), its further fake inputs, and the
    residuals that are the last of them.
    """
    gm, extra = template.graph(), list[Any]()
    if isinstance(variant, ForwardVariant):
        gm, extra = build_forward_variant(gm, variant, output_strides)
    elif variant is not None:
        gm, extra = build_backward_variant(gm, variant, template.saved)
    pin_shards(gm.graph)
    gm, residuals = add_residual_inputs(gm)
    return gm, [*extra, *map(value_of, residual_inputs(gm.graph))], residuals
