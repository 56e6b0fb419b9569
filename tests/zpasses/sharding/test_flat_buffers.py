"""Flat buffers of parameters and of shards."""

import copy
import gc
import json
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import zpasses
from tests.graphs import few_examples
from tests.on_ranks import on_ranks
from tests.programs import start_python
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
from zpasses.sharding.flat_buffers import pack_parameters
from zpasses.testing import fake_world, world_mesh


def assert_parts(flats, tensors):
    """Every tensor is a contiguous, aligned part of its flat buffer. The gaps are zero."""
    assert sorted(i for flat in flats for i in flat.views) == list(range(len(tensors)))
    for flat in flats:
        covered = torch.zeros_like(flat.buffer, dtype=torch.bool)
        for i, view in flat.views.items():
            assert torch.equal(view, tensors[i].detach())
            assert view.dtype == flat.buffer.dtype == tensors[i].dtype
            assert view.is_contiguous()
            assert not view.requires_grad
            if view.numel():
                start = (view.data_ptr() - flat.buffer.data_ptr()) // view.element_size()
                assert view.data_ptr() % 16 == 0
                covered[start : start + view.numel()] = True
        assert covered.sum() == sum(
            {view.data_ptr(): view.numel() for view in flat.views.values()}.values()
        )
        assert not flat.buffer[~covered].any()
        assert flat.buffer.nbytes % 16 == 0


# --- pack_parameters ------------------------------------------------------------------------------
def odd_tensors():
    frozen, trained = torch.full((3,), 7.0), nn.Parameter(torch.ones(5, 2))
    return [
        frozen,
        trained,
        torch.arange(6.0).view(2, 3).t(),
        torch.empty(0, 4),
        torch.tensor(3.0),
        torch.ones(3, dtype=torch.bfloat16),
        trained,
    ]


def test_tensors_lie_aligned_in_one_buffer_per_dtype():
    assert pack_parameters([]) == []
    flats = pack_parameters(odd_tensors())
    assert [flat.buffer.dtype for flat in flats] == [torch.float32, torch.bfloat16]
    assert_parts(flats, odd_tensors())
    (flat, _) = flats
    assert flat.views[1].data_ptr() == flat.views[6].data_ptr(), "tied tensors share a place"
    assert flat.buffer.grad_fn is None
    before = flat.views[2]._version
    flat.views[0].add_(1)
    assert flat.views[2]._version == before
    assert flat.buffer[0] == 8.0


def test_room_can_be_reserved_and_alignment_be_wider():
    tensors = [torch.ones(3), torch.ones(2)]
    (flat,) = pack_parameters(tensors, reserve=[9, 2])
    assert flat.buffer.tolist() == [1.0] * 3 + [0.0] * 9 + [1.0] * 2 + [0.0] * 2
    (flat,) = pack_parameters(tensors, align_bytes=64)
    assert (flat.views[1].data_ptr() - flat.buffer.data_ptr(), flat.buffer.nbytes) == (64, 128)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ([torch.empty(3, device="meta")], {}, r"tensor 0 \(\[3\]\) is on meta.*to_empty"),
        ([torch.ones(3)], {"reserve": [2]}, r"reserve\[0\] is 2, but the tensor has 3"),
        (
            [torch.ones(3)],
            {"align_bytes": 6},
            "align_bytes is 6; expected a multiple of the 4 bytes",
        ),
    ],
)
def test_wrong_arguments_are_refused(tensors, options, message):
    with pytest.raises(ValueError, match=message):
        pack_parameters(tensors, **options)


@few_examples
@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.integers(1, 4),
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
            st.booleans(),
        )
    )
)
def test_random_lists_are_packed_correctly(drawn):
    tensors = [torch.arange(a * b).view(a, b).to(dtype) for a, b, dtype, _ in drawn]
    tensors = [
        tensor.t() if flip else tensor for tensor, (*_, flip) in zip(tensors, drawn, strict=True)
    ]
    assert_parts(pack_parameters(tensors), tensors)


def test_buffer_lives_as_long_as_a_part_of_it():
    (flat,) = pack_parameters([torch.ones(1000), torch.full((1000,), 2.0)])
    view = flat.views[1]
    del flat
    gc.collect()
    others = [torch.zeros(2000) for _ in range(20)]
    assert view.eq(2).all(), others
    assert view.untyped_storage().nbytes() == 4000


# --- shards ---------------------------------------------------------------------------------------
def locals_of(model):
    return {name: compat.local_of(param) for name, param in model.named_parameters()}


def places(model):
    """Offset in bytes of each non-empty shard from the start of the buffer."""
    addresses = [local.data_ptr() for local in locals_of(model).values() if local.numel()]
    return [address - min(addresses) for address in addresses]


@pytest.mark.parametrize("rank", range(3))
def test_packed_shards_lie_in_one_buffer_identically_on_every_rank(rank):
    with fake_world(3, rank) as mesh:
        plain = zpasses.shard(Odd(), mesh=mesh)
        packed = zpasses.shard(Odd(), mesh=mesh, pack_mb=1)
        later = zpasses.pack_shards(zpasses.shard(Odd(), mesh=mesh), 1)
    # Blocks of 14, 15, 5, 1, 0, 10 and 3 elements, each at a multiple of 4 elements. Only the first
    # rank holds the parameter with one row.
    offsets = [0, 16, 32, 40, 44, 56] if rank == 0 else [0, 16, 40, 44, 56]
    for each in (packed, later):
        assert_same_values(locals_of(each), locals_of(plain))
        assert places(each) == [4 * first for first in offsets] != places(plain)


def test_buffers_end_where_they_are_full():
    with fake_world(2) as mesh:
        model = zpasses.shard(
            nn.Sequential(*(nn.Linear(256, 512, bias=False) for _ in range(5))),
            mesh=mesh,
            pack_mb=0.5,
        )
    first, second, third, fourth, _ = places(model)
    assert (second - first, fourth - third) == (1 << 18, 1 << 18)


def test_parameters_stay_the_same_objects_and_keep_their_attributes():
    with fake_world(3, 1) as mesh:
        model = Odd()
        model.wide.no_weight_decay = True
        zpasses.shard(model, mesh=mesh, pack_mb=1)
        before = list(model.parameters())
        zpasses.pack_shards(model, 0.0001)
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert model._parameters["wide"].no_weight_decay
    assert [name for name, param in model.named_parameters() if not param.requires_grad] == [
        "frozen"
    ]


def test_tied_shards_are_packed_once():
    with fake_world(3, 1) as mesh:
        model = zpasses.shard(Tied(), mesh=mesh, pack_mb=1)
        assert model.embed._parameters["weight"] is model.head._parameters["weight"]
        zpasses.pack_shards(model, 1)
    assert [local.shape for local in locals_of(model).values()] == [(4, 4)]


def test_meta_model_is_packed_once_it_has_memory():
    with fake_world(3, 1) as mesh:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4))
        with pytest.raises(
            zpasses.ShardingError,
            match=r"0\.weight is on meta.*call zpasses\.pack_shards after to_empty",
        ):
            zpasses.shard(model, mesh=mesh, pack_mb=1)
        zpasses.shard(model, mesh=mesh)
        with pytest.raises(zpasses.ShardingError, match=r"Sequential is on meta.*Call to_empty"):
            zpasses.pack_shards(model, 1)
        model.to_empty(device="cpu")
        with_integer_shards = {
            name: local.fill_(i) for i, (name, local) in enumerate(locals_of(model).items())
        }
        zpasses.pack_shards(model, 1)
        assert_same_values(locals_of(model), with_integer_shards)
        assert places(model) == [0, 48, 64, 144]


@pytest.mark.parametrize("pack_mb", [0, -1, True, "1"])
def test_invalid_sizes_are_refused(pack_mb):
    with (
        fake_world(2) as mesh,
        pytest.raises(zpasses.ShardingError, match=r"pack_mb is .*; expected MiB of shards"),
    ):
        zpasses.shard(nn.Linear(2, 2), mesh=mesh, pack_mb=pack_mb)


def test_unsharded_model_cannot_be_packed():
    with pytest.raises(
        zpasses.ShardingError,
        match=r"Linear has no sharded parameter to pack\. Call zpasses\.shard first",
    ):
        zpasses.pack_shards(nn.Linear(2, 2), 1)


class HostCopies(TorchDispatchMode):
    """Records the shape of each tensor that is copied between the host and a device."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[0].device.type != args[1].device.type:
            self.shapes.append(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


def test_model_on_the_host_moves_only_its_own_shards_to_the_device():
    """Uses fake tensors, because the device may not exist."""
    with fake_world(4, 1) as mesh, compat.FakeTensorMode():
        mesh._device_type = "cuda"
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
        with HostCopies() as copies:
            zpasses.shard(model, mesh=mesh, pack_mb=1)
        assert {local.device for local in locals_of(model).values()} == {torch.device("cuda", 0)}
    assert copies.shapes == [(32, 64), (32,), (16, 128), (16,)]


@pytest.mark.slow(quick="test_inductor_takes_shards_of_one_buffer")
@on_ranks(2)
def test_packed_models_checkpoint_like_others(tmp_path):
    mesh, x = world_mesh(), integers(2, 7, seed=dist.get_rank())
    packed = zpasses.shard(Odd(), mesh=mesh, pack_mb=0.0001)
    with torch.no_grad():
        for param in packed.parameters():
            param.add_(1)
    dcp.save({"model": get_model_state_dict(packed)}, checkpoint_id=tmp_path)
    loaded = zpasses.shard(Odd(), mesh=mesh, pack_mb=1)
    memory = {name: local.data_ptr() for name, local in locals_of(loaded).items()}
    state = {"model": get_model_state_dict(loaded)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(loaded, state["model"])
    assert_same_values(locals_of(loaded), locals_of(packed))
    assert {name: local.data_ptr() for name, local in locals_of(loaded).items()} == memory

    memo = {id(group): group for group in compat.process_groups()}
    twin, state = copy.deepcopy(packed, memo), copy.deepcopy(packed.state_dict(), dict(memo))
    assert_same_values(
        {name: compat.local_of(state[name]) for name in locals_of(packed)}, locals_of(packed)
    )
    loaded.load_state_dict(Odd().state_dict())
    for other in (twin, loaded.to(torch.float64).to(torch.float32)):
        other(x).sum().backward()
    assert_same_values(locals_of(twin), locals_of(packed))
    assert_same_values(locals_of(loaded), locals_of(zpasses.shard(Odd(), mesh=mesh)))

    # Packing again drops the cached parameters of stage 2.
    run = torch.compile(packed, backend="zpasses", options={"zero_stage": 2, "codegen": "eager"})
    before = run(x).detach().clone()
    zpasses.pack_shards(packed, 1)
    assert torch.equal(run(x), before)


@pytest.mark.inductor
@on_ranks(2)
def test_inductor_takes_shards_of_one_buffer():
    plain, batches = nn.Linear(4, 6), [integers(2, 4, seed=rank) for rank in range(2)]
    expected = reference_gradients(with_integer_weights(plain), batches)
    model = zpasses.shard(plain, mesh=world_mesh(), pack_mb=1)
    step = torch.compile(model, backend="zpasses", options={"zero_stage": 2})
    step(batches[dist.get_rank()]).sum().backward()
    assert_same_values(full_gradients(model), expected)


# --- memory of the host ---------------------------------------------------------------------------
_PEAK = """
import gc, json, sys, torch
import zpasses
from torch import nn
from zpasses.testing import fake_world

def read(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

for ranks, pack_mb in json.loads(sys.argv[1]):
    with fake_world(ranks) as mesh:
        zpasses.shard(nn.Linear(64, 64), mesh=mesh, pack_mb=pack_mb)  # whatever the first call loads
        model = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(8)))  # 32 MiB each
        gc.collect()
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5")  # forget the peak
        before = read("VmRSS")
        zpasses.shard(model, mesh=mesh, pack_mb=pack_mb)
        print(read("VmHWM") - before, read("VmRSS") - before)
        del model
"""  # noqa: E501


@pytest.mark.slow(quick="tests/zpasses/sharding/test_flat_buffers.py")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_sharding_never_holds_a_second_copy_of_the_model():
    # (ranks, MiB of a group): most MiB on top of the model's 256.
    expected = {(1, None): 32, (1, 64): 64, (4, None): 8, (4, 16): 16}
    done = start_python("-c", _PEAK, json.dumps(list(expected)))
    assert done.returncode == 0, done.stderr
    for ((ranks, _), most), line in zip(expected.items(), done.stdout.splitlines(), strict=True):
        peak, rest = map(float, line.split())
        assert most - 8 < peak < most + 24, "plus what the allocator rounds up"
        assert rest == pytest.approx(256 / ranks - 256, abs=24)


# --- on a real device -----------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_model_on_the_host_is_sharded_onto_a_gpu(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = zpasses.shard(Odd(), mesh=init_device_mesh("cuda", (1,)), pack_mb=1)
        assert all(local.is_cuda for local in locals_of(model).values())
        assert_same_values(
            {name: local.cpu() for name, local in locals_of(model).items()},
            {n: p.detach() for n, p in Odd().named_parameters()},
        )
    finally:
        dist.destroy_process_group()
