"""A drawn program that saves, and goes on in a new model and optimizer that load, goes on as the
same program without that, bit for bit.
"""

import random
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

import zpasses
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
    )


def _cut_last(param):
    return Shard(param.dim() - 1) if param.dim() > 1 else None


def _side(program, seed):
    torch.manual_seed(seed)
    model = Model(program.model).double()
    zpasses.shard(model, mesh=world_mesh(), **program.shard)

    def compiled(model):
        if program.stage is None:
            return model
        options = {"zero_stage": program.stage, "codegen": "eager"}
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


def _steps(side, frozen, scheduler):
    for part in frozen:
        if part:
            ACTIONS["freeze"](side, part, True)
        ACTIONS["backward"](side, (3, 3), 2, "exit", "plain", "compiled")
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
    _steps(side, ["", ""], scheduler)


def _run(program, path):
    side = _side(program, program.seed)
    scheduler = _scheduler(side) if program.scheduler in ("before", "both") else None
    _steps(side, program.before, scheduler)
    flags = [param.requires_grad for param in side.params]
    dcp.save(zpasses.training_state(side.model, side.optimizer), checkpoint_id=path)

    other = _side(program, program.seed + 1)
    if program.unfreezes == "before":
        _unfreeze(other)
    else:
        for param, flag in zip(other.params, flags, strict=True):
            param.requires_grad_(flag)
    late = _scheduler(other) if program.scheduler in ("after", "both") else None
    if program.warm:
        _steps(other, [""], None)
        ACTIONS["backward"](other, (3, 3), 1, "none", "plain", "compiled")
    zpasses.load_training_state(path, other.model, other.optimizer)
    other.model.zero_grad()
    other.batches = side.batches
    if program.scheduler == "both":
        late.load_state_dict(scheduler.state_dict())
    elif program.scheduler == "after":
        scheduler = _scheduler(side)
    elif program.scheduler == "before":
        scheduler = None
    for buffer in side.model.buffers():
        dist.broadcast(buffer, 0)

    _go_on(program, side, scheduler)
    _go_on(program, other, late)
    values, expected = dict(_values(other)), dict(_values(side))
    assert values.keys() == expected.keys(), values.keys() ^ expected.keys()
    for name, mine in expected.items():
        theirs = values[name]
        assert isinstance(mine, DTensor) == isinstance(theirs, DTensor), name
        if isinstance(mine, DTensor):
            assert mine.placements == theirs.placements, name
            mine, theirs = mine.to_local(), theirs.to_local()
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == theirs.dtype, name
            assert torch.equal(mine, theirs), name
        else:
            assert mine == theirs, name


def _values(side):
    names = {param: name for name, param in side.model.named_parameters()}
    yield from side.model.named_buffers()
    for param, name in names.items():
        yield name, param.detach()
        for key, value in sorted(side.optimizer.state.get(param, {}).items()):
            yield f"{key} of {name}", value
    for number, group in enumerate(side.optimizer.param_groups):
        # torch adds `differentiable` to the defaults of any optimizer that loads.
        for key in sorted(group.keys() - {"params", "differentiable"}):
            yield f"{key} of group {number}", group[key]
        yield f"group {number}", [names[param] for param in group["params"]]


def _runs(seeds):
    for seed in seeds:
        program, folder = _draw(seed), [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder, 0)
        try:
            _run(program, folder[0])
        except Exception as error:
            raise AssertionError(f"{program}: {error}") from error
        finally:
            torch.compiler.reset()


def test_a_few_programs_go_on_as_without_a_checkpoint():
    run_on_ranks(_runs, range(10))


@pytest.mark.slow(quick="test_a_few_programs_go_on_as_without_a_checkpoint")
@pytest.mark.parametrize("first", range(10, 130, 20))
def test_programs_go_on_as_without_a_checkpoint(first):
    run_on_ranks(_runs, range(first, first + 20), timeout_s=300)
