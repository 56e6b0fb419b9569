"""The backend function of `torch.compile(model, backend="zpasses", options={...})`.

torch.compile calls `zpasses_backend` once per captured graph. The graph passes through the levels
of the pipeline: captured, joint, then forward and backward. Inductor or the eager code generator
makes code of the results, and the runtime (zpasses.runtime) wraps the code.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.backend.cache.stored_graph import from_cache
from zpasses.backend.captured import Capture, capture
from zpasses.backend.compile_graph import compile_captured
from zpasses.backend.compile_job import CompileJob, compiling_graph, open_events, report
from zpasses.backend.tuning import with_tried_options
from zpasses.cost.time.fused_kernels import use_fusion
from zpasses.cost.time.target import Target, current_target, use_target
from zpasses.errors import AgreementError, OptionError
from zpasses.garbage import PausedCollection, no_garbage_collection
from zpasses.pipeline.bisection import apply_bisect_limits
from zpasses.pipeline.events import CompileEnded, Events, Problem
from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Pipeline
from zpasses.ranks.notes import check_conflicts
from zpasses.ranks.vote import has_other_ranks, rejoin_after_failure, vote_timeout
from zpasses.runtime.forward import AccumulationOptions, with_local_shards
from zpasses.sharding.guard import with_guarded_outputs, with_plain_inputs

log = logging.getLogger("zpasses")

_paused = PausedCollection()


def _collect_no_garbage_in_compiles() -> None:
    """From now on, no cyclic garbage is collected while torch compiles, with Dynamo's trace.

    It applies to all compiles of this process, because what runs before the backend is called does
    not know the backend. Further calls do nothing.
    """
    compat.call_around_compiles(_paused.start, _paused.end)


# torch.compile imports this module before the first trace.
_collect_no_garbage_in_compiles()


def zpasses_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one captured graph. `torch.compile` calls this function.

    Args:
        options: see `zpasses.pipeline.options.Options`.
        mode: not supported; must be None.

    Raises:
        OptionError: for unknown options, passes or values, before anything is compiled.
        PassError: if a pass fails or leaves an invalid graph.
        AgreementError: if the ranks are about to run different collectives, or another rank failed.
        ShardingError: if the model writes to a gathered copy of a parameter.
    """
    if mode is not None:
        raise OptionError(
            f"backend 'zpasses' has no modes (got {mode!r}); set Inductor's options with "
            f"options={{'inductor': {{...}}}}."
        )
    _collect_no_garbage_in_compiles()  # torch._dynamo.reset forgets it
    given = Options.parse(options)
    captured = capture(gm, example_inputs)
    with _reporting_failures(captured, given):
        return _compile(captured, given, example_inputs)


def _compile(
    captured: Capture, given: Options, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    _check_accumulation(given, captured)
    chosen = _chosen_options(given, captured)
    pipeline, result_hook = apply_bisect_limits(chosen.passes(), compat.current_compile_id())
    target = Target.parse(chosen.target) if chosen.target else current_target()
    if not chosen.agreement:
        _log_remaining_votes(pipeline, captured.groups, given)
    with (
        no_garbage_collection(),
        use_target(target),
        use_fusion(chosen.codegen == "inductor"),
        vote_timeout(chosen.agreement_timeout_s),
    ):
        events = open_events(captured, example_inputs, chosen, pipeline, target)
        with _sending_failures(events):
            with compiling_graph(compat.current_compile_id(), captured, chosen):
                begun = CompileJob.begin(captured, chosen, pipeline, target, events, result_hook)
            job, compiled = from_cache(begun, example_inputs)
            if compiled is None:
                compiled = compile_captured(job)
            events.send(CompileEnded())
            captured.inputs.clear()  # the values of this call, which the code would keep in memory
            compiled = with_plain_inputs(_with_local_shards(job, compiled), example_inputs)
            compiled = with_guarded_outputs(compiled, captured.returned)
            return result_hook(compiled, "outputs")


def _check_accumulation(options: Options, captured: Capture) -> None:
    if options.grad_accum == "shards" and captured.shards and not captured.is_hybrid:
        raise OptionError(
            "grad_accum='shards' is for hybrid sharding, and no parameter of this graph has "
            "replicas. Pass a mesh of two dimensions (replicate, shard) to zpasses.shard, or leave "
            "grad_accum out."
        )


def _chosen_options(options: Options, captured: Capture) -> Options:
    """Return the options, or those that `zpasses tune` tries in this run."""
    with vote_timeout(options.agreement_timeout_s):
        if options.agreement:
            check_conflicts()
            rejoin_after_failure(captured.groups)
        return with_tried_options(options, captured)


def _log_remaining_votes(pipeline: Pipeline, groups: Sequence[str], options: Options) -> None:
    if not any(map(has_other_ranks, groups)):
        return
    where = []
    if options.prefetch == "auto":
        where.append("for how many graphs ahead gathers start")
    if options.cache and options.codegen == "inductor":
        where.append("whether all have the graph in their compile caches")
    if voting := dict.fromkeys(each.name for each in pipeline if each.facts.votes):
        where.append(f"in {', '.join(voting)}, whose choices must be equal on all ranks")
    if pipeline.uses_engines:
        where.append("about the routes of gathers when they first run")
    level = logging.WARNING if where else logging.INFO
    where.append("in coalesce_grad_reduction blocks")
    log.log(
        level,
        "agreement=False: ranks still vote %s. They wait up to agreement_timeout_s for each other.",
        ", and ".join(where),
    )


@contextlib.contextmanager
def _reporting_failures(captured: Capture, options: Options) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # interrupts, too
        if not compat.is_dynamo_restart(error):
            report(captured, options, compat.current_compile_id(), error)
        raise


@contextlib.contextmanager
def _sending_failures(events: Events) -> Iterator[None]:
    try:
        yield
    except AgreementError as error:
        events.send(Problem("agreement", error))
        raise
    except Exception as error:
        if compat.is_dynamo_restart(error):
            events.send(CompileEnded(restarted=True))
        else:
            events.send(Problem("compile", error))
        raise


def _with_local_shards(job: CompileJob, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the code of the captured graph so that it takes the inputs that Dynamo gave."""
    options, shards = job.options, job.captured.shards
    timeout_s = options.agreement_timeout_s if options.agreement else None
    accumulation = AccumulationOptions(
        options.backwards_per_step, options.grad_accum_dtype, timeout_s
    )
    return with_local_shards(
        compiled,
        list(shards),
        list(shards.values()),
        job.bound if job.state.caches_params else None,
        accumulation,
        job.compiling,
    )
