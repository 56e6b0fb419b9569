"""Edits of sharded parameters, of every kind: what runs afterwards uses the new values, as an
unsharded model does, or an error says on all ranks why it cannot.
"""

import copy
import datetime
import re
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from zpasses.runtime.edits import EditLog
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh

pytestmark = pytest.mark.processes

X = torch.linspace(-1, 1, 12).reshape(2, 6)
EAGER = {"codegen": "eager", "agreement_timeout_s": 20.0}


def build(sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
    return zpasses.shard(model, mesh=world_mesh()) if sharded else model


def compiled(model, stage, **options):
    return torch.compile(
        model, backend="zpasses", options={"zero_stage": stage, **EAGER, **options}
    )


def set_group_timeout(seconds):
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    backend._set_default_timeout(datetime.timedelta(seconds=seconds))


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def raised(rank):
    """The name of the error that ended a rank."""
    return re.findall(r"^zpasses\.errors\.(\w+):", rank.error, re.MULTILINE)[-1]


def same_on_all_ranks(param):
    return torch.linspace(-1, 1, param.numel()).reshape(param.shape)


# --- edits ----------------------------------------------------------------------------------------
def assigned_data(model):
    for param in model.parameters():
        param.data = param.data + 0.1


def assigned_full(model):
    for param in model.parameters():
        param.data = same_on_all_ranks(param)


def in_place_through_data(model):
    for param in model.parameters():
        param.data.mul_(1.5)


def in_place_through_detach(model):
    for param in model.parameters():
        param.detach().sub_(0.3)


def in_place_on_the_shard(model):
    for param in model.parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        local.data.mul_(0.5)


def rows(model):
    for param in model.parameters():
        param[0] += 0.5
        param.data[1] = 0.25


def views_of_copies(model):
    for param in model.parameters():
        first, second = param.data.chunk(2)
        first.mul_(2)
        second[0].zero_()


def transposed(model):
    for param in model.parameters():
        if param.dim() == 2:
            param.data.t().mul_(2)
            param.data.t()[0].zero_()


def lists(model):
    params = list(model.parameters())
    torch._foreach_mul_(params, 1.5)
    torch._foreach_add_(params, [same_on_all_ranks(param) for param in params])
    torch._foreach_copy_([param.data for param in params], [param * 2 for param in params])


def full_values(model):
    for param in model.parameters():
        param.copy_(same_on_all_ranks(param))
        param.data.lerp_(same_on_all_ranks(param), 0.5)
        param.add_(torch.ones(param.shape[-1]))


def vectors(model):
    vector = parameters_to_vector([whole(param) for param in model.parameters()])
    vector_to_parameters(vector * 1.5, model.parameters())


def flattened(model):
    params = list(model.parameters())
    vector_to_parameters(parameters_to_vector(params) * 1.5, params)
    for param in params:
        param.data.view(-1).add_(0.25)


def swapped_and_restored(model):
    kept = [param.data for param in model.parameters()]
    for param in model.parameters():
        param.data = param.data * 3
    model(X)
    for param, value in zip(model.parameters(), kept, strict=True):
        param.data = value
        value.add_(0.125)  # which is the parameter's memory again


def shared_data(model):
    shadows = [param.detach().clone() for param in model.parameters()]
    for param, shadow in zip(model.parameters(), shadows, strict=True):
        param.data = shadow
    for shadow in shadows:
        shadow.mul_(0.5)


def state_dict_values(model):
    for value in model.state_dict().values():
        value.mul_(1.5)


def loaded(model):
    model.load_state_dict({name: whole(value) * 2 for name, value in model.state_dict().items()})


def assigned_state(model):
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state, assign=True)
    for value in model.parameters():
        value.mul_(1.5)


def random_numbers(model):
    torch.manual_seed(1)
    for param in model.parameters():
        nn.init.normal_(param)
        param.add_(torch.randn_like(param))


EDITS = [
    *(assigned_data, assigned_full, in_place_through_data, in_place_through_detach),
    *(in_place_on_the_shard, rows, views_of_copies, transposed, lists, full_values, vectors),
    flattened,
    *(swapped_and_restored, shared_data, state_dict_values, loaded, assigned_state),
    random_numbers,
]


def _losses_and_gradients(edit, sharded, stage, **options):
    model = build(sharded)
    call = compiled(model, stage, **options) if sharded else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    call(X)  # stages 1 and 2 keep what they gather
    with torch.no_grad():
        edit(model)
    loss = call(X).square().sum()
    loss.backward()
    gradients = [whole(param.grad) for param in model.parameters()]
    return [loss.detach(), *gradients, *[whole(param.detach()) for param in model.parameters()]]


def differences(stage, edits=EDITS, **options):
    """Returns how far the sharded model is from the unsharded one after each edit, relatively."""
    found = {}
    for edit in edits:
        torch._dynamo.reset()
        expected = _losses_and_gradients(edit, False, stage)
        values = _losses_and_gradients(edit, True, stage, **options)
        pairs = zip(values, expected, strict=True)
        found[edit.__name__] = max(
            ((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs
        )
    return found


@pytest.mark.parametrize("stage", some_quick([2, 3], [2]))
@pytest.mark.slow(quick="test_edits_are_seen_by_the_defaults")
def test_edits_are_seen(stage):
    for found in run_on_ranks(differences, stage):
        assert found == dict.fromkeys((edit.__name__ for edit in EDITS), pytest.approx(0, abs=1e-6))


@pytest.mark.inductor
def test_edits_are_seen_by_the_defaults():
    edits = [assigned_data, lists, swapped_and_restored]
    for found in run_on_ranks(differences, 2, edits, codegen="inductor", timeout_s=280):
        assert found == dict.fromkeys((edit.__name__ for edit in edits), pytest.approx(0, abs=1e-6))


def _averages(sharded, stage):
    model = build(sharded)
    average = AveragedModel(model)
    step = compiled(model, stage) if sharded else model
    call = compiled(average, stage) if sharded else average
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        step(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        found.append(call(X).detach())  # with gradients enabled
        # A moving average that is stored, copied to the model, and restored.
        stored = [param.data.clone() for param in model.parameters()]
        for param, value in zip(model.parameters(), average.module.parameters(), strict=True):
            param.data.copy_(value.data)
        found.append(step(X).detach())
        for param, value in zip(model.parameters(), stored, strict=True):
            param.data.copy_(value.data)
    return torch.cat(found)


def _average_difference(stage):
    return (_averages(True, stage) - _averages(False, stage)).abs().max().item()


@pytest.mark.parametrize("stage", [2, 3])
def test_averages_of_weights_are_evaluated_as_they_are(stage):
    assert run_on_ranks(_average_difference, stage) == [pytest.approx(0, abs=1e-6)] * 2


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


@on_ranks(2)
def test_what_cannot_be_mixed_says_what_to_do():
    model, plain = build(True), build(False)
    own, other = next(model.parameters()), next(plain.parameters())
    with torch.no_grad():
        with pytest.raises(zpasses.ShardingError, match="shard the other model, too"):
            other + own
        with pytest.raises(zpasses.ShardingError, match=r"got a plain tensor of shape \[3, 6\]"):
            own.copy_(torch.zeros(3, 6))
        with pytest.raises(zpasses.ShardingError, match="same shape"):
            own.data = torch.zeros(3, 6)
        with pytest.raises(zpasses.ShardingError, match="shard the other model, too"):
            0.9 * other.detach() + 0.1 * own
        with pytest.raises(zpasses.ShardingError, match=r"Assign the value: param\.data = value"):
            own.data.set_(torch.zeros(7, 6))
        with pytest.raises(zpasses.ShardingError, match="Share a full copy"):
            model.share_memory()


@pytest.mark.parametrize("stage", [0, 3])
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
def test_noise_like_a_parameter_is_that_of_the_full_one():
    own, plain = next(build(True).parameters()), next(build(False).parameters())
    for make in (torch.zeros_like, torch.empty_like, torch.clone):
        noises = []
        for param in (own, plain):
            torch.manual_seed(3)
            with torch.no_grad():
                noises.append(whole(make(param).normal_()))
            noises.append(torch.rand(1))  # the generators stay equal
        assert torch.equal(noises[0], noises[2])
        assert torch.equal(noises[1], noises[3])


@on_ranks(2)
def test_noise_after_a_step_that_raised_and_state_that_is_plain():
    model = build(True)
    own, plain = next(model.parameters()), next(build(False).parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    assert type(optimizer.state[own]["exp_avg"]) is DTensor

    def fails():
        raise ValueError("injected")

    with pytest.raises(ValueError, match="injected"):
        optimizer.step(fails)
    noises = []
    for param in (own, plain):
        torch.manual_seed(3)
        noises.append(whole(torch.zeros_like(param, requires_grad=False).normal_()))
    assert torch.equal(*noises)


@on_ranks(2)
def test_what_torch_cannot_run_on_shards_says_how():
    own = next(build(True).parameters())
    with torch.no_grad():
        for operation in (lambda: own.fill_diagonal_(1.0), lambda: own.unbind(0)):
            with pytest.raises(zpasses.ShardingError, match=r"full = param\.full_tensor\(\)"):
                operation()


@on_ranks(2)
def test_masks_of_the_parameter_itself():
    own, plain = next(build(True).parameters()), next(build(False).parameters())
    with torch.no_grad():
        for param in (own, plain):
            param[param > 0.1] = 0.25
    assert torch.equal(own.full_tensor(), plain)


# --- copies ---------------------------------------------------------------------------------------
@on_ranks(2)
def test_copies_are_sharded_models_with_values_of_their_own():
    model = build(True)
    model(X).sum().backward()
    other = copy.deepcopy(model)
    assert all(param.grad is None for param in other.parameters())  # as of torch's parameters
    model.zero_grad()
    for stage in (2, 3):
        call, call_other = compiled(model, stage), compiled(other, stage)
        before = call(X).detach()
        assert torch.equal(call_other(X), before)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        call_other(X).sum().backward()
        optimizer.step()
        assert torch.equal(call(X), before)
        assert not torch.equal(call_other(X), before)
        assert all(param.grad is None for param in model.parameters())
        other.load_state_dict(model.state_dict())


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


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.slow(quick="test_copies_are_sharded_models_with_values_of_their_own")
def test_ranks_that_run_different_copies_learn_it(stage):
    for rank in run_in_fresh_ranks(_run_copies, stage):
        assert raised(rank) == "AgreementError", str(rank)
        assert "copy 1" in rank.error
        assert "copy 2" in rank.error


def _load_by_rank(stage, values, **given):
    model = build(True)
    call = compiled(model, stage) if stage else model
    call(X).sum().backward()
    states = values()
    model.load_state_dict(states[torch.distributed.get_rank()], **given)
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


_OTHER_VALUES = "has other arguments or values on rank 1"


@pytest.mark.parametrize(
    ("stage", "values", "assign", "told"),
    some_quick(
        _LOADS := [
            (2, _of_copies, False, "copy_ from '0.weight, copy 2'"),
            (3, _snapshots, False, f"copy_ of parameter '0.weight', {_OTHER_VALUES}"),
            (3, _full_values, False, f"load_state_dict of parameter '0.bias', {_OTHER_VALUES}"),
            (0, _of_copies, True, "assignment from '0.weight, copy 1'"),
            (3, _of_copies, True, "assignment from '0.weight, copy 1'"),
            (2, _snapshots, True, f"assignment of parameter '0.weight', {_OTHER_VALUES}"),
            (2, _full_values, True, f"load_state_dict of parameter '0.bias', {_OTHER_VALUES}"),
        ],
        _LOADS[1:4],
    ),
)
def test_ranks_that_load_different_values_learn_it(stage, values, assign, told):
    for rank in run_in_fresh_ranks(_load_by_rank, stage, values, assign=assign):
        assert raised(rank) == "AgreementError", str(rank)
        assert "after different edits of sharded parameters" in rank.error
        assert told in rank.error, rank.error


def _load_on_one_rank():
    model = build(True)
    call = compiled(model, 3)
    call(X).sum().backward()
    if torch.distributed.get_rank() == 1:
        model.load_state_dict(build(False).state_dict(), assign=True)
    call(X)


def test_a_rank_that_loads_alone_is_an_error_on_all():
    for rank in run_in_fresh_ranks(_load_on_one_rank):
        assert raised(rank) == "AgreementError", str(rank)
        assert "Edit 1 is nothing on rank 0, but load_state_dict of parameter" in rank.error


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


def test_optimizer_state_that_one_rank_loads_alone_is_an_error():
    for rank in run_in_fresh_ranks(_load_state_on_one_rank):
        assert raised(rank) == "AgreementError", str(rank)
        assert "load of the state of an optimizer" in rank.error


def _fused(params, rate):
    return torch.optim.AdamW(params, lr=rate, fused=True)


def _foreach(params, rate):
    return torch.optim.SGD(params, lr=rate, foreach=True)


@pytest.mark.parametrize(("make", "stage", "steps"), [(_fused, 0, 104), (_foreach, 3, 2)])
@pytest.mark.slow(quick="test_ranks_that_load_different_values_learn_it")
def test_ranks_with_other_learning_rates_learn_it(make, stage, steps):
    for rank in run_in_fresh_ranks(_step_by_rank, make, stage, steps):
        assert raised(rank) == "AgreementError", str(rank)
        assert "settings, such as learning rates" in rank.error


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


@pytest.mark.parametrize("kind", ["copies", "edit"])
@pytest.mark.parametrize("save", [zpasses.full_state_dict, zpasses.training_state, _safetensors])
def test_ranks_that_would_save_different_values_learn_it(save, kind):
    for rank in run_in_fresh_ranks(_save_by_rank, save, kind):
        assert raised(rank) == "AgreementError", str(rank)
        assert "make the same edits and steps before" in rank.error


# --- edits at the wrong time ----------------------------------------------------------------------
@pytest.mark.parametrize("per_block", some_quick([False, True], [False]))
@on_ranks(2)
def test_a_compiled_step_between_forward_and_backward_raises(per_block):
    model = build(True)
    if per_block:
        zpasses.compile_blocks(model, "0,2", **EAGER)
    call = model if per_block else compiled(model, 3)
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


@pytest.mark.parametrize(("stage", "per_block"), [(2, False), (3, True)])
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


@pytest.mark.parametrize(("stage", "changed"), [(2, 0), (3, 1), (0, 0)])
@pytest.mark.slow(quick="test_a_rank_that_loads_alone_is_an_error_on_all")
def test_a_step_that_raised_on_one_rank_and_was_caught_is_an_error_on_all(stage, changed):
    for rank in run_in_fresh_ranks(_step_that_raises, stage, (1,), changed):
        assert raised(rank) == "AgreementError", str(rank)
        assert "after different edits of sharded parameters" in rank.error
        first = "add_ of parameter '0.bias'" if changed else "add_ of parameter '0.weight'"
        assert f"is {first} on rank 0, but nothing on rank 1" in rank.error


@pytest.mark.slow(quick="test_a_rank_that_loads_alone_is_an_error_on_all")
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


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_an_optimizer_that_was_built_before_shard_raises(stage):
    model = build(False)
    optimizer = torch.optim.AdamW(model.parameters())
    zpasses.shard(model, mesh=world_mesh())
    compiled(model, stage)(X).sum().backward()
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


@pytest.mark.parametrize("settings", [{}, {"foreach": False}, {"fused": True}])
@on_ranks(2)
def test_the_state_of_an_optimizer_of_the_unsharded_model_is_sharded(settings):
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
        assert torch.equal(param.full_tensor(), expected)
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
        flattened(model)
        flattened(reference)
    torch.testing.assert_close(step(X), reference(X))
