"""`zpasses.shard`: the sharded model, refused models, and the rest of torch on sharded models."""

import copy
import functools
import io
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.training_programs import act, check, program
from tests.zpasses.models import (
    Odd,
    Tied,
    assert_same_values,
    full_gradients,
    integers,
    reference_gradients,
    with_integer_weights,
)
from zpasses import compat
from zpasses.graph.queries import collectives
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import fake_world, world_mesh
from zpasses.tools.stress.drawn_programs import OPTIMIZERS


@pytest.fixture
def mesh():
    """A mesh of a fake world of three ranks, of which this process is the second."""
    with fake_world(3, 1) as mesh:
        yield mesh


class CountCollectives(TorchDispatchMode):
    """Counts parameter reads, and records names, dtypes and bytes of collectives."""

    def __init__(self):
        super().__init__()
        self.calls, self.reads = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # let it come back as local operations
        name, functional = func.overloadpacket.__name__, func.namespace == "_c10d_functional"
        if functional and name in ("wait_tensor", "_wrap_tensor_autograd"):
            return func(*args, **(kwargs or {}))
        if functional or name.startswith("gloo_"):
            self.calls.append((name, str(args[0].dtype), args[0].nbytes))
        elif func.namespace == "zpasses":
            self.reads += name == "unshard"
            with self:  # look inside
                return getattr(zpasses.graph.dialect, f"_{name}")(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


# --- structure ------------------------------------------------------------------------------------
ROWS = {
    "wide": [2, 3],
    "deep": [3, 4, 5],
    "single": [],
    "scale": ...,
    "empty": [],
    "frozen": [2, 3],
    "unused": [1],
}
"""Rows of the parameters of `Odd` that the second of three ranks holds."""


def test_every_parameter_becomes_a_dtensor_with_its_rows_and_nothing_is_communicated(mesh):
    plain, model = Odd(), Odd()
    offset, model.wide.no_weight_decay = model.offset, True
    with CountCollectives() as counted:
        assert zpasses.shard(model, mesh=mesh) is model
    assert counted.calls == []
    assert model.offset is offset, "buffers are not changed"
    assert model._parameters["wide"].no_weight_decay
    params = dict(model.named_parameters())
    assert list(params) == list(ROWS)
    for name, param in params.items():
        full, local = plain.get_parameter(name), param.to_local()
        assert isinstance(param, nn.Parameter), name
        assert isinstance(param, DTensor), name
        assert param.is_leaf, name
        assert (param.shape, param.requires_grad) == (full.shape, full.requires_grad), name
        assert param.placements == ((Shard(0),) if param.dim() else (Replicate(),)), name
        assert torch.equal(local, full.detach()[ROWS[name]]), name
        assert local.untyped_storage().nbytes() == local.nbytes, f"{name} owns its memory"


@pytest.mark.parametrize("calls", [1, 2])
def test_tied_parameters_are_sharded_once(mesh, calls):
    model = Tied()
    for each in (model.embed, model)[-calls:]:
        zpasses.shard(each, mesh=mesh)
    assert model.embed._parameters["weight"] is model.head._parameters["weight"]
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]


def test_a_later_call_on_the_whole_model_shards_the_rest(mesh):
    model = nn.Sequential(nn.Linear(2, 6), nn.Linear(6, 2))
    zpasses.shard(model[0], mesh=mesh, param_dtype=torch.bfloat16)
    first = model[0]._parameters["weight"]
    zpasses.shard(model, mesh=mesh, param_dtype=torch.float64)
    assert model[0]._parameters["weight"] is first
    assert [model[i]._zpasses_specs["weight"].param_dtype for i in (0, 1)] == [
        torch.bfloat16,
        torch.float64,
    ]
    assert all(isinstance(param, DTensor) for param in model.parameters())


def test_parameters_added_later_can_be_sharded_by_another_call(mesh):
    model = zpasses.shard(nn.Linear(2, 6), mesh=mesh)
    model.extra = nn.Parameter(torch.zeros(6))
    zpasses.shard(model, mesh=mesh)
    assert isinstance(model._parameters["extra"], DTensor)
    assert isinstance(model, nn.Linear)
    assert type(model).__mro__.count(zpasses.sharding.module.ShardedModule) == 1


def test_ignored_and_missing_parameters_are_not_changed(mesh):
    model = nn.Sequential(nn.Linear(2, 6), nn.Linear(6, 2, bias=False))
    bias = model[0].bias
    zpasses.shard(model, mesh=mesh, ignored_params=[bias])
    assert model[0].bias is bias
    assert model[1].bias is None
    assert isinstance(model[0]._parameters["weight"], DTensor)


def test_integer_parameters_are_sharded_in_their_own_dtype(mesh):
    model = nn.Module()
    model.table = nn.Parameter(torch.arange(6), requires_grad=False)
    zpasses.shard(model, mesh=mesh, param_dtype=torch.bfloat16)
    assert model._parameters["table"].dtype == torch.int64
    assert model.table.dtype == torch.int64


# --- refusals -------------------------------------------------------------------------------------
class Hides(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.groups = {"all": [self.linear.weight]}


class Helper:
    """Reads a parameter that a module gave it."""

    def __init__(self, weight):
        self.weight = weight

    def read(self):
        return self.weight


class HidesIn(nn.Linear):
    def __init__(self, how):
        super().__init__(2, 2)
        weight = self.weight
        self.helper = {
            "object": Helper(weight),
            "method": Helper(weight).read,
            "partial": functools.partial(torch.matmul, weight),
            "closure": lambda x: x @ weight,
        }[how]


def _dtensor_model(mesh):
    model = nn.Linear(2, 6)
    model.weight = nn.Parameter(
        DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)], run_check=False)
    )
    return model


def _already_sharded(mesh):
    return zpasses.shard(nn.Linear(2, 2), mesh=mesh)


def _complex(mesh):
    model = nn.Linear(2, 2)
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return model


def _plain(mesh):
    return nn.Linear(2, 2)


def _tied_by_memory(mesh):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False))
    model[2].weight.data = model[0].weight.data.t()
    return model


def _in_a_buffer(mesh):
    model = nn.Linear(2, 2)
    model.register_buffer("row", model.weight.detach()[1])
    return model


def _of(*kind, **options):
    """A function that makes a module at place 1 of a sequence."""
    return lambda mesh: nn.Sequential(nn.Linear(2, 2), kind[0](*kind[1:], **options))


NUMBER = "expected a floating-point"
REFUSED = {
    "hidden": (_of(Hides), {}, r"module 1 \(Hides\).*'groups'.*ignored_params"),
    **{
        how: (_of(HidesIn, how), {}, r"module 1 \(HidesIn\).*'helper'.*ignored_params")
        for how in ("object", "method", "partial", "closure")
    },
    "twice": (_already_sharded, {}, "Linear is sharded already. Shard a model once"),
    "nothing": (lambda mesh: nn.ReLU(), {}, "ReLU has no parameter to shard"),
    "dtensor": (_dtensor_model, {}, "parameter weight is a DTensor already"),
    "memory": (_tied_by_memory, {}, r"0\.weight and 2\.weight are two tensors that share memory"),
    "buffer": (_in_a_buffer, {}, "weight and row are two tensors that share memory.*a copy"),
    "lazy": (_of(nn.LazyLinear, 2), {}, r"parameter 1\.weight has no shape yet.*Run one forward"),
    "complex": (_complex, {}, "parameter phase is complex.*view_as_real"),
    "max_norm": (_of(nn.Embedding, 4, 2, max_norm=1), {}, r"module 1 \(Embedding\) has max_norm"),
    "sparse": (_of(nn.Embedding, 4, 2, sparse=True), {}, r"1 \(Embedding\) has sparse gradients"),
    "script": (lambda mesh: torch.jit.script(nn.Linear(2, 2)), {}, "TorchScript"),
    "integer": (_plain, {"param_dtype": torch.int8}, f"param_dtype is torch.int8; {NUMBER}"),
    "text": (_plain, {"reduce_dtype": "float32"}, f"reduce_dtype is 'float32'; {NUMBER}"),
    "no mesh": (_plain, {"mesh": 8}, "mesh is a int; expected a DeviceMesh"),
}


def test_parts_of_one_memory_that_do_not_overlap_are_sharded(mesh):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    memory = torch.arange(8.0)
    for layer, part in zip(model, memory.chunk(2), strict=True):
        layer.weight.data = part.view(2, 2)
    zpasses.shard(model, mesh=mesh)
    assert all(isinstance(param, DTensor) for param in model.parameters())


def test_what_a_class_does_with_its_subclasses_is_not_done_to_sharded_ones(mesh):
    known = []

    class Listed(nn.Linear):
        def __init_subclass__(cls, *, key, **kwargs):
            known.append((key, cls))

    class Own(Listed, key="own"):
        pass

    model = zpasses.shard(nn.Sequential(Own(2, 2)), mesh=mesh)
    assert known == [("own", Own)]
    assert isinstance(model[0], Own)


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_names_the_place_and_changes_nothing(mesh, case):
    build, options, message = REFUSED[case]
    model = build(mesh)
    classes, params = [type(module) for module in model.modules()], list(model.parameters())
    with pytest.raises(zpasses.ShardingError, match=message):
        zpasses.shard(model, **{"mesh": mesh, **options})
    assert [type(module) for module in model.modules()] == classes
    assert all(old is new for old, new in zip(params, model.parameters(), strict=True))


def test_parameters_tied_over_two_meshes_are_refused(mesh):
    model = Tied()
    zpasses.shard(model.embed, mesh=mesh)
    other = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    with pytest.raises(
        zpasses.ShardingError,
        match=r"parameter head\.weight is tied to one that .* sharded over another mesh.*untie",
    ):
        zpasses.shard(model, mesh=other)
    assert type(model.head) is nn.Linear


def test_parameter_on_another_device_type_is_refused():
    with fake_world(2) as mesh:
        mesh._device_type = "cuda"
        with pytest.raises(
            zpasses.ShardingError,
            match=r"parameter 0\.weight is on cpu, the mesh on cuda.*model\.to\('cuda'\)",
        ):
            zpasses.shard(nn.Sequential(nn.Linear(2, 2)), mesh=mesh)


def test_shard_without_a_process_group_is_refused():
    assert not dist.is_initialized()
    with pytest.raises(zpasses.ShardingError, match="init_process_group"):
        zpasses.shard(nn.Linear(2, 2), mesh=None)


@on_ranks(2)
def test_an_rnn_that_is_ignored_stays_in_a_sharded_model():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LSTM(3, 4), TakesFirst(), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    zpasses.shard(model, mesh=world_mesh(), ignored_params=set(model[0].parameters()))
    batches = [torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    expected = reference_gradients(plain, batches)
    _run(model, 3)(batches[dist.get_rank()]).sum().backward()
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            actual = param.grad.full_tensor()
        else:
            actual = param.grad
            dist.all_reduce(actual)
            actual /= 2
        torch.testing.assert_close(actual, expected[name])


class TakesFirst(nn.Module):
    def forward(self, outputs):
        return outputs[0]


def test_a_sharded_module_is_copied_but_not_pickled(mesh):
    model = zpasses.shard(nn.Sequential(nn.Linear(2, 4)), mesh=mesh)
    copied = copy.deepcopy(model)
    shards = [each[0].get_parameter("bias").to_local() for each in (copied, model)]
    assert torch.equal(*shards)
    for made in (copied, copy.copy(model)):
        with pytest.raises(zpasses.ShardingError, match=r"Linear .*cannot be pickled.*full_state_"):
            torch.save(made, io.BytesIO())


# --- gradients ------------------------------------------------------------------------------------
def _run(model, stage):
    if stage is None:
        return model
    options = {"zero_stage": stage, "codegen": "eager"}
    return torch.compile(model, backend="zpasses", options=options)


@pytest.mark.parametrize("stage", some_quick([None, 2, 3], [None, 2]))
@on_ranks(3)
def test_gradients_of_odd_and_tied_parameters_equal_the_unsharded_ones(stage):
    tokens = [integers(6, seed=rank).long().abs() for rank in range(3)]
    for model, batches in (
        (Odd(), [integers(2, 7, seed=rank) for rank in range(3)]),
        (with_integer_weights(Tied()), tokens),
    ):
        expected, x = reference_gradients(model, batches), batches[dist.get_rank()]
        loss = model(x).sum().item()
        out = _run(zpasses.shard(model, mesh=world_mesh()), stage)(x).sum()
        assert out.item() == loss
        out.backward()
        # The mean of three is rounded. None stays None, as of unused and frozen parameters.
        torch.testing.assert_close(full_gradients(model), expected)


@on_ranks(2)
def test_frozen_parameters_are_gathered_but_not_reduced():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    zpasses.shard(model, mesh=world_mesh())[0].requires_grad_(False)
    with CountCollectives() as counted:
        model(integers(2, 4)).sum().backward()
    names = [name for name, _, _ in counted.calls]
    assert names == ["gloo_all_gather", "gloo_all_gather", "gloo_reduce_scatter"]


@pytest.mark.parametrize("stage", [None, 3], ids=["eager", "stage3"])
@on_ranks(2)
def test_submodules_may_differ_in_mesh_and_dtype(stage):
    model = with_integer_weights(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    batches = [integers(2, 4, seed=rank) for rank in range(2)]
    expected = reference_gradients(model, batches)
    other = dist.new_group([0, 1])
    zpasses.shard(model[0], mesh=DeviceMesh.from_group(other, "cpu"), param_dtype=torch.float64)
    zpasses.shard(model[1], mesh=world_mesh())
    model[0].register_forward_pre_hook(lambda module, args: args[0].double())
    model[0].register_forward_hook(lambda module, args, out: out.float())
    _run(model, stage)(batches[dist.get_rank()]).sum().backward()
    assert_same_values(full_gradients(model), expected)


# --- mixed precision ------------------------------------------------------------------------------


@on_ranks(2)
def test_gathers_are_in_param_dtype_and_averages_in_reduce_dtype():
    low, model = torch.bfloat16, with_integer_weights(nn.Linear(8, 8, bias=False))
    batches = [integers(2, 8, seed=rank) for rank in range(2)]
    expected = reference_gradients(model, batches)["weight"]
    zpasses.shard(model, mesh=world_mesh(), param_dtype=low, reduce_dtype=torch.float32)
    x, weight = batches[dist.get_rank()].to(low), model._parameters["weight"]
    with CountCollectives() as counted:
        out = model(x)
        out.sum().backward()
    assert counted.calls == [
        ("gloo_all_gather", "torch.bfloat16", 4 * 8 * 2),
        ("gloo_reduce_scatter", "torch.float32", 8 * 8 * 4),
    ]
    assert (out.dtype, weight.dtype, weight.grad.dtype) == (low, torch.float32, torch.float32)
    assert torch.equal(weight.grad.full_tensor(), expected)  # exact in bfloat16 too

    moved = {}

    def count(log):
        moved[log.kind] = [
            (each.op, [str(dtype) for dtype in each.dtypes], each.shapes)
            for _, each in collectives(log.graph)
        ]

    with observe_graphs(count):
        _run(model, 3)(x).sum().backward()
    assert moved["forward"] == [("all_gather_into_tensor", ["bfloat16"], ((4, 8),))]
    assert moved["backward"] == [("reduce_scatter_tensor", ["float32"], ((8, 8),))]
    assert torch.equal(weight.grad.full_tensor(), 2 * expected), "added to the eager gradient"


# --- optimizers -----------------------------------------------------------------------------------
@pytest.mark.processes
@pytest.mark.parametrize(
    ("optimizer", "kind", "stage"),
    some_quick(
        [
            *((optimizer, "norm", None) for optimizer in OPTIMIZERS),
            (OPTIMIZERS[0], "inf", 2),
            (OPTIMIZERS[3], "value", 3),
        ],
        [(OPTIMIZERS[1], "norm", None), (OPTIMIZERS[3], "value", 3)],
    ),
    ids=str,
)
def test_steps_equal_the_unsharded_ones(optimizer, kind, stage):
    backward = act("backward", through="compiled" if stage else "module")
    train = backward, act("clip", kind=kind), "step", "zero_grad"
    given = program(*train, *train, *train, blocks=("layer_norm", "scalars"), optimizer=optimizer)
    check(given, zero_stage=stage or 2)


@on_ranks(3)
def test_norm_counts_scalars_once_and_empty_shards_not_at_all():
    model, batches = Odd(), [integers(2, 7, seed=rank) for rank in range(dist.get_world_size())]
    grads = reference_gradients(model, batches)
    expected = torch.linalg.vector_norm(
        torch.stack([grad.norm() for grad in grads.values() if grad is not None])
    )
    zpasses.shard(model, mesh=world_mesh())
    model(batches[dist.get_rank()]).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(norm.full_tensor() if isinstance(norm, DTensor) else norm, expected)


# --- state dicts and checkpoints ------------------------------------------------------------------


@on_ranks(2)
def test_state_dict_holds_the_shards_under_the_old_names():
    plain = Odd()
    model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
    with CountCollectives() as counted:
        state = model.state_dict()
        sharded = get_model_state_dict(model)
    assert (counted.reads, counted.calls) == (0, [])
    assert list(state) == list(sharded) == list(plain.state_dict())
    for name, param in model.named_parameters():
        assert isinstance(state[name], DTensor), name
        assert state[name].to_local().data_ptr() == param.to_local().data_ptr(), name
    assert_same_values(zpasses.full_state_dict(model), plain.state_dict())


@on_ranks(2)
def test_full_state_dict_of_torch_equals_the_unsharded_one():
    for plain in (Odd(), Tied()):
        model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
        with CountCollectives() as counted:
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert_same_values(dict(state), dict(plain.state_dict()))
        assert counted.reads == 0
        cut = [value for value in model.state_dict().values() if isinstance(value, DTensor)]
        assert len(counted.calls) <= sum(value.dim() > 0 for value in cut)


# --- invalidation of cached parameters ------------------------------------------------------------


@on_ranks(2)
def test_writes_to_memory_by_other_code_are_seen_after_invalidate():
    model = zpasses.shard(with_integer_weights(nn.Linear(4, 4, bias=False)), mesh=world_mesh())
    run, x = _run(model, 2), integers(2, 4)
    # With gradients, so that stage 2 caches the gathered parameters until the next step.
    before = run(x).detach().clone()
    assert before.any()
    compat.local_of(model._parameters["weight"]).numpy()[...] *= 2
    assert torch.equal(run(x), before)
    zpasses.invalidate(model)
    assert torch.equal(run(x), 2 * before)


@on_ranks(2)
def test_trained_parameters_that_are_ignored_cause_a_warning():
    said, handler, logger = [], logging.Handler(), logging.getLogger("zpasses")
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        for ignored in (False, True):
            assert said == []
            model = nn.Linear(4, 4)
            left = [model.bias] if ignored else []
            zpasses.shard(model, mesh=world_mesh(), ignored_params=left)
            _run(model, 3)(integers(2, 4)).sum().backward()
    finally:
        logger.removeHandler(handler)
    if dist.get_rank() == 0:
        expected = "parameters bias are trained but not sharded, because they are ignored"
        assert expected in "\n".join(said)


@on_ranks(2)
def test_trained_parameters_that_are_not_sharded_are_an_error():
    model = nn.Sequential(zpasses.shard(nn.Linear(4, 4), mesh=world_mesh()), nn.Linear(4, 4))
    with pytest.raises(Exception, match=r"parameters 1\.weight, 1\.bias are trained but not"):
        _run(model, 3)(integers(2, 4))
    model[1].requires_grad_(False)
    _run(model, 3)(integers(2, 4)).sum().backward()
