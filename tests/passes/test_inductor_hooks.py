"""Tests of passes in Inductor's own hooks, on graphs that zpasses did not capture."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import init_device_mesh

from tests.foreign import simple_fsdp
from zpasses import Level, Pass, Pipeline
from zpasses.graph.queries import collectives
from zpasses.passes import (
    FlattenOnDevice,
    GatherParams,
    ReduceGrads,
    ReshardAfterForward,
    Schedule,
    Sdma,
)
from zpasses.testing import (
    copy_graph,
    fake_world,
    run_on_ranks,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated", "ignore:dynamo_pgo")

X = torch.ones(2, 6)


@dataclass(frozen=True)
class Watch(Pass):
    """Records the collectives of every graph it sees."""

    name: ClassVar[str] = "watch"
    level: ClassVar[Level] = Level.JOINT

    seen: list = field(default_factory=list)

    def rewrite(self, graph):
        self.seen.append([each.op for _, each in collectives(graph)])
        return 0


def partitioned(model, **hooks):
    """Returns the forward and backward graphs that Inductor is about to generate code for. No code
    is generated.
    """
    graphs = []

    def keep(gm, inputs, **kwargs):
        graphs.append(copy_graph(gm))
        gm.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
        gm.recompile()

        def run(args):
            return gm(args)

        run._boxed_call = True
        return run

    def backend(gm, inputs):
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(gm, inputs, inner_compile=keep)

    with config.patch(hooks):
        torch.compile(model, backend=backend, fullgraph=True)(X).sum().backward()
    return graphs


def ops(gm):
    return [each.op for _, each in collectives(gm.graph)]


def saved_bytes(forward):
    returned = forward.graph.output_node().args[0]
    return sum(node.meta["val"].nbytes for node in returned[1:] if node.op != "placeholder")


VOTING = (
    Schedule(),
    Sdma(),
    FlattenOnDevice(tier="plain"),
    FlattenOnDevice(group="0"),
    ReshardAfterForward(),
    Pipeline((ReshardAfterForward(), Schedule())),
)


def _keys():
    return [each.uuid() for each in VOTING], [each.digest() for each in VOTING]


@pytest.mark.processes
def test_passes_that_vote_have_cache_keys_per_process():
    assert all(isinstance(each, CustomGraphPass) for each in VOTING)
    assert [each.uuid() == each.digest() for each in VOTING] == [True] * 6  # nobody else is there
    (keys, digests), (other_keys, other_digests) = run_on_ranks(_keys)
    differ = [mine != other for mine, other in zip(keys, other_keys, strict=True)]
    assert differ == [True, True, False, True, False, True]
    del digests[3], other_digests[3]  # chosen by free memory, which is each process's own matter
    assert digests == other_digests


@pytest.mark.parametrize(
    "hook",
    [None, ReshardAfterForward(), Pipeline((ReshardAfterForward(),)), [ReshardAfterForward()]],
    ids=["nothing", "pass", "pipeline", "list"],
)
def test_reshard_after_forward_in_the_joint_hook_turns_simple_fsdp_into_zero_3(hook):
    hooks = {"joint_custom_post_pass": hook} if hook else {}
    with fake_world(2) as mesh:
        forward, backward = partitioned(simple_fsdp(mesh), **hooks)
    assert ops(forward) == ["all_gather_into_tensor"] * 2
    again = ["all_gather_into_tensor"] if hook else []
    assert sorted(ops(backward)) == [*again, "reduce_scatter_tensor", "reduce_scatter_tensor"]
    assert (saved_bytes(forward) < 6 * 8 * 4) == bool(hook)


@pytest.mark.inductor
def test_dialect_is_lowered_in_the_post_grad_hook_of_a_plain_inductor_compile():
    watch = Watch()

    def fn(shard, x):
        return x @ torch.ops.zpasses.unshard(shard, 4, None, None, "0")

    lower = Pipeline((GatherParams(), ReduceGrads("reduce_scatter"), watch))
    with fake_world(2), config.patch(post_grad_custom_post_pass=lower, force_disable_caches=True):
        shard = torch.zeros(2, 3, requires_grad=True)
        torch.compile(fn, fullgraph=True)(shard, torch.ones(5, 4)).sum().backward()
    assert shard.grad.shape == (2, 3)
    assert watch.seen == [["all_gather_into_tensor"], ["reduce_scatter_tensor"]]


@pytest.mark.inductor
def test_simple_fsdp_through_inductor_computes_the_same_with_the_pass():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = simple_fsdp(
            init_device_mesh("cpu", (1,)), activation=torch.nn.Identity
        )  # no kernel to compile: quick
        model(X).sum().backward()
        expected = [param.grad.clone() for param in model.parameters()]
        model.zero_grad()
        with config.patch(joint_custom_post_pass=ReshardAfterForward(), force_disable_caches=True):
            torch.compile(model, fullgraph=True)(X).sum().backward()
        for param, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, grad)
    finally:
        dist.destroy_process_group()
