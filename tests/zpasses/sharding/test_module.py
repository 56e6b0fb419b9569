"""Reads of sharded parameters, writes to gathered copies, and edits of the shards."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.zpasses.models import (
    Odd,
    assert_same_values,
    full_gradients,
    integers,
    reference_gradients,
    with_integer_weights,
)
from zpasses.sharding.guard import GatheredCopy
from zpasses.testing import fake_world, world_mesh

pytestmark = pytest.mark.processes


def _linear(**options):
    return zpasses.shard(with_integer_weights(nn.Linear(4, 5)), mesh=world_mesh(), **options)


# --- values ---------------------------------------------------------------------------------------
@on_ranks(3)
def test_read_gives_the_full_parameter():
    model = Odd()
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    zpasses.shard(model, mesh=world_mesh())
    assert_same_values({name: getattr(model, name).detach().clone() for name in expected}, expected)
    low = _linear(param_dtype=torch.bfloat16)
    assert (low.weight.dtype, low.weight.shape) == (torch.bfloat16, (5, 4))
    assert low._parameters["weight"].dtype == torch.float32


def test_reads_hold_constants_that_dynamo_need_not_check_at_each_call():
    model = nn.ModuleDict({"a": nn.Linear(4, 5), "b": nn.LayerNorm(4)})
    with fake_world(1) as mesh:
        zpasses.shard(model["a"], mesh=mesh, param_dtype=torch.bfloat16)
        zpasses.shard(model["b"], mesh=mesh, reduce_dtype=torch.float64)
    for key, dtype in (("a", torch.bfloat16), ("b", torch.float64)):
        for name in ("weight", "bias"):
            read = vars(type(model[key]))[name].fget
            constants = read.__code__.co_consts
            assert read.__closure__ is None
            assert ("weight" in constants) == (name == "weight")
            assert [each for each in constants if isinstance(each, torch.dtype)] == [dtype]
            assert not any(str(each).startswith("$") for each in constants)


# --- writes to a gathered copy --------------------------------------------------------------------
WRITES = {
    "init": lambda m: nn.init.normal_(m.weight),
    "copy_": lambda m: m.weight.copy_(torch.zeros(5, 4)),
    "mul_": lambda m: m.weight.mul_(2),
    "imul": lambda m: m.weight.__imul__(2),
    "torch.add out": lambda m: torch.add(torch.ones(5, 4), 1, out=m.weight),
    "data": lambda m: m.weight.data.zero_(),
    "a row of data": lambda m: m.weight.data[0].zero_(),
    "data +=": lambda m: m.weight.data.__iadd__(1.0),
    "set grad": lambda m: setattr(m.weight, "grad", None),
    "set data": lambda m: setattr(m.weight, "data", torch.zeros(5, 4)),
    "setitem": lambda m: m.weight.__setitem__(0, 1.0),
    "requires_grad_": lambda m: m.weight.requires_grad_(False),
    "set requires_grad": lambda m: setattr(m.weight, "requires_grad", False),
    "a row": lambda m: m.weight[1].fill_(0),
    "a detached view": lambda m: m.weight.detach().zero_(),
    "a chunk": lambda m: m.weight.chunk(2)[1].zero_(),
    "foreach": lambda m: torch._foreach_mul_([m.weight], 2.0),
}


@on_ranks(2)
def test_write_to_a_gathered_copy_raises():
    model = _linear()
    before = model.weight.clone()
    said = r"parameter 'weight' of a Linear.*with zpasses\.local_shards\(model\)"
    for how, write in WRITES.items():
        with torch.no_grad(), pytest.raises(zpasses.ShardingError, match=said):
            write(model)
        assert torch.equal(model.weight, before), how


@on_ranks(2)
def test_reads_of_a_gathered_copy_do_not_raise():
    model = _linear()
    weight = model.weight
    assert isinstance(weight, GatheredCopy)
    assert type(weight * 2) is torch.Tensor
    assert type(weight.clone().mul_(2)) is torch.Tensor, "a copy of the copy may be written to"
    assert weight.sum().item() == sum(map(sum, weight.tolist()))
    assert (len(weight), weight.dim(), weight.dtype) == (5, 2, torch.float32)
    assert (weight.device.type, weight.requires_grad) == ("cpu", True)
    assert weight[0].shape == (4,)
    assert "requires_grad" in repr(weight) or "grad_fn" in repr(weight)
    assert torch.equal(torch.stack([weight, weight])[0], weight)
    assert weight.numpy(force=True).shape == (5, 4)
    assert torch.equal(weight.data, weight)
    assert not weight.data.requires_grad
    assert type(weight.data + 1) is torch.Tensor


@on_ranks(2)
def test_gradient_of_a_gathered_copy_says_where_it_is():
    model = _linear()
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(
        zpasses.ShardingError,
        match=r"parameter 'weight' of a Linear is sharded: the gradient is stored with the shards"
        r".*named_parameters\(\) yield DTensors.*full_tensor\(\)",
    ):
        model.weight.grad
    assert dict(model.named_parameters())["weight"].grad.full_tensor().shape == (5, 4)


# --- modules and transforms that read parameters in unusual ways ----------------------------------
class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Collects(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.zeros(4, 3), torch.zeros(3, 4)])
        self.dict = nn.ParameterDict({"bias": torch.zeros(4)})

    def forward(self, x):
        for weight in self.list:
            x = x @ weight
        return x + self.dict["bias"]


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, x):
        return F.embedding(x.long().abs(), self.table.weight) + self.table(x.long().abs())


class Checkpoints(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class PassesWeight(nn.Module):
    """Reads a weight and passes it to a function, as models with shared heads do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        weight, bias = self.linear.weight, self.linear.bias
        return torch.addmm(bias, F.linear(x, weight), weight.t()[:3, :3]) if x.dim() == 2 else x


class Breaks(nn.Module):
    """Reads a weight before a graph break and uses it after."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        weight = self.linear.weight
        x = x @ weight
        torch._dynamo.graph_break()
        return x @ weight + self.linear(x)


class Skipped(nn.Module):
    """Its own frame is not compiled, but the function that it calls is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    @torch.compiler.disable(recursive=False)
    def forward(self, x):
        return torch.compile(
            F.linear, backend="zpasses", options={"codegen": "eager"}, fullgraph=True
        )(x, self.linear.weight)


MODELS = {
    cls.__name__: cls
    for cls in (Attends, Collects, Embeds, Checkpoints, PassesWeight, Breaks, Skipped)
}


@pytest.mark.parametrize(
    ("kind", "how"),
    some_quick(
        itertools.product(MODELS, ["eager", "compiled"]),
        [
            *((kind, "eager") for kind in ("Attends", "Checkpoints", "Collects")),
            *((kind, "compiled") for kind in ("Breaks", "Embeds", "PassesWeight", "Skipped")),
        ],
    ),
)
@on_ranks(2)
def test_gradients_equal_the_unsharded_ones(kind, how):
    torch.manual_seed(0)
    model = MODELS[kind]()
    if kind != "Attends":  # softmax makes no integers
        with_integer_weights(model)
    shape = (2, 3, 4) if kind == "Attends" else (6, 4)
    batches = [integers(*shape, seed=rank) for rank in range(dist.get_world_size())]
    expected = reference_gradients(model, batches)
    zpasses.shard(model, mesh=world_mesh())
    run = model
    if how == "compiled":
        run = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
    run(batches[dist.get_rank()]).sum().backward()
    actual = full_gradients(model)
    if kind != "Attends":
        assert_same_values(actual, expected)
    else:
        torch.testing.assert_close(actual, expected)


@on_ranks(2)
def test_functional_call_swaps_full_tensors_and_shards():
    model = _linear()
    weight, bias, x = integers(5, 4, seed=8), integers(5, seed=9), integers(2, 4)
    out = torch.func.functional_call(model, {"weight": weight, "bias": bias}, (x,))
    assert torch.equal(out, F.linear(x, weight, bias))
    own = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    assert torch.equal(own, model(x))
    assert isinstance(model._parameters["weight"], DTensor)


# --- the class ------------------------------------------------------------------------------------


@on_ranks(2)
def test_sharded_module_is_an_instance_of_its_old_class():
    model = zpasses.shard(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.ReLU()),
        mesh=world_mesh(),
    )
    assert isinstance(model[0], nn.Linear)
    assert isinstance(model[0], zpasses.sharding.module.ShardedModule)
    assert type(model[0]) is type(model[1]), "compiled code for one block serves all"
    assert type(model[0]) is not type(model[2])
    assert (type(model[0]).__name__, type(model[0]).__module__) == (
        "Linear",
        "torch.nn.modules.linear",
    )
    assert type(model[3]) is nn.ReLU
    assert type(model) is nn.Sequential
    assert repr(model[0]) == repr(nn.Linear(2, 2))


@on_ranks(2)
def test_modules_that_differ_in_rows_share_no_code():
    """Rank 0 has three rows of five and of six."""
    x = integers(2, 4)

    def check(model, expected):
        model.zero_grad()
        run = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
        run(x).sum().backward()
        assert_same_values(full_gradients(model), expected)

    plain = [with_integer_weights(nn.Sequential(nn.Linear(4, rows))) for rows in (5, 6)]
    expected = [reference_gradients(each, [x, x]) for each in plain]
    models = [zpasses.shard(copy.deepcopy(each), mesh=world_mesh()) for each in plain]
    for model, grads in zip(models, expected, strict=True):
        check(model, grads)
    models[0][0].weight = nn.Parameter(integers(6, 4))
    models[0][0].bias = nn.Parameter(integers(6))
    check(models[0], expected[1])


@on_ranks(2)
def test_local_shards_gives_dtensors_inside_and_full_parameters_after():
    model = nn.Sequential(_linear(), nn.Sequential(_linear()))
    with zpasses.local_shards(model) as inside:
        assert inside is model
        assert isinstance(model[0].weight, DTensor)
        assert isinstance(model[1][0].weight, DTensor)
        assert type(model[0]) is nn.Linear
    assert not isinstance(model[0].weight, DTensor)
    with zpasses.local_shards(model, recurse=False):
        assert not isinstance(model[0].weight, DTensor)
    with pytest.raises(KeyError), zpasses.local_shards(model):
        raise KeyError
    assert not isinstance(model[0].weight, DTensor)
    with zpasses.local_shards(torch.compile(model)):
        assert isinstance(model[0].weight, DTensor)
    assert not isinstance(model[0].weight, DTensor)


# --- edits of the shards --------------------------------------------------------------------------
def _qkv(weight):
    for part in weight.chunk(3):
        nn.init.xavier_uniform_(part)


def _in_rounds(weight):
    nn.init.trunc_normal_(weight, a=-0.5, b=0.5)  # draws again as long as a value is outside
    weight[1:6].normal_()


INITS = {
    "normal": nn.init.normal_,
    "trunc_normal": nn.init.trunc_normal_,
    "trunc_normal, and more": _in_rounds,
    "kaiming": nn.init.kaiming_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "eye": nn.init.eye_,
    "dirac": lambda weight: nn.init.dirac_(weight.unsqueeze(-1)),
    "sparse": lambda weight: nn.init.sparse_(weight, 0.5),
    "chunks": _qkv,
    "row": lambda weight: weight[2].fill_(7),
    "slice": lambda weight: weight[1:4].normal_(),
    "setitem": lambda weight: weight.__setitem__((2, 1), 5.0),
    "column": lambda weight: weight[:, 1].zero_(),
    "data": lambda weight: weight.data.normal_(0, 0.02),
    "data row": lambda weight: weight.data[3].zero_(),
    "copy": lambda weight: weight.copy_(integers(*weight.shape, seed=5)),
    "randn_like": lambda weight: weight.copy_(torch.randn_like(weight) * 2),
    "bernoulli": lambda weight: weight.bernoulli_(0.5),
    "add": lambda weight: weight.add_(1).mul_(2),
}


@on_ranks(2)
def test_edit_of_the_shards_does_what_it_does_to_a_full_parameter():
    for how, edit in INITS.items():
        plain = with_integer_weights(nn.Linear(4, 7))
        model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
        with torch.no_grad():
            torch.manual_seed(3)
            edit(plain.weight)
            torch.manual_seed(3)
            with zpasses.local_shards(model):
                edit(model.weight)
        found, far = model.weight.detach().clone(), 1e-6 if how == "orthogonal" else 0
        assert torch.allclose(found, plain.weight, rtol=0, atol=far), how
        rows = model._parameters["weight"].to_local().shape[0]
        assert rows == 4 - dist.get_rank(), how


@on_ranks(3)
def test_edits_are_correct_on_ranks_without_rows():
    plain = nn.Embedding(2, 4, padding_idx=1)
    model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
    torch.manual_seed(3)
    plain.reset_parameters()
    torch.manual_seed(3)
    model.reset_parameters()
    assert torch.equal(model.weight, plain.weight)
    assert torch.equal(model.weight[1], torch.zeros(4))


def _init(module):
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


def _init_inside(model):
    with zpasses.local_shards(model):
        for module in model.modules():
            _init(module)


INITIALISERS = {
    "apply": lambda model: model.apply(_init),
    "reset_parameters": lambda model: [module.reset_parameters() for module in model],
    "local_shards": _init_inside,
}


@on_ranks(2)
def test_meta_model_is_initialised_on_the_shards_as_an_unsharded_one():
    def build():
        return nn.Sequential(
            nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 5), nn.LayerNorm(5), nn.BatchNorm1d(3)
        )

    for init in INITIALISERS.values():
        plain = build()
        with torch.device("meta"):
            model = build()
        zpasses.shard(model, mesh=world_mesh())
        assert all(param.is_meta and isinstance(param, DTensor) for param in model.parameters())
        model.to_empty(device="cpu")
        for each in (plain, model):
            torch.manual_seed(2)
            init(each)
        assert_same_values(zpasses.full_state_dict(model), dict(plain.state_dict()))
        assert all(isinstance(param, DTensor) for param in model.parameters())


# --- assignment and loading -----------------------------------------------------------------------


@on_ranks(2)
def test_assigned_full_parameter_is_sharded():
    model = _linear()
    full = integers(5, 4, seed=7)
    model.weight = nn.Parameter(full)
    assert isinstance(model._parameters["weight"], DTensor)
    assert model._parameters["weight"].to_local().shape[0] < 5
    assert torch.equal(model.weight, full)
    model.weight = nn.Parameter(distribute_tensor(full + 1, world_mesh(), [Shard(0)]))
    assert torch.equal(model.weight, full + 1)
    model.weight = nn.Parameter(full, requires_grad=False)
    assert not model.weight.requires_grad
    model.bias = None
    assert model.bias is None
    assert model(integers(2, 4)).shape == (2, 5)


def test_modules_of_a_new_world_have_its_mesh():
    for rank in (1, 0):
        with fake_world(2, rank) as mesh:
            model = zpasses.shard(nn.Linear(4, 4), mesh=mesh).to_empty(device="cpu")
            assert model._parameters["weight"].device_mesh is mesh


@on_ranks(2)
def test_assigned_dtensor_must_have_the_same_placement():
    model = _linear()
    wrong = nn.Parameter(distribute_tensor(integers(5, 4), world_mesh(), [Shard(1)]))
    with pytest.raises(
        zpasses.ShardingError, match=r"assigned to 'weight'.*Shard\(dim=1\).*redistribute"
    ):
        model.weight = wrong
    with pytest.raises(TypeError, match="cannot assign"):
        model.weight = integers(5, 4)


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks(2)
def test_state_dict_loads_into_the_shards(kind):
    source, x = Odd(), integers(2, 7)
    with torch.no_grad():
        for param in source.parameters():
            param.add_(1)
    state = source.state_dict()
    if kind == "sharded":
        state = zpasses.shard(copy.deepcopy(source), mesh=world_mesh()).state_dict()
    expected = {name: param.detach() for name, param in source.named_parameters()}
    for assign in (False, True):
        model = zpasses.shard(Odd(), mesh=world_mesh())
        before = list(model.parameters())
        assert model.load_state_dict(state, assign=assign) == ([], [])
        now = dict(model.named_parameters())
        assert all((old is new) != assign for old, new in zip(before, now.values(), strict=True))
        assert all(isinstance(each, nn.Parameter) for each in now.values())
        assert_same_values({name: param.full_tensor() for name, param in now.items()}, expected)
        assert not now["frozen"].requires_grad
        assert torch.equal(model(x), source(x))


@on_ranks(2, timeout_s=60)
def test_one_rank_prints_the_model():
    plain = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2, bias=False))
    model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
    if dist.get_rank() == 0:
        assert repr(model) == repr(plain)
    model(torch.ones(2, 3))
