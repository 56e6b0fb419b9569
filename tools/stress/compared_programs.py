"""The suite `programs`: whole training programs on two gloo ranks, beside unsharded references.

Each rank also trains two unsharded models, on the data of both ranks, and averages their gradients.
After each action of a program, what it returned, parameters, gradients and buffers are compared.
A program that moves values to the host, encodes communication or computes in bfloat16 also has a
twin, which is sharded and moves and encodes nothing: all its bits must be equal. Encoded programs
are compared only with their twin. The twin of these, and of programs in bfloat16, has stage 1 and
no memory budget. The ranks live on from program to program, until one is not equal.
"""

from __future__ import annotations

import copy
import functools
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import zpasses
from zpasses import compat
from zpasses.errors import OptionError, ZpassesError
from zpasses.optim import offload
from zpasses.pipeline.options import Options
from zpasses.runtime.free_memory import planned_peak_bytes
from zpasses.testing.ranks import Outcome as RankOutcome
from zpasses.testing.ranks import close_pools
from zpasses.testing.ranks.pool import call_on_ranks
from zpasses.tools.stress.cases import CaseResult, Outcome, StressConfig, own_part
from zpasses.tools.stress.drawn_models import Model
from zpasses.tools.stress.drawn_programs import Action, Program, draw, dtype_of
from zpasses.tools.stress.training_actions import ACTIONS, Side

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference, as a part of one more than the largest value of a tensor."""


# --- on a rank ------------------------------------------------------------------------------------
@dataclass
class RankReport:
    """What came of a program on one rank."""

    wrong: str = ""
    """The first difference from the reference."""
    error: str = ""
    """The exception that ended the program."""
    own: bool = False
    """Whether the exception is one of zpasses."""
    refused_alike: bool = False
    """Whether the references raised an exception of the same type."""
    at: str = ""
    """The action that it was."""
    actions: int = 0
    """Actions that ended normally."""


def run_program(program: Program) -> RankReport:
    """Run a program on this rank, and compare it with the references."""
    report = RankReport(at="the setup")
    try:
        # Without these guards, compiled code ignores hooks that modules get later.
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False), _room_for_states(program):
            _run_actions(program, report)
    except Exception as error:
        report.error = f"{type(error).__name__}: {error}"
        cause = compat.inner_exception(error) or error
        report.own = isinstance(cause, (ZpassesError, OptionError))
        traceback.print_exc()
    return report


def _room_for_states(program: Program) -> AbstractContextManager[Any]:
    """Have `device_bytes="auto"` find little memory on a device of any size."""

    def usable_bytes(*_: object) -> int:
        return planned_peak_bytes() + program.room_bytes

    return mock.patch.object(offload, "usable_bytes", usable_bytes)


def _run_actions(program: Program, report: RankReport) -> None:
    world = _World.of(program)
    world.compare("the setup", report)
    for action in program.actions:
        report.at = str(action)
        world.run(action, report)
        world.compare(str(action), report)
        report.actions += 1


def _sharded_side(program: Program, model: nn.Module) -> Side:
    given = dict(program.shard)
    if given.pop("cut_last", None):
        given["shard_placement_fn"] = _cut_last
    zpasses.shard(model, mesh=_mesh(program.mesh), **given)
    if program.rests is not None:
        zpasses.offload_parameters(model, **program.rests)
    return _side(program, dist.get_rank(), model, sharded=True)


@functools.cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@dataclass
class _World:
    """The sharded model of this rank, and an unsharded one for each rank."""

    program: Program
    sharded: Side
    references: list[Side]
    twin: Side | None

    @classmethod
    def of(cls, program: Program) -> _World:
        torch.manual_seed(program.seed)
        model = Model(program.model).to(program.dtype)
        references = [_side(program, rank, copy.deepcopy(model)) for rank in range(2)]
        twin = program.twin()
        other = None if twin is None else _sharded_side(twin, copy.deepcopy(model))
        return cls(program, _sharded_side(program, model), references, other)

    def run(self, action: Action, report: RankReport) -> None:
        perform = ACTIONS[action.name]
        before = [param.grad for param in self.references[0].params]
        before = [None if grad is None else grad.clone() for grad in before]
        refused: Exception | None = None
        try:
            for side in self.references:
                perform(side, **action.arguments)
        except Exception as error:
            refused = error
        else:
            self._reduce(before if action.name in _BACKWARDS else None)
        try:
            perform(self.sharded, **action.arguments)
        except Exception as error:
            report.refused_alike = type(error) is type(refused)
            raise
        if self.twin is not None:
            perform(self.twin, **action.arguments)
        if refused is not None:
            report.wrong = report.wrong or (
                f"{action}: plain torch raises {type(refused).__name__}: {refused}"
            )

    def _reduce(self, before: Sequence[Tensor | None] | None) -> None:
        """Average what the last action added to the gradients of the references, and returned.

        Args:
            before: the gradients before it; None if it added nothing.
        """
        factor = self.program.shard.get("grad_divide_factor", 2.0)
        one, other = self.references
        for mine, theirs, old in zip(one.params, other.params, before or (), strict=False):
            if mine.grad is not None and theirs.grad is not None:
                kept = 0.0 if old is None else (1 - 2 / factor) * old
                mine.grad = (mine.grad + theirs.grad) / factor + kept
                theirs.grad = mine.grad.clone()
        both = zip(one.averaged, other.averaged, strict=True)
        one.averaged = [(mine + theirs) / factor for mine, theirs in both]
        other.averaged = one.averaged

    def compare(self, what: str, report: RankReport) -> None:
        reference = self.references[self.sharded.rank]
        for name, ours, theirs in () if self.program.encodes else _pairs(self.sharded, reference):
            if not report.wrong and (text := self._difference(ours, theirs)):
                report.wrong = f"{what}: {name}: {text}"
        for name, ours, theirs in () if self.twin is None else _pairs(self.sharded, self.twin):
            if not report.wrong and (text := _bits_differ(ours, theirs)):
                report.wrong = f"{what}: {name}: {text} of the twin"
        for side in (self.sharded, *self.references, *([] if self.twin is None else [self.twin])):
            side.shown, side.averaged = [], []

    def _difference(self, ours: Tensor | None, theirs: Tensor | None) -> str:
        if ours is None or theirs is None:
            return "" if ours is theirs else f"is {_short(ours)}, expected {_short(theirs)}"
        if isinstance(ours, DTensor):
            theirs, ours = own_part(theirs, ours), ours.to_local()
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"is {_short(ours)}, expected {_short(theirs)}"
        if not ours.numel() or torch.equal(ours, theirs):
            return ""
        dtypes = (ours.dtype, self.program.precision)
        limit = max(_TOLERANCE.get(each, 0.0) for each in dtypes)
        error, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
        if error <= limit * (largest + 1):
            return ""
        return f"differs by {error:.3g} of {largest:.3g}: {ours.flatten()[:4].tolist()}"


def _bits_differ(ours: Tensor | None, theirs: Tensor | None) -> str:
    if ours is None or theirs is None:
        return "" if ours is theirs else f"is {_short(ours)}, not {_short(theirs)}"
    ours, theirs = (
        each.to_local() if isinstance(each, DTensor) else each for each in (ours, theirs)
    )
    if ours.dtype == theirs.dtype and torch.equal(ours.nan_to_num(), theirs.nan_to_num()):
        return ""
    return f"is {ours.flatten()[:4].tolist()}, not {theirs.flatten()[:4].tolist()}"


_BACKWARDS = ("backward", "edit_before_backward")
"""Actions that add to gradients."""


def _side(program: Program, rank: int, model: nn.Module, sharded: bool = False) -> Side:
    called = functools.partial(_compiled_call if sharded else _plain_call, program)
    build = functools.partial(_optimizer, program, sharded)
    about, factor = (rank, program.seed, dtype_of(program), model), program.rows_factor
    return Side(
        *about,
        rows_factor=factor,
        autocast=program.autocast,
        compile=called,
        build=build,
        sharded=sharded,
    )


def _cut_last(param: nn.Parameter) -> Shard | None:
    return Shard(param.dim() - 1) if param.dim() > 1 else None


def _plain_call(program: Program, model: nn.Module) -> Callable[[Tensor], Tensor]:
    return functools.partial(_call_cast, model, program.shard.get("param_dtype"))


def _call_cast(model: nn.Module, dtype: torch.dtype | None, x: Tensor) -> Tensor:
    """Call an unsharded model with parameters in another dtype."""
    if dtype is None:
        return model(x)  # type: ignore[no-any-return]
    cast: dict[Any, Any] = {param: param.to(dtype) for param in model.parameters()}
    # Not by `functional_call`, which leaves the cast in a module that is found by two names.
    owners = [(each, dict(each._parameters)) for each in model.modules()]
    try:
        for owner, params in owners:
            owner._parameters.update({name: cast.get(each) for name, each in params.items()})
        return model(x)  # type: ignore[no-any-return]
    finally:
        for owner, params in owners:
            owner._parameters.update(params)


def _compiled_call(program: Program, model: nn.Module) -> Callable[[Tensor], Tensor]:
    options = dict(program.options)
    if program.how == "whole":
        return torch.compile(model, backend="zpasses", dynamic=program.dynamic, options=options)
    if program.how == "blocks":
        zpasses.compile_blocks(model, **options)
        return model
    for name, layer in model.named_modules():
        if name.rpartition(".")[2].isdecimal() and name.count(".") <= 2:
            layer.compile(backend="zpasses", dynamic=program.dynamic, options=options)
    return model


def _optimizer(program: Program, sharded: bool, model: nn.Module) -> torch.optim.Optimizer:
    name, arguments = program.optimizer
    home = zpasses.optim if sharded and hasattr(zpasses.optim, name) else torch.optim
    built: torch.optim.Optimizer = getattr(home, name)(model.parameters(), **arguments)
    if sharded and program.offloads is not None:
        zpasses.offload_optimizer(built, **program.offloads)
    return built


def _pairs(sharded: Side, reference: Side) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """What must be equal, with its name."""
    for kind in ("shown", "averaged"):
        ours, theirs = getattr(sharded, kind), getattr(reference, kind)
        if len(ours) != len(theirs):
            ours, theirs = [torch.tensor(len(ours))], [torch.tensor(len(theirs))]
        for at, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
            yield f"{kind} value {at}", mine, wanted
    expected = dict(reference.model.named_parameters())
    for name, param in sharded.model.named_parameters():
        yield name, param.detach(), expected[name].detach()
        yield f"gradient of {name}", param.grad, expected[name].grad
    buffers = dict(reference.model.named_buffers())
    for name, buffer in sharded.model.named_buffers():
        yield name, buffer, buffers[name]


def _short(value: Tensor | None) -> str:
    return "None" if value is None else f"{value.dtype}{list(value.shape)}"


# --- the suite ------------------------------------------------------------------------------------
def run(seeds: Iterable[int], config: StressConfig) -> Iterator[CaseResult]:
    """Run one program per seed."""
    for seed in seeds:
        started = time.monotonic()
        program = draw(seed, config.codegen)
        outcome: Outcome
        outcomes: Sequence[RankOutcome] = ()
        try:
            Options.parse(program.options)
        except OptionError as error:
            outcome, reason = "crash", f"the drawn options are not valid: {error}"
        else:
            outcomes = call_on_ranks(
                run_program, (program,), {}, ranks=2, timeout_s=config.case_limit_s
            )
            outcome, reason = _judge(outcomes)
        if outcome != "equal":
            close_pools()  # the ranks may still hold what the program left
        seconds = time.monotonic() - started
        detail = f"{reason}\n{program}"
        kind = _kind(outcomes) if outcome == "refused" else ""
        yield CaseResult("programs", program.how, seed, outcome, detail, seconds, kind)


def _judge(outcomes: Sequence[RankOutcome]) -> tuple[Outcome, str]:
    """What came of a program, and why."""
    if any(each.timed_out for each in outcomes):
        return "hang", "\n".join(map(str, outcomes))
    if not all(each.ok for each in outcomes):
        return "crash", "\n".join(map(str, outcomes))
    reports: list[RankReport] = [each.result for each in outcomes]
    texts = [
        f"rank {rank}, {each.wrong or f'in {each.at}: {each.error}'}"
        for rank, each in enumerate(reports)
        if each.wrong or each.error
    ]
    if not texts:
        return "equal", "all values are equal"
    if any(each.wrong for each in reports):
        return "wrong", "\n".join(texts)
    if all(each.refused_alike for each in reports):
        return "equal", "plain torch raises, too\n" + "\n".join(texts)
    if not all(each.own for each in reports):
        texts += [str(each) for each in outcomes]
        return "crash", "\n".join(texts)
    return "refused", "\n".join(texts)


def _kind(outcomes: Sequence[RankOutcome]) -> str:
    """What refused a program, without names, numbers and ranks."""
    error = next(each.result.error for each in outcomes if each.result.error)
    varying = r"(?<=parameter )\S+|'[^']*'|\"[^\"]*\"|\([^()]*\)|\d[\d.]*"
    return re.sub(varying, "*", " ".join(error.split()))[:400]
