"""Draws the training programs of the suite `programs`."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_type_hints

import torch

from zpasses.option_values import field_types
from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Pipeline, catalogue
from zpasses.testing.drawing import draw_pipeline, values_of
from zpasses.tools.stress.drawn_models import Model, ModelChoice, deepened, draw_model
from zpasses.tools.stress.training_actions import ACTIONS, EDITS, DeviceBytes, Edit, Rows

_VOTE_LIMIT_S = 30.0


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
    DeviceBytes: ("0B", "512B", "2KiB", "auto", "auto"),
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
    offloads: Mapping[str, Any] | None
    """Arguments of `zpasses.offload_optimizer`; None if the states stay on the device."""
    rests: Mapping[str, Any] | None
    """Arguments of `zpasses.offload_parameters`; None if the shards stay on the device."""
    actions: tuple[Action, ...]
    room_bytes: int = 0
    """What `device_bytes="auto"` finds free beside forward and backward."""
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
            self.rests is not None and f"zpasses.offload_parameters(model, **{dict(self.rests)})",
            calls[self.how],
            f"optimizer = {kind}(model.parameters(), **{dict(arguments)})",
            self.offloads is not None
            and f"zpasses.offload_optimizer(optimizer, **{dict(self.offloads)})"
            f"  # 'auto' finds {self.room_bytes} bytes",
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
        moves = self.offloads is not None or self.rests is not None
        moves = moves or "host_memory" in self.options
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
        twin = replace(self, options=options, offloads=None, rests=None)
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
        offloads={} if moved.random() < 0.2 else None,
        rests={"trained": True} if moved.random() < 0.2 else None,
        actions=tuple(_draw_actions(chance, how, shard, options.get("backwards_per_step", 1))),
        rows_factor=_HOST_ROWS if "host_memory" in options else 1,
        autocast=autocast,
    )
    if program.rounds and codegen == "inductor":  # which otherwise rounds what leaves a kernel
        emulated = {"inductor": {"emulate_precision_casts": True}}
        program = replace(program, options={**program.options, **emulated})
    return _draw_offloads(random.Random(f"offload {seed}"), program)


def _draw_offloads(chance: random.Random, program: Program) -> Program:
    """The program with the arguments of what it offloads. Half of those that could offload frozen
    parameters, and offload none, do.
    """
    # What was frozen when it moved may not be trained, and nothing may be assigned in its place.
    refused = ("freeze", "assign")
    possible = not any(word in str(each) for each in program.actions for word in refused)
    rests = program.rests if possible else None
    if possible and rests is None and chance.random() < 0.5 and _has_frozen(program.model):
        rests = {}
    if rests is not None:
        rests = {**rests, "device_bytes": chance.choice(("0B", "0B", "128B", "512B"))}
    if program.offloads is None:
        return replace(program, rests=rests)
    offloads = {
        "device_bytes": chance.choice(_ARGUMENTS[DeviceBytes]),
        "bucket_bytes": chance.choice(("256MiB", "1KiB", "256B")),
    }
    actions = list(program.actions)
    if chance.random() < 0.5:
        again = _draw_action(chance, "offload_again", backwards=1, windows=False)
        actions.insert(chance.randrange(len(actions)), again)
    room = chance.choice((512, 2048, 8192))
    return replace(program, rests=rests, offloads=offloads, actions=tuple(actions), room_bytes=room)


def _has_frozen(choice: ModelChoice) -> bool:
    """Whether a parameter is frozen that can rest on the host, which scalars cannot."""
    with torch.device("meta"):
        return any(each.dim() and not each.requires_grad for each in Model(choice).parameters())


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
    searches = _searches(options.get("pipeline", "zero3"))
    if "prefetch" in options or not searches or chance.random() < 0.65:
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
    others = [name for name in ACTIONS if name not in (*_STEP, "offload_again")]
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


def dtype_of(program: Program) -> torch.dtype:
    """The dtype of the data of a program."""
    return program.shard.get("param_dtype") or program.dtype
