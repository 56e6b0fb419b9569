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
import random
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import zpasses
from zpasses import compat
from zpasses.errors import OptionError, ZpassesError
from zpasses.option_values import field_types
from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Pipeline, catalogue
from zpasses.testing.drawing import draw_pipeline, values_of
from zpasses.testing.ranks import Outcome as RankOutcome
from zpasses.testing.ranks import close_pools
from zpasses.testing.ranks.pool import call_on_ranks
from zpasses.tools.stress.cases import CaseResult, Outcome, StressConfig, own_part
from zpasses.tools.stress.drawn_models import Model, ModelChoice, deepened, draw_model
from zpasses.tools.stress.training_actions import ACTIONS, EDITS, Edit, Rows, Side

_VOTE_LIMIT_S = 30.0
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference, as a part of one more than the largest value of a tensor."""


# --- drawing --------------------------------------------------------------------------------------
OPTION_VALUES: Mapping[str, tuple[Any, ...]] = {
    "target": ("h100",),
    "memory_budget": ("auto", "0%", "60GiB"),
    "backwards_per_step": (1, 1, 2, 3),
    "grad_accum_dtype": (torch.float64,),
    "prefetch": (0, 1, 4),
}
"""Option of a compile -> values to draw beside those that follow from its type."""

OPTIONS_NOT_DRAWN: Mapping[str, str] = {
    "codegen": "an argument of the command",
    "verify": "`simulate` takes seconds; the suite `graphs` checks the passes",
    "agreement_timeout_s": "a limit that right programs do not reach",
    "cache": "the suite `caches` draws it",
    "dump": "changes no number",
    "dump_ranks": "changes no number",
    "inductor": "options of another compiler",
}
"""Option of a compile that is not drawn -> the reason."""

_HOST_ROWS = 2048
"""With `host_memory`, batches have this many times the rows: smaller values stay on the device."""

_HOST_BUDGETS_KIB = (1536, 2048, 3072, 4096, 6144)
"""Memory budgets that are drawn with `host_memory`. A value of such a batch has 150 to 400 KiB."""

_BLOCK_BUDGETS_KIB = (3072, 4096, 6144, 8192, 12288)
"""Those with blocks, which do not recompute."""

_HOST_TARGET = "h100,tflops=1,host_out_gb_s=2000,host_in_gb_s=2000"
"""Copies to the host are faster than recomputing there."""

OPTIMIZERS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.02, "eps": 1e-3, "amsgrad": True}),
    ("AdamW", {"lr": 0.02, "eps": 1e-3}),
    ("AdamW", {"lr": 0.02, "eps": 1e-3, "fused": True}),
    ("Adagrad", {"lr": 0.05, "eps": 1e-3}),
    ("RMSprop", {"lr": 0.02, "eps": 1e-3, "momentum": 0.5, "centered": True}),
    ("Adamax", {"lr": 0.02, "eps": 1e-3}),
    ("NAdam", {"lr": 0.02, "eps": 1e-3}),
    ("RAdam", {"lr": 0.02, "eps": 1e-3}),
    ("Adadelta", {"lr": 0.5, "eps": 1e-3}),
    ("ASGD", {"lr": 0.05}),
    ("Adafactor", {"lr": 0.02, "eps": (1e-3, 1e-3)}),
)
"""Classes with arguments. A large `eps` keeps gradients that are 0 but for rounding small."""

_ARGUMENTS: Mapping[Any, Sequence[Any]] = {
    float: (0.5, 1.25),
    Rows: ((3, 3), (3, 3), (4, 4), (5, 2)),
    Edit: tuple(EDITS),
}
"""Type of an action's argument -> what is drawn for it, where the type does not say it."""


@dataclass(frozen=True)
class Action:
    """One call of a program."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self.arguments.items())
        return f"{self.name}({given})"


@dataclass(frozen=True)
class Program:
    """What both ranks run."""

    seed: int
    model: ModelChoice
    dtype: torch.dtype
    mesh: tuple[int, ...]
    shard: Mapping[str, Any]
    """Arguments of `zpasses.shard`; `cut_last` is a placement function that cuts the last
    dimension."""
    how: Literal["whole", "parts", "blocks"]
    """What is compiled: the model, its blocks one by one, or by `zpasses.compile_blocks`."""
    dynamic: bool | None
    """Argument of `torch.compile`, but for `zpasses.compile_blocks`."""
    options: Mapping[str, Any]
    optimizer: tuple[str, Mapping[str, Any]]
    offloads: bool
    """Whether the states of the optimizer rest on the host."""
    rests: bool
    """Whether the shards of all parameters do, and their gradients."""
    actions: tuple[Action, ...]
    rows_factor: int = 1
    """How many times the rows that an action names a batch has."""
    autocast: bool = False
    """Whether the model is called within `torch.autocast` to bfloat16."""

    def __str__(self) -> str:
        """The program as a listing."""
        kind, arguments = self.optimizer
        options = dict(self.options)
        given = f"backend='zpasses', dynamic={self.dynamic}, options={options}"
        calls = {
            "whole": f"torch.compile(model, {given})",
            "parts": f"layer.compile({given})  # each",
            "blocks": f"zpasses.compile_blocks(model, **{options})",
        }
        lines = [
            f"model = {self.model}  # {self.dtype}",
            f"zpasses.shard(model, mesh={self.mesh}, **{dict(self.shard)})",
            self.rests and "zpasses.offload_parameters(model, trained=True)",
            calls[self.how],
            f"optimizer = {kind}(model.parameters(), **{dict(arguments)})",
            self.offloads and "zpasses.offload_optimizer(optimizer)",
            f"# batches have {self.rows_factor} times these rows",
            self.autocast and '# forwards run in torch.autocast("cpu", torch.bfloat16)',
            *map(str, self.actions),
        ]
        return "\n".join(line for line in lines if line)

    @property
    def encodes(self) -> bool:
        """Whether communication is encoded, so that values differ from those of plain torch."""
        return "encode" in str(self.options.get("pipeline"))

    @property
    def rounds(self) -> bool:
        """Whether it computes in bfloat16, so that only much larger differences from plain torch
        count.
        """
        return self.precision == torch.bfloat16

    @property
    def precision(self) -> torch.dtype:
        """The least precise dtype in which it computes."""
        return torch.bfloat16 if self.autocast else dtype_of(self)

    def twin(self) -> Program | None:
        """The program with the same bits that leaves all on the device, in stage 1 if this one
        encodes or rounds; None if this is it, or if plain torch shows enough.
        """
        moves = self.offloads or self.rests or "host_memory" in self.options
        if not (moves or self.encodes or self.rounds):
            return None
        left_out = {"memory_budget", "host_memory"} & {*self.options}
        options = {key: value for key, value in self.options.items() if key not in left_out}
        if self.encodes:
            options["pipeline"] = re.sub(r"^zero\d", "zero1", options["pipeline"])
        elif self.rounds and "zero_stage" in options:
            options["zero_stage"] = 1
        elif "pipeline" in options:
            options["pipeline"] = _with_chunks(options["pipeline"])
        twin = replace(self, options=options, offloads=False, rests=False)
        return None if twin == self else twin


def draw(seed: int, codegen: str = "eager") -> Program:
    """The program of a seed."""
    chance = random.Random(f"program {seed}")
    model = draw_model(chance)
    how: Any = chance.choice(("whole", "whole", "parts", "blocks"))
    kind, arguments = chance.choice(OPTIMIZERS)
    if "fused" not in arguments and kind != "Adafactor":
        arguments = {**arguments, "foreach": chance.choice((None, True, False))}
    mesh = chance.choice(((2,), (2,), (2,), (2, 1), (1, 2)))
    options, shard = _draw_options(chance, how, mesh), _draw_shard(chance, model)
    moved = random.Random(f"host {seed}")
    options |= _draw_host_options(moved, how, options)
    if how == "blocks" and "host_memory" in options:
        model = deepened(moved, model)
        if "param_dtype" in shard:
            model = replace(model, checkpoints=False)  # the reference would recompute without it
    options = _draw_encodings(moved, options)
    dtype = chance.choice((torch.float64, torch.float64, torch.float32))
    dtype, autocast, shard = _draw_precision(random.Random(f"bits {seed}"), dtype, model, shard)
    program = Program(
        seed,
        model,
        dtype=dtype,
        mesh=mesh,
        shard=shard,
        how=how,
        dynamic=chance.choice((None, None, None, True, False)),
        options={"codegen": codegen, "agreement_timeout_s": _VOTE_LIMIT_S, **options},
        optimizer=(kind, arguments),
        offloads=moved.random() < 0.2,
        rests=moved.random() < 0.2,
        actions=tuple(_draw_actions(chance, how, shard, options.get("backwards_per_step", 1))),
        rows_factor=_HOST_ROWS if "host_memory" in options else 1,
        autocast=autocast,
    )
    if program.rounds and codegen == "inductor":  # which otherwise rounds what leaves a kernel
        emulated = {"inductor": {"emulate_precision_casts": True}}
        program = replace(program, options={**program.options, **emulated})
    # What was frozen when it moved may not be trained, and nothing may be assigned in its place.
    refused = ("freeze", "assign")
    possible = not any(word in str(each) for each in program.actions for word in refused)
    return replace(program, rests=program.rests and possible)


def _draw_shard(chance: random.Random, model: ModelChoice) -> dict[str, Any]:
    drawn = {
        "param_dtype": chance.choice((None, None, None, torch.float32)),
        "reduce_dtype": chance.choice((None, None, None, torch.float64)),
        "pack_mb": chance.choice((None, None, 1.0)),
        "grad_divide_factor": chance.choice((None, None, None, 1.0, 4.0)),
        "cut_last": chance.choice((None, None, True)),
    }
    if not _may_cast(model):
        drawn["param_dtype"] = None
    return {name: value for name, value in drawn.items() if value is not None}


def _may_cast(model: ModelChoice) -> bool:
    """Whether parameters may be cast: buffers are not, nor what the reference recomputes."""
    return not model.checkpoints and not {"buffers", "batch_norm", "recomputed"} & {*model.blocks}


def _draw_precision(
    chance: random.Random, dtype: torch.dtype, model: ModelChoice, shard: Mapping[str, Any]
) -> tuple[torch.dtype, bool, dict[str, Any]]:
    """The dtype of the model, whether `torch.autocast` is on, and the arguments of
    `zpasses.shard`. A third of the programs computes in bfloat16.
    """
    low = torch.bfloat16
    how = chance.choice((*("model", "params", "autocast"), *[None] * 6))
    if how is None or (how == "params" and not _may_cast(model)):
        return dtype, False, dict(shard)
    given = {**shard, "reduce_dtype": chance.choice((None, torch.float32))}
    given["param_dtype"] = low if how == "params" else None
    given = {name: value for name, value in given.items() if value is not None}
    return low if how == "model" else torch.float32, how == "autocast", given


def _draw_options(chance: random.Random, how: str, mesh: tuple[int, ...]) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    for name, kind in field_types(Options).items():
        values = [*values_of(kind), *OPTION_VALUES.get(name, ())]
        if name == "pipeline":
            drawn[name] = draw_pipeline(chance.choice) if chance.random() < 0.15 else None
        elif name == "zero_stage" or chance.random() < 0.15:
            drawn[name] = chance.choice(values) if name not in OPTIONS_NOT_DRAWN else None
    pipeline = drawn["pipeline"]
    if pipeline is not None:
        drawn["zero_stage"] = None
    impossible = {
        "memory_budget": pipeline is not None and not _searches(pipeline),
        "grad_accum": len(mesh) == 1 or (pipeline is not None and "defer" not in pipeline),
        "backwards_per_step": pipeline is not None and "defer" not in pipeline,
        "blocks": how == "blocks",
    }
    if drawn.get("memory_budget") is not None and drawn.get("prefetch") != "auto":
        impossible["prefetch"] = True
    given = {
        name: value
        for name, value in drawn.items()
        if value is not None and not impossible.get(name)
    }
    if "pipeline" in given and ("memory_budget" not in given or "prefetch" in given):
        given["pipeline"] = _with_chunks(given["pipeline"])
    return given


def _with_chunks(pipeline: str) -> str:
    """A pipeline of which nothing chooses the number of chunks."""
    return re.sub(r"\bchunk-loss(?!\{)", "chunk-loss{chunks=2}", pipeline)


def _draw_host_options(
    chance: random.Random, how: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Options that let saved values rest on the host, for a third of the programs that may."""
    if {"pipeline", "prefetch"} & {*options} or chance.random() < 0.65:
        return {}
    budgets = _BLOCK_BUDGETS_KIB if how == "blocks" else _HOST_BUDGETS_KIB
    budget = f"{chance.choice(budgets)}KiB"
    return {"memory_budget": budget, "host_memory": "1GiB", "target": _HOST_TARGET}


def _draw_encodings(chance: random.Random, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with encoded communication in some of the programs that have a stage."""
    stage = options.get("zero_stage")
    encodes = {
        each: chance.choice(values_of(field_types(catalogue()[each])["encode"]))
        for each in ("gather-params", "reduce-grads")
    }
    given = [
        f"{name}.encode={how},{name}.exact_below_kib=0" for name, how in encodes.items() if how
    ]
    if stage is None or not given or chance.random() < 0.8:
        return dict(options)
    others = {key: value for key, value in options.items() if key != "zero_stage"}
    return {**others, "pipeline": f"zero{stage}{{{','.join(given)}}}"}


def _searches(pipeline: str) -> bool:
    """Whether a pass keeps within a memory budget."""
    return any(each.facts.plans_within is not None for each in Pipeline.parse(pipeline))


_STEP = ("backward", "clip", "step", "zero_grad")
"""The actions of each step of training. Any other action may come before each of them."""


def _draw_actions(
    chance: random.Random, how: str, shard: Mapping[str, Any], backwards: int
) -> Iterator[Action]:
    others = [name for name in ACTIONS if name not in _STEP]
    if backwards > 1:
        others.remove("fail")
    if how != "whole" or backwards > 1 or chance.random() < 0.8 or "cut_last" in shard:
        # Most such programs are refused, and end there. Code that is not compiled keeps the values
        # that forward read, and so does a parameter that is cut along its last dimension.
        others.remove("edit_before_backward")
    windows = backwards > 1 or "grad_divide_factor" in shard or chance.random() < 0.6
    for _ in range(chance.randint(2, 3)):
        for name in _STEP:
            while chance.random() < 0.3:
                yield _draw_action(chance, chance.choice(others), backwards, windows)
            if name != "clip" or chance.random() < 0.3:
                yield _draw_action(chance, name, backwards, windows)


def _draw_action(chance: random.Random, name: str, backwards: int, windows: bool) -> Action:
    """Draw the arguments of an action.

    Args:
        backwards: how many backwards a step has; 1 for any number.
        windows: whether several backwards may be reduced once, or hooks may see each gradient.
    """
    drawn = {
        key: chance.choice(values_of(kind) or _ARGUMENTS[kind])
        for key, kind in get_type_hints(ACTIONS[name]).items()
        if key not in ("side", "return")
    }
    if name == "backward":
        if backwards > 1 or not windows:
            drawn["window"] = "none"
        if backwards > 1:
            drawn |= {"micro": backwards, "form": "plain", "through": "compiled"}
    if name == "hook" and windows:
        drawn["kind"] = "tensor"
    return Action(name, drawn)


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
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            _run_actions(program, report)
    except Exception as error:
        report.error = f"{type(error).__name__}: {error}"
        cause = compat.inner_exception(error) or error
        report.own = isinstance(cause, (ZpassesError, OptionError))
        traceback.print_exc()
    return report


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
    if program.rests:
        zpasses.offload_parameters(model, trained=True)
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


def dtype_of(program: Program) -> torch.dtype:
    """The dtype of the data of a program."""
    return program.shard.get("param_dtype") or program.dtype


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
    return zpasses.offload_optimizer(built) if sharded and program.offloads else built


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
