"""Gathering parameters again in backward from fewer ranks: `shard(reshard_after_forward=...)`."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zpasses
from tests.cases import some_quick
from tests.graphs import expect_listing
from tests.on_ranks import on_ranks
from zpasses import compat
from zpasses.cost.time.step_time import collective_timing
from zpasses.cost.time.target import Target
from zpasses.errors import ShardingError
from zpasses.graph.queries import collective_of, collectives
from zpasses.graph.regathers import remove_regathers
from zpasses.graph.tags import tagged
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import (
    assert_step_equals_reference,
    capture_graphs,
    capture_ranks,
    fake_world,
    listing,
)

STAGE3 = (
    "merge-reads,gather-params,reduce-grads,reshard-after-forward{keep=nothing},{schedule}"
    "average-replicas,defer-reduction"
)
LEAN = STAGE3.replace("{schedule}", "schedule,")
KEEPING = LEAN.replace("{keep=nothing}", "")
SINGLE = STAGE3.replace("{schedule}", "")
ENCODED = LEAN.replace("gather-params", "gather-params{encode=int8,exact_below_kib=0}").replace(
    "reduce-grads", "reduce-grads{encode=int8,exact_below_kib=0}"
)


class Net(nn.Module):
    """Its rows are not divisible by the ranks, and one block is recomputed in backward."""

    def __init__(self):
        super().__init__()
        self.up, self.mid, self.down = (
            nn.Linear(7, 13),
            nn.Linear(13, 9, bias=False),
            nn.Linear(9, 5),
        )

    def forward(self, x):
        x = self.up(x).tanh()
        return self.down(checkpoint(lambda y: self.mid(y).tanh(), x, use_reentrant=False))


class EvenNet(nn.Sequential):
    """Its rows are divisible by the ranks, so a full parameter is the gathered value itself."""

    def __init__(self):
        super().__init__(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))


def hybrid(model, mesh):
    ranks = mesh.size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    zpasses.shard(model, mesh=mesh, reshard_after_forward=2)


def in_bfloat16(model, mesh):
    zpasses.shard(model, mesh=mesh, reshard_after_forward=2, param_dtype=torch.bfloat16)


def along_columns(model, mesh):
    def place(param):
        return Shard(1) if param.dim() == 2 else None

    zpasses.shard(model, mesh=mesh, reshard_after_forward=2, shard_placement_fn=place)


# --- graphs ---------------------------------------------------------------------------------------
SHARDED = {
    "3 of 6": (6, {"reshard_after_forward": 3}),
    "hybrid": (8, hybrid),
    "bfloat16": (4, in_bfloat16),
    "columns": (4, along_columns),
    "even": (4, {"reshard_after_forward": 2}),
}


@pytest.mark.parametrize(
    ("how", "pipeline"),
    some_quick(
        [
            ("3 of 6", SINGLE),
            ("even", KEEPING),
            *((how, text) for how in SHARDED for text in (LEAN, ENCODED)),
        ],
        [("columns", LEAN)],
    ),
)
def test_simulated_ranks_compute_the_same_step(how, pipeline):
    (ranks, shard), model = SHARDED[how], EvenNet() if how == "even" else Net()
    dtype = torch.bfloat16 if shard is in_bfloat16 else torch.float32
    x = torch.ones(3, 16 if how == "even" else 7, dtype=dtype)
    captures = capture_ranks(model, (x,), world_size=ranks, shard=shard, pipeline=pipeline)
    assert_step_equals_reference(captures)


def _gathers(gm):
    return [
        (compat.group_ranks(each.group), tuple(shape))
        for _, each in collectives(gm.graph)
        if "gather" in each.op
        for shape in each.shapes
    ]


def _gathered(model=None, rank=1, *, pipeline=LEAN, **how):
    """Returns what forward and backward gather, and how many parts forward saves."""
    model = model or Net()
    x = torch.ones(3, 16 if isinstance(model, EvenNet) else 7)
    how = {"shard": {"reshard_after_forward": 2}, "pipeline": pipeline, **how}
    with fake_world(4, rank):
        after = capture_graphs(model, (x,), **how).after
        parts = len(list(tagged(after.forward.graph, "part")))
        return _gathers(after.forward), _gathers(after.backward), parts


def test_forward_gathers_once_and_backward_from_fewer_ranks():
    forward, backward, parts = _gathered(rank=3, pipeline=SINGLE)
    assert len(forward) == 5
    assert {len(ranks) for ranks, _ in forward} == {4}
    # `mid` and `down`: blocks of 3 and 2 rows, of which a part has those of two ranks.
    assert sorted(backward) == [([2, 3], (4, 9)), ([2, 3], (6, 13))]
    assert parts == 2


def test_backward_gathers_codes_again():
    _, backward, parts = _gathered(EvenNet(), pipeline=ENCODED)
    assert parts == len(backward) == 2
    assert all(len(shape) == 1 and shape[0] % 16 == 0 for _, shape in backward)


def test_parameters_that_are_kept_are_not_saved_in_parts():
    assert _gathered(pipeline=KEEPING)[1:] == ([], 0)  # so small a model fits
    _, lean, parts = _gathered(EvenNet())
    assert len(lean) == parts == 2
    _, again, parts = _gathered(EvenNet(), pipeline=KEEPING)
    assert len(again) == parts < 2
    rich = {"memory_budget": "1GiB"}
    assert _gathered(EvenNet(), pipeline=KEEPING, options=rich)[1:] == ([], 0)


def test_without_gradients_nothing_is_gathered_again():
    with fake_world(4):
        how = {"shard": {"reshard_after_forward": 2}, "pipeline": LEAN, "train": False}
        found = capture_graphs(Net(), (torch.ones(3, 7),), **how)
        assert {len(ranks) for ranks, _ in _gathers(found.after.inference)} == {4}


def test_one_parameter_as_text():
    with fake_world(4, rank=3):
        found = capture_graphs(
            nn.Linear(4, 8, bias=False),
            (torch.ones(3, 4, requires_grad=True),),
            shard={"reshard_after_forward": 2},
            pipeline=SINGLE,
        )
        expect_listing(
            _short(listing(found.after.forward)),
            """\
primals_1: f32[2, 4]  # shard: weight
primals_2: f32[3, 4]
all_gather = all_gather(primals_1, 4, '0')  # f32[8, 4]; gather: weight
wait_tensor_2 = wait_tensor(all_gather)  # f32[8, 4]; full: weight
slice_tensor = slice(wait_tensor_2, 0, 4, 8)  # f32[4, 4]
clone = clone(slice_tensor)  # f32[4, 4]; part: weight
t = t(wait_tensor_2)  # f32[4, 8]; recomputed
mm = mm(primals_2, t)  # f32[3, 8]
return (mm, primals_2, clone)
""",
        )
        expect_listing(
            _short(listing(found.after.backward)),
            """\
primals_2: f32[3, 4]
clone: f32[4, 4]  # part: weight
tangents_1: f32[3, 8]
t_1 = t(tangents_1)  # f32[8, 3]
mm_1 = mm(t_1, primals_2)  # f32[8, 4]
t_2 = t(mm_1)  # f32[4, 8]
all_gather_1 = all_gather(clone, 2, '0.ranks_of_2.2-0')  # f32[8, 4]; gather: weight; recomputed
wait_tensor_2 = wait_tensor(all_gather_1)  # f32[8, 4]; full: weight; recomputed
t = t(wait_tensor_2)  # f32[4, 8]; recomputed
t_3 = t(t)  # f32[8, 4]; recomputed
mm_2 = mm(tangents_1, t_3)  # f32[3, 4]
t_4 = t(t_2)  # f32[8, 4]
reduce_scatter_tensor = reduce_scatter_tensor(t_4, 'avg', 4, '0')  # f32[2, 4]; reduce: weight
wait_tensor_1 = wait_tensor(reduce_scatter_tensor)  # f32[2, 4]; shard_grad: weight
return (wait_tensor_1, mm_2)
""",
        )


def _short(text):
    return re.sub(" +#", "  #", text.replace("_into_tensor", "").replace("_default", ""))


def test_the_cost_model_takes_the_network_of_fewer_ranks():
    """Two nodes of two ranks each: forward gathers over the network, backward within a node."""
    target = Target.parse("h100,ranks_per_node=2")

    def gathering_us(gm):
        return sum(
            collective_timing(node, each, target).duration_us
            for node, each in collectives(gm.graph)
            if "gather" in each.op
        )

    model, sums = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3))), []
    for shard in ({}, {"reshard_after_forward": 2}):
        with fake_world(4):
            how = {"shard": shard, "pipeline": SINGLE}
            after = capture_graphs(copy.deepcopy(model), (torch.ones(3, 512),), **how).after
            sums.append((gathering_us(after.forward), gathering_us(after.backward)))
    assert sums[1][0] == sums[0][0]
    assert sums[1][1] < sums[0][1] / 2


def test_labels_name_the_dimension():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        for _ in range(2):  # the group is made once
            zpasses.shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=2)
        labels = [compat.mesh_dimension(name) for name in compat.group_names()]
        assert labels.count("dp_of_2") == 1


def test_a_step_with_tensor_parallelism():
    with fake_world(8, rank=5):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        zpasses.shard(model, mesh=mesh["dp"], reshard_after_forward=2)
        options, logs = {"pipeline": LEAN, "codegen": "eager", "agreement": False}, []
        step = torch.compile(model, backend="zpasses", options=options)
        with observe_graphs(logs.append):
            step(torch.ones(3, 8)).sum().backward()
        (backward,) = (each.graph for each in logs if each.kind == "backward")
        found = collectives(backward)
        ranks = [compat.group_ranks(each.group) for _, each in found if "gather" in each.op]
        assert [5, 7] in ranks  # of tp 1: ranks 1, 3, 5, 7


# --- refusals -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "says"),
    [
        (True, r"True; expected a number of ranks.*zero_stage"),
        (1, "is 1; expected None, or a number of ranks above 1 that divides the 4 ranks"),
        (3, "is 3; expected None"),
        (4, "is 4; expected None.*leave it out"),
        ("2", "is '2'; expected None"),
    ],
)
def test_other_sizes_are_refused(size, says):
    with fake_world(4):
        model = nn.Linear(4, 4)
        with pytest.raises(ShardingError, match=says):
            zpasses.shard(model, mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=size)
        assert not isinstance(model._parameters["weight"], torch.distributed.tensor.DTensor)


# --- ranks ----------------------------------------------------------------------------------------
def _train(rank, size, options, make=Net, width=7):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    zpasses.shard(model, mesh=mesh, reshard_after_forward=size)
    step = torch.compile(model, backend="zpasses", options={"pipeline": LEAN, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, groups = [], set()

    def note(log):
        if log.kind == "backward":
            found = map(collective_of, log.graph.nodes)
            groups.update(len(compat.group_ranks(each.group)) for each in found if each)

    with observe_graphs(note):
        for batch in range(6):
            generator = torch.Generator().manual_seed(10 * batch + rank)
            loss = step(torch.randn(3, width, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
            if batch % options.get("backwards_per_step", 1) == 0:
                optimizer.step()
                optimizer.zero_grad()
    return losses, [param.full_tensor() for param in model.parameters()], groups


KEPT = {"pipeline": KEEPING, "memory_budget": "1GiB", "backwards_per_step": 2}


@pytest.mark.slow(quick="test_simulated_ranks_compute_the_same_step")
@pytest.mark.parametrize(
    ("options", "model", "groups"),
    [
        pytest.param({"backwards_per_step": 2}, (Net, 7), {2, 4}, id="window"),
        pytest.param(KEPT, (EvenNet, 16), {4}, id="kept"),
        pytest.param(
            {"codegen": "inductor"}, (Net, 7), {2, 4}, id="inductor", marks=pytest.mark.inductor
        ),
    ],
)
@on_ranks(4)
def test_training_equals_gathering_from_all_ranks(options, model, groups):
    options = {"codegen": "eager", **options}
    whole, parts = (_train(dist.get_rank(), size, options, *model) for size in (None, 2))
    assert whole[0] == parts[0]
    assert all(map(torch.equal, whole[1], parts[1]))
    assert (whole[2], parts[2]) == ({4}, groups)


def test_removing_leaves_other_graphs_alone():
    with fake_world(4):
        found = capture_graphs(Net(), (torch.ones(3, 7),), pipeline=SINGLE)
        for gm in (found.after.forward, found.after.backward):
            before = [node.name for node in gm.graph.nodes]
            remove_regathers(gm.graph)
            assert [node.name for node in gm.graph.nodes] == before
