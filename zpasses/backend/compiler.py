"""`torch.compile(model, backend="zpasses", options={...})`."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from zpasses import compat
from zpasses.backend.capture import Capture, capture, describe_inputs, tag_joint
from zpasses.cost.target import Target, current_target, use_target
from zpasses.dumps.recorders import recorders_for
from zpasses.errors import AgreementError, OptionError
from zpasses.graph.ops import UNSHARD
from zpasses.pipeline.observers import GraphLog, notify_observers
from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Level, Pipeline
from zpasses.pipeline.recorder import Recorders, ResultHook, apply_bisect_limits, recorded_passes
from zpasses.ranks.agreement import agree
from zpasses.ranks.vote import report_failure
from zpasses.runtime.backward import BackwardDispatch, warn_if_always_reduced
from zpasses.runtime.backward_variants import BackwardVariant, cut_backward
from zpasses.runtime.barrier import with_barrier
from zpasses.runtime.codegen import boxed, eager_codegen
from zpasses.runtime.flush import GraphLowering, flush
from zpasses.runtime.forward import (
    Accumulation,
    BoundParameters,
    ForwardDispatch,
    with_local_shards,
)
from zpasses.runtime.forward_variants import (
    ForwardVariant,
    ParamSlot,
    cut_forward,
    gather_ids,
    is_cached_param,
    param_slots,
    unmark_returned,
)
from zpasses.runtime.gloo import replace_gloo_all_gathers
from zpasses.runtime.grad_slots import GradSlot, always_reduced, grad_slots
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
    """Compile one captured graph. `torch.compile` calls it; see `zpasses.pipeline.options.Options`
    for the options.

    Raises:
        OptionError: for unknown options, passes or values, before anything is compiled.
        PassError: when a pass leaves a graph that is not right.
        AgreementError: when the ranks are about to run different collectives.
        ShardingError: when the model writes to a gathered copy of a parameter.
    """
    if mode is not None:
        raise OptionError(
            f"backend 'zpasses' has no modes (got {mode!r}); set Inductor's options with "
            f"options={{'inductor': {{...}}}}."
        )
    parsed = Options.parse(options)
    captured = capture(gm, example_inputs)
    pipeline, record = apply_bisect_limits(parsed.passes(), compat.compile_name())
    compiler = _GraphCompiler(captured, parsed, pipeline, record)
    try:
        with use_target(compiler.target):
            compiler.open_recorders(example_inputs)
            return record(with_plain_inputs(compiler.compile(), example_inputs), "outputs")
    except AgreementError as error:
        compiler.recorder.problem("agreement", error)
        raise
    except Exception as error:
        if compat.is_restart(error):
            compiler.recorder.restarted()
            raise
        compiler.recorder.problem("compile", error)
        if parsed.agreement:
            report_failure(captured.groups, compiler.name, error)
        raise


class _GraphCompiler:
    """Takes one captured graph through the levels of a pipeline to runnable code."""

    def __init__(
        self, captured: Capture, options: Options, pipeline: Pipeline, record: ResultHook
    ) -> None:
        self.name = compat.compile_name()
        self._record = record
        self.target = Target.parse(options.target) if options.target else None
        self.recorder = Recorders()
        self._captured, self._options, self._pipeline = captured, options, pipeline
        self._bound = BoundParameters()
        self._retains = False

    def open_recorders(self, example_inputs: Sequence[Any]) -> None:
        """Start the dump of this compile, if somebody wants one."""

        def describe() -> dict[str, Any]:
            options, pipeline = self._options.as_text(), str(self._pipeline)
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
            patches = compat.inductor_patches(
                _Partitioner(self._partition, self._pipeline.digest()), self._options.inductor
            )
            compiled = compat.inductor_compile(
                gm, inputs, functools.partial(self._inductor_inner, patches), patches
            )
        self.recorder.done()
        positions, names = list(self._captured.shards), list(self._captured.shards.values())
        return with_local_shards(
            compiled, positions, names, self._bound if self._retains else None, self._accumulation()
        )

    def _accumulation(self) -> Accumulation:
        options = self._options
        if options.backwards_per_step > 1:
            install_step_guard()
        timeout_s = options.agreement_timeout_s if options.agreement else None
        return Accumulation(options.backwards_per_step, options.grad_accum_dtype, timeout_s, _close)

    # --- levels -----------------------------------------------------------------------------------
    def _partition(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        reads = [
            node for node in gm.graph.nodes if node.op == "call_function" and node.target is UNSHARD
        ]
        compat.eliminate_common_subexpressions(gm, reads)
        self._run_level(gm, Level.JOINT, "joint")
        return compat.partition(
            gm, joint_inputs, recompute_elementwise=self._options.recomputes_elementwise(), **kwargs
        )

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
        unmark_returned(gm.graph, compat.returned_to_caller(values))
        found = param_slots(gm.graph)
        if not found:
            with self.recorder.watching(f"code of {name}"):
                return self._generate(codegen, gm, inputs)
        self._retains = True
        compat.undonate_saved(values, is_cached_param(gm.graph))
        state = compat.CompilerState()
        template = compat.clone_graph_module(gm)

        def compile_variant(variant: ForwardVariant) -> Compiled:
            cut, extra = cut_forward(template, variant)
            log.debug(
                "graph %s: variant given %d of %d parameters, keeps %d",
                self.name,
                len(variant.given),
                len(found),
                len(variant.kept),
            )
            self.recorder.variant(
                name, name, _named(found, variant.given), _named(found, variant.kept), cut.graph
            )
            with state.restored(), self.recorder.watching(f"code of a variant of {name}"):
                return self._generate(codegen, cut, [*inputs, *extra])

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

    def _backward(self, codegen: _Codegen, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        self._run_level(gm, Level.BACKWARD, "backward")
        order = {name: i for i, name in enumerate(self._captured.shards.values())}
        left = [name for name in always_reduced(gm.graph) if name in order]
        compiled = boxed(self._record(self._deferring(codegen, gm, inputs, order), "gradients"))
        return boxed(warn_if_always_reduced(compiled, self.name, left, order)) if left else compiled

    def _deferring(
        self, codegen: _Codegen, gm: fx.GraphModule, inputs: Sequence[Any], order: Mapping[str, int]
    ) -> Compiled:
        found = grad_slots(gm.graph)
        if not found or not all(slot.param in order and slot.reduction for slot in found):
            self._agree(gm, "backward")
            with self.recorder.watching("code of backward"):
                return self._generate(codegen, gm, inputs)
        state = compat.CompilerState()
        template = compat.clone_graph_module(gm)

        def compile_variant(variant: BackwardVariant) -> Compiled:
            cut, extra = cut_backward(template, variant)
            self.recorder.variant(
                "backward",
                "backward",
                _named(found, variant.given),
                _named(found, variant.deferred),
                cut.graph,
            )
            self._agree(
                cut, "backward"
            )  # on what runs: a rank may defer gradients that others do not have
            log.debug("graph %s: %s of %d gradients", self.name, variant, len(found))
            with state.restored(), self.recorder.watching("code of a variant of backward"):
                return self._generate(codegen, cut, [*inputs, *extra])

        outputs = len(cast(Sequence[Any], gm.graph.output_node().args[0]))
        return boxed(BackwardDispatch(found, outputs, order, self._lowering(), compile_variant))

    def _generate(self, codegen: _Codegen, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        runnable = replace_gloo_all_gathers(gm)
        return (
            with_barrier(codegen, runnable, inputs)
            if self._options.agreement
            else codegen(runnable, inputs)
        )

    def _lowering(self) -> Lowering:
        if self._options.codegen == "eager":
            return GraphLowering(self._pipeline, eager_codegen, self.recorder)
        patches = compat.inductor_patches(
            _Partitioner(self._partition, self._pipeline.digest()), self._options.inductor
        )
        return GraphLowering(
            self._pipeline,
            functools.partial(compat.inductor_codegen_alone, patches=patches),
            self.recorder,
        )

    def _run_level(self, gm: fx.GraphModule, level: Level, kind: str) -> None:
        if level is Level.JOINT:
            tag_joint(gm.graph, self._captured.shards)
        with use_target(self.target):  # torch may compile a backward late
            records = recorded_passes(
                self.recorder, kind, level.value, gm.graph, self._pipeline.at(level)
            )
        gm.recompile()
        name = f"{self.name} {kind}"
        for record in records:
            cost = f"{record.time_us:.0f} us, checks {record.check_us:.0f} us"
            log.debug("graph %s: %s changed %d, %s", name, record.text, record.changes, cost)
        notify_observers(GraphLog(name, kind, gm.graph, records))

    def _agree(self, gm: fx.GraphModule, kind: str) -> None:
        asks = self._options.agreement and torch.distributed.is_initialized()
        if asks:
            with self.recorder.watching("agreement"):
                agree(gm.graph, self.name, self._options.agreement_timeout_s)
        self.recorder.agreed(kind, gm.graph, asks)

    # --- Inductor ---------------------------------------------------------------------------------
    def _inductor_inner(
        self, patches: dict[str, Any], gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> Compiled:
        def codegen(graph: fx.GraphModule, values: Sequence[Any]) -> Compiled:
            return compat.inductor_codegen(graph, values, patches, copy.copy(kwargs))

        if kwargs.get("is_backward"):
            return self._backward(codegen, gm, inputs)
        return self._forward(codegen, gm, inputs, inference=bool(kwargs.get("is_inference")))


def _named(found: Sequence[ParamSlot] | Sequence[GradSlot], places: Iterable[int]) -> list[str]:
    return [found[i].param for i in sorted(places)]


def _close(window: StepWindow) -> None:
    flush(window, window.agreement_timeout_s, window.broken)


_Codegen = Callable[[fx.GraphModule, Sequence[Any]], Compiled]


class _Partitioner(compat.CustomPartitionerFn):
    """Inductor's partitioner, after the joint passes of a pipeline."""

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
        return self  # Inductor copies its configuration, of which this is a part

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self._uuid,)  # and pickles it for the key of its cache
