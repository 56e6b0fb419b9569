"""One compile: what the steps from a captured graph to its code share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zpasses import compat
from zpasses.backend.cache.entry import GraphArtifacts, StoredVariant
from zpasses.backend.captured import Capture, describe_inputs
from zpasses.cost.time.fused_kernels import use_fusion
from zpasses.cost.time.target import Target, use_target
from zpasses.dumps.listeners import events_for
from zpasses.errors import AgreementError
from zpasses.host.host_pool import agreed_host_bytes
from zpasses.host.saved_arenas import host
from zpasses.pipeline.bisection import ResultHook
from zpasses.pipeline.events import Events
from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Pipeline
from zpasses.ranks.agree import planning_for, recorded_answers
from zpasses.ranks.compared_options import compare_options
from zpasses.ranks.current_compile import compiling
from zpasses.ranks.failures import is_reported, pass_on_failure, report_failure
from zpasses.ranks.vote import vote_timeout
from zpasses.runtime.forward import BoundParameters
from zpasses.runtime.forward_variants import OutputStrides
from zpasses.runtime.free_memory import agreed_free_bytes
from zpasses.runtime.overflows import OverflowWatch
from zpasses.runtime.run_checks import in_window

Compiled = Callable[[list[Any]], Any]
Codegen = Callable[[fx.GraphModule, Sequence[Any]], Compiled]


@dataclass
class CompileState:
    """What one step of a compile leaves for later ones."""

    pipeline: Pipeline
    """The passes that run, with the memory budget that is known so far."""
    saved_params: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Output of the forward graph -> the parameters whose shard or full value it is."""
    caches_params: bool = False
    """The forward graph takes full parameters from earlier calls."""
    output_strides: OutputStrides = ()
    """Strides that the forward graph returns, which its variants keep."""
    preloaded: tuple[str, StoredVariant, Compiled] | None = None
    """A variant, and its code from the compile cache, which no rank has been asked about yet."""
    movable: tuple[int, ...] = ()
    """Positions of the outputs of the forward graph that may rest on the host until backward, the
    smallest first, if other graphs run in between."""
    in_call: bool = False
    """torch has called the backend, which has not returned yet."""


@dataclass(frozen=True)
class CompileJob:
    """One compile of one captured graph."""

    name: str
    """Dynamo's id of the compile."""
    captured: Capture
    options: Options
    cache_pipeline: Pipeline
    """The passes as the compile cache's key has them, without the bytes of the memory budget
    "auto", which differ from start to start. `state.pipeline` is what runs."""
    target: Target
    """Hardware to plan for."""
    listeners: Events
    result_hook: ResultHook
    free_bytes: int | None
    """What the memory budget "auto" stands for."""
    budget: str | None
    """The memory budget of the step, with those bytes; None without one, or if it bounds several
    graphs together."""
    host_bytes: int
    """How many bytes of the host a step may take on each rank."""
    state: CompileState
    artifacts: GraphArtifacts | None = None
    """What the compile cache has, or gets, of the graph; None if the graph takes no part."""
    bound: BoundParameters = field(default_factory=BoundParameters)
    """The parameters of the current call."""
    overflows: OverflowWatch = field(default_factory=OverflowWatch)
    """Looks at the gradients of encoded reductions."""

    @classmethod
    def begin(
        cls,
        captured: Capture,
        options: Options,
        pipeline: Pipeline,
        target: Target,
        events: Events,
        result_hook: ResultHook,
    ) -> CompileJob:
        """Find the memory budget, for which the ranks vote if it is "auto". With a budget, they
        compare their options first.

        Raises:
            AgreementError: if another rank has other options, failed, or does not come in time.
        """
        budget, free_bytes = options.memory_budget, None
        if options.agreement:
            compare_options(
                captured.groups,
                compat.current_compile_id(),
                options.compared(),
                votes=budget is not None,
            )
        if budget == "auto":
            device = torch.get_default_device()
            for value in captured.inputs:
                if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                    device = value.device  # shards may rest on the host
            free_bytes = agreed_free_bytes(captured.groups, device)
            budget = f"{free_bytes}B"
        if options.prefetch:
            budget = None  # it bounds the whole step, see zpasses.backend.block_steps
        state = CompileState(pipeline if budget is None else pipeline.with_memory_budget(budget))
        return cls(
            compat.current_compile_id(),
            captured,
            options,
            pipeline,
            target,
            events,
            result_hook,
            free_bytes,
            budget,
            agreed_host_bytes(captured.groups, options.host_memory, host),
            state,
        )

    @property
    def order(self) -> dict[str, int]:
        """Name of a sharded input -> its position among the sharded inputs of the call."""
        return {name: at for at, name in enumerate(self.captured.shards.values())}

    # --- contexts ---------------------------------------------------------------------------------
    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Context in which votes are about this compile."""
        with compiling_graph(self.name, self.captured, self.options):
            yield

    @contextlib.contextmanager
    def compiling_late(self) -> Iterator[None]:
        """Context of what is compiled after the call of the backend. Reports failures."""
        with self.compiling(), self.planning():
            try:
                yield
            except BaseException as error:  # interrupts, too
                self.report(error)
                raise

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Context of passes. torch may compile a backward late, outside of the backend's call."""
        with (
            use_target(self.target),
            use_fusion(self.options.codegen == "inductor"),
            vote_timeout(self.options.agreement_timeout_s),
            planning_for(self.captured.models),
        ):
            yield

    @contextlib.contextmanager
    def recording_answers(self) -> Iterator[None]:
        """Context that stores the answers of votes in what the compile cache gets."""
        if self.artifacts is None or self.artifacts.loaded:
            yield
        else:
            with recorded_answers(self.artifacts.entry.answers):
                yield

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this rank failed to compile, if it has not told them yet."""
        report(self.captured, self.options, self.name, error)


@contextlib.contextmanager
def compiling_graph(name: str, captured: Capture, options: Options) -> Iterator[None]:
    """Context in which votes are about the compile of a captured graph."""
    ranks = options.dumping_ranks()
    dumps = ranks is None or compat.global_rank() in ranks
    folder = options.dump_folder() if dumps else None
    params = list(captured.shards.values())
    with compiling(name, params, folder, options.non_default(), options.compared()):
        yield


def report(captured: Capture, options: Options, name: str, error: BaseException) -> None:
    """Tell the other ranks that this rank failed to compile a graph, unless they know."""
    groups = captured.groups
    if options.agreement and isinstance(error, AgreementError):
        pass_on_failure(groups, error)
    elif options.agreement and not is_reported(error):
        # A window ends in an error on all ranks, also if this rank's program catches it.
        doing = f"compiling graph {name}"
        report_failure(groups, error, doing, recoverable=not in_window(groups))


def open_events(
    captured: Capture,
    example_inputs: Sequence[Any],
    options: Options,
    pipeline: Pipeline,
    target: Target,
) -> Events:
    """Start the dump and the structured trace of a compile, if they are enabled. They listen."""

    def describe() -> dict[str, Any]:
        parts = {
            "name": compat.current_compile_id(),
            "options": options.non_default(),
            "pipeline": str(pipeline),
            "codegen": options.codegen,
            "recompile_reason": compat.recompile_reason() or "",
        }
        return {**parts, **describe_inputs(captured, example_inputs)}

    return events_for(options.dump_folder(), options.dumping_ranks(), target, describe)
