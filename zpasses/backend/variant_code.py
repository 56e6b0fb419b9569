"""Makes code of the graphs of one compile, from rewritten graphs or from the compile cache.

A graph whose calls differ (cached parameters, deferred reductions) becomes a dispatcher, which
compiles a variant when it first runs. A graph or variant that the compile cache has is loaded.

What a call goes through, from the outside (f: of a forward only, b: of a backward only):

- `compiler.py`: checks of outputs, plain inputs; f: local shards of the parameters of the call
  (`runtime/forward.py`); then torch's autograd function
- b: a warning about reductions that cannot wait, a check that parameters have not changed
- arenas of what rests on the host
- the dispatcher, if calls differ: `ForwardDispatch`, `BackwardDispatch`
- residuals of error feedback
- the check that all ranks run this graph, and the time limit of its collectives
- the range of profilers
- `HoistedCode`, of blocks
- b: a look at gradients of encoded reductions
- Inductor's code
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import fx

import zpasses.runtime.exchanged_rows  # noqa: F401  (the operators)
from zpasses import compat
from zpasses.backend.cache.entry import Variant
from zpasses.backend.compile_job import Codegen, Compiled, CompileJob
from zpasses.backend.graph_facts import BackwardFacts, ForwardFacts, VariantFacts
from zpasses.backend.hoisted_parts import hoisted_code, hoisted_graph, with_grad_arenas
from zpasses.backend.partitioner import inductor_patches
from zpasses.graph.cached_params import param_slots
from zpasses.graph.encoding import expand_encodings
from zpasses.graph.error_feedback import Residual, add_residual_inputs, residual_inputs
from zpasses.graph.hoisting import HoistedGraph
from zpasses.graph.host_copies import host_need
from zpasses.graph.queries import returned_values, value_of
from zpasses.host.saved_arenas import SavedArenas, with_arenas
from zpasses.host.saved_values import with_values_back, with_values_out
from zpasses.option_values import format_size, parse_budget
from zpasses.pipeline.events import VariantBuilt
from zpasses.ranks.compared_collectives import (
    Sequences,
    call_sequences,
    compare_collectives,
    compare_sequences,
    run_events,
)
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
    pin_shards,
    static_strides,
)
from zpasses.runtime.free_memory import note_planned_peak
from zpasses.runtime.gloo import replace_gloo_collectives
from zpasses.runtime.grad_slots import grad_slots
from zpasses.runtime.overflows import encoded_grads
from zpasses.runtime.profiling import collective_names, with_profiler_range
from zpasses.runtime.residuals import with_residuals
from zpasses.runtime.run_checks import with_run_check, with_vote_limit
from zpasses.runtime.windows import Lowering

log = logging.getLogger("zpasses")

_UNTOLD = 1.003
"""What code may take of its plan without a warning."""


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
        code = with_grad_arenas(job, code, facts.host)
    code = boxed(job.result_hook(code, "gradients"))
    read = dict.fromkeys(name for params in facts.saved.values() for name in params)
    positions = {name: order[name] for name in read if name in order}
    if positions:
        code = boxed(with_value_check(code, positions))
    left = facts.always_reduced
    return boxed(warn_if_always_reduced(code, job.name, left, order)) if left else code


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
        return with_grad_arenas(job, codegen(gm, inputs), host_need(gm.graph))

    pipeline, verify = job.state.pipeline, job.options.verify
    target = job.options.target
    return GraphLowering(
        pipeline, with_arenas_of_grads, job.listeners, verify=verify, target=target
    )


# --- variants -------------------------------------------------------------------------------------
class _Made(NamedTuple):
    """Code of a variant, as Inductor generates it."""

    code: Compiled
    facts: VariantFacts
    hoisted: HoistedGraph | None
    """The parts of its graph, if `code` is that of its body."""


def _variant(job: CompileJob, template: Template, variant: Variant | None) -> Compiled:
    """Returns code of a variant (None: of the graph itself) that checks each run."""
    made = _loaded(job, template, variant) or _compiled(job, template, variant)
    code, facts, hoisted = made
    options, kind = job.options, template.kind
    name, events, body = f"{job.name} {kind}", facts.events, None
    code = job.overflows.watching(code, facts.encoded_grads, f"graph {name}")
    if hoisted is not None:
        outputs = len(returned_values(template.graph().graph))
        code, events = hoisted_code(job, kind, code, hoisted, facts, outputs)
        body = collective_names(hoisted.body.graph)
    code = with_profiler_range(code, facts.collectives, job.name, kind, body=body)
    timeout_s = options.agreement_timeout_s
    if options.agreement:
        every_run = options.agreement != "first"
        code = with_run_check(code, events, name, timeout_s, every_run=every_run, report=job.report)
    else:
        code = with_vote_limit(code, events, timeout_s)
    if facts.residuals:
        code = boxed(with_residuals(code, facts.residuals, job.order))
    return code


def _compiled(job: CompileJob, template: Template, variant: Variant | None) -> _Made:
    gm, extra, residuals = _built(template, variant)
    kind, what, sequences = template.kind, f"code of {template.kind}", Sequences()
    if variant is not None:
        what = f"code of a variant of {kind}"
        log.debug("graph %s %s: %s", job.name, kind, variant)
        job.listeners.send(_built_event(template, variant, gm.graph))
        if isinstance(variant, BackwardVariant):
            agree(job, gm, kind)
            sequences = call_sequences(gm.graph) if job.artifacts is not None else {}
    facts = VariantFacts(
        run_events(gm.graph, f"{job.name} {kind}"),
        collective_names(gm.graph),
        sequences,
        residuals,
        encoded_grads(gm.graph) if kind == "backward" else [],
    )
    hoisted = hoisted_graph(job, gm, kind, variant)
    inputs = [*template.inputs(), *extra, *(hoisted.extra_inputs if hoisted is not None else ())]
    whole = expand_encodings(replace_gloo_collectives(gm if hoisted is None else hoisted.body))
    with job.listeners.report_errors(what):
        code, strides, peak_bytes = _generated(template, whole, inputs, job.state.output_strides)
    if not isinstance(variant, BackwardVariant) or not (variant.given or variant.deferred):
        _warn_above_budget(job, kind, peak_bytes)
    _keep_output_strides(job, template, strides)
    if job.artifacts is not None:
        job.artifacts.add_code(kind, variant, code, facts)
    return _Made(code, facts, hoisted)


def _generated(
    template: Template, gm: fx.GraphModule, inputs: Sequence[Any], chosen: OutputStrides
) -> tuple[Compiled, OutputStrides, int]:
    """Returns code of a graph, the strides that it returns, and its peak of memory, 0 if unknown.

    Inductor mostly chooses the strides of an earlier variant again. Otherwise they are demanded in
    a second compile; in the first, that might have it compute values earlier than planned.
    """
    demanded = {} if template.kind == "backward" else static_strides(gm.graph, chosen)
    again = compat.clone_graph_module(gm) if demanded else None
    strides: list[tuple[int, ...] | None] = []
    with template.state.restored(strides), compat.observing_peaks() as peaks:
        code = template.codegen(gm, inputs)
    found = dict(enumerate(strides))  # nothing, if they are not known
    if again is not None and any(found.get(i) != demanded[i] for i in demanded):
        compat.pin_output_strides(again.graph.output_node(), demanded)
        return _generated(template, again, inputs, ())
    return code, strides, max(peaks, default=0)


def _warn_above_budget(job: CompileJob, kind: str, peak_bytes: int) -> None:
    """Warns if the code of a graph takes more than the plan may, which did not foresee it."""
    budget = job.state.pipeline.memory_budget
    if job.budget is None or budget is None or kind == "inference":
        return
    limit = parse_budget(budget, "memory_budget").most_bytes
    if limit is not None and peak_bytes > limit * _UNTOLD:
        log.warning(
            "graph %s: the code of %s takes %s at its peak, %s more than the %s that "
            "memory_budget=%r leaves for it, because Inductor's kernels hold more than the plan "
            "counted. Set a budget that is smaller by as much.",
            job.name,
            kind,
            format_size(peak_bytes, up=True),
            format_size(peak_bytes - limit, up=True),
            format_size(limit),
            job.options.memory_budget,
        )


def _built_event(template: Template, variant: Variant, graph: fx.Graph) -> VariantBuilt:
    original = template.graph().graph
    if isinstance(variant, ForwardVariant):
        params = [slot.param for slot in param_slots(original)]
        slots = variant.given, variant.kept, frozenset[int]()
    else:
        params = [slot.param for slot in grad_slots(original)]
        slots = variant.given, variant.deferred, variant.stepped
    given, kept, stepped = ([params[i] for i in sorted(each)] for each in slots)
    return VariantBuilt(template.kind, given, kept, stepped, graph)


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


def _loaded(job: CompileJob, template: Template, variant: Variant | None) -> _Made | None:
    """The same from the compile cache, if it is stored."""
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
        agree_on(job, stored.facts.sequences)
    old, new = f"graph {job.artifacts.entry.name} ", f"graph {job.name} "
    events = {
        group: dataclasses.replace(event, text=event.text.replace(old, new, 1))
        for group, event in stored.facts.events.items()
    }
    hoisted = None
    if job.options.prefetch:
        gm, *_ = _built(template, variant)
        hoisted = hoisted_graph(job, gm, kind, variant)
    return _Made(code, dataclasses.replace(stored.facts, events=events), hoisted)


def _built(
    template: Template, variant: Variant | None
) -> tuple[fx.GraphModule, list[Any], list[Residual]]:
    """Returns the graph of a variant (None: the graph itself), its further fake inputs, and the
    residuals that are the last of them.
    """
    gm, extra = template.graph(), list[Any]()
    if isinstance(variant, ForwardVariant):
        gm, extra = build_forward_variant(gm, variant)
    elif variant is not None:
        gm, extra = build_backward_variant(gm, variant, template.saved)
    pin_shards(gm.graph)
    gm, residuals = add_residual_inputs(gm)
    return gm, [*extra, *map(value_of, residual_inputs(gm.graph))], residuals
