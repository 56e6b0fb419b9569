"""Sharding over one dimension of a device mesh, on top of tensor parallelism over another one."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.zpasses.parallel_models import (
    Words,
    assert_near,
    assert_trains_as,
    mesh_2d,
    parallelized,
    token_batches,
    whole,
)
from zpasses.errors import ShardingError
from zpasses.graph.patterns import tag_foreign_gathers, tag_foreign_reductions
from zpasses.graph.queries import collective_of
from zpasses.graph.tags import tag_of
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import (
    fake_world,
    run_on_ranks,
)

STEPS = 4


@pytest.fixture
def mesh():
    """A mesh of 2 x 2 fake ranks, of which this process is the last."""
    with fake_world(4, rank=3):
        yield mesh_2d()


# --- structure ------------------------------------------------------------------------------------
def test_reads_return_dtensors_on_the_mesh_of_tensor_parallelism(mesh):
    model = zpasses.shard(parallelized(Words(), mesh["tp"]), mesh=mesh["dp"])
    read = model.blocks[0].down.weight
    assert isinstance(read, DTensor)
    assert (read.device_mesh, read.placements) == (mesh["tp"], (Shard(1),))
    assert (read.shape, read.to_local().shape) == ((8, 10), (8, 5))
    assert model.blocks[0].norm.weight.placements == (Replicate(),)
    with pytest.raises(ShardingError, match="add_ would write to parameter 'weight' of a Linear"):
        model.head.weight.add_(1)


def test_collectives_of_tensor_parallelism_are_not_taken_for_those_of_parameters(mesh):
    # The input is gathered, and its gradient is reduced, as if it were a parameter.
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel()}
    zpasses.shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
    options = {"zero_stage": 3, "codegen": "eager", "agreement": False, "backwards_per_step": 2}
    compiled = torch.compile(model, backend="zpasses", options=options, fullgraph=True)
    logs = []
    with observe_graphs(logs.append):
        compiled(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert {log.kind for log in logs} >= {"joint", "forward", "backward"}
    for log in logs:
        for node in log.graph.nodes:
            collective = collective_of(node)
            if collective is not None and collective.group == mesh["tp"].get_group().group_name:
                assert tag_of(node) is None, node.format_node()
        assert not tag_foreign_gathers(log.graph, "test")
        assert not tag_foreign_reductions(log.graph, "test")


@pytest.mark.slow(quick="test_training_equals_the_unsharded_model")
def test_a_memory_budget_takes_device_meshes_that_are_inputs(mesh):
    model = zpasses.shard(parallelized(Words(), mesh["tp"]), mesh=mesh["dp"])
    options = {"zero_stage": 3, "codegen": "eager", "agreement": False}
    counts = []
    for budget in ("1GiB", "0%"):
        torch.compiler.reset()
        logs = []
        compiled = torch.compile(
            model, backend="zpasses", options={**options, "memory_budget": budget}, fullgraph=True
        )
        with observe_graphs(logs.append):
            compiled(token_batches(1, 2)[0][0]).sum().backward()
        counts.append(sum(len(log.graph.nodes) for log in logs if log.kind == "backward"))
    assert counts[0] < counts[1]  # "0%" gathers again, and may recompute


# --- refusals -------------------------------------------------------------------------------------


def test_other_meshes_and_sharded_models_are_refused(mesh):
    model, unnamed = parallelized(Words(), mesh["tp"]), DeviceMesh("cpu", [1, 3])
    for other, said in (
        (mesh["tp"], r"embed\.weight is a DTensor already"),
        (unnamed, "does not go together with the mesh to shard over"),
    ):
        with pytest.raises(ShardingError, match=said):
            zpasses.shard(model, mesh=other)
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(ShardingError, match="shard it once"):
        zpasses.shard(model, mesh=mesh["dp"])


def test_optimizers_of_whole_matrices_are_refused(mesh):
    model = zpasses.shard(parallelized(Words(), mesh["tp"]), mesh=mesh["dp"])
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    with pytest.raises(ShardingError, match="does not hold whole rows"):
        zpasses.optim.Muon([model.head._parameters["weight"]]).step()


# --- training -------------------------------------------------------------------------------------
CASES = {
    "stage 3": {},
    **{f"window, stage {stage}": {"stage": stage, "windows": 2} for stage in (0, 1, 2)},
    "no sequence parallelism": {"sequence": False},
    "loss parallelism, window, clipping": {"loss_cut": True, "windows": 2, "clip": 0.1},
}


@pytest.mark.parametrize("case", some_quick(CASES, ["stage 3"]))
def test_training_equals_the_unsharded_model(case):
    run_on_ranks(_train, **CASES[case], ranks=4)


def _train(stage=3, sequence=True, loss_cut=False, windows=1, clip=None):
    torch.manual_seed(0)
    plain, mesh = Words(layers=1), mesh_2d()
    model = parallelized(copy.deepcopy(plain), mesh["tp"], sequence=sequence, loss=loss_cut)
    zpasses.shard(model, mesh=mesh["dp"])
    options = {"zero_stage": stage, "backwards_per_step": windows} if stage else None
    batches = token_batches(STEPS, 2 * windows)
    given = (plain, model, batches, mesh["dp"].get_local_rank(), options)
    how = {"clip": clip, "mode": loss_parallel if loss_cut else contextlib.nullcontext}
    # Rounding differs between processors, such as one without AVX-512.
    assert_trains_as(*given, windows=windows, rtol=1e-5, **how)


def _whole_state(model):
    return {name: whole(value) for name, value in model.state_dict().items()}


@on_ranks(4)
def test_initialisers_and_full_state_dicts():
    mesh = mesh_2d()
    torch.manual_seed(3)
    plain = Words()
    with torch.device("meta"):
        model = Words()
    model = zpasses.shard(parallelized(model, mesh["tp"]), mesh=mesh["dp"])
    model.to_empty(device="cpu")

    def init(module):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    for each in (model, plain):
        torch.manual_seed(5)
        each.apply(init)
    assert_near(_whole_state(model), plain.state_dict(), 0)
    with zpasses.local_shards(model), torch.no_grad():
        model.head.weight.data = plain.embed.weight.data
        model.embed.weight[2].fill_(3.0)
    with torch.no_grad():
        plain.embed.weight[2].fill_(3.0)
    assert torch.equal(whole(model.head._parameters["weight"])[0], plain.embed.weight[0])
    assert torch.equal(whole(model.embed._parameters["weight"]), plain.embed.weight)
    model.load_state_dict(plain.state_dict())
    assert_near(_whole_state(model), plain.state_dict(), 0)
