"""The options of `torch.compile(model, backend="zpasses", options={...})`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from zpasses import compat
from zpasses.cost.time.target import Target
from zpasses.errors import OptionError, suggestion
from zpasses.option_values import build_dataclass, field_types, parse_budget, parse_size
from zpasses.pipeline.pipeline import Pipeline, catalogue
from zpasses.pipeline.runner import Verify
from zpasses.ranks.current_compile import ComparedOptions
from zpasses.ranks.vote import DEFAULT_TIMEOUT_S


@dataclass(frozen=True)
class Options:
    """Options of one compile."""

    zero_stage: Literal[1, 2, 3] | None = None
    """ZeRO stage, which picks the named pipeline `zero1`, `zero2` or `zero3`; 3 if `pipeline` is
    not given either."""
    pipeline: Pipeline | str | None = None
    """Passes to run instead of a stage, as text or as a `Pipeline`. The empty text leaves the
    dialect unlowered, which is the reference."""
    codegen: Literal["inductor", "eager"] = "inductor"
    """`"inductor"` generates kernels; `"eager"` runs the rewritten graph itself, which compiles
    quickly and is bit-exact, for tests and debugging."""
    recompute_elementwise: bool | None = None
    """Recompute pointwise results that matmuls consume instead of saving them for backward; `None`
    does so in stage 3. This saves memory and costs little time."""
    target: str | None = None
    """Hardware to plan for, such as `"h100"` or `"mi300x,ranks_per_node=4"`; `None` takes
    `ZPASSES_TARGET`, else the device of this process."""
    memory_budget: str | None = None
    """The most that a step may hold above what rests between steps, such as `"60GiB"`; a percentage
    counts from the least peak with overlap, and `"auto"` takes 90 % of what is free when the first
    graph is compiled, on the rank with the least. zpasses then chooses what to keep, recompute,
    merge and prefetch. `None` leaves each graph to the option of `schedule`. Needs a pipeline with
    `schedule`; stages get it. See docs/memory-budget.md."""
    host_memory: str | None = None
    """The most that a step may hold of the host's memory on each rank, such as `"40GiB"`: what
    forward saves may rest there until backward, where that is the best way into `memory_budget`.
    `None` moves nothing. Refused if the ranks of a machine have less together. See
    docs/memory-budget.md."""
    verify: Verify = "static"
    """`"static"` checks the graph after each pass; `"simulate"` also runs it before and after on
    simulated ranks, compares bit for bit, and takes seconds even for small models; `"off"` checks
    nothing. See docs/writing-passes.md."""
    agreement: bool | Literal["first"] = True
    """Before its first run, compare a graph's collectives between ranks; before each later run,
    check that all ranks run the same graph; `"first"` only does the former, `False` neither. Votes
    of passes whose choices must be equal on all ranks, of windows and of copy-engine routes remain.
    """
    agreement_timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds to wait for the other ranks, in every vote and in the collectives of a graph whose
    runs are compared."""
    backwards_per_step: int = 1
    """Reduce gradients only in every Nth backward, to accumulate over N micro-batches. See
    `zpasses.coalesce_grad_reduction` for windows of other lengths."""
    grad_accum_dtype: torch.dtype | None = None
    """Add up pending gradients in this dtype, such as `torch.float32`; `None` keeps the dtype in
    which they are computed."""
    grad_accum: Literal["full", "shards"] = "full"
    """What accumulates between reductions: `"full"` gradients, and nothing is communicated before
    the last backward; or `"shards"`, for hybrid sharding: every backward reduces within a replica,
    and only the average over replicas waits. Needs less memory and more communication. `"shards"`
    sets `defer-reduction{part=average}` in the pipeline."""
    prefetch: int | Literal["auto"] = 0
    """For how many graphs ahead gathers start, and how many backwards reductions may take, if a
    model runs as several graphs: `"auto"` plans it, 0 keeps all collectives inside their graphs.
    `zpasses.compile_blocks` sets `"auto"`. See docs/equal-blocks.md."""
    cache: bool = True
    """Store compiled graphs on disk, and take them from there when the program starts again. See
    docs/compile-cache.md."""
    dump: str | Path | None = None
    """Folder to write every graph into, before and after every pass; `None` takes `ZPASSES_DUMP`,
    else writes nothing. docs/dump-format.md describes the files."""
    dump_ranks: str | None = None
    """Ranks that write the dump, `"all"` or numbers such as `"0,3"`; `None` takes
    `ZPASSES_DUMP_RANKS`, else rank 0."""
    inductor: dict[str, Any] = field(default_factory=dict)
    """Options for `torch._inductor.config` during this compile, e.g. `{"max_autotune": True}`."""

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """Check and convert the options that the user passed.

        Raises:
            OptionError: for unknown keys, unknown passes and values of the wrong type. The message
                suggests the most similar known name.
        """
        _refuse_options_of_passes(given or {})
        options = build_dataclass(cls, given or {}, "backend 'zpasses'")
        if options.zero_stage is not None and options.pipeline is not None:
            raise OptionError(
                f"zero_stage={options.zero_stage} and pipeline={str(options.pipeline)!r} both "
                "choose the passes; give one of them. "
                f"A stage can start a pipeline: pipeline='zero{options.zero_stage},...'."
            )
        if not 0 < options.agreement_timeout_s < math.inf:
            raise OptionError(
                f"agreement_timeout_s={options.agreement_timeout_s}; expected seconds > 0, not "
                "inf. agreement=False turns it off."
            )
        if options.prefetch != "auto" and options.prefetch < 0:
            raise OptionError(
                f"prefetch={options.prefetch}; expected a number of graphs >= 0, or 'auto'."
            )
        if options.backwards_per_step < 1:
            raise OptionError(
                f"backwards_per_step={options.backwards_per_step}; expected the number of "
                "backwards per optimizer step, >= 1."
            )
        if options.grad_accum_dtype is not None and not options.grad_accum_dtype.is_floating_point:
            raise OptionError(
                f"grad_accum_dtype={options.grad_accum_dtype}; expected a floating-point dtype "
                "such as torch.float32."
            )
        known = compat.inductor_option_names()
        for name in options.inductor:
            if name not in known:
                raise OptionError(
                    f"option 'inductor': torch._inductor.config has no "
                    f"{name!r}.{suggestion(name, known).split(' Known')[0]}"
                )
        options.passes()
        options._check_memory_budget()
        options.dumping_ranks()
        if options.target is not None:
            Target.parse(options.target)
        return options

    def _check_memory_budget(self) -> None:
        if self.host_memory is not None:
            parse_size(self.host_memory, "option 'host_memory'")
            if self.memory_budget is None:
                raise OptionError(
                    f"host_memory={self.host_memory!r} needs memory_budget, which says what does "
                    "not fit the device. Give it as well, such as memory_budget='60GiB'."
                )
        if self.memory_budget is None or self.prefetch:
            for each in self.passes():
                if each.facts.chunks_loss:
                    raise OptionError(
                        f"pass {each.name!r}: the number of chunks is chosen within memory_budget, "
                        "which this compile does not have. Give memory_budget, such as '60GiB', or "
                        f"a number of chunks: {each.name}{{chunks=8}}."
                    )
        if self.memory_budget is None:
            return
        if self.memory_budget != "auto":
            parse_budget(self.memory_budget, "option 'memory_budget' ('auto' is possible, too)")
        if self.prefetch:
            if self.prefetch != "auto":
                raise OptionError(
                    f"memory_budget={self.memory_budget!r} and prefetch={self.prefetch} both say "
                    "how far ahead gathers start; give one of them."
                )
            return
        if not any(each.facts.plans_within is not None for each in self.passes()):
            raise OptionError(
                f"memory_budget={self.memory_budget!r} needs the pass 'schedule', which keeps "
                f"within it; the pipeline {str(self.pipeline)!r} has no such pass. Put it after "
                "the passes that gather and reduce, or give zero_stage instead of pipeline."
            )

    def recomputes_elementwise(self) -> bool:
        """Whether this compile recomputes pointwise results.

        By default it does if its pipeline gathers parameters again in backward.
        """
        if self.recompute_elementwise is None:
            return any(each.facts.regathers for each in self.passes())
        return self.recompute_elementwise

    def non_default(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as JSON-compatible values."""
        default = Options()
        given = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != getattr(default, each.name)
        }
        return {
            key: value if isinstance(value, (bool, int, float)) else str(value)
            for key, value in given.items()
        }

    def compared(self) -> ComparedOptions:
        """Return the options that decide what ranks communicate. Ranks must give them alike.

        Equal meanings are equal text, such as those of "1GiB" and "1024MiB".
        """
        budget, host, passes = self.memory_budget, self.host_memory, str(self.passes())
        bounds = None if budget in (None, "auto") else parse_budget(budget, "memory_budget")
        found = {
            "memory_budget": (budget, bounds or budget),
            "host_memory": (host, None if host is None else parse_size(host, "host_memory")),
            "zero_stage": (self.zero_stage, passes),
            "pipeline": (self.pipeline, passes),
            "recompute_elementwise": (self.recompute_elementwise, self.recomputes_elementwise()),
            "backwards_per_step": (self.backwards_per_step, self.backwards_per_step),
            "grad_accum": (self.grad_accum, self.grad_accum),
            "grad_accum_dtype": (self.grad_accum_dtype, self.grad_accum_dtype),
            "prefetch": (self.prefetch, self.prefetch),
        }
        return {
            name: ("not given" if given is None else str(given), str(meaning))
            for name, (given, meaning) in found.items()
        }

    def dump_folder(self) -> str | None:
        """The folder to dump into; None dumps nothing."""
        return str(self.dump) if self.dump else os.environ.get("ZPASSES_DUMP") or None

    def dumping_ranks(self) -> frozenset[int] | None:
        """The ranks that write a dump; None means all ranks.

        Raises:
            OptionError: for text that is neither "all" nor a list of numbers.
        """
        text = (
            self.dump_ranks
            if self.dump_ranks is not None
            else os.environ.get("ZPASSES_DUMP_RANKS") or "0"
        )
        numbers = [part.strip() for part in text.split(",")]
        if text.strip() == "all":
            return None
        if not all(number.isdecimal() for number in numbers):
            where = "option 'dump_ranks'" if self.dump_ranks is not None else "ZPASSES_DUMP_RANKS"
            raise OptionError(
                f"{where}: got {text!r}; expected 'all' or rank numbers such as '0,3'."
            )
        return frozenset(map(int, numbers))

    def passes(self) -> Pipeline:
        """Return the pipeline that these options select."""
        if isinstance(self.pipeline, Pipeline):
            return self._with_grad_accum(self.pipeline)
        stage = f"zero{self.zero_stage or 3}"
        pipeline = Pipeline.parse(stage if self.pipeline is None else self.pipeline)
        if self.prefetch and self.pipeline is None:
            # All collectives leave the graph, so nothing is left to schedule.
            texts = (each.facts.without_schedule or str(each) for each in pipeline)
            pipeline = Pipeline.parse(",".join(texts))
        return self._with_grad_accum(pipeline)

    def _with_grad_accum(self, pipeline: Pipeline) -> Pipeline:
        if self.grad_accum == "full":
            return pipeline
        if not any(each.facts.defers for each in pipeline):
            raise OptionError(
                f"grad_accum={self.grad_accum!r} needs the pass 'defer-reduction'; the pipeline "
                f"{str(pipeline)!r} has none. Put it at the end."
            )
        return Pipeline(
            tuple(
                replace(cast(Any, each), part="average") if each.facts.defers else each
                for each in pipeline
            )
        )


def _refuse_options_of_passes(given: Mapping[str, Any]) -> None:
    """Raises an error that says where to give a pass, or an option that only a pass has."""
    for name in given.keys() - field_types(Options).keys():
        what = f"backend 'zpasses' has no option {name!r}; "
        if name == "blocks":
            raise OptionError(
                f"{what}call zpasses.compile_blocks(model, 'layers.*') in place of torch.compile."
            )
        owners = [each.name for each in Pipeline.parse("zero3") if name in field_types(type(each))]
        if owners:
            raise OptionError(
                f"{what}it is one of {' and '.join(owners)}. "
                f"Give it in the pipeline, such as pipeline='zero3{{{owners[0]}.{name}=...}}'."
            )
        for other, kind in catalogue().items():
            if name.replace("_", "-") == other:
                raise OptionError(f"{what}{other!r} is written in the option 'pipeline'.")
            if isinstance(kind, type) and name in field_types(kind):
                raise OptionError(
                    f"{what}it is one of {other}. Give it where the option 'pipeline' names that "
                    f"pass, as {other}{{{name}=...}}."
                )
