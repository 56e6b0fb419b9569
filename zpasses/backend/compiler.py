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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import fx

from zpasses import compat
from zpasses.backend.cache.artifacts import GraphArtifacts
from zpasses.backend.cache.graph_text import NotCacheableError
from zpasses.backend.cache.key import graph_key, refusal, refusal_here
from zpasses.backend.cache.lookup import decline_artifacts, find_artifacts
from zpasses.backend.cache.stored_graph import StoredGraph
from zpasses.backend.capture import Capture, capture, describe_inputs, tag_joint
from zpasses.backend.code import (
    Codegen,
    Compiled,
    GraphCompiler,
    Template,
    backward_facts,
    forward_facts,
)
from zpasses.backend.free_memory import agreed_free_bytes
from zpasses.backend.garbage import no_garbage_collection_in_compiles
from zpasses.backend.partition import PartitionPolicy, partition_step
from zpasses.backend.tuning import with_tried_options
from zpasses.cost.kept_params import Repetition
from zpasses.cost.target import Target, current_target, use_target
from zpasses.dumps.recorders import recorders_for
from zpasses.errors import AgreementError, OptionError
from zpasses.garbage import no_garbage_collection
from zpasses.graph.nodes import put_inputs_first
from zpasses.graph.ops import UNSHARD
from zpasses.graph.regathers import remove_regathers
from zpasses.graph.subgraphs import read_subgraph_inputs_directly
from zpasses.pipeline.observers import ObservedGraph, notify_observers
from zpasses.pipeline.options import Options
from zpasses.pipeline.passes import Level, Pass
from zpasses.pipeline.pipeline import Pipeline
from zpasses.pipeline.prediction import Predictor
from zpasses.pipeline.recorder import (
    Recorders,
    ResultHook,
    apply_bisect_limits,
    run_recorded_passes,
)
from zpasses.ranks.compiling import compiling
from zpasses.ranks.notes import check_conflicts
from zpasses.ranks.vote import (
    has_other_ranks,
    is_reported,
    pass_on_failure,
    recorded_answers,
    rejoin_after_failure,
    report_failure,
    vote_timeout,
)
from zpasses.runtime.codegen import boxed, eager_codegen
from zpasses.runtime.flush import GraphLowering, flush
from zpasses.runtime.forward import AccumulationOptions, BoundParameters, with_local_shards
from zpasses.runtime.forward_variants import is_cached_param, saved_params, unmark_returned
from zpasses.runtime.run_checks import in_window
from zpasses.runtime.windows import Lowering, StepWindow, install_step_guard
from zpasses.sharding.gathered import with_plain_inputs

__all__ = ["zpasses_backend"]

log = logging.getLogger("zpasses")

# torch.compile imports this module before the first trace.
no_garbage_collection_in_compiles()


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
    no_garbage_collection_in_compiles()  # torch._dynamo.reset forgets it
    given = Options.parse(options)
    captured = capture(gm, example_inputs)
    if given.grad_accum == "shards" and captured.shards and not captured.is_hybrid:
        raise OptionError(
            "grad_accum='shards' is for hybrid sharding, and no parameter of this graph has "
            "replicas. Pass a mesh of two dimensions (replicate, shard) to zpasses.shard, or leave "
            "grad_accum out."
        )
    parsed = _chosen_options(given, captured)
    pipeline, result_hook = apply_bisect_limits(parsed.passes(), compat.current_compile_id())
    compiler = _GraphCompiler(captured, parsed, pipeline, result_hook)
    if not parsed.agreement:
        _log_remaining_votes(pipeline, captured.groups, given)
    try:
        with (
            no_garbage_collection(),
            use_target(compiler.target),
            vote_timeout(parsed.agreement_timeout_s),
        ):
            compiler.open_recorders(example_inputs)
            return result_hook(
                with_plain_inputs(compiler.compile(example_inputs), example_inputs), "outputs"
            )
    except AgreementError as error:
        compiler.recorder.problem("agreement", error)
        compiler.report(error)
        raise
    except Exception as error:
        if compat.is_dynamo_restart(error):
            compiler.recorder.restarted()
            raise
        compiler.recorder.problem("compile", error)
        compiler.report(error)
        raise


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
    for what in dict.fromkeys(each.facts.votes_at_run_time for each in pipeline):
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
        self._saved_params: dict[str, tuple[str, ...]] = {}
        self._budget: str | None = None
        """Option `memory_budget`, with the bytes of "auto"."""
        self._free_bytes: int | None = None
        """Those bytes."""
        self._given_pipeline = pipeline
        """The passes before they get the bytes of "auto", which differ from start to start."""
        self._artifacts: GraphArtifacts | None = None
        """What the compile cache has, or gets, of this graph."""
        self._in_call = False
        """Whether torch has called the backend, which has not returned yet."""

    def open_recorders(self, example_inputs: Sequence[Any]) -> None:
        """Start the dump and the structured trace of this compile, if they are enabled."""

        def describe() -> dict[str, Any]:
            options, pipeline = self._options.non_default(), str(self._pipeline)
            parts = {
                "name": self.name,
                "options": options,
                "pipeline": pipeline,
                "codegen": self._options.codegen,
                "recompile_reason": compat.recompile_reason(),
            }
            return {**parts, **describe_inputs(self._captured, example_inputs)}

        ranks = self._options.dumping_ranks()
        self.recorder = recorders_for(
            self._options.dump_folder(), ranks, self.target or current_target(), describe
        )

    def compile(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns the code of the graph, from the compile cache if all ranks have it there.

        Args:
            example_inputs: the inputs that Dynamo gave.
        """
        self._find_budget()
        compiled = self._from_cache(example_inputs)
        if compiled is None:
            self._in_call = True
            try:
                with self._compiling():
                    compiled = compat.call_with_stack_room(self._compile)
            finally:
                self._in_call = False
        self.recorder.done()
        positions, names = list(self._captured.shards), list(self._captured.shards.values())
        return with_local_shards(
            compiled,
            positions,
            names,
            self._bound if self._caches_params else None,
            self._accumulation(),
            self._compiling,
        )

    def _compiling(self) -> AbstractContextManager[None]:
        ranks = self._options.dumping_ranks()
        dumps = ranks is None or compat.global_rank() in ranks
        folder = self._options.dump_folder() if dumps else None
        params, options = list(self._captured.shards.values()), self._options.non_default()
        return compiling(self.name, params, folder, options)

    def _compile(self) -> Callable[..., Any]:
        gm, inputs = self._captured.gm, self._captured.inputs
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._recording_answers())
            self._run_level(gm, Level.CAPTURED, "captured")
            compiled: Callable[..., Any]
            if self._options.codegen == "eager":
                compiled = compat.aot_compile(
                    gm,
                    inputs,
                    functools.partial(self._forward, eager_codegen),
                    functools.partial(self._backward, eager_codegen),
                    functools.partial(self._forward, eager_codegen, inference=True),
                    self._partition,
                )
                return compiled
            patches = self._patches()
            inner = functools.partial(self._inductor_inner, patches)
            if self._artifacts is None:
                compiled = compat.inductor_compile(gm, inputs, inner, patches)
                return compiled
            compiled, result = compat.inductor_compile_packed(gm, inputs, inner, patches)
        if result is None:
            self._artifacts.give_up("torch cannot store what AOTAutograd made of it")
        self._artifacts.entry.result = result
        self._artifacts.write_if_complete()
        return compiled

    def _patches(self) -> dict[str, Any]:
        partitioner = _Partitioner(self._partition, self._pipeline.digest())
        return compat.inductor_config_patches(partitioner, self._options.inductor)

    # --- the compile cache ------------------------------------------------------------------------
    def _from_cache(self, example_inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """Returns the code of the graph, or None if it must be compiled.

        Then `self._artifacts` takes what is compiled, unless the graph cannot be stored.
        """
        started = time.perf_counter()
        reason = refusal(self._captured, self._options, self._pipeline)
        try:
            if reason is None:
                key = graph_key(self._captured, example_inputs, self._options, self._given_pipeline)
                reason = refusal_here(self._options, recorded=bool(self.recorder))
                if reason is not None:  # a dump, for example, is often that of one rank
                    decline_artifacts(key, self._captured.groups)
        except NotCacheableError as error:
            reason = str(error)
        if reason is not None:
            log.info("graph %s: without the compile cache: %s", self.name, reason)
            return None
        graphs: list[StoredGraph] = []

        def load(artifacts: GraphArtifacts) -> None:
            compiler = self._graph_compiler(artifacts)
            graphs.append(StoredGraph(artifacts, self._captured.inputs, compiler, self._codegen))

        found = find_artifacts(key, self._captured.groups, self._free_bytes, load)
        if isinstance(found, str):
            log.info("graph %s: not in the compile cache: %s", self.name, found)
            self._artifacts = GraphArtifacts.new(key.digest, self.name)
            self._artifacts.entry.free_bytes = self._free_bytes
            return None
        budget, facts = found.entry.memory_budget, found.entry.forward
        if budget is not None:
            self._pipeline = self._pipeline.with_memory_budget(budget)
        self._caches_params = facts is not None and bool(facts.slots)
        graphs[0].finish()
        taken = time.perf_counter() - started
        log.info("graph %s: from the compile cache, in %.2f s", self.name, taken)
        return graphs[0].compiled

    def _codegen(self, settings: Mapping[str, Any]) -> Codegen:
        patches = self._patches()
        return lambda gm, inputs: compat.inductor_codegen(gm, inputs, patches, dict(settings))

    @contextlib.contextmanager
    def _recording_answers(self) -> Iterator[None]:
        if self._artifacts is None or self._artifacts.loaded:
            yield
            return
        with recorded_answers(self._artifacts.entry.answers):
            yield

    def _graph_compiler(self, artifacts: GraphArtifacts | None) -> GraphCompiler:
        order = {name: i for i, name in enumerate(self._captured.shards.values())}
        return GraphCompiler(
            self.name,
            self._options,
            self.recorder,
            order,
            self._bound,
            self.report,
            self._compiling,
            self._lowering,
            self._result_hook,
            artifacts,
            self.target or current_target(),
            self._free_bytes,
        )

    def _find_budget(self) -> None:
        self._budget = self._options.memory_budget
        if self._budget == "auto":
            device = torch.get_default_device()
            for value in self._captured.inputs:
                device = value.device if isinstance(value, torch.Tensor) else device
            self._free_bytes = agreed_free_bytes(self._captured.groups, device)
            self._budget = f"{self._free_bytes}B"
        if self._options.prefetch:
            self._budget = None  # it bounds the whole step, see zpasses.backend.prefetch
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
        if compat.is_joint_of_subgraph(gm):
            return compat.partition(
                gm,
                joint_inputs,
                recompute_elementwise=self._options.recomputes_elementwise(),
                **kwargs,
            )
        read_subgraph_inputs_directly(gm)
        reads = [
            node for node in gm.graph.nodes if node.op == "call_function" and node.target is UNSHARD
        ]
        compat.eliminate_common_subexpressions(gm, reads)
        self._run_level(gm, Level.JOINT, "joint")
        policy = PartitionPolicy(
            self._budget,
            self._captured.share,
            any(each.facts.keeps_params for each in self._pipeline),
            self._captured.groups,
            self._options.recomputes_elementwise(),
            Repetition(self._options.backwards_per_step, self._captured.frozen),
        )
        with use_target(self.target), vote_timeout(self._options.agreement_timeout_s):
            partitioned = partition_step(
                gm, joint_inputs, policy, fallback_cost=self._pipeline.fallback_cost, **kwargs
            )
        if partitioned.limit_bytes is not None:
            limit = f"{partitioned.limit_bytes}B"
            self._pipeline = self._pipeline.with_memory_budget(limit)
            if self._artifacts is not None:
                self._artifacts.entry.memory_budget = limit
        if partitioned.note:
            log.info("graph %s: %s", self.name, partitioned.note)
            for each in self._pipeline:
                if each.facts.regathers:
                    self.recorder.runtime_note(each.name, partitioned.note)
        return partitioned.graphs

    def _forward(
        self,
        codegen: Codegen,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        inference: bool = False,
    ) -> Compiled:
        if inference:
            self._run_level(gm, Level.JOINT, "inference")
            remove_regathers(gm.graph)
            gm.recompile()
        self._run_level(gm, Level.FORWARD, "inference" if inference else "forward")
        kind = "inference" if inference else "forward"
        graphs = self._graph_compiler(self._artifacts)
        graphs.agree(gm, kind)
        values = cast(Sequence[Any], gm.graph.output_node().args[0])
        unmark_returned(gm.graph, compat.user_outputs(values))
        if any(map(compat.is_subgraph_call, gm.graph.nodes)):
            # Inductor would let subgraphs overwrite inputs, by the positions of the outer graph's
            # saved values: a caller then reuses memory that a subgraph has returned.
            compat.undonate_saved(values, lambda value: True)
        facts = forward_facts(gm, kind)
        self._saved_params = saved_params(gm.graph)
        if self._artifacts is not None:
            self._artifacts.set_forward(facts, gm, inputs)
        if facts.slots:
            self._caches_params = True
            compat.undonate_saved(values, is_cached_param(gm.graph))
            gm = compat.clone_graph_module(gm)
        code = graphs.forward(Template.of(kind, gm, inputs, codegen), facts)
        compat.report_output_strides(graphs.output_strides)
        return code

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this rank failed to compile, if it has not told them yet."""
        groups = self._captured.groups
        if self._options.agreement and isinstance(error, AgreementError):
            pass_on_failure(groups, error)
        elif self._options.agreement and not is_reported(error):
            # A window ends in an error on all ranks, also if this rank's program catches it.
            report_failure(groups, self.name, error, recoverable=not in_window(groups))

    def _backward(self, codegen: Codegen, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        graphs = self._graph_compiler(self._artifacts)
        if not self._in_call:
            with no_garbage_collection(), graphs.compiling_late():
                return self._compile_backward(graphs, codegen, gm, inputs)
        # torch compiles backwards of dynamic shapes ahead, and others when they first run. Ranks
        # may hold one of each, but must vote in one order: all compile when the backward first
        # runs. The forward may itself run in a backward, of a checkpoint or of a hook.
        state, compiled = compat.CompilerState(), list[Compiled]()
        # A compile that failed may run again, and must not find its own changes. AOTAutograd clears
        # the metadata of `gm` where it stores it.
        original = compat.clone_graph_module(gm)

        def run(args: list[Any]) -> Any:
            if not compiled:
                copied = compat.clone_graph_module(original)
                compile_it = functools.partial(
                    self._compile_backward, graphs, codegen, copied, inputs
                )
                with no_garbage_collection(), state.restored(), graphs.compiling_late():
                    compiled.append(compat.call_with_stack_room(compile_it))
            return compiled[0](args)

        return boxed(run)

    def _compile_backward(
        self, graphs: GraphCompiler, codegen: Codegen, gm: fx.GraphModule, inputs: Sequence[Any]
    ) -> Compiled:
        with self._recording_answers():
            self._run_level(gm, Level.BACKWARD, "backward")
        order = {name: i for i, name in enumerate(self._captured.shards.values())}
        facts = backward_facts(gm, order, self._saved_params)
        if self._artifacts is not None:
            self._artifacts.set_backward(facts, gm, inputs)
        if facts.slots:
            gm = compat.clone_graph_module(gm)
        else:
            graphs.agree(gm, "backward")
        compiled = graphs.backward(Template.of("backward", gm, inputs, codegen), facts)
        if self._artifacts is not None:
            self._artifacts.write_if_complete()
        return compiled

    def _lowering(self) -> Lowering:
        if self._options.codegen == "eager":
            return GraphLowering(
                self._pipeline, eager_codegen, self.recorder, verify=self._options.verify
            )
        return GraphLowering(
            self._pipeline,
            functools.partial(compat.inductor_codegen_standalone, patches=self._patches()),
            self.recorder,
            verify=self._options.verify,
        )

    def _run_level(self, gm: fx.GraphModule, level: Level, kind: str) -> None:
        put_inputs_first(gm.graph)
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

    # --- Inductor ---------------------------------------------------------------------------------
    def _inductor_inner(
        self, patches: dict[str, Any], gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> Compiled:
        def codegen(graph: fx.GraphModule, values: Sequence[Any]) -> Compiled:
            return compat.inductor_codegen(graph, values, patches, copy.copy(kwargs))

        if self._artifacts is not None:
            kind = compat.kind_of_inner_compile(kwargs)
            static = kwargs.get("static_input_idxs") or ()
            self._artifacts.entry.static_inputs[kind] = list(static)
        if kwargs.get("is_backward"):
            return self._backward(codegen, gm, inputs)
        return self._forward(codegen, gm, inputs, inference=bool(kwargs.get("is_inference")))


def _close(window: StepWindow) -> None:
    flush(window, window.agreement_timeout_s, window.failure)


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
