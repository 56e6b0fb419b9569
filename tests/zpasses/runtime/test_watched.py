"""Edits of sharded parameters, of every kind: what runs afterwards uses the new values, as an
unsharded model does, or an error says on all ranks why it cannot.
"""

import copy
import datetime
import itertools
import re
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.training_programs import act, check, program
from tests.zpasses.parallel_models import whole
from tests.zpasses.runtime.watched_models import EAGER, X, build, compiled
from zpasses.ranks.edit_log import EditLog
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh
from zpasses.tools.stress.training_actions import EDITS

pytestmark = pytest.mark.processes


def set_group_timeout(seconds):
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    backend._set_default_timeout(datetime.timedelta(seconds=seconds))


def raised(rank):
    """The name of the error that ended a rank."""
    return re.findall(r"^zpasses\.errors\.(\w+):", rank.error, re.MULTILINE)[-1]


# --- edits ----------------------------------------------------------------------------------------
def edited(*ways):
    """A program that makes each edit between a step and a backward, from the same values."""
    before = act("edit", way="load own"), "backward", "step", "zero_grad", "evaluate"
    actions = [(*before, act("edit", way=way), "evaluate", "backward", "zero_grad") for way in ways]
    return program(*itertools.chain(*actions))


@pytest.mark.parametrize(
    ("stage", "codegen"), some_quick([(2, "eager"), (3, "eager"), (2, "inductor")], [(2, "eager")])
)
def test_edits_of_all_kinds_are_seen_by_one_model(stage, codegen):
    check(edited(*EDITS), zero_stage=stage, codegen=codegen)


@pytest.mark.parametrize("stage", some_quick([2, 3], [2]))
def test_averages_of_weights_are_evaluated_as_they_are(stage):
    train = "backward", "step", "zero_grad", "average_model", "moving_average"
    check(program(*train, *train, *train), zero_stage=stage)


@on_ranks(2)
def test_plain_tensors_are_edited_by_full_values():
    model, reference, expected = build(True), build(False), build(False)
    with torch.no_grad():
        for param in (*model.parameters(), *reference.parameters()):
            param.mul_(2)
        # As trl updates a reference model that is not sharded, and AveragedModel its copy.
        for target, param in zip(reference.parameters(), model.parameters(), strict=True):
            target.data.mul_(0.5).add_(param.data, alpha=0.5)
        torch._foreach_lerp_(list(reference.parameters()), list(model.parameters()), 0.5)
        for param, other in zip(reference.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(param, 2 * other)


MIXED = {
    "other + own": (lambda own, other: other + own, "shard the other model, too"),
    "average": (lambda own, other: 0.9 * other.detach() + own, "shard the other model, too"),
    "rows": (lambda own, _: own.copy_(torch.zeros(3, 6)), r"a plain tensor of shape \[3, 6\]"),
    "data": (lambda own, _: setattr(own, "data", torch.zeros(3, 6)), "same shape"),
    "set_": (
        lambda own, _: own.data.set_(torch.zeros(7, 6)),
        r"Assign the value: param\.data = value",
    ),
}


@on_ranks(2)
def test_what_cannot_be_mixed_says_what_to_do():
    model, plain = build(True), build(False)
    own, other = next(model.parameters()), next(plain.parameters())
    with torch.no_grad():
        for mix, said in MIXED.values():
            with pytest.raises(zpasses.ShardingError, match=said):
                mix(own, other)
        with pytest.raises(zpasses.ShardingError, match="Share a full copy"):
            model.share_memory()


@pytest.mark.parametrize("stage", some_quick([0, 3], [3]))
@on_ranks(2)
def test_penalties_on_parameters_are_exact_as_full_values(stage):
    model, plain = build(True), build(False)
    call = compiled(model, stage) if stage else model
    penalty = sum(param.pow(2).sum() for param in model.parameters())
    with pytest.raises(zpasses.ShardingError, match=r"penalty\.full_tensor\(\)"):
        call(X).square().sum() + penalty
    (call(X).square().sum() + 0.1 * penalty.full_tensor()).backward()
    expected = sum(param.pow(2).sum() for param in plain.parameters())
    (plain(X).square().sum() + 0.1 * expected).backward()
    for param, same in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), same.grad)


@on_ranks(2)
def test_noise_like_a_parameter_is_that_of_the_full_one_also_after_a_step_that_raised():
    model = build(True)
    own, plain = next(model.parameters()), next(build(False).parameters())

    def compare(make):
        noises = []
        for param in (own, plain):
            torch.manual_seed(3)
            with torch.no_grad():
                noises.append(whole(make(param).normal_()))
            noises.append(torch.rand(1))  # the generators stay equal
        assert torch.equal(noises[0], noises[2])
        assert torch.equal(noises[1], noises[3])

    for make in (torch.zeros_like, torch.empty_like, torch.clone):
        compare(make)
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    assert type(optimizer.state[own]["exp_avg"]) is DTensor

    def fails():
        raise ValueError("injected")

    with pytest.raises(ValueError, match="injected"):
        optimizer.step(fails)
    compare(torch.zeros_like)


@on_ranks(2)
def test_masks_of_the_parameter_itself_and_what_torch_cannot_run_on_shards():
    own, plain = next(build(True).parameters()), next(build(False).parameters())
    with torch.no_grad():
        for operation in (lambda: own.fill_diagonal_(1.0), lambda: own.unbind(0)):
            with pytest.raises(zpasses.ShardingError, match=r"full = param\.full_tensor\(\)"):
                operation()
        for param in (own, plain):
            param[param > 0.1] = 0.25
    assert torch.equal(own.full_tensor(), plain)


# --- copies ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", some_quick([2, 3], [2]))
@on_ranks(2)
def test_copies_are_sharded_models_with_values_of_their_own(stage):
    model = build(True)
    model(X).sum().backward()
    other = copy.deepcopy(model)
    assert all(param.grad is None for param in other.parameters())  # as of torch's parameters
    model.zero_grad()
    call, call_other = compiled(model, stage), compiled(other, stage)
    before = call(X).detach()
    assert torch.equal(call_other(X), before)
    call_other(X).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert torch.equal(call(X), before)
    assert not torch.equal(call_other(X), before)
    assert all(param.grad is None for param in model.parameters())


def _run_copies(stage):
    model = build(True)
    copies = copy.deepcopy(model), copy.deepcopy(model)
    calls = [compiled(each, stage) if stage else each for each in copies]
    with torch.no_grad():
        for param in copies[1].parameters():
            param.mul_(2)
    for call in calls:
        call(X).sum().backward()
    calls[torch.distributed.get_rank()](X)


def _load_by_rank(stage, values, assign):
    model = build(True)
    call = compiled(model, stage) if stage else model
    call(X).sum().backward()
    states = values()
    model.load_state_dict(states[torch.distributed.get_rank()], assign=assign)
    call(X)


def _of_copies():
    model = build(True)
    return [copy.deepcopy(model).state_dict() for _ in range(2)]


def _snapshots():
    """Of one model before and after a step."""
    model = build(True)
    states = [copy.deepcopy(model.state_dict())]
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    return [*states, {name: value.clone() for name, value in model.state_dict().items()}]


def _full_values():
    other = build(False)
    with torch.no_grad():
        other[0].bias.add_(1e-6)
    return [build(False).state_dict(), other.state_dict()]


def _load_on_one_rank():
    model = build(True)
    call = compiled(model, 3)
    call(X).sum().backward()
    if torch.distributed.get_rank() == 1:
        model.load_state_dict(build(False).state_dict(), assign=True)
    call(X)


EDITS_BY_RANK = {
    "full values": lambda p, r: p.copy_(torch.full(p.shape, float(r))),
    "an operand": lambda p, r: p.add_(torch.full(p.shape, float(r))),
    "assigned values": lambda p, r: setattr(p, "data", torch.full(p.shape, float(r))),
    "a row": lambda p, r: p[0].copy_(torch.full((p.shape[1],), float(r))),
    "another row": lambda p, r: p[r].mul_(2),
    "a factor": lambda p, r: p.mul_(r + 2),
    "a scalar": lambda p, r: p.mul_(torch.tensor(r + 2.0)),
    "a list": lambda p, r: torch._foreach_mul_([p], r + 2.0),
    "a result": lambda p, r: setattr(p, "data", p.data * (r + 2)),
    "a clone": lambda p, r: p.copy_([p.clone(), p * 2][r]),
    "a mask": lambda p, r: p.__setitem__(p > r / 10, 0.5),
    "a result of out": lambda p, r: torch.mul(p, r + 2, out=p),
    "random numbers": lambda p, r: (torch.manual_seed(r), p.normal_()),
    "noise": lambda p, r: (torch.manual_seed(r), p.add_(torch.zeros_like(p).normal_())),
    "an initialiser": lambda p, r: (torch.manual_seed(r), nn.init.kaiming_uniform_(p)),
}


def _edit_by_rank(names):
    """What each edit raises: if all ranks make one, and if each makes it with another value."""
    told = {}
    for name in names:
        model = build(True)
        call, param = compiled(model, 3), next(model.parameters())
        for rank in (0, torch.distributed.get_rank()):
            with torch.no_grad():
                EDITS_BY_RANK[name](param, rank)
            try:
                call(X)
            except zpasses.AgreementError as error:
                told.setdefault(name, []).append(str(error))
            else:
                told.setdefault(name, []).append("")
    return told


def test_edits_with_other_values_on_each_rank_are_errors():
    for told in run_on_ranks(_edit_by_rank, list(EDITS_BY_RANK)):
        for name, (alike, by_rank) in told.items():
            assert not alike, name
            assert "after different edits of sharded parameters" in by_rank, name


def _step_by_rank(make, stage, steps):
    """Ends with a call of the model that it has not seen before, in compiled code."""
    model = build(True)
    call = compiled(model, stage) if stage else model
    rates = [0.1, 0.1 * (1 + torch.distributed.get_rank())]
    optimizer = make(model.parameters(), rates[0])
    for step in range(steps):
        if step == 1:
            optimizer.param_groups[0]["lr"] = rates[1]
        call(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        call(X)


def _load_state_on_one_rank():
    model = build(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model(X).sum().backward()
    optimizer.step()
    if torch.distributed.get_rank() == 1:
        optimizer.load_state_dict(optimizer.state_dict())
    set_group_timeout(20)
    model(X)


def _fused(params, rate):
    return torch.optim.AdamW(params, lr=rate, fused=True)


def _foreach(params, rate):
    return torch.optim.SGD(params, lr=rate, foreach=True)


def test_arguments_of_edits_are_compared_now_and_then():
    log = EditLog()
    for step in range(100):
        assert not log.needs_vote()
        log.add_step("a completed SGD.step()", 1, step)
        log.end_event(voted=False)
    assert log.needs_vote()
    log.end_event(voted=True)
    assert not log.needs_vote()
    assert log.values == 0


def _save_by_rank(save, kind):
    model, rank = build(True), torch.distributed.get_rank()
    copies = [copy.deepcopy(model), copy.deepcopy(model)]
    if kind == "copies":
        model = copies[rank]
    elif rank == 1:
        with torch.no_grad():
            next(model.parameters()).mul_(2)
    return save(model)


def _safetensors(model):
    return zpasses.save_safetensors(model, "unused")


def _step_that_raises(stage, failing_ranks, changed):
    model = build(True)
    call = compiled(model, stage) if stage else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module = sys.modules["torch.optim.sgd"]
    update = module._single_tensor_sgd

    def partly(params, grads, buffers, **kwargs):
        update(params[:changed], grads[:changed], buffers[:changed], **kwargs)
        raise ValueError("a step that fails")

    for i in range(3):
        call(X).square().sum().backward()
        if i == 0:
            set_group_timeout(20)  # that of code which is not compiled
        if i == 1 and torch.distributed.get_rank() in failing_ranks:
            module._single_tensor_sgd = partly
        try:
            optimizer.step()
        except ValueError:
            pass
        finally:
            module._single_tensor_sgd = update
        optimizer.zero_grad()
    return [whole(param).sum().item() for param in model.parameters()]


_EDITS_DIFFER = "after different edits of sharded parameters.*"
_SAVED = "make the same edits and steps before"
_RAISED = r"a completed SGD.step\(\) on rank 0, but a SGD.step\(\) that raised .*on rank 1"
_SETTINGS = "settings, such as learning rates"


def _other(edit):
    return f"{_EDITS_DIFFER}{edit}, has other arguments or values on rank 1"


def row(program, *given, told, slow=False):
    marks = pytest.mark.slow(quick="the other rows of the same test") if slow else ()
    return pytest.param(program, given, told, marks=marks)


@pytest.mark.parametrize(
    ("program", "given", "told"),
    [
        row(_load_by_rank, 3, _snapshots, False, told=_other("copy_ of parameter '0.weight'")),
        row(_load_on_one_rank, told="Edit 1 is nothing on rank 0, but load_state_dict of param"),
        row(_load_state_on_one_rank, told="load of the state of an optimizer"),
        row(_save_by_rank, zpasses.full_state_dict, "copies", told=_SAVED),
        row(_save_by_rank, zpasses.training_state, "edit", told=_SAVED, slow=True),
        row(_save_by_rank, _safetensors, "edit", told=_SAVED, slow=True),
        row(_run_copies, 3, told="(?=.*copy 1)(?=.*copy 2)", slow=True),
        row(_load_by_rank, 2, _of_copies, False, told="copy_ from '0.weight, copy 2'", slow=True),
        row(
            *(_load_by_rank, 3, _full_values, False),
            told=_other("load_state_dict of .* '0.bias'"),
            slow=True,
        ),
        row(
            *(_load_by_rank, 0, _of_copies, True),
            told="assignment from '0.weight, copy 1'",
            slow=True,
        ),
        row(_load_by_rank, 2, _snapshots, True, told=_other("assignment of .*"), slow=True),
        row(_step_by_rank, _fused, 0, 104, told=_SETTINGS, slow=True),
        row(_step_by_rank, _foreach, 3, 2, told=_SETTINGS, slow=True),
        row(_step_that_raises, 3, (1,), 1, told=_RAISED, slow=True),
        row(_step_that_raises, 0, (1,), 0, told=_RAISED, slow=True),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_do_different_things_learn_it(program, given, told):
    for rank in run_in_fresh_ranks(program, *given):
        assert raised(rank) == "AgreementError", str(rank)
        assert re.search(told, rank.error, re.DOTALL), rank.error


# --- edits at the wrong time ----------------------------------------------------------------------
@on_ranks(2)
def test_a_compiled_step_between_forward_and_backward_raises():
    model = build(True)
    call = compiled(model, 3)
    step = torch.compile(torch.optim.SGD(model.parameters(), lr=0.1).step, backend="eager")
    call(X).square().sum().backward()
    loss = call(X).square().sum()
    step()
    with pytest.raises(zpasses.ShardingError, match="edited between a forward and its backward"):
        loss.backward()


def _edit_before_backward(stage, editing_ranks, per_block):
    model = build(True)
    if per_block:
        zpasses.compile_blocks(model, "0,2", zero_stage=stage, **EAGER)
    call = model if per_block else compiled(model, stage)
    call(X).square().sum().backward()
    loss = call(X).square().sum()
    if torch.distributed.get_rank() in editing_ranks:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
    loss.backward()


@pytest.mark.parametrize(("stage", "per_block"), some_quick([(2, False), (3, True)], [(3, True)]))
def test_an_edit_between_forward_and_backward_raises(stage, per_block):
    for rank in run_in_fresh_ranks(_edit_before_backward, stage, (0, 1), per_block):
        assert raised(rank) == "ShardingError", str(rank)
        assert "edited between a forward and its backward" in rank.error


@pytest.mark.slow(quick="test_an_edit_between_forward_and_backward_raises")
def test_an_edit_on_one_rank_between_forward_and_backward_raises_on_all():
    ranks = run_in_fresh_ranks(_edit_before_backward, 3, (1,), False)
    assert [raised(rank) for rank in ranks] == ["AgreementError", "ShardingError"]
    assert all("edited between a forward and its backward" in rank.error for rank in ranks)


@on_ranks(2)
def test_training_goes_on_after_an_edit_at_the_wrong_time():
    model = build(True)
    call, optimizer = compiled(model, 3), torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4):
        loss = call(X).sum()
        if i % 2:
            with torch.no_grad():
                model[2]._parameters["weight"].mul_(1.5)
            with pytest.raises(zpasses.ShardingError, match=r"2\.weight"):
                loss.backward()
            continue
        with torch.no_grad():
            model[2]._parameters["bias"].add_(1)  # which backward does not need
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class ReturnsViews(nn.Module):
    """Its first outputs are views of its input and of another output."""

    def __init__(self):
        super().__init__()
        self.inner = build(False)

    def forward(self, x):
        y = self.inner(x)
        return x[0], y[0], y


@on_ranks(2)
def test_edits_are_seen_where_outputs_are_views():
    model = zpasses.shard(ReturnsViews(), mesh=world_mesh())
    call, x = compiled(model, 3), X.clone().requires_grad_()
    plain = ReturnsViews()
    for outputs in (call(x * 2), plain(x * 2)):
        sum(each.square().sum() for each in outputs).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    loss = call(x * 2)[1].sum()
    with torch.no_grad():
        model.inner[2]._parameters["weight"].mul_(1.5)
    with pytest.raises(zpasses.ShardingError, match=r"inner\.2\.weight"):
        loss.backward()


@pytest.mark.slow(quick="test_ranks_that_do_different_things_learn_it")
def test_a_step_that_raised_on_all_ranks_alike_can_be_caught():
    # New ranks, because it changes the limit of their group.
    first, second = run_in_fresh_ranks(_step_that_raises, 3, (0, 1), 1)
    assert first.ok, first
    assert first.result == second.result


@on_ranks(2)
def test_closures_of_optimizers_run_graphs_inside_the_step():
    model = build(True)
    call, optimizer = compiled(model, 3), torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = call(X).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item(), optimizer.step(closure=closure).item()]
    assert losses[1] < losses[0]


@on_ranks(2)
def test_an_optimizer_that_was_built_before_shard_raises():
    model = build(False)
    optimizer = torch.optim.AdamW(model.parameters())
    zpasses.shard(model, mesh=world_mesh())
    compiled(model, 3)(X).sum().backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(zpasses.ShardingError, match=r"built before zpasses\.shard: 4 of its 4"):
        optimizer.step()
    for use in (
        optimizer.zero_grad,
        lambda: scaler.unscale_(optimizer),
        lambda: nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0),
    ):
        with pytest.raises(zpasses.ShardingError, match=r"zpasses\.shard replaced it"):
            use()
    model.zero_grad()
    assert copy.deepcopy(optimizer.param_groups[0]["params"][0]).grad is None


@on_ranks(2)
def test_the_state_of_an_optimizer_of_the_unsharded_model_is_sharded():
    for settings in ({}, {"foreach": False}, {"fused": True}):
        model, plain = build(True), build(False)
        steps = [torch.optim.AdamW(each.parameters(), **settings) for each in (model, plain)]
        plain(X).sum().backward()
        steps[1].step()
        model.load_state_dict(plain.state_dict())
        steps[0].load_state_dict(copy.deepcopy(steps[1].state_dict()))
        for each, step in zip((model, plain), steps, strict=True):
            step.zero_grad()
            each(X).square().sum().backward()
            step.step()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(steps[0].state[param]["exp_avg"], DTensor)
            assert torch.equal(param.full_tensor(), expected), settings
        torch.optim.AdamW(model.parameters()).step()


@on_ranks(2)
def test_parameters_may_be_parts_of_one_tensor():
    """With one shard per node, shards are views of the vector that they are set to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    reference = copy.deepcopy(model)
    zpasses.shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "local")))
    step = compiled(model, 2)
    with torch.no_grad():
        for each in (model, reference):
            vector = nn.utils.parameters_to_vector(each.parameters())
            nn.utils.vector_to_parameters(vector * 1.5, each.parameters())
            for param in each.parameters():
                param.data.view(-1).add_(0.25)
    torch.testing.assert_close(step(X), reference(X))
