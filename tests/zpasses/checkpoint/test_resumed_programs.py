"""A drawn program that saves, and goes on in a new model and optimizer that load, goes on as the
same program without that, bit for bit.
"""

import functools
import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor, Shard

import zpasses
from tests.zpasses.checkpoint.checkpoint_models import assert_equal_values, values_of
from zpasses.testing import run_on_ranks, world_mesh
from zpasses.tools.stress.drawn_models import Model, ModelChoice, draw_model
from zpasses.tools.stress.drawn_programs import OPTIMIZERS
from zpasses.tools.stress.training_actions import ACTIONS, Side

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Program:
    seed: int
    model: ModelChoice
    optimizer: tuple[str, dict[str, Any]]
    shard: dict[str, Any]
    stage: int | None
    """None runs without the compiler."""
    groups: int
    """Number of parameter groups."""
    left_out: bool
    """Whether a third of the parameters comes into the optimizer after the checkpoint."""
    before: tuple[str, ...]
    """What is frozen before each of the steps before the checkpoint; "" for nothing."""
    unfreezes: str
    """When everything is unfrozen: "" for never, before or after the checkpoint is loaded."""
    scheduler: str
    """When there is a scheduler: "" for never, before, after, or both."""
    warm: bool
    """Whether the new optimizer has made a step, and gradients are there, when it loads."""
    dropout: bool
    """Whether the model draws random numbers, others on each rank."""
    window: str
    """How the two backwards of a step end their gradient window; "none" for no window."""
    file: bool
    """Whether the weights go through a safetensors file, which other code reads, too."""
    pending: bool
    """Whether it saves inside a gradient window, and goes on without the gradients from there."""
    codegen: str


def _draw(seed):
    chance = random.Random(f"resumed {seed}")
    model = draw_model(chance)
    name, arguments = chance.choice(OPTIMIZERS)
    shard = {"pack_mb": 1.0} if chance.random() < 0.3 else {}
    if name != "Adafactor" and chance.random() < 0.3:
        shard["shard_placement_fn"] = _cut_last
    return Program(
        seed,
        model,
        (name, dict(arguments)),
        shard,
        stage=chance.choice((None, None, 2, 3)),
        groups=chance.choice((1, 1, 2, 3)),
        left_out=chance.random() < 0.3,
        before=tuple(
            chance.choice(("", "", "first layer", "biases", "every other"))
            for _ in range(chance.choice((0, 1, 2, 3)))
        ),
        unfreezes=chance.choice(("", "before", "after")),
        scheduler=chance.choice(("", "before", "after", "both")),
        warm=chance.random() < 0.4,
        dropout=chance.random() < 0.4,
        window=chance.choice(("exit", "count", "last", "none")),
        file=chance.random() < 0.4,
        pending=chance.random() < 0.25,
        codegen="inductor" if chance.random() < 0.15 else "eager",
    )


def _cut_last(param):
    return Shard(param.dim() - 1) if param.dim() > 1 else None


def _side(program, seed):
    torch.manual_seed(seed)
    model = Model(program.model).double()
    if program.dropout:
        model.head.register_forward_pre_hook(lambda _, args: nn.functional.dropout(args[0], 0.2))
    zpasses.shard(model, mesh=world_mesh(), **program.shard)

    def compiled(model):
        if program.stage is None:
            return model
        options = {"zero_stage": program.stage, "codegen": program.codegen}
        return torch.compile(model, backend="zpasses", options=options)

    def optimizer(model):
        name, arguments = program.optimizer
        home = zpasses.optim if hasattr(zpasses.optim, name) else torch.optim
        params = [p for at, p in enumerate(model.parameters()) if at % 3 or not program.left_out]
        groups = [
            {"params": params[at :: program.groups], "lr": arguments["lr"] * (1 + at / 4)}
            for at in range(program.groups)
        ]
        return getattr(home, name)([group for group in groups if group["params"]], **arguments)

    return Side(
        dist.get_rank(), program.seed, torch.float64, model, compiled, optimizer, sharded=True
    )


def _steps(program, side, frozen, scheduler):
    for part in frozen:
        if part:
            ACTIONS["freeze"](side, part, True)
        ACTIONS["backward"](side, (3, 3), 2, program.window, "plain", "compiled")
        side.optimizer.step()
        side.model.zero_grad()
        if scheduler is not None:
            scheduler.step()


def _scheduler(side):
    return torch.optim.lr_scheduler.StepLR(side.optimizer, 1, 0.5)


def _unfreeze(side):
    for param in side.params:
        param.requires_grad_(True)


def _go_on(program, side, scheduler):
    """The part after the checkpoint."""
    if program.unfreezes:
        _unfreeze(side)
    if program.left_out:
        side.optimizer.add_param_group({"params": side.params[::3]})
        if scheduler is not None:
            scheduler = None  # it knows the groups from before only
    _steps(program, side, ["", ""], scheduler)


def _first(program, folder):
    """Save, and go on without loading."""
    side = _side(program, program.seed)
    scheduler = _scheduler(side) if program.scheduler in ("before", "both") else None
    _steps(program, side, program.before, scheduler)
    _save(program, side, folder)
    found = {
        "flags": [param.requires_grad for param in side.params],
        "batches": side.batches,
        "scheduler": scheduler.state_dict() if program.scheduler == "both" else None,
    }
    if program.scheduler == "after":
        scheduler = _scheduler(side)
    elif program.scheduler == "before":
        scheduler = None
    for buffer in side.model.buffers():  # a checkpoint has those of rank 0
        dist.broadcast(buffer, 0)
    _go_on(program, side, scheduler)
    found["values"] = values_of(side.model, side.optimizer)
    torch.save(found, f"{folder}/{dist.get_rank()}.pt")


def _save(program, side, folder):
    run = functools.partial(zpasses.training_state, side.model, side.optimizer)
    with zpasses.coalesce_grad_reduction(side.model) if program.pending else nullcontext():
        if program.pending:
            side.loss(side.batch((3, 3))).backward()
            with pytest.raises(zpasses.ShardingError, match="is pending in a gradient window"):
                run()
        dcp.save(run(drop_pending=program.pending), checkpoint_id=f"{folder}/state")
        if program.file:
            zpasses.save_safetensors(side.model, f"{folder}/weights")
        _check_files(side, folder, program)
    side.model.zero_grad()


def _check_files(side, folder, program):
    """A checkpoint holds what one process would have written."""
    weights = zpasses.full_state_dict(side.model)
    moments = {
        (name, key): value.full_tensor() if isinstance(value, DTensor) else value
        for name, param in side.model.named_parameters()
        for key, value in side.optimizer.state.get(param, {}).items()
    }
    if dist.get_rank():
        return
    with torch.random.fork_rng():
        plain = Model(program.model).double()
    plain.load_state_dict(weights)
    expected = plain.state_dict()
    if program.file:
        found = load_file(f"{folder}/weights/model.safetensors")
        tied = {value.data_ptr(): found.get(name) for name, value in expected.items()}
        tied |= {expected[name].data_ptr(): value for name, value in found.items()}
        found = {name: tied[value.data_ptr()] for name, value in expected.items()}
    else:
        dcp_to_torch_save(f"{folder}/state", f"{folder}/whole.pt")
        whole = torch.load(f"{folder}/whole.pt", weights_only=False)
        found = {
            name: value if isinstance(value, torch.Tensor) else value[0]
            for name, value in whole["model"].items()
        }
        states = whole["optimizer_0"].get("state", {})
        inner = {(name, key): state[key] for name, state in states.items() for key in state}
        assert inner.keys() == moments.keys()
        for key, value in moments.items():
            assert torch.equal(torch.as_tensor(inner[key]), torch.as_tensor(value)), key
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def _pass_on(program, folder):
    """Load and save."""
    side = _side(program, program.seed + 2)
    zpasses.load_training_state(f"{folder}/state", side.model, side.optimizer)
    dcp.save(zpasses.training_state(side.model, side.optimizer), checkpoint_id=f"{folder}/other")
    Path(f"{folder}/state").rename(f"{folder}/earlier") if dist.get_rank() == 0 else None
    dist.barrier()
    Path(f"{folder}/other").rename(f"{folder}/state") if dist.get_rank() == 0 else None


def _second(program, folder):
    """Load, go on, and compare."""
    found = torch.load(f"{folder}/{dist.get_rank()}.pt", weights_only=False)
    other = _side(program, program.seed + 1)
    if program.unfreezes == "before":
        _unfreeze(other)
    else:
        for param, flag in zip(other.params, found["flags"], strict=True):
            param.requires_grad_(flag)
    late = _scheduler(other) if program.scheduler in ("after", "both") else None
    if program.warm:
        _steps(program, other, [""], None)
        ACTIONS["backward"](other, (3, 3), 1, "none", "plain", "compiled")
    zpasses.load_training_state(
        f"{folder}/state", other.model, other.optimizer, weights=not program.file
    )
    if program.file:
        zpasses.load_safetensors(other.model, f"{folder}/weights")
    other.model.zero_grad()
    other.batches = found["batches"]
    if program.scheduler == "both":
        late.load_state_dict(found["scheduler"])
    _go_on(program, other, late)
    assert_equal_values(values_of(other.model, other.optimizer), found["values"])


def _each(folder, seeds, *parts, **changes):
    """Run parts of the programs of seeds, each in a folder of its own."""
    for seed in seeds:
        program = replace(_draw(seed), **changes)
        own = f"{folder}/{seed}"
        try:
            for part in parts:
                part(program, own)
                torch.compiler.reset()
        except Exception as error:
            raise AssertionError(f"{program}: {type(error).__name__}: {error}") from error


def _through_three_ranks(folder, seeds):
    # Generators are restored on as many ranks only.
    changes = {"dropout": False, "file": False}
    run_on_ranks(_each, folder, seeds, _first, timeout_s=300, **changes)
    run_on_ranks(_each, folder, seeds, _pass_on, ranks=3, timeout_s=300, **changes)
    run_on_ranks(_each, folder, seeds, _second, timeout_s=300, **changes)


def test_a_few_programs_go_on_as_without_a_checkpoint(tmp_path):
    run_on_ranks(_each, str(tmp_path), range(5), _first, _second)


@pytest.mark.slow(quick="test_a_few_programs_go_on_as_without_a_checkpoint")
@pytest.mark.parametrize("first", range(5, 125, 20))
def test_programs_go_on_as_without_a_checkpoint(tmp_path, first):
    run_on_ranks(_each, str(tmp_path), range(first, first + 20), _first, _second, timeout_s=300)


@pytest.mark.slow(quick="test_a_few_programs_go_on_as_without_a_checkpoint")
@pytest.mark.parametrize("first", range(125, 165, 20))
def test_checkpoints_pass_through_another_number_of_ranks(tmp_path, first):
    _through_three_ranks(str(tmp_path), range(first, first + 20))
