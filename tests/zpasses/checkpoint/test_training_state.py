"""What a checkpoint of a training run holds, and what is refused."""

import random
from contextlib import nullcontext
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

import zpasses
from tests.on_ranks import on_ranks
from tests.zpasses.checkpoint.checkpoint_models import assert_equal_values
from tests.zpasses.models import integers
from zpasses import ZpassesError
from zpasses.checkpoint import optimizer_states
from zpasses.checkpoint.random_states import packed_random_states, restore_random_states
from zpasses.runtime.early_steps import has_stepped
from zpasses.testing import fake_world, run_on_ranks, world_mesh

pytestmark = pytest.mark.processes


class Net(nn.Module):
    """Batch norm, a head that nothing uses, and extra state."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))

    def get_extra_state(self):
        return {"made by": {"rank": dist.get_rank()}}

    def set_extra_state(self, state):
        self.extra = state


def _training(**arguments):
    torch.manual_seed(0)
    model = zpasses.shard(Net(), mesh=world_mesh())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, **arguments)


def _step(model, optimizer):
    model(integers(4, 4, seed=dist.get_rank())).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_state_of_a_read_of_a_parameter_is_refused_by_name():
    model, optimizer = _training()
    _step(model, optimizer)
    assert not optimizer.state[model.first.weight]  # makes an entry
    with pytest.raises(zpasses.ShardingError, match=r"look up optimizer\.state\[module\.get_param"):
        zpasses.training_state(model, optimizer)
    assert optimizer.state[model.first.get_parameter("weight")]["step"] == 1


@on_ranks(4)
def test_every_rank_loads_the_buffers_of_rank_0(tmp_path):
    model, optimizer = _training()
    _step(model, optimizer)
    of_first = [buffer.clone() for buffer in model.buffers()]
    own = [buffer.clone() for buffer in model.buffers()]
    for buffer in of_first:
        dist.broadcast(buffer, 0)
    if dist.get_rank():
        assert not torch.equal(own[0], of_first[0])
    dcp.save(zpasses.training_state(model, optimizer), checkpoint_id=tmp_path)
    assert all(torch.equal(*both) for both in zip(model.buffers(), own, strict=True))
    zpasses.load_training_state(tmp_path, model, optimizer)
    assert all(torch.equal(*both) for both in zip(model.buffers(), of_first, strict=True))
    assert model.extra == {"made by": {"rank": 0}}


@on_ranks(2)
def test_states_of_torch_load(tmp_path):
    for documented in (True, False):
        model = zpasses.shard(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), mesh=world_mesh())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        _step(model, optimizer)
        weights, moments = get_state_dict(model, optimizer)
        key = "optimizer" if documented else "optimizer_0"
        path = f"{tmp_path}/{documented}"
        dcp.save({"model": weights, key: moments}, checkpoint_id=path)
        expected = zpasses.full_state_dict(model)
        other = torch.optim.AdamW(model.parameters(), lr=0.5)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        zpasses.load_training_state(path, model, other)
        assert other.param_groups[0]["lr"] == 0.1
        torch.testing.assert_close(zpasses.full_state_dict(model), expected, rtol=0, atol=0)
        for param in model.parameters():
            for name, value in optimizer.state[param].items():
                mine = other.state[param][name]
                assert type(mine) is type(value)
                mine, value = (getattr(each, "_local_tensor", each) for each in (mine, value))
                assert torch.equal(mine, value)


@on_ranks(2)
def test_what_would_be_lost_is_refused(tmp_path):
    model, optimizer = _training()
    x = integers(4, 4)
    with zpasses.coalesce_grad_reduction(model):
        model(x).sum().backward()
        with pytest.raises(zpasses.ShardingError, match=r"is pending in a gradient window"):
            zpasses.training_state(model, optimizer)
        assert "model" in zpasses.training_state(model, optimizer, drop_pending=True)
    _step(model, optimizer)
    stranger = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(zpasses.ShardingError, match="not in the model"):
        zpasses.training_state(model, stranger)
    dcp.save(zpasses.training_state(model, optimizer), checkpoint_id=tmp_path)

    before = zpasses.full_state_dict(model)
    part = torch.optim.AdamW(model.last.parameters(), lr=0.5)
    with pytest.raises(zpasses.ShardingError, match=r"has state of first\.weight and of 3 more"):
        zpasses.load_training_state(tmp_path, model, part)
    with pytest.raises(zpasses.ShardingError, match="got 2 optimizers, and the checkpoint holds 1"):
        zpasses.load_training_state(tmp_path, model, [optimizer, part])
    larger = zpasses.shard(
        nn.ModuleDict({"first": nn.Linear(4, 5), "new": nn.Linear(2, 2)}), mesh=world_mesh()
    )
    with pytest.raises(
        zpasses.ShardingError, match=r"has no new\.weight of the model, nor 1 others"
    ):
        zpasses.load_training_state(tmp_path, larger)
    torch.testing.assert_close(zpasses.full_state_dict(model), before, rtol=0, atol=0)

    local = optimizer.state[model.first._parameters["weight"]]
    local["mine"] = torch.zeros(local["exp_avg"].to_local().shape)
    with pytest.raises(zpasses.ShardingError, match=r"mine of first\.weight .* this rank's part"):
        zpasses.training_state(model, optimizer)


def test_arguments_in_another_order_say_what_is_expected(tmp_path):
    with fake_world(2) as mesh:
        model = zpasses.shard(nn.Linear(4, 4), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for arguments, said in (
            ((model, optimizer, tmp_path), r"got Linear as its first argument; expected the fold"),
            ((tmp_path, optimizer, model), r"got SGD; expected a torch\.nn\.Module"),
        ):
            with pytest.raises(ZpassesError, match=said):
                zpasses.load_training_state(*arguments)
        with pytest.raises(ZpassesError, match=r"training_state: got SGD; expected"):
            zpasses.training_state(optimizer, model)
        with pytest.raises(ZpassesError, match=r"got Linear as an optimizer; expected"):
            zpasses.training_state(model, model)


@on_ranks(2)
def test_every_rank_gets_the_error_of_one():
    model, optimizer = _training()
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(zpasses.ShardingError, match=r"failed on rank 1: .* not in the model"):
        zpasses.training_state(model, optimizer)


@pytest.mark.parametrize("owner", ["model", "optimizer"])
@on_ranks(2)
def test_every_rank_is_told_of_one_that_cannot_take_what_was_read(tmp_path, owner):
    model, optimizer = _training()
    _step(model, optimizer)
    dcp.save(zpasses.training_state(model, optimizer), checkpoint_id=tmp_path)
    target = {"model": model, "optimizer": optimizer}[owner]
    failing = mock.Mock(side_effect=torch.OutOfMemoryError("out of memory"))
    said = r"failed on rank 1: OutOfMemoryError: .* are incomplete; load them again"
    with (
        mock.patch.object(target, "load_state_dict", failing) if dist.get_rank() else nullcontext(),
        pytest.raises(zpasses.ShardingError, match=said),
    ):
        zpasses.load_training_state(tmp_path, model, optimizer, timeout_s=10.0)
    zpasses.load_training_state(tmp_path, model, optimizer)
    _step(model, optimizer)  # ranks compare their edits
    zpasses.training_state(model, optimizer)


@on_ranks(2)
def test_state_of_other_kinds_comes_back_as_it_was(tmp_path):
    """State with text, numbers, nested dicts and dtypes of its own; two groups."""
    model, _ = _training()
    params = list(model.parameters())
    make = [{"params": params[:3], "lr": 0.5}, {"params": params[3:], "lr": torch.tensor(0.25)}]
    saved, loaded = (torch.optim.SGD(make, lr=0.1) for _ in range(2))
    saved.state[params[0]] = {
        "text": "abc",
        "step": 3,
        "nested": {7: {"half": torch.zeros_like(params[0], dtype=torch.float16) + 2}},
        "wide": torch.zeros_like(params[0], dtype=torch.float64) + 1,
        "mean": torch.tensor(0.5, dtype=torch.float64),
    }
    saved.param_groups[1]["lr"].fill_(0.125)
    loaded.param_groups[0]["initial_lr"] = 0.75
    dcp.save(zpasses.training_state(model, saved), checkpoint_id=tmp_path)
    zpasses.load_training_state(tmp_path, model, loaded)
    got = loaded.state[params[0]]
    assert len(loaded.state) == 1
    assert (got["text"], got["step"]) == ("abc", 3)
    assert torch.equal(got["wide"].to_local(), saved.state[params[0]]["wide"].to_local())
    assert torch.equal(got["mean"], saved.state[params[0]]["mean"])
    assert got["nested"][7]["half"].full_tensor().eq(2).all()
    assert loaded.param_groups[0]["initial_lr"] == 0.75
    assert torch.equal(loaded.param_groups[1]["lr"], torch.tensor(0.125))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (optimizer_states.LIKE_PARAMETER, (7, 3)),
        (optimizer_states.LIKE_PARAMETER, (7, 1)),
        (optimizer_states.REPLICATED, (1, 3)),
        (optimizer_states.PLAIN, (5,)),
    ],
)
def test_states_that_rest_on_the_host_are_read_there(kind, shape):
    """As if meta were the device."""
    with fake_world(2, rank=1) as mesh, torch.device("meta"):
        param = zpasses.shard(nn.Linear(3, 7), mesh=mesh).get_parameter("weight")
        value = optimizer_states._Value("", "weight", ("exp_avg",), kind)
        for on_host, device in ((False, "meta"), (True, "cpu")):
            made = optimizer_states._destination(
                param, torch.Size(shape), torch.float32, value, on_host
            )
            local = made.to_local() if isinstance(made, DTensor) else made
            assert made.shape == shape
            assert local.device.type == device
            assert local.shape == ((3, shape[1]) if shape[0] == 7 else shape)


@on_ranks(2)
def test_numpy_may_have_another_generator():
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(7))
    try:
        packed = packed_random_states()
        drawn = _drawn()
        _drawn()
        restore_random_states(packed)
        for mine, theirs in zip(_drawn(), drawn, strict=True):
            assert bool((torch.as_tensor(mine) == torch.as_tensor(theirs)).all())
    finally:
        numpy.random.set_bit_generator(before)


def test_a_build_for_accelerators_that_the_machine_lacks_has_no_generator(monkeypatch):
    """A CUDA build of torch on a machine without a GPU."""

    def current_accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    packed = packed_random_states()
    drawn = torch.rand(3)
    restore_random_states(packed)
    assert torch.equal(torch.rand(3), drawn)


def _drawn():
    return torch.rand(3), random.random(), numpy.random.rand()


def _random_states(folder, resumes):
    model, optimizer = _training()
    if not resumes:
        for _ in range(3 + dist.get_rank()):
            _drawn()
        _step(model, optimizer)
        dcp.save(zpasses.training_state(model, optimizer), checkpoint_id=folder)
        torch.save(_drawn(), f"{folder}/drawn-{dist.get_rank()}.pt")
        return
    state = torch.get_rng_state()
    zpasses.load_training_state(folder, model)  # only the model
    assert torch.equal(torch.get_rng_state(), state)
    zpasses.load_training_state(folder, model, optimizer)
    expected = torch.load(f"{folder}/drawn-{dist.get_rank() % 2}.pt", weights_only=False)
    same = dist.get_world_size() == 2
    assert torch.equal(torch.get_rng_state(), state) != same
    for mine, theirs in zip(_drawn(), expected, strict=True):
        assert bool((torch.as_tensor(mine) == torch.as_tensor(theirs)).all()) == same


def test_random_generators_go_on_where_they_were(tmp_path):
    run_on_ranks(_random_states, str(tmp_path), False)
    run_on_ranks(_random_states, str(tmp_path), True)
    run_on_ranks(_random_states, str(tmp_path), True, ranks=3)


@pytest.mark.parametrize("saved", [None, "int8"])
def test_checkpoints_of_another_encoding_say_what_to_do(tmp_path, saved):
    run_on_ranks(_other_encoding, tmp_path, saved, ranks=1)


def _other_encoding(folder, saved):
    def model(encoding):
        net = zpasses.shard(nn.Sequential(nn.Linear(64, 64)), mesh=world_mesh())
        net.requires_grad_(False)
        return net if encoding is None else zpasses.encode_parameters(net, encoding)

    source, target = model(saved), model("nf4")
    dcp.save(zpasses.training_state(source), checkpoint_id=folder / "dcp")
    zpasses.save_safetensors(source, folder / "files")
    way = r"Load it before zpasses\." if saved is None else r"Call zpasses\..* with this format"
    match = rf"has \S*0\.weight\S* in place of \S*0\.weight_nf4_64\. {way}"
    with pytest.raises(zpasses.ShardingError, match=match):
        zpasses.load_training_state(folder / "dcp", target)
    with pytest.raises(zpasses.ShardingError, match=match):
        zpasses.load_safetensors(target, folder / "files")


@pytest.mark.parametrize("window", ["option", "block"])
@on_ranks(2)
def test_loading_drops_what_the_run_has_accumulated(tmp_path, window):
    """A run that goes back to a checkpoint in the middle of a window goes on from there."""
    torch.manual_seed(0)
    model = zpasses.shard(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), mesh=world_mesh())
    options = {"codegen": "eager", "backwards_per_step": 2 if window == "option" else 1}
    step = torch.compile(model, backend="zpasses", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def block():
        return zpasses.coalesce_grad_reduction(model) if window == "block" else nullcontext()

    def backward(seed):
        step(integers(4, 4, seed=seed + 10 * dist.get_rank())).square().sum().backward()

    def gradients():
        optimizer.zero_grad()
        with block():
            backward(1)
            backward(2)
        return [param.grad.full_tensor() for param in model.parameters()]

    expected = gradients()
    dcp.save(zpasses.training_state(model, optimizer), checkpoint_id=tmp_path)
    with block():
        backward(3)
        zpasses.load_training_state(tmp_path, model, optimizer)
        if window == "block":
            backward(1)
            backward(2)
            optimizer.zero_grad()
    found = [param.grad.full_tensor() for param in model.parameters()]
    found = found if window == "block" else gradients()
    assert all(map(torch.equal, found, expected))


@on_ranks(2)
def test_a_checkpoint_has_no_half_of_a_step(tmp_path):
    """Of parameters that step in backward. What they have stepped is gone when it is loaded."""
    torch.manual_seed(0)
    model = zpasses.shard(Stack(), mesh=world_mesh())
    zpasses.compile_blocks(model, "layers.*", codegen="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zpasses.step_in_backward(optimizer)

    def backward():
        model(integers(4, 4, seed=dist.get_rank())).square().sum().backward()

    for _ in range(3):  # blocks know their followers from the second step on
        backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(zpasses.training_state(model, optimizer), checkpoint_id=tmp_path)
    saved = zpasses.full_state_dict(model)
    backward()
    assert any(has_stepped(param) for param in model.parameters())
    assert not all(has_stepped(param) for param in model.parameters())
    with pytest.raises(zpasses.ShardingError, match="has stepped in backward"):
        zpasses.training_state(model, optimizer)
    optimizer.step()
    expected = zpasses.full_state_dict(model)
    optimizer.zero_grad()
    for _ in range(2):
        backward()
        zpasses.load_training_state(tmp_path, model, optimizer)
        optimizer.zero_grad()
        assert_equal_values(zpasses.full_state_dict(model), saved)
    backward()
    optimizer.step()
    assert_equal_values(zpasses.full_state_dict(model), expected)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)
