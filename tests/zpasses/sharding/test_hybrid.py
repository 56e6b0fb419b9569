"""Hybrid sharding: replicas of the model, each sharded over the ranks of one mesh dimension."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import zpasses
from tests.zpasses.parallel_models import (
    Words,
    assert_near,
    mesh_2d,
    parallelized,
    sgd,
    token_batches,
    train_unsharded,
    whole,
    word_loss,
)
from zpasses.errors import OptionError, ShardingError
from zpasses.graph.queries import collectives
from zpasses.pipeline.events import observe_graphs
from zpasses.pipeline.options import Options
from zpasses.sharding.shard_plan import REPLICATE_DIMENSIONS
from zpasses.testing import (
    assert_step_equals_reference,
    capture_ranks,
    fake_world,
    run_on_ranks,
)
from zpasses.tools.capture.mesh_shapes import MeshShape

STEPS = 10
NAMES = ("replicate", "shard")


def hybrid_mesh(replicas=2, shards=2):
    return mesh_2d(replicas, shards, NAMES)


@pytest.fixture
def mesh():
    """A mesh of 2 x 2 fake ranks, of which this process is the last."""
    with fake_world(4, rank=3):
        yield hybrid_mesh()


# --- structure ------------------------------------------------------------------------------------
def test_parameters_are_what_fsdp2_makes_of_them(mesh):
    ours, theirs = zpasses.shard(Words(), mesh=mesh), Words()
    fully_shard(theirs, mesh=mesh)
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert a.placements == b.placements == (Replicate(), Shard(0)), name
        assert a.device_mesh == b.device_mesh, name
        assert (a.shape, a.to_local().shape) == (b.shape, b.to_local().shape), name


def test_parameters_under_tensor_parallelism_are_what_fsdp2_makes_of_them():
    with fake_world(8, rank=5):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=(*NAMES, "tp"))
        models = [parallelized(Words(), mesh["tp"]) for _ in range(2)]
        ours, theirs = zpasses.shard(models[0], mesh=mesh[NAMES]), models[1]
        fully_shard(theirs, mesh=mesh[NAMES])
        pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
        for (name, a), (_, b) in pairs:
            assert (a.placements, a.device_mesh) == (b.placements, b.device_mesh), name
            assert (a.shape, a.to_local().shape) == (b.shape, b.to_local().shape), name


def test_scalars_are_replicated_over_both_dimensions(mesh):
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    zpasses.shard(model, mesh=mesh)
    assert model._parameters["scale"].placements == (Replicate(), Replicate())


def _graphs(mesh, pipeline):
    torch.compiler.reset()
    model = zpasses.shard(Words(), mesh=mesh)
    options = {"pipeline": pipeline, "codegen": "eager", "agreement": False}
    compiled = torch.compile(model, backend="zpasses", options=options, fullgraph=True)
    logs = []
    with observe_graphs(logs.append):
        compiled(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    return {log.kind: log.graph for log in logs}


@pytest.mark.parametrize("pipeline", ["zero2", "zero3"])
def test_gathers_stay_in_a_replica_and_gradients_are_reduced_in_both_groups(mesh, pipeline):
    found = _graphs(mesh, pipeline)
    inside, across = (mesh.get_group(dim).group_name for dim in (1, 0))
    gathers = [each for _, each in collectives(found["forward"])]
    assert gathers
    assert {each.group for each in gathers} == {inside}
    reductions = [each for _, each in collectives(found["backward"]) if each.reduce_op]
    groups = {each.op.removesuffix("_coalesced"): each.group for each in reductions}
    assert groups == {"reduce_scatter_tensor": inside, "all_reduce": across}


def test_averages_run_beside_the_kernels_that_are_left(mesh):
    graph = _graphs(mesh, "zero3-one-ahead")["backward"]
    nodes = list(graph.nodes)
    started = next(i for i, n in enumerate(nodes) if "all_reduce" in str(n.target))
    waits = [i for i, n in enumerate(nodes) if n in _awaited(nodes[started])]
    kernels = [i for i, n in enumerate(nodes) if "aten.mm" in str(n.target)]
    assert any(started < at < min(waits) for at in kernels)


def _awaited(started):
    users = list(started.users)
    return [user for part in users for user in part.users] if "wait" not in str(users[0]) else users


def test_gradients_have_the_placements_of_their_parameters(mesh):
    model = zpasses.shard(Words(), mesh=mesh)
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    for param in model.parameters():
        assert param.grad.placements == param.placements
        assert param.grad.device_mesh == param.device_mesh


class Reductions(TorchDispatchMode):
    """Collects the names of reductions that run."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found |= {name for name in ("reduce_scatter", "all_reduce") if name in str(func)}
        return func(*args, **(kwargs or {}))


def test_variants_reduce_within_a_replica_and_defer_the_average(mesh):
    torch.compiler.reset()
    model = zpasses.shard(Words(), mesh=mesh)
    options = {"codegen": "eager", "agreement": False, "grad_accum": "shards"}
    compiled = torch.compile(model, backend="zpasses", options=options | {"backwards_per_step": 2})
    ran = []
    for _ in range(4):  # the first two also compile
        loss = compiled(torch.zeros(2, 4, dtype=torch.long)).sum()
        with Reductions() as reductions:
            loss.backward()
        ran.append(reductions.found)
    assert ran[2:] == [{"reduce_scatter"}, {"reduce_scatter", "all_reduce"}]


# --- refusals -------------------------------------------------------------------------------------
def test_meshes_without_names_are_refused():
    with fake_world(4), pytest.raises(ShardingError, match=r"sizes \(2, 2\) without names"):
        zpasses.shard(Words(), mesh=init_device_mesh("cpu", (2, 2)))


@pytest.mark.parametrize("name", REPLICATE_DIMENSIONS)
def test_replicas_after_shards_are_refused_as_by_capture(name):
    with fake_world(4), pytest.raises(ShardingError, match="expected replicas first and shards"):
        zpasses.shard(Words(), mesh=mesh_2d(2, 2, ("shard", name)))
    with pytest.raises(OptionError, match="Neighbouring ranks, which share a node"):
        MeshShape.parse(f"shard=2,{name}=2")


def test_meshes_of_three_dimensions_are_refused():
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        with pytest.raises(ShardingError, match="mesh has 3 dimensions"):
            zpasses.shard(Words(), mesh=mesh)


def test_the_average_cannot_be_deferred_without_replicas():
    with fake_world(2) as line:
        model = zpasses.shard(Words(), mesh=line)
        compiled = torch.compile(model, backend="zpasses", options={"grad_accum": "shards"})
        with pytest.raises(Exception, match="no parameter of this graph has replicas"):
            compiled(torch.zeros(2, 4, dtype=torch.long))


def test_the_average_cannot_be_deferred_without_the_pass():
    options = {"grad_accum": "shards", "pipeline": "gather-params,reduce-grads"}
    with pytest.raises(OptionError, match="needs the pass 'defer-reduction'"):
        Options.parse(options)


# --- simulated ranks ------------------------------------------------------------------------------
def _capture(replicas, shards, pipeline, **arguments):
    def shard(model, _):
        zpasses.shard(model, mesh=hybrid_mesh(replicas, shards), **arguments)

    tokens = torch.zeros(2, 8, dtype=torch.long)
    ranks = replicas * shards
    return capture_ranks(Words(), [tokens], world_size=ranks, shard=shard, pipeline=pipeline)


@pytest.mark.slow(quick="test_training_equals_the_unsharded_model")
@pytest.mark.parametrize("pipeline", ["zero3", "zero2-one-ahead"])
def test_simulated_steps_equal_the_unlowered_graph(pipeline):
    assert_step_equals_reference(_capture(2, 2, pipeline))


@pytest.mark.slow(quick="test_training_equals_the_unsharded_model")
def test_low_precision_reductions():
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    assert_step_equals_reference(_capture(2, 2, "zero3", **dtypes))


@pytest.mark.slow(quick="test_training_equals_the_unsharded_model")
@pytest.mark.parametrize(("replicas", "shards"), [(2, 4), (4, 2), (8, 1), (4, 4)])
def test_more_simulated_ranks(replicas, shards):
    assert_step_equals_reference(_capture(replicas, shards, "zero3"))


# --- training -------------------------------------------------------------------------------------
def _train(stage, windows=1, clip=None, explicit=False, tp=1, accum="full", most=None, **shard):
    """Trains on a mesh of 2 x 2, and compares with the unsharded model.

    Args:
        windows: backwards per optimizer step.
        most: backwards that the option announces; None for `windows`.
    """
    torch.manual_seed(0)
    plain = Words()
    shards = dist.get_world_size() // 2 // tp
    mesh = init_device_mesh("cpu", (2, shards, tp), mesh_dim_names=(*NAMES, "tp"))
    ranks = 2 * shards
    row = mesh.get_local_rank(0) * shards + mesh.get_local_rank(1)
    batches = token_batches(STEPS, ranks * windows)
    expected = train_unsharded(plain, batches, clip=clip)
    model = copy.deepcopy(plain)
    if tp > 1:
        parallelized(model, mesh["tp"])
    zpasses.shard(model, mesh=mesh[NAMES], **shard)
    run = model
    if stage:
        options = {"zero_stage": stage, "codegen": "eager", "grad_accum": accum}
        steps = {"backwards_per_step": most or windows} if windows > 1 and not explicit else {}
        run = torch.compile(model, backend="zpasses", options=options | steps, fullgraph=True)
    optim, losses = sgd(model), []

    def backward(part):
        loss = word_loss(run(part), part)
        (loss / windows).backward()
        losses.append(loss.item())

    for step in batches:
        optim.zero_grad()
        parts = step.unflatten(0, (windows, ranks))[:, row]
        if explicit or not stage:
            with zpasses.coalesce_grad_reduction(model):
                for part in parts:
                    backward(part)
        else:
            for part in parts:
                backward(part)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim.step()
    own = torch.tensor(expected[0]).unflatten(1, (windows, ranks))[:, :, row].flatten()
    torch.testing.assert_close(torch.tensor(losses), own, rtol=2e-6, atol=0)
    assert_near({n: whole(p.grad) for n, p in model.named_parameters()}, expected[1], 1e-5)
    assert_near({n: whole(p) for n, p in model.named_parameters()}, expected[2])


def test_training_equals_the_unsharded_model():
    run_on_ranks(_train, 3, ranks=4)


@pytest.mark.slow(quick="test_training_equals_the_unsharded_model")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_all_stages(stage):
    run_on_ranks(_train, stage, ranks=4)


@pytest.mark.slow(quick="test_variants_reduce_within_a_replica_and_defer_the_average")
def test_windows():
    run_on_ranks(_train, 3, 2, ranks=4)


@pytest.mark.slow(quick="test_variants_reduce_within_a_replica_and_defer_the_average")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_windows_of_all_stages(stage):
    run_on_ranks(_train, stage, 2, ranks=4)


@pytest.mark.slow(quick="test_variants_reduce_within_a_replica_and_defer_the_average")
def test_windows_of_the_average_over_replicas():
    run_on_ranks(_train, 3, 2, accum="shards", ranks=4)


@pytest.mark.slow(quick="test_variants_reduce_within_a_replica_and_defer_the_average")
def test_a_step_before_the_window_ends_reduces_what_is_pending():
    run_on_ranks(_train, 3, 2, accum="shards", most=3, ranks=4)
    run_on_ranks(_train, 3, 2, accum="full", most=3, ranks=4)


@pytest.mark.slow(quick="test_variants_reduce_within_a_replica_and_defer_the_average")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_explicit_windows_of_the_average_over_replicas(stage):
    run_on_ranks(_train, stage, 2, None, True, accum="shards", ranks=4)


@pytest.mark.slow(quick="test_variants_reduce_within_a_replica_and_defer_the_average")
def test_windows_of_the_average_in_another_dtype():
    run_on_ranks(_train, 3, 2, accum="shards", reduce_dtype=torch.float64, ranks=4)


@pytest.mark.slow(quick="test_variants_reduce_within_a_replica_and_defer_the_average")
def test_explicit_windows():
    run_on_ranks(_train, 3, 2, None, True, ranks=4)


@pytest.mark.slow(quick="test_training_equals_the_unsharded_model")
def test_clipping():
    run_on_ranks(_train, 3, 1, 0.1, ranks=4)


@pytest.mark.slow(quick="test_training_equals_the_unsharded_model")
def test_one_shard_per_replica_beside_tensor_parallelism():
    run_on_ranks(_train, 3, tp=2, ranks=4)


# --- checkpoints ----------------------------------------------------------------------------------
def _state(model):
    return {name: whole(value) for name, value in model.state_dict().items()}


def _step(model, optim, batches):
    for step in batches:
        optim.zero_grad()
        word_loss(model(step[dist.get_rank()]), step[dist.get_rank()]).backward()
        optim.step()


def _to_and_from_fsdp2(folder):
    """FSDP2 with hybrid sharding and zpasses read each other's checkpoints, with optimizer."""
    torch.manual_seed(0)
    plain, mesh, batches = Words(), hybrid_mesh(), token_batches(4, 4)

    def sharded(how):
        model = copy.deepcopy(plain)
        if how == "fsdp2":
            fully_shard(model, mesh=mesh)
        else:
            zpasses.shard(model, mesh=mesh)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    for first, second in (("fsdp2", "zpasses"), ("zpasses", "fsdp2")):
        model, optim = sharded(first)
        _step(model, optim, batches[:2])
        states = get_state_dict(model, optim)
        dcp.save(dict(zip("mo", states, strict=True)), checkpoint_id=f"{folder}/{first}")
        _step(model, optim, batches[2:])
        other, others = sharded(second)
        for param in other.parameters():
            with torch.no_grad():
                param.to_local().zero_()
        mine = dict(zip("mo", get_state_dict(other, others), strict=True))
        dcp.load(mine, checkpoint_id=f"{folder}/{first}")
        set_state_dict(other, others, model_state_dict=mine["m"], optim_state_dict=mine["o"])
        _step(other, others, batches[2:])
        assert_near(_state(other), _state(model), 1e-6)


@pytest.mark.slow(quick="test_checkpoints_load_on_other_meshes")
def test_checkpoints_go_to_and_from_fsdp2(tmp_path):
    run_on_ranks(_to_and_from_fsdp2, str(tmp_path), ranks=4)


def _to_other_meshes(folder):
    """A checkpoint loads over other meshes: swapped, all ranks, all replicas, unsharded."""
    torch.manual_seed(0)
    plain = Words()
    model = zpasses.shard(copy.deepcopy(plain), mesh=hybrid_mesh())
    dcp.save({"m": get_model_state_dict(model)}, checkpoint_id=folder)
    for param in plain.parameters():
        param.data.add_(1)
    others = [
        zpasses.shard(copy.deepcopy(plain), mesh=hybrid_mesh(4, 1)),
        zpasses.shard(copy.deepcopy(plain), mesh=init_device_mesh("cpu", (4,))),
        copy.deepcopy(plain),
    ]
    for other in others:
        state = {"m": get_model_state_dict(other)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state["m"])
        assert_near(_state(other), _state(model), 0)


def test_checkpoints_load_on_other_meshes(tmp_path):
    run_on_ranks(_to_other_meshes, str(tmp_path), ranks=4)


def _files(folder):
    torch.manual_seed(0)
    plain = Words()
    model = zpasses.shard(copy.deepcopy(plain), mesh=hybrid_mesh(), pack_mb=1)
    zpasses.save_safetensors(model, folder)
    assert_near(zpasses.full_state_dict(model), plain.state_dict(), 0)
    first = zpasses.full_state_dict(model, rank0_only=True)
    assert bool(first) == (dist.get_rank() == 0)
    for param in model.parameters():
        with torch.no_grad():
            param.to_local().zero_()
    zpasses.load_safetensors(model, folder)
    assert_near(_state(model), plain.state_dict(), 0)


def test_safetensors_files_hold_whole_parameters(tmp_path):
    run_on_ranks(_files, str(tmp_path), ranks=4)
