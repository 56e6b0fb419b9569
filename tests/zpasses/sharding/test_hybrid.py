"""Hybrid sharding: replicas of the model, each sharded over the ranks of one mesh dimension."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import zpasses
from tests.cases import some_quick
from tests.zpasses.parallel_models import (
    Words,
    assert_trains_as,
    mesh_2d,
    parallelized,
    token_batches,
)
from zpasses.errors import OptionError, ShardingError
from zpasses.graph.queries import collectives
from zpasses.pipeline.events import observe_graphs
from zpasses.pipeline.options import Options
from zpasses.short_names import REPLICATE_DIMENSIONS
from zpasses.testing import (
    fake_world,
    run_on_ranks,
)
from zpasses.tools.capture.mesh_shapes import MeshShape

STEPS = 4
NAMES = ("replicate", "shard")


def hybrid_mesh(replicas=2, shards=2):
    return mesh_2d(replicas, shards, NAMES)


@pytest.fixture
def mesh():
    """A mesh of 2 x 2 fake ranks, of which this process is the last."""
    with fake_world(4, rank=3):
        yield hybrid_mesh()


# --- structure ------------------------------------------------------------------------------------
@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_are_what_fsdp2_makes_of_them(tp):
    with fake_world(4 * tp, rank=3):
        mesh = init_device_mesh("cpu", (2, 2, tp), mesh_dim_names=(*NAMES, "tp"))
        models = [parallelized(Words(), mesh["tp"]) if tp > 1 else Words() for _ in range(2)]
        ours, theirs = zpasses.shard(models[0], mesh=mesh[NAMES]), models[1]
        fully_shard(theirs, mesh=mesh[NAMES])
        pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
        for (name, a), (_, b) in pairs:
            assert (a.placements, a.device_mesh) == (b.placements, b.device_mesh), name
            assert (a.shape, a.to_local().shape) == (b.shape, b.to_local().shape), name
            assert tp > 1 or a.placements == (Replicate(), Shard(0)), name
        ours(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
        for param in ours.parameters():
            grad = param.grad
            assert (grad.placements, grad.device_mesh) == (param.placements, param.device_mesh)


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


def test_gathers_stay_in_a_replica_and_gradients_are_reduced_in_both_groups(mesh):
    found = _graphs(mesh, "zero3")
    inside, across = (mesh.get_group(dim).group_name for dim in (1, 0))
    gathers = [each for _, each in collectives(found["forward"])]
    assert gathers
    assert {each.group for each in gathers} == {inside}
    reductions = [each for _, each in collectives(found["backward"]) if each.reduce_op]
    groups = {each.op.removesuffix("_coalesced"): each.group for each in reductions}
    assert groups == {"reduce_scatter_tensor": inside, "all_reduce": across}


def test_averages_run_beside_the_kernels_that_are_left(mesh):
    pipeline = (
        "merge-reads,gather-params,reduce-grads,reshard-after-forward,"
        "schedule{plan=one-ahead,cap_mb=0},average-replicas,defer-reduction"
    )
    nodes = list(_graphs(mesh, pipeline)["backward"].nodes)
    started = next(i for i, n in enumerate(nodes) if "all_reduce" in str(n.target))
    users = list(nodes[started].users)
    if "wait" not in str(users[0]):  # the parts of a merged launch
        users = [user for part in users for user in part.users]
    kernels = [i for i, n in enumerate(nodes) if "aten.mm" in str(n.target)]
    assert any(started < at < min(map(nodes.index, users)) for at in kernels)


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
@pytest.mark.parametrize(
    ("sizes", "names", "said"),
    [
        ((2, 2), None, r"sizes \(2, 2\) without names"),
        ((2, 2, 2), ("a", "b", "c"), "mesh has 3 dimensions"),
    ],
)
def test_other_meshes_are_refused(sizes, names, said):
    with fake_world(2 ** len(sizes)), pytest.raises(ShardingError, match=said):
        zpasses.shard(Words(), mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))


@pytest.mark.parametrize("name", REPLICATE_DIMENSIONS)
def test_replicas_after_shards_are_refused_as_by_capture(name):
    with fake_world(4), pytest.raises(ShardingError, match="expected replicas first and shards"):
        zpasses.shard(Words(), mesh=mesh_2d(2, 2, ("shard", name)))
    with pytest.raises(OptionError, match="Neighbouring ranks, which share a node"):
        MeshShape.parse(f"shard=2,{name}=2")


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


# --- training -------------------------------------------------------------------------------------
AVERAGES = {"windows": 2, "accum": "shards"}
CASES = {
    "stage 3": {},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    **{f"window, stage {stage}": {"stage": stage, "windows": 2} for stage in (0, 1, 2, 3)},
    "clipping": {"clip": 0.1},
    "explicit window": {"windows": 2, "explicit": True},
    "a step before the window ends": {"windows": 2, "most": 3},
    "averages in windows": AVERAGES,
    "averages, a step before the window ends": AVERAGES | {"most": 3},
    "averages in another dtype": AVERAGES | {"reduce_dtype": torch.float64},
    **{
        f"averages in explicit windows, {stage}": AVERAGES | {"stage": stage, "explicit": True}
        for stage in (1, 2, 3)
    },
    "one shard per replica, and tensor parallelism": {"tp": 2},
}


@pytest.mark.parametrize("case", some_quick(CASES, ["stage 3"]))
def test_training_equals_the_unsharded_model(case):
    run_on_ranks(_train, **CASES[case], ranks=4)


def _train(stage=3, windows=1, explicit=False, tp=1, accum="full", most=None, clip=None, **shard):
    """`most` is the number of backwards that the option announces; None for `windows`."""
    torch.manual_seed(0)
    plain = Words(layers=1)
    shards = dist.get_world_size() // 2 // tp
    mesh = init_device_mesh("cpu", (2, shards, tp), mesh_dim_names=(*NAMES, "tp"))
    own = mesh.get_local_rank(0) * shards + mesh.get_local_rank(1)
    model = copy.deepcopy(plain)
    if tp > 1:
        parallelized(model, mesh["tp"])
    zpasses.shard(model, mesh=mesh[NAMES], **shard)
    options = {"zero_stage": stage, "grad_accum": accum}
    if windows > 1 and not explicit:
        options["backwards_per_step"] = most or windows
    batches = token_batches(STEPS, 2 * shards * windows)
    how = {"windows": windows, "explicit": explicit or not stage, "clip": clip}
    assert_trains_as(plain, model, batches, own, options if stage else None, **how)
