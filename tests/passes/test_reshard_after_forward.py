import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.cases import some_quick
from tests.graphs import (
    Param,
    few_examples,
    joint,
    rewritten,
    saved_for_backward,
)
from zpasses import compat
from zpasses.graph.tags import tagged
from zpasses.passes import GatherParams, MergeReads, ReduceGrads, ReshardAfterForward
from zpasses.pipeline.pipeline import Pipeline
from zpasses.testing import (
    assert_equal_bits,
    assert_step_equals_reference,
    capture_graphs,
    capture_ranks,
    fake_world,
    random_inputs,
    trace_joint,
)
from zpasses.testing.strategies import param_lists

X = torch.zeros(2, 6)
LOWER = (GatherParams(), ReduceGrads("reduce_scatter"))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 5, bias=False), nn.Linear(5, 6, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Autocast(Mlp):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class CheckpointedAutocast(Checkpointed):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Derived(nn.Module):
    """Computes its weights from parameters: views, casts, a norm, a product of two parameters."""

    def __init__(self):
        super().__init__()
        self.direction, self.scale = nn.Parameter(torch.ones(6, 6)), nn.Parameter(torch.ones(6, 1))

    def forward(self, x):
        weight = self.scale * self.direction / self.direction.norm(dim=1, keepdim=True)
        return (x @ weight.t().to(torch.bfloat16).to(torch.float32)).sin() @ self.direction


MODELS = [Mlp, Checkpointed, Autocast, CheckpointedAutocast, Derived]


REGATHER = ReshardAfterForward(keep="nothing")
REGATHERS = str(Pipeline.parse("zero3")).replace(
    "reshard-after-forward", "reshard-after-forward{keep=nothing}"
)
"""Stage 3 without parameters that stay until backward."""


def step(model, pipeline):
    return capture_graphs(model, (X,), world_size=2, pipeline=pipeline)


def saved_from_parameters_only(capture):
    """Returns the values saved for backward that were computed only from shards. The shards
    themselves do not count.
    """
    derived = {node for node, _ in tagged(capture.after.forward.graph, "shard")}
    for node in capture.after.forward.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and derived.issuperset(inputs):
            derived.add(node)
    return [
        node.name
        for node in saved_for_backward(capture)
        if isinstance(node, torch.fx.Node) and node.op != "placeholder" and node in derived
    ]


@pytest.mark.parametrize("model", some_quick(MODELS, [CheckpointedAutocast, Derived]))
def test_no_value_computed_only_from_parameters_is_saved_for_backward(model):
    assert saved_from_parameters_only(step(model(), REGATHERS)) == []


def test_without_the_pass_full_parameters_are_saved():
    assert saved_from_parameters_only(step(Derived(), Pipeline(LOWER)))


def test_no_cast_parameter_is_saved_with_mixed_precision():
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    x = (X.bfloat16(),)
    captured = capture_graphs(Checkpointed(), x, world_size=2, pipeline=REGATHERS, shard=dtypes)
    assert saved_from_parameters_only(captured) == []


def test_backward_gathers_only_what_it_reads():
    captured = step(Mlp(), Pipeline((*LOWER, REGATHER)))
    forward = [tag.params for _, tag in tagged(captured.after.forward.graph, "gather")]
    backward = [tag.params for _, tag in tagged(captured.after.backward.graph, "gather")]
    assert forward == [("up.weight",), ("down.weight",)]
    assert backward == [("down.weight",)]


def test_checkpointed_region_gathers_each_parameter_once_in_backward():
    captured = step(Checkpointed(), Pipeline((MergeReads(), *LOWER, REGATHER)))
    gathered = [tag.params[0] for _, tag in tagged(captured.after.backward.graph, "gather")]
    assert len(gathered) == len(set(gathered)), gathered


def test_every_node_of_a_gather_and_its_views_is_marked(listing_snapshot):
    with fake_world(3, 2):
        gm = joint([Param((7, 2), param_dtype=torch.bfloat16)], 2, 3)
        gm = rewritten(gm, GatherParams(), REGATHER)
    listing_snapshot(gm)


@pytest.mark.parametrize("model", some_quick([Checkpointed, Autocast], [Checkpointed]))
def test_special_models_equal_the_dialect_on_all_ranks(model):
    assert_step_equals_reference(
        capture_ranks(model(), (X,), world_size=3, pipeline=Pipeline((*LOWER, REGATHER)))
    )


def test_random_values_are_not_recomputed():
    def noisy(shard, x):
        full = torch.ops.zpasses.unshard(shard, 4, None, None, "0")
        return torch.bernoulli(full.sigmoid()) * x * full

    inputs = [torch.zeros(2, 2, requires_grad=True), torch.zeros(4, 2)]
    with fake_world(2):
        gm = rewritten(trace_joint(noisy, inputs, {0: "w"}), GatherParams(), REGATHER)
    (drawn,) = (node for node in gm.graph.nodes if "bernoulli" in node.name)
    assert not compat.is_marked_recompute(drawn)
    assert compat.is_marked_recompute(drawn.args[0])


def test_inference_graph_runs_unchanged():
    captures = capture_ranks(Mlp(), (X,), world_size=2, pipeline="zero3", train=False)
    before = [each.before.inference for each in captures]
    assert_equal_bits(before, [each.after.inference for each in captures], random_inputs(before))


@few_examples
@given(param_lists(frozen=False, max_size=3), st.sampled_from([2, 3]))
def test_no_full_parameter_of_random_graphs_is_saved(params, world_size):
    with fake_world(world_size):
        gm = rewritten(joint(params, 0, world_size), *LOWER, REGATHER)
        inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
        primals = [
            value
            for value, node in zip(inputs, gm.graph.nodes, strict=False)
            if "tangents" not in node.name
        ]
        outputs = len(gm.graph.output_node().args[0]) - len(primals)
        forward, _ = compat.partition(
            gm, inputs, num_fwd_outputs=outputs, static_lifetime_input_indices=[]
        )
    full = {node for node, _ in tagged(forward.graph, "full", "gathered", "gather", "gather_input")}
    assert not full & set(forward.graph.output_node().args[0][outputs:])
