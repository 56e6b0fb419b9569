"""The backend function of `torch.compile(model, backend="zpasses", options={...})`.

torch.compile calls `zpasses_backend` once per captured graph. The graph passes through the levels
of the pipeline: captured, joint, then forward and backward. Inductor or the eager code generator
makes code of the results, and the runtime (zpasses.runtime) wraps the code.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from zpasses import compat
from zpasses.backend.capture import Capture, capture, describe_inputs, tag_joint
from zpasses.backend.free_memory import agreed_free_bytes
from zpasses.backend.partition import PartitionPolicy, partition_step
from zpasses.backend.tuned import with_tuned_options
from zpasses.backend.tuning import with_tried_options
from zpasses.cost.kept_params import Repetition
from zpasses.cost.target import Target, current_target, use_target
from zpasses.dumps.recorders import recorders_for
from zpasses.errors import AgreementError, OptionError
from zpasses.graph.ops import UNSHARD
from zpasses.pipeline.observers import ObservedGraph, notify_observers
from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Level, Pass, Pipeline
from zpasses.pipeline.prediction import Predictor
from zpasses.pipeline.recorder import (
    Recorders,
    ResultHook,
    apply_bisect_limits,
    pass_options,
    run_recorded_passes,
)
from zpasses.ranks.agreement import compare_collectives, run_events
from zpasses.ranks.vote import (
    has_other_ranks,
    is_reported,
    rejoin_after_failure,
    report_failure,
    vote_timeout,
)
from zpasses.runtime.backward import BackwardDispatch, warn_if_always_reduced
from zpasses.runtime.backward_variants import BackwardVariant, build_backward_variant
from zpasses.runtime.codegen import boxed, eager_codegen
from zpasses.runtime.flush import GraphLowering, flush
from zpasses.runtime.forward import (
    AccumulationOptions,
    BoundParameters,
    ForwardDispatch,
    with_local_shards,
)
from zpasses.runtime.forward_variants import (
    ForwardVariant,
    ParamSlot,
    build_forward_variant,
    gather_ids,
    is_cached_param,
    param_slots,
    unmark_returned,
)
from zpasses.runtime.gloo import replace_gloo_collectives
from zpasses.runtime.grad_slots import GradSlot, always_reduced, grad_slots
from zpasses.runtime.profiling import with_profiler_range
from zpasses.runtime.run_checks import in_window, with_run_check, with_vote_limit
from zpasses.runtime.windows import Lowering, StepWindow, install_step_guard
from zpasses.sharding.module import with_plain_inputs

__all__ = ["zpasses_backend"]

log = logging.getLogger("zpasses")

Compiled = Callable[[list[Any]], Any]


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
    given = Options.parse(options)
    captured = capture(gm, example_inputs)
    parsed = _chosen_options(given, captured)
    pipeline, result_hook = apply_bisect_limits(parsed.passes(), compat.current_compile_id())
    compiler = _GraphCompiler(captured, parsed, pipeline, result_hook)
    if not parsed.agreement:
        _log_remaining_votes(pipeline, captured.groups, tuned=given.tuned is not None)
    try:
        with use_target(compiler.target), vote_timeout(parsed.agreement_timeout_s):
            compiler.open_recorders(example_inputs)
            return result_hook(with_plain_inputs(compiler.compile(), example_inputs), "outputs")
    except AgreementError as error:
        compiler.recorder.problem("agreement", error)
        raise
    except Exception as error:
        if compat.is_dynamo_restart(error):
            compiler.recorder.restarted()
            raise
        compiler.recorder.problem("compile", error)
        compiler.report(error)
        raise


def _chosen_options(options: Options, captured: Capture) -> Options:
    """Return the options with what `zpasses tune` tries now, or found before."""
    with vote_timeout(options.agreement_timeout_s):
        if options.agreement:
            rejoin_after_failure(captured.groups)
        return with_tuned_options(with_tried_options(options, captured), captured)


def _log_remaining_votes(pipeline: Pipeline, groups: Sequence[str], *, tuned: bool) -> None:
    if not any(map(has_other_ranks, groups)):
        return
    where = ["about the option 'tuned'"] if tuned else []
    if voting := dict.fromkeys(each.name for each in pipeline if each.votes()):
        where.append(f"in {', '.join(voting)}, whose choices must be equal on all ranks")
    for what in dict.fromkeys(each.votes_at_run_time for each in pipeline):
        where += [f"about {what} when they first run"] if what else []
    level = logging.WARNING if where else logging.INFO
    where.append("in coalesce_grad_reduction blocks")
    log.log(
        level,
        "agreement=False: ranks still vote %s. They wait up to agreement_timeout_s for each other.",
        ", and ".join(where),
    )


class _GraphCompiler:
    """Compiles one captured graph: runs the passes of each level and generates code."""

    def __init__(
        self, captured: Capture, options: Options, pipeline: Pipeline, result_hook: ResultHook
    ) -> None:
        self.name = compat.current_compile_id()
        self._result_hook = result_hook
        self.target = Target.parse(options.target) if options.target else None
        self.recorder = Recorders()
        self._captured, self._options, self._pipeline = captured, options, pipeline
        self._bound = BoundParameters()
        self._caches_params = False
        self._budget: str | None = None
        """Option `memory_budget`, with the bytes of "auto"."""

    def open_recorders(self, example_inputs: Sequence[Any]) -> None:
        """Start the dump and the structured trace of this compile, if they are enabled."""

        def describe() -> dict[str, Any]:
            options, pipeline = self._options.non_default(), str(self._pipeline)
            parts = {
                "name": self.name,
                "options": options,
                "pipeline": pipeline,
                "codegen": self._options.codegen,
            }
            return {**parts, **describe_inputs(self._captured, example_inputs)}

        ranks = self._options.dumping_ranks()
        self.recorder = recorders_for(
            self._options.dump_folder(), ranks, self.target or current_target(), describe
        )

    def compile(self) -> Callable[..., Any]:
        gm, inputs = self._captured.gm, self._captured.inputs
        self._find_budget()
        self._run_level(gm, Level.CAPTURED, "captured")
        if self._options.codegen == "eager":
            backward = functools.partial(self._backward, eager_codegen)
            inference = functools.partial(self._forward, eager_codegen, inference=True)
            compiled = compat.aot_compile(
                gm,
                inputs,
                functools.partial(self._forward, eager_codegen),
                backward,
                inference,
                self._partition,
            )
        else:
            patches = compat.inductor_config_patches(
                _Partitioner(self._partition, self._pipeline.digest()), self._options.inductor
            )
            compiled = compat.inductor_compile(
                gm, inputs, functools.partial(self._inductor_inner, patches), patches
            )
        self.recorder.done()
        positions, names = list(self._captured.shards), list(self._captured.shards.values())
        return with_local_shards(
            compiled,
            positions,
            names,
            self._bound if self._caches_params else None,
            self._accumulation(),
        )

    def _find_budget(self) -> None:
        self._budget = self._options.memory_budget
        if self._budget == "auto":
            device = torch.get_default_device()
            for value in self._captured.inputs:
                device = value.device if isinstance(value, torch.Tensor) else device
            self._budget = f"{agreed_free_bytes(self._captured.groups, device)}B"
        if self._budget is not None:
            self._pipeline = self._pipeline.with_memory_budget(self._budget)

    def _accumulation(self) -> AccumulationOptions:
        options = self._options
        if options.backwards_per_step > 1 or options.agreement is True:
            install_step_guard()
        timeout_s = options.agreement_timeout_s if options.agreement else None
        return AccumulationOptions(
            options.backwards_per_step, options.grad_accum_dtype, timeout_s, _close
        )

    # --- levels -----------------------------------------------------------------------------------
    def _partition(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        reads = [
            node for node in gm.graph.nodes if node.op == "call_function" and node.target is UNSHARD
        ]
        compat.eliminate_common_subexpressions(gm, reads)
        self._run_level(gm, Level.JOINT, "joint")
        regathers = [each for each in self._pipeline if each.name == "reshard-after-forward"]
        policy = PartitionPolicy(
            self._budget,
            self._captured.share,
            any(pass_options(each)["keep"] != "nothing" for each in regathers),
            self._captured.groups,
            self._options.recomputes_elementwise(),
            Repetition(self._options.backwards_per_step, self._captured.frozen),
        )
        with use_target(self.target), vote_timeout(self._options.agreement_timeout_s):
            partitioned = partition_step(gm, joint_inputs, policy, **kwargs)
        if partitioned.limit_bytes is not None:
            self._pipeline = self._pipeline.with_memory_budget(f"{partitioned.limit_bytes}B")
        if partitioned.note:
            log.info("graph %s: %s", self.name, partitioned.note)
            self.recorder.runtime_note("reshard-after-forward", partitioned.note)
        return partitioned.graphs

    def _forward(
        self,
        codegen: _Codegen,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        inference: bool = False,
    ) -> Compiled:
        if inference:
            self._run_level(gm, Level.JOINT, "inference")
        self._run_level(gm, Level.FORWARD, "inference" if inference else "forward")
        name = "inference" if inference else "forward"
        self._agree(gm, name)
        values = cast(Sequence[Any], gm.graph.output_node().args[0])
        unmark_returned(gm.graph, compat.user_outputs(values))
        found = param_slots(gm.graph)
        if not found:
            with self.recorder.record_errors(f"code of {name}"):
                return self._generate(codegen, gm, inputs, name)
        self._caches_params = True
        compat.undonate_saved(values, is_cached_param(gm.graph))
        state = compat.CompilerState()
        template = compat.clone_graph_module(gm)

        def compile_variant(variant: ForwardVariant) -> Compiled:
            with self._reporting():
                return generate(variant)

        def generate(variant: ForwardVariant) -> Compiled:
            variant_gm, extra = build_forward_variant(template, variant)
            log.debug(
                "graph %s: variant given %d of %d parameters, keeps %d",
                self.name,
                len(variant.given),
                len(found),
                len(variant.kept),
            )
            self.recorder.variant(
                name,
                name,
                _param_names(found, variant.given),
                _param_names(found, variant.kept),
                variant_gm.graph,
            )
            with state.restored(), self.recorder.record_errors(f"code of a variant of {name}"):
                return self._generate(codegen, variant_gm, [*inputs, *extra], name)

        return boxed(
            ForwardDispatch(
                found,
                gather_ids(template.graph),
                len(values),
                self._bound,
                inference,
                compile_variant,
            )
        )

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this rank failed to compile, if it has not told them yet."""
        if self._options.agreement and not is_reported(error):
            groups = self._captured.groups
            # A window ends in an error on all ranks, also if this rank's program catches it.
            report_failure(groups, self.name, error, recoverable=not in_window(groups))

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report failures of what is compiled late, when the call of the backend is over."""
        try:
            yield
        except Exception as error:
            self.report(error)
            raise

    def _backward(self, codegen: _Codegen, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        if compat.in_backward():
            with self._reporting():
                return self._compile_backward(codegen, gm, inputs)
        # torch compiles backwards of dynamic shapes ahead, and others when they first run. Ranks
        # may hold one of each, but must vote in one order: all compile when the backward first
        # runs.
        state, compiled = compat.CompilerState(), list[Compiled]()

        def run(args: list[Any]) -> Any:
            if not compiled:
                # A compile that failed may run again, and must not find its own changes.
                copied = compat.clone_graph_module(gm)
                with state.restored(), self._reporting():
                    compiled.append(self._compile_backward(codegen, copied, inputs))
            return compiled[0](args)

        return boxed(run)

    def _compile_backward(
        self, codegen: _Codegen, gm: fx.GraphModule, inputs: Sequence[Any]
    ) -> Compiled:
        self._run_level(gm, Level.BACKWARD, "backward")
        order = {name: i for i, name in enumerate(self._captured.shards.values())}
        left = [name for name in always_reduced(gm.graph) if name in order]
        compiled = boxed(
            self._result_hook(self._backward_code(codegen, gm, inputs, order), "gradients")
        )
        return boxed(warn_if_always_reduced(compiled, self.name, left, order)) if left else compiled

    def _backward_code(
        self, codegen: _Codegen, gm: fx.GraphModule, inputs: Sequence[Any], order: Mapping[str, int]
    ) -> Compiled:
        found = grad_slots(gm.graph)
        if not found or not all(slot.param in order and slot.reduction for slot in found):
            self._agree(gm, "backward")
            with self.recorder.record_errors("code of backward"):
                return self._generate(codegen, gm, inputs, "backward")
        state = compat.CompilerState()
        template = compat.clone_graph_module(gm)

        def compile_variant(variant: BackwardVariant) -> Compiled:
            with self._reporting():
                return generate(variant)

        def generate(variant: BackwardVariant) -> Compiled:
            variant_gm, extra = build_backward_variant(template, variant)
            self.recorder.variant(
                "backward",
                "backward",
                _param_names(found, variant.given),
                _param_names(found, variant.deferred),
                variant_gm.graph,
            )
            # Compare the variant that runs, because another rank may defer other gradients.
            self._agree(variant_gm, "backward")
            log.debug("graph %s: %s of %d gradients", self.name, variant, len(found))
            with state.restored(), self.recorder.record_errors("code of a variant of backward"):
                return self._generate(codegen, variant_gm, [*inputs, *extra], "backward")

        outputs = len(cast(Sequence[Any], gm.graph.output_node().args[0]))
        return boxed(BackwardDispatch(found, outputs, order, self._lowering(), compile_variant))

    def _generate(
        self, codegen: _Codegen, gm: fx.GraphModule, inputs: Sequence[Any], kind: str
    ) -> Compiled:
        runnable = replace_gloo_collectives(gm)
        name, timeout_s = f"{self.name} {kind}", self._options.agreement_timeout_s
        events = run_events(gm.graph, name)
        codegen = with_profiler_range(codegen, gm.graph, self.name, kind)
        if not self._options.agreement:
            return with_vote_limit(codegen(runnable, inputs), events, timeout_s)
        every_run = self._options.agreement != "first"
        return with_run_check(
            codegen, runnable, inputs, events, name, timeout_s, every_run=every_run
        )

    def _lowering(self) -> Lowering:
        if self._options.codegen == "eager":
            return GraphLowering(
                self._pipeline, eager_codegen, self.recorder, verify=self._options.verify
            )
        patches = compat.inductor_config_patches(
            _Partitioner(self._partition, self._pipeline.digest()), self._options.inductor
        )
        return GraphLowering(
            self._pipeline,
            functools.partial(compat.inductor_codegen_standalone, patches=patches),
            self.recorder,
            verify=self._options.verify,
        )

    def _run_level(self, gm: fx.GraphModule, level: Level, kind: str) -> None:
        if level is Level.JOINT:
            tag_joint(gm.graph, self._captured.shards)
        # torch may compile a backward late, outside of the call of the backend
        with use_target(self.target), vote_timeout(self._options.agreement_timeout_s):
            passes = self._pipeline.at(level)
            predictor = self._predictor(level, passes)
            records = run_recorded_passes(
                self.recorder.with_recorder(predictor),
                kind,
                level.value,
                gm.graph,
                passes,
                verify=self._options.verify,
            )
            if predictor is not None:
                self._record_prediction(predictor, kind, gm.graph)
        gm.recompile()
        name = f"{self.name} {kind}"
        for record in records:
            cost = f"{record.time_us:.0f} us, checks {record.check_us:.0f} us"
            log.debug("graph %s: %s changed %d, %s", name, record.text, record.changes, cost)
        notify_observers(ObservedGraph(name, kind, gm.graph, records))

    def _predictor(self, level: Level, passes: Sequence[Pass]) -> Predictor | None:
        """Predictions take time, so they are made only for a dump."""
        if not self.recorder.take_predictions() or level not in (Level.FORWARD, Level.BACKWARD):
            return None
        return Predictor(passes, current_target())

    def _record_prediction(self, predictor: Predictor, kind: str, graph: fx.Graph) -> None:
        found = predictor.predicted(graph)
        if found is not None:
            log.info("graph %s %s: %s", self.name, kind, found)
            self.recorder.prediction(kind, found)

    def _agree(self, gm: fx.GraphModule, kind: str) -> None:
        asks = self._options.agreement and torch.distributed.is_initialized()
        if asks:
            with self.recorder.record_errors("agreement"):
                compare_collectives(gm.graph, self.name, self._options.agreement_timeout_s)
        self.recorder.record_agreement(kind, gm.graph, asks)

    # --- Inductor ---------------------------------------------------------------------------------
    def _inductor_inner(
        self, patches: dict[str, Any], gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> Compiled:
        def codegen(graph: fx.GraphModule, values: Sequence[Any]) -> Compiled:
            return compat.inductor_codegen(graph, values, patches, copy.copy(kwargs))

        if kwargs.get("is_backward"):
            return self._backward(codegen, gm, inputs)
        return self._forward(codegen, gm, inputs, inference=bool(kwargs.get("is_inference")))


def _param_names(
    found: Sequence[ParamSlot] | Sequence[GradSlot], places: Iterable[int]
) -> list[str]:
    return [found[i].param for i in sorted(places)]


def _close(window: StepWindow) -> None:
    flush(window, window.agreement_timeout_s, window.failure)


_Codegen = Callable[[fx.GraphModule, Sequence[Any]], Compiled]


class _Partitioner(compat.CustomPartitionerFn):
    """Partitioner for Inductor that first runs the joint passes of a pipeline."""

    def __init__(self, run: Callable[..., Any], uuid: str) -> None:
        self._run, self._uuid = run, uuid

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        result: tuple[fx.GraphModule, fx.GraphModule] = self._run(gm, joint_inputs, **kwargs)
        return result

    def uuid(self) -> str:
        return self._uuid

    def __deepcopy__(self, memo: dict[int, Any]) -> _Partitioner:
        return self  # Inductor copies its configuration, which contains this object

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self._uuid,)  # Inductor pickles its configuration for its cache key
