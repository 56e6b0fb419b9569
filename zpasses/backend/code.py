"""Code of the graphs of one compile, from rewritten graphs or from the compile cache.

A graph whose calls differ (cached parameters, deferred reductions) becomes a dispatcher, which
compiles a variant when it first runs. A graph or variant that the compile cache has is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch.distributed as dist
from torch import fx

from zpasses import compat
from zpasses.backend.cache.artifacts import (
    BackwardFacts,
    ForwardFacts,
    GraphArtifacts,
    StoredVariant,
)
from zpasses.backend.prefetch import (
    add_turning_point,
    agreed_prefetch,
    graph_cost,
    turn_order,
    turn_text,
)
from zpasses.cost.prefetch import GraphRun
from zpasses.cost.target import Target
from zpasses.graph.hoisting import HoistedGraph, hoist_collectives
from zpasses.pipeline.options import Options
from zpasses.pipeline.recorder import Recorders, ResultHook
from zpasses.ranks.agreement import (
    Sequences,
    call_sequences,
    compare_collectives,
    compare_sequences,
    run_events,
)
from zpasses.ranks.run_order import RunEvent
from zpasses.runtime.backward import BackwardDispatch, warn_if_always_reduced
from zpasses.runtime.backward_variants import BackwardVariant, build_backward_variant
from zpasses.runtime.codegen import boxed, eager_codegen
from zpasses.runtime.forward import BoundParameters, ForwardDispatch, with_value_check
from zpasses.runtime.forward_variants import (
    ForwardVariant,
    OutputStrides,
    build_forward_variant,
    gather_ids,
    param_slots,
    params_read,
)
from zpasses.runtime.gloo import replace_gloo_collectives
from zpasses.runtime.grad_slots import always_reduced, grad_slots, returned_gradients
from zpasses.runtime.hoisted import HoistedCode, Surroundings
from zpasses.runtime.profiling import collective_names, with_part_range, with_profiler_range
from zpasses.runtime.run_checks import limited_run, with_run_check, with_vote_limit
from zpasses.runtime.windows import Lowering

__all__ = ["Codegen", "Compiled", "GraphCompiler", "Template", "backward_facts", "forward_facts"]

log = logging.getLogger("zpasses")

Compiled = Callable[[list[Any]], Any]
Codegen = Callable[[fx.GraphModule, Sequence[Any]], Compiled]


def forward_facts(gm: fx.GraphModule, kind: str) -> ForwardFacts:
    """Describes a forward or inference graph after its passes."""
    values = cast(Sequence[Any], gm.graph.output_node().args[0])
    slots = param_slots(gm.graph)
    ids = gather_ids(gm.graph) if slots else []
    return ForwardFacts(kind, len(values), slots, ids, call_sequences(gm.graph))


def backward_facts(
    gm: fx.GraphModule, order: Mapping[str, int], saved: Mapping[str, tuple[str, ...]]
) -> BackwardFacts:
    """Describes a backward graph after its passes.

    Args:
        order: name of a sharded input -> its position among the sharded inputs of the call.
        saved: from `saved_params` of the forward graph.
    """
    values = cast(Sequence[Any], gm.graph.output_node().args[0])
    left = [name for name in always_reduced(gm.graph) if name in order]
    slots = grad_slots(gm.graph)
    if not all(slot.param in order and slot.reduction for slot in slots):
        slots = []
    sequences = {} if slots else call_sequences(gm.graph)
    read = [name for name in params_read(gm.graph, saved) if name in order]
    return BackwardFacts(len(values), slots, left, sequences, read)


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

    @classmethod
    def of(cls, kind: str, gm: fx.GraphModule, inputs: Sequence[Any], codegen: Codegen) -> Template:
        return cls(kind, lambda: gm, lambda: list(inputs), codegen, compat.CompilerState())


class GraphCompiler:
    """Makes code of the graphs of one compile.

    Args:
        name: Dynamo's id of the compile.
        order: name of a sharded input -> its position among the sharded inputs of the call.
        bound: the parameters of the current call.
        report: tells the other ranks that this rank failed to compile.
        compiling: context in which votes are about this compile.
        lowering: returns how reductions that a backward deferred are run.
        result_hook: wraps the code of a backward.
        artifacts: the graph's part of the compile cache; None if it takes no part.
        target: hardware to plan for.
        free_bytes: what the memory budget "auto" stands for.
    """

    def __init__(
        self,
        name: str,
        options: Options,
        recorder: Recorders,
        order: Mapping[str, int],
        bound: BoundParameters,
        report: Callable[[BaseException], None],
        compiling: Callable[[], AbstractContextManager[None]],
        lowering: Callable[[], Lowering],
        result_hook: ResultHook,
        artifacts: GraphArtifacts | None,
        target: Target,
        free_bytes: int | None,
    ) -> None:
        self._target, self._free_bytes = target, free_bytes
        self._name, self._options, self._recorder = name, options, recorder
        self._order, self._bound = order, bound
        self._report, self._compiling = report, compiling
        self._lowering, self._result_hook, self._artifacts = lowering, result_hook, artifacts
        self._preloaded: tuple[str, StoredVariant, Compiled] | None = None
        self.output_strides = artifacts.entry.output_strides if artifacts is not None else ()
        """Strides that the forward graph returns, which its backward is compiled for."""

    # --- graphs -----------------------------------------------------------------------------------
    def forward(self, template: Template, facts: ForwardFacts) -> Compiled:
        """Returns the code of a forward or inference graph whose collectives ranks agreed on."""
        if not facts.slots:
            return self._variant(template, None)

        def compile_variant(variant: ForwardVariant) -> Compiled:
            with self.compiling_late():
                return self._variant(template, variant)

        return boxed(
            ForwardDispatch(
                facts.slots,
                facts.gather_ids,
                facts.outputs,
                self._bound,
                compile_variant,
            )
        )

    def backward(self, template: Template, facts: BackwardFacts) -> Compiled:
        """Returns the code of a backward graph.

        The collectives of a graph without deferrable gradients have been agreed on. Variants are
        agreed on here, because another rank may defer other gradients.
        """

        def compile_variant(variant: BackwardVariant) -> Compiled:
            with self.compiling_late():
                return self._variant(template, variant)

        if facts.slots:
            code = boxed(
                BackwardDispatch(
                    facts.slots, facts.outputs, self._order, self._lowering(), compile_variant
                )
            )
        else:
            code = self._variant(template, None)
        code = boxed(self._result_hook(code, "gradients"))
        if facts.params_read:
            positions = {name: self._order[name] for name in facts.params_read}
            code = boxed(with_value_check(code, positions))
        left = facts.always_reduced
        return boxed(warn_if_always_reduced(code, self._name, left, self._order)) if left else code

    def agree(self, gm: fx.GraphModule, kind: str) -> None:
        """Compares what a graph communicates with the other ranks.

        Raises:
            AgreementError: on every rank, if they differ.
        """
        asks = self._asks()
        if asks:
            with self._recorder.record_errors("agreement"):
                compare_collectives(gm.graph, self._name, self._options.agreement_timeout_s)
        self._recorder.record_agreement(kind, gm.graph, asks)

    def agree_on(self, sequences: Sequences) -> None:
        """The same for a graph of the compile cache."""
        if self._asks():
            compare_sequences(sequences, self._name, self._options.agreement_timeout_s)

    def preload(self, kind: str, variant: ForwardVariant | None) -> None:
        """Loads the code of a variant from the compile cache, if it is stored.

        Raises:
            Exception: any kind, from damaged files.
        """
        assert self._artifacts is not None
        stored = self._artifacts.variant(kind, variant)
        if stored is not None:
            code = compat.unpack_code(stored.code, (), is_backward=False)
            self._preloaded = (repr((kind, variant)), stored, code)

    @contextlib.contextmanager
    def compiling_late(self) -> Iterator[None]:
        """Context of compiles after the call of the backend. Reports their failures."""
        with self._compiling():
            try:
                yield
            except Exception as error:
                self._report(error)
                raise

    def _asks(self) -> bool:
        return bool(self._options.agreement) and dist.is_initialized()

    # --- variants ---------------------------------------------------------------------------------
    def _variant(
        self, template: Template, variant: ForwardVariant | BackwardVariant | None
    ) -> Compiled:
        loaded = self._load(template, variant)
        if loaded is not None:
            return loaded
        gm, extra = _built(template, variant, self.output_strides)
        sequences: Sequences = {}
        what = f"code of {template.kind}"
        if variant is not None:
            what = f"code of a variant of {template.kind}"
            done = variant.kept if isinstance(variant, ForwardVariant) else variant.deferred
            log.debug("graph %s %s: %s", self._name, template.kind, variant)
            slots = param_slots if isinstance(variant, ForwardVariant) else grad_slots
            params = [slot.param for slot in slots(template.graph().graph)]
            self._recorder.variant(
                template.kind,
                template.kind,
                [params[i] for i in sorted(variant.given)],
                [params[i] for i in sorted(done)],
                gm.graph,
            )
            if isinstance(variant, BackwardVariant):
                self.agree(gm, template.kind)
                sequences = call_sequences(gm.graph) if self._artifacts is not None else {}
        inputs = [*template.inputs(), *extra]
        events = run_events(gm.graph, f"{self._name} {template.kind}")
        hoisted = self._hoist(gm, template.kind)
        whole = replace_gloo_collectives(gm)
        strides: list[tuple[int, ...] | None] = []
        with template.state.restored(strides), self._recorder.record_errors(what):
            if hoisted is None:
                code = template.codegen(whole, inputs)
            else:
                body = replace_gloo_collectives(hoisted.body)
                code = template.codegen(body, [*inputs, *hoisted.extra_inputs])
        self._keep_output_strides(template, strides)
        names = collective_names(gm.graph)
        if self._artifacts is not None:
            self._artifacts.add_code(template.kind, variant, code, events, names, sequences)
        return self._checked(code, events, names, template.kind, hoisted)

    def _keep_output_strides(
        self, template: Template, strides: Sequence[tuple[int, ...] | None]
    ) -> None:
        """The first variant of a forward graph chooses the strides that all return."""
        if template.kind == "backward" or self.output_strides:
            return
        outputs = cast(Sequence[Any], template.graph().graph.output_node().args[0])
        self.output_strides = tuple(strides[: len(outputs)])
        if self._artifacts is not None:
            self._artifacts.entry.output_strides = self.output_strides

    def _load(
        self, template: Template, variant: ForwardVariant | BackwardVariant | None
    ) -> Compiled | None:
        if self._artifacts is None or not self._artifacts.loaded:
            return None
        kind = template.kind
        if self._preloaded is not None and self._preloaded[0] == repr((kind, variant)):
            (_, stored, code), self._preloaded = self._preloaded, None
        else:
            found = self._artifacts.variant(kind, variant)
            if found is None:
                return None
            stored = found
            try:
                with template.state.restored():
                    code = compat.unpack_code(stored.code, (), is_backward=kind == "backward")
            except Exception as error:  # compiled from the graph instead
                log.warning("compile cache: code of graph %s is not used: %s", self._name, error)
                return None
        if isinstance(variant, BackwardVariant):
            self.agree_on(stored.sequences)
        old, new = f"graph {self._artifacts.entry.name} ", f"graph {self._name} "
        events = {
            group: dataclasses.replace(event, text=event.text.replace(old, new, 1))
            for group, event in stored.events.items()
        }
        hoisted = None
        if self._options.prefetch:
            gm, _ = _built(template, variant, self.output_strides)
            hoisted = self._hoist(gm, kind)
        return self._checked(code, events, stored.collectives, kind, hoisted)

    def _hoist(self, gm: fx.GraphModule, kind: str) -> HoistedGraph | None:
        """Returns the parts of a graph whose collectives may leave it."""
        if not self._options.prefetch:
            return None
        is_backward = kind == "backward"
        hoisted = hoist_collectives(gm, returned_gradients(gm.graph) if is_backward else None)
        if hoisted is None or not all(param in self._order for param in hoisted.params()):
            return None
        add_turning_point(hoisted, self._target)
        return hoisted

    def _checked(
        self,
        code: Compiled,
        events: Mapping[str, RunEvent],
        names: Sequence[str],
        kind: str,
        hoisted: HoistedGraph | None = None,
    ) -> Compiled:
        options, name = self._options, f"{self._name} {kind}"
        timeout_s = options.agreement_timeout_s
        if hoisted is not None:
            # Ranks that start gathers elsewhere start collectives in another order.
            cost = graph_cost(hoisted, kind, self._target)
            leaves = f"{hoisted.summary()}, {self._options.prefetch} ahead"
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
                self._order,
                None if options.prefetch == "auto" else options.prefetch,
                lambda runs: self._plan_prefetch(runs, sorted(events)),
                limits,
                lambda gm: self._part(gm, names, kind),
            )
            digests = " ".join([kind, *(event.digest for event in events.values())])
            code = boxed(HoistedCode(hoisted, code, digests, cost, surroundings))
        body = None if hoisted is None else collective_names(hoisted.body.graph)
        code = with_profiler_range(code, names, self._name, kind, body=body)
        if not self._options.agreement:
            return with_vote_limit(code, events, timeout_s)
        every_run = self._options.agreement != "first"
        return with_run_check(
            code, events, name, timeout_s, every_run=every_run, report=self._report
        )

    def _part(self, gm: fx.GraphModule, names: Sequence[str], kind: str) -> Compiled:
        """Returns code of gathers before a graph, or of reductions after it."""
        code = eager_codegen(replace_gloo_collectives(gm), ())
        return with_part_range(code, names, collective_names(gm.graph), self._name, kind)

    def _plan_prefetch(self, runs: Sequence[GraphRun], groups: Sequence[str]) -> int:
        options = self._options
        with self._recorder.record_errors("prefetch"):
            return agreed_prefetch(
                runs, options.memory_budget, self._free_bytes, groups, options.agreement_timeout_s
            )


def _built(
    template: Template,
    variant: ForwardVariant | BackwardVariant | None,
    output_strides: OutputStrides,
) -> tuple[fx.GraphModule, list[Any]]:
    """Returns the graph of a variant (None: the graph itself), and its further fake inputs."""
    if variant is None:
        return template.graph(), []
    if isinstance(variant, ForwardVariant):
        return build_forward_variant(template.graph(), variant, output_strides)
    return build_backward_variant(template.graph(), variant)
