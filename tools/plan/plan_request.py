"""What to plan, and the capture for it."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import zpasses
import zpasses.optim
from zpasses.cost.time.target import Target, current_target
from zpasses.errors import MemoryBudgetError, OptionError, suggestion
from zpasses.graph.loss_chunks import Gradients
from zpasses.option_values import format_size, parse_budget, parse_size
from zpasses.passes.pipelines import ZERO3
from zpasses.pipeline.pipeline import Pipeline
from zpasses.tools.capture.capture_command import StepOptions
from zpasses.tools.capture.captured_step import CaptureRequest
from zpasses.tools.plan.repeated_layers import FEWEST_LAYERS


def optimizer_class(name: str) -> type[Optimizer]:
    """Returns the optimizer of torch, or the exact one of zpasses, with this name in any case.

    Raises:
        OptionError: if there is none.
    """
    known = {
        value.__name__.lower(): value
        for module in (torch.optim, zpasses.optim)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name.lower() not in known:
        names = [each.__name__ for each in known.values()]
        raise OptionError(f"--optimizer: got {name!r}.{suggestion(name, names)}")
    return known[name.lower()]


def optimizer_of(text: str) -> functools.partial[Optimizer]:
    """Returns what makes an optimizer of parameters, from its name and settings:
    "sgd,momentum=0.9".

    Raises:
        OptionError: for an unknown name, and settings that it does not take.
    """
    name, *given = re.split(r",(?=\s*\w+\s*=)", text)
    name, comma, odd = name.partition(",")
    if comma:
        raise OptionError(
            f"--optimizer {text!r}: cannot read {odd!r}; expected setting=value, such as "
            "'sgd,momentum=0.9'."
        )
    cls: Any = optimizer_class(name.strip())
    settings = dict[str, Any]()
    known = [*inspect.signature(cls).parameters][1:]
    for each in given:
        key, _, value = (part.strip() for part in each.partition("="))
        if key not in known:
            raise OptionError(
                f"--optimizer {text!r}: {cls.__name__} has no setting {key!r}."
                f"{suggestion(key, known)}"
            )
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
    made = functools.partial(cls, **settings)
    try:
        made([nn.Parameter(torch.empty(2, 2, device="meta"))])
    except Exception as error:  # whatever it says about a setting
        raise OptionError(f"--optimizer {text!r}: {error}") from error
    return made


@dataclass(frozen=True)
class PlanRequest(StepOptions):
    """Which step to plan, and for which ranks and hardware."""

    memory: str | None = None
    """Budget whose plan is chosen, such as "70GiB"; None chooses the fastest plan."""
    points: int = 8
    """About how many plans to make; of repeated layers, 0 makes only that of `memory`. A step of
    blocks has one for each number of graphs ahead."""
    backwards_per_step: int = 1
    """Forwards, each with its backward, from one optimizer step to the next; 1 with blocks."""
    compile_blocks: str | None = None
    """Modules that are compiled one by one, as `zpasses.compile_blocks` does; None makes the step
    one graph."""
    host_memory: str | None = None
    """What a plan may take of the host on each rank, such as "40GiB"; None is nothing."""
    offload_parameters: str | None = None
    """Which parameters have their shards on the host: "frozen", or "all" with the gradients of
    trained ones. None keeps all on the device."""
    pipeline: str | None = None
    """Passes that gather parameters again in backward and have a schedule, as text; None is
    "zero3"."""
    repeat: str | None = None
    """Argument of the function that is the number of layers: a few are captured, and the others are
    copies of one of them. None captures all."""
    stages: bool = True
    """Whether to plan stages 2 and 3 without a budget, too; or the pipeline, if there is one."""
    optimizer: str | None = None
    """Class and settings of the optimizer whose states the device holds as well, such as "AdamW" or
    "sgd,momentum=0.9"; None plans without states."""
    device_memory: str | None = None
    """What shards, gradients, states and step may take together, such as "80GiB". The states that
    do not fit rest on the host, and the fastest plan is chosen; None has no such limit."""
    step_in_backward: bool = False
    """Whether parameters of blocks step in backward, so that their gradients are freed there."""

    @cached_property
    def passes(self) -> Pipeline:
        """The passes of the step.

        Raises:
            OptionError: for text that is no pipeline.
        """
        return ZERO3 if self.pipeline is None else Pipeline.parse(self.pipeline)

    @property
    def chunks_loss(self) -> Gradients | None:
        """Where gradients are computed if a plan may compute the loss in chunks; else None."""
        return next((e.facts.chunks_loss for e in self.passes if e.facts.chunks_loss), None)

    def check(self) -> None:
        """Raises OptionError for sizes that are none, options that do not go together, or too few
        ranks.
        """
        self._check_pipeline()
        if self.memory is not None:
            where = "--memory"
            if self.memory == "auto":
                raise OptionError(
                    f"{where}: got 'auto', which measures the device of a running job; expected a "
                    "size such as '70GiB'."
                )
            parse_budget(self.memory, where)
        if self.offload_parameters not in (None, "frozen", "all"):
            raise OptionError(
                f"--offload-parameters: got {self.offload_parameters!r}; expected 'frozen', or "
                "'all' for trained parameters, too."
            )
        if self.optimizer is not None:
            optimizer_of(self.optimizer)
        if self.device_memory is not None:
            parse_size(self.device_memory, "--device-memory")
            if self.optimizer is None or self.memory is not None:
                raise OptionError(
                    "--device-memory divides the memory of a device between a step and the states "
                    "of --optimizer NAME, which must be given, and --memory must not."
                )
        if self.step_in_backward:
            if self.optimizer is None or self.compile_blocks is None:
                raise OptionError(
                    "--step-in-backward plans parameters of blocks that step in backward; give "
                    "--compile-blocks NAMES and --optimizer NAME, too."
                )
            if self.offload_parameters == "all":
                raise OptionError(
                    "--step-in-backward does not go together with --offload-parameters all: "
                    "gradients of parameters on the host go there. Leave out one of the two."
                )
            if self.device_memory is not None:
                raise OptionError(
                    "--device-memory does not go together with --step-in-backward, with which no "
                    "states rest on the host; leave it out. The column 'total' has what the "
                    "device holds."
                )
        if self.world < 2:
            raise OptionError(
                f"--world: got {self.world}; expected at least 2 ranks, since one rank has no "
                "collectives to plan."
            )
        given = self.arguments.get(self.repeat or "")
        if self.repeat is not None and (type(given) is not int or given < FEWEST_LAYERS):
            raise OptionError(
                f"--repeat-layers {self.repeat}: expected the number of layers, at least "
                f"{FEWEST_LAYERS}, as an argument of the function, such as --arg "
                f"{self.repeat}=80; got {given!r}."
            )

    def _check_pipeline(self) -> None:
        facts = [each.facts for each in self.passes]
        if not any(each.regathers for each in facts) or not any(
            each.plans_within is not None for each in facts
        ):
            raise OptionError(
                f"--pipeline: got {self.pipeline!r}; expected passes that gather again in backward "
                "and have a schedule, so that there is something to plan, such as "
                "'zero3{gather-params.encode=int8}'."
            )
        if self.chunks_loss is not None:
            others = {
                "--compile-blocks, because the loss is outside of the blocks": self.compile_blocks,
                "--repeat-layers, which plans the loss as one": self.repeat,
            }
            for name in (name for name, given in others.items() if given is not None):
                raise OptionError(
                    f"--pipeline {self.pipeline!r}: the pass that computes the loss in chunks does "
                    f"not go together with {name}; leave out one of the two."
                )

    def parsed_target(self) -> Target:
        """Returns the hardware to plan for.

        Raises:
            OptionError: for an unknown target.
        """
        return Target.parse(self.target) if self.target else current_target()

    def host_bytes(self, target: Target) -> int:
        """Returns what a plan may take of the host on each rank, in bytes.

        Raises:
            OptionError: for text that is no size.
            MemoryBudgetError: if it is more than the target has for each rank.
        """
        if self.host_memory is None:
            return 0
        given = parse_size(self.host_memory, "--host-memory")
        if given > target.host_memory_bytes:
            raise MemoryBudgetError(
                f"--host-memory: got {self.host_memory!r} for each rank, and a node of "
                f"{target.name} has {format_size(target.host_memory_bytes)} for each of its "
                f"{target.ranks_per_node} ranks. Give less, or change the figure: --target "
                f"{target.name},host_memory_bytes=..."
            )
        return given

    def about(self, target: Target) -> dict[str, Any]:
        """Returns what a table says about the step, as the fields of `StepTable`."""
        return {
            "function": self.function,
            "world": self.world,
            "target": target.name,
            "given_target": self.target,
            "pipeline": self.pipeline,
            "backwards_per_step": self.backwards_per_step,
            "blocks": self.compile_blocks,
            "step_in_backward": self.step_in_backward,
            "offload_parameters": self.offload_parameters,
        }

    def capture(self, on_sharded: Callable[[nn.Module], object], **options: Any) -> CaptureRequest:
        """Returns the capture of the step, with these options of the backend.

        Args:
            on_sharded: called with the sharded model, before its step. Its parameters are where
                they rest.
        """

        def placed(model: nn.Module) -> None:
            if self.offload_parameters is not None:
                zpasses.offload_parameters(model, trained=self.offload_parameters == "all")
            on_sharded(model)

        options |= {"target": self.target} if self.target is not None else {}
        few = {} if self.repeat is None else {self.repeat: FEWEST_LAYERS}
        return CaptureRequest(
            self.function,
            None,
            self.world,
            arguments={**self.arguments, **few},
            shard=self.shard,
            options=options,
            compile_blocks=self.compile_blocks,
            mesh=self.mesh,
            on_sharded=placed,
        )
