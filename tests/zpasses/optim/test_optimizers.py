"""The table of docs/optimizers.md: each optimizer on sharded parameters, compared with the
unsharded model.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.tensor import DTensor

import zpasses
from tests.cases import some_quick
from tests.on_ranks import needs, on_ranks
from zpasses.testing import run_on_ranks, world_mesh

pytestmark = pytest.mark.processes

FORMS = [{}, {"foreach": True}]
FUSED = [*FORMS, {"fused": True}]
EXACT = {
    "SGD": (optim.SGD, [*FUSED, {"momentum": 0.9, "nesterov": True}]),
    "Adam": (optim.Adam, [*FUSED, {"amsgrad": True}]),
    "RMSprop": (optim.RMSprop, [*FORMS, {"momentum": 0.9, "centered": True}]),
    **{name: (getattr(optim, name), FUSED) for name in ("AdamW", "Adagrad")},
    **{
        name: (getattr(optim, name), FORMS)
        for name in ("Rprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD")
    },
}
"""Optimizers of torch that work on DTensors -> their variants."""

OURS = {
    "Adafactor": [{}, {"weight_decay": 0.1, "eps": (1e-5, 1e-2), "d": 1.2}, {"maximize": True}],
    "Muon": [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3}],
}
"""Optimizers of zpasses that replace those of torch -> their variants."""


class Net(nn.Module):
    """Matrices of several shapes, rows that no world size divides, vectors, a scalar, a stack of
    matrices, one row, and a parameter that is not used.
    """

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 1)
        self.wide = nn.Linear(1, 9, bias=False)
        self.stack = nn.Parameter(torch.randn(3, 2, 5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        y = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.wide(self.c(y)) * self.scale + (self.stack @ y.t()).sum() * 0.1


def _params(model, which):
    return [p for p in model.parameters() if p.dim() == 2 or which != "Muon"]


def _steps(model, optimizer, seeds):
    for seed in seeds:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _compare(which, ours, theirs, options, atol, ignores=False):
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    ignored = [*model.a.parameters()] if ignores else []
    zpasses.shard(model, mesh=world_mesh(), ignored_params=ignored)
    _steps(model, ours(_params(model, which), lr=0.05, **options), range(4))
    _steps(plain, theirs(_params(plain, which), lr=0.05, **options), range(4))
    torch.testing.assert_close(
        zpasses.full_state_dict(model), dict(plain.state_dict()), rtol=0, atol=atol
    )


@pytest.mark.parametrize("which", some_quick(EXACT, ["AdamW", "Adagrad"]))
@on_ranks(2)
def test_optimizers_of_torch_are_exact(which):
    cls, variants = EXACT[which]
    for options in variants:
        _compare(which, cls, cls, options, atol=1e-6)


@pytest.mark.parametrize("which", some_quick(OURS, ["Adafactor", "Muon"]))
@on_ranks(3)
def test_optimizers_of_zpasses_are_exact(which):
    """Also with parameters in them that are not sharded."""
    ours, theirs = getattr(zpasses.optim, which), getattr(optim, which)
    atol = 1e-5 if which == "Adafactor" else 1e-6
    for options in OURS[which]:
        _compare(which, ours, theirs, options, atol)
    _compare(which, ours, theirs, {}, 1e-5, ignores=True)


def _save(which, folder):
    torch.manual_seed(0)
    model = zpasses.shard(Net(), mesh=world_mesh())
    optimizer = getattr(zpasses.optim, which)(_params(model, which), lr=0.05)
    _steps(model, optimizer, range(2))
    sharded = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    assert sharded
    assert all(isinstance(value, DTensor) for value in sharded)
    dcp.save(zpasses.training_state(model, optimizer), checkpoint_id=folder)
    _steps(model, optimizer, range(2, 4))
    return zpasses.full_state_dict(model)


def _resume(which, folder):
    model = zpasses.shard(Net(), mesh=world_mesh())
    optimizer = getattr(zpasses.optim, which)(_params(model, which), lr=0.05)
    zpasses.load_training_state(folder, model, optimizer)
    _steps(model, optimizer, range(2, 4))
    return zpasses.full_state_dict(model)


@pytest.mark.parametrize("which", some_quick(OURS, ["Adafactor"]))
def test_training_resumes_from_a_checkpoint(which, tmp_path):
    expected = run_on_ranks(_save, which, str(tmp_path))[0]
    for state in run_on_ranks(_resume, which, str(tmp_path), ranks=3):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-5)


# --- refused --------------------------------------------------------------------------------------
def _hugging_face(params):
    from transformers.optimization import Adafactor

    return Adafactor(params)


def _prodigy(params):
    from prodigyopt import Prodigy

    return Prodigy(params)


REFUSED = {
    "Muon": (lambda params: optim.Muon(params), r"zpasses\.optim\.Muon"),
    "Adafactor": (lambda params: optim.Adafactor(params), r"zpasses\.optim\.Adafactor"),
    "Hugging Face's Adafactor": (_hugging_face, r"zpasses\.optim\.Adafactor"),
    "LBFGS": (lambda params: optim.LBFGS(params), "Use another optimizer"),
    "Prodigy": (_prodigy, "Use AdamW with a learning rate"),
}


@on_ranks(2)
def test_refused_optimizers_name_the_way_out_and_change_nothing():
    model = zpasses.shard(nn.Linear(4, 5, bias=False), mesh=world_mesh())
    before = zpasses.full_state_dict(model)["weight"]
    model(torch.ones(2, 4)).sum().backward()
    for make, message in REFUSED.values():
        said = rf"parameters that zpasses sharded.*{message}"
        with pytest.raises(zpasses.ShardingError, match=said):
            make(list(model.parameters())).step()
        assert torch.equal(zpasses.full_state_dict(model)["weight"], before)
    plain = nn.Linear(4, 5, bias=False)
    plain(torch.ones(2, 4)).sum().backward()
    optim.Adafactor(plain.parameters()).step()


@on_ranks(2)
def test_a_refused_step_has_not_begun():
    model = zpasses.shard(nn.Linear(4, 5), mesh=world_mesh())
    run = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
    run(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 0:
        with pytest.raises(zpasses.ShardingError):
            optim.Adafactor(model.parameters()).step()
    run(torch.ones(2, 4))


def _keys(rows):
    model = zpasses.shard(nn.Linear(4, rows, bias=False), mesh=world_mesh())
    model(torch.ones(2, 4)).sum().backward()
    (param,) = model.parameters()
    return param._stable_hash_for_caching(), param.grad._stable_hash_for_caching()


def test_ranks_with_other_rows_do_not_share_compiled_steps():
    """AOTAutograd's cache knows inputs of a compiled `optimizer.step` by these keys."""
    first, second = run_on_ranks(_keys, 9)
    assert set(first).isdisjoint(second)
    assert run_on_ranks(_keys, 8)[0] == run_on_ranks(_keys, 8)[1]


FUSED_AND_FOREACH = [
    (optim.AdamW, {"foreach": True}),
    (optim.Adam, {"fused": True}),
    (optim.SGD, {"foreach": True, "momentum": 0.9}),
]


@pytest.mark.parametrize(("cls", "options"), FUSED_AND_FOREACH)
@on_ranks(2)
def test_ignored_parameters_beside_sharded_ones_in_one_group(cls, options):
    plain = nn.Linear(4, 5)
    model = copy.deepcopy(plain)
    zpasses.shard(model, mesh=world_mesh(), ignored_params=[model.bias])
    steps = [cls(each.parameters(), lr=0.1, **options) for each in (plain, model)]
    for _ in range(2):
        for each, optimizer in zip((plain, model), steps, strict=True):
            each(torch.ones(2, 4)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight.detach(), plain.weight.detach())
    torch.testing.assert_close(model.bias, plain.bias)


@pytest.mark.parametrize("flag", ["foreach", "fused"])
@on_ranks(2)
def test_subclasses_take_sharded_and_ignored_parameters_in_groups_of_their_own(flag):
    class Other(optim.AdamW):
        pass

    plain = nn.Linear(4, 5)
    model = copy.deepcopy(plain)
    zpasses.shard(model, mesh=world_mesh(), ignored_params=[model.bias])
    for each in (plain, model):
        each(torch.ones(2, 4)).pow(2).sum().backward()
    optimizer = Other(model.parameters(), lr=0.1, **{flag: True})
    with pytest.raises(zpasses.ShardingError, match=rf"1 sharded .* 1 that are not.*leave {flag}"):
        optimizer.step()
    assert not optimizer.state
    # Both ways out give the step of the unsharded model.
    groups = [{"params": [param]} for param in model.parameters()]
    for made, options in (
        (Other(groups, lr=0.1, **{flag: True}), {flag: True}),
        (Other(model.parameters(), lr=0.1), {}),
    ):
        made.step()
        optim.AdamW(plain.parameters(), lr=0.1, **options).step()
        torch.testing.assert_close(model.weight.detach(), plain.weight.detach())
        torch.testing.assert_close(model.bias, plain.bias)


# --- low-bit optimizers of torchao ----------------------------------------------------------------
LOW_BIT = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


@pytest.mark.parametrize("which", LOW_BIT)
@needs("torchao")
@on_ranks(2)
def test_low_bit_optimizers_are_exact_if_shards_are_whole_blocks(which):
    import torchao.optim

    cls = getattr(torchao.optim, which)
    # A shard of the second shape has 32.5 blocks of 256 values, or 64.5 of 128, so its state is in
    # fp32, like that of torch's optimizer.
    width = 129 if which == "AdamW4bit" else 130
    for shape, reference in (((64, 128), cls), ((width, 128), optim.AdamW)):
        torch.manual_seed(0)
        plain = nn.Linear(*shape)
        model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
        for each, kind in ((plain, reference), (model, cls)):
            optimizer = kind(each.parameters(), lr=1e-2)
            for seed in range(3):
                x = torch.randn(8, shape[0], generator=torch.Generator().manual_seed(seed))
                each(x).square().mean().backward()
                with torch.compiler.set_stance("force_eager"):  # it compiles each update
                    optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(
            zpasses.full_state_dict(model), dict(plain.state_dict()), rtol=0, atol=1e-6
        )
        moments = optimizer.state[model._parameters["weight"]]["exp_avg"].to_local()
        assert (type(moments) is torch.Tensor) == (reference is optim.AdamW)


# --- the page -------------------------------------------------------------------------------------
def test_rows_of_the_page_are_tested():
    page = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text()
    rows = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    tested = {f"torch.optim.{name}" for name in EXACT} | {f"zpasses.optim.{name}" for name in OURS}
    tested |= {f"torch.optim.{name}" for name in ("Muon", "Adafactor", "LBFGS")}
    tested |= {"transformers.Adafactor", "prodigyopt.Prodigy"}
    tested |= {f"torchao.optim.{name}" for name in LOW_BIT}
    assert set(rows) == tested
    assert len(rows) == len(tested)
