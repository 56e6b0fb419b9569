import pytest
import torch
import torch.distributed._functional_collectives as funcol

from tests.foreign import already_sharded, simple_fsdp
from tests.graphs import Param, joint, rewritten
from zpasses.graph.patterns import tag_foreign_gathers
from zpasses.graph.tags import tagged
from zpasses.passes import GatherParams
from zpasses.testing import capture_graphs, fake_world, trace_joint

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated")

X = torch.zeros(2, 6)
F = torch.ops._c10d_functional
gather, wait = F.all_gather_into_tensor, F.wait_tensor


def captured(dtype=None):
    with fake_world(2) as mesh:
        return capture_graphs(
            simple_fsdp(mesh, dtype), (X if dtype is None else X.to(dtype),), shard=already_sharded
        ).before.joint


def roles(gm):
    return [(tag.role, tag.params, tag.nbytes, tag.origin) for _, tag in tagged(gm.graph)]


def test_gathers_of_a_parametrization_are_recognised_once():
    gm = captured()
    assert tag_foreign_gathers(gm.graph, "test") == 2
    assert tag_foreign_gathers(gm.graph, "second") == 0
    assert roles(gm) == [
        ("gather", ("primals_1",), 4 * 6 * 4, "test"),
        ("full", ("primals_1",), 0, "test"),
        ("gather", ("primals_3",), 3 * 8 * 4, "test"),
        ("full", ("primals_3",), 0, "test"),
    ]


def test_casts_before_the_gather_belong_to_it():
    gm = captured(torch.bfloat16)
    assert tag_foreign_gathers(gm.graph, "test") == 2
    assert [role for role, *_ in roles(gm)] == ["gather_input", "gather", "full"] * 2


def test_gathers_that_zpasses_inserted_are_unchanged():
    with fake_world(3, 2):
        gm = rewritten(joint([Param((7, 2))], 2, 3), GatherParams())
    before = roles(gm)
    assert tag_foreign_gathers(gm.graph, "test") == 0
    assert roles(gm) == before


@pytest.mark.parametrize(
    "fn",
    [
        lambda shard, x: wait(gather(shard * 2, 2, "0")) * x,
        lambda shard, x: wait(gather(shard + shard.sum(), 2, "0")) * x,
        lambda shard, x: wait(F.all_reduce(x, "sum", "0")) * shard.sum(),
    ],
    ids=["computed", "two inputs", "another collective"],
)
def test_other_collectives_are_not_tagged(fn):
    with fake_world(2):
        gm = trace_joint(
            lambda shard, x: fn(shard.detach(), x) * shard.sum(),
            [torch.zeros(2, 2, requires_grad=True), torch.zeros(4, 2)],
        )
    before = roles(gm)
    assert tag_foreign_gathers(gm.graph, "test") == 0
    assert roles(gm) == before


def test_gather_of_an_incoming_gradient_is_not_tagged():
    def scatter(value):
        return funcol.reduce_scatter_tensor_autograd(value, "sum", 0, torch.distributed.group.WORLD)

    with fake_world(2):
        gm = trace_joint(scatter, [torch.zeros(4, 2, requires_grad=True)])
    assert any(node.target is gather.default for node in gm.graph.nodes)
    assert tag_foreign_gathers(gm.graph, "test") == 0
