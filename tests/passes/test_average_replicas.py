import pytest
import torch
from hypothesis import given

from tests.graphs import expect_listing, few_examples
from zpasses.errors import PassError
from zpasses.graph.dialect import AVERAGE_GRAD, REDUCE_GRAD
from zpasses.graph.queries import calls, collectives
from zpasses.graph.tags import tag_of
from zpasses.passes import AverageReplicas, MergeReads
from zpasses.testing import (
    JointRecipe,
    ParamSpec,
    assert_equal_bits,
    joint_graph,
    random_inputs,
    run_pipeline,
)
from zpasses.testing.strategies import joint_recipes, pipelines
from zpasses.testing.worlds import fake_world

WORLDS = {"world_sizes": [4, 6], "replicas": [2, 3]}


def lowered(*params, replicas=2, world_size=4, pipeline="reduce-grads,average-replicas"):
    """Returns the graph of the last rank after a pipeline."""
    recipe = JointRecipe(tuple(params), world_size, replicas=replicas)
    return recipe.run_pipeline(pipeline)[1][-1]


def operators(gm, name):
    return [node for node, each in collectives(gm.graph) if name in each.op]


def test_gradients_are_averaged_after_they_are_reduced():
    gm = lowered(ParamSpec((3, 2)), ParamSpec((4, 2)))
    expect_listing(
        "\n".join(_reductions(gm)),
        """\
reduce_scatter_tensor p1
wait_tensor p1
all_reduce p1
reduce_scatter_tensor p0
wait_tensor p0
slice_copy p0
wait_tensor p1
all_reduce p0
wait_tensor p0
""",
    )


def test_large_gradients_share_no_all_reduce_over_gloo(monkeypatch):
    params = [ParamSpec(shape) for shape in ((64, 1024), (64, 1024), (4, 2), (6, 2))]
    monkeypatch.setattr("zpasses.compat.is_gloo", lambda group, device=None: True)
    gm = lowered(*params, pipeline="zero2-one-ahead")
    averages = [tag_of(node).params for node in operators(gm, "all_reduce")]
    assert sorted(averages, key=len) == [("p1",), ("p0",), ("p3", "p2")]


def _reductions(gm):
    for node in gm.graph.nodes:
        tag = tag_of(node)
        if tag is not None and tag.role in ("reduce", "reduced", "shard_grad"):
            yield f"{node.target.overloadpacket.__name__} {','.join(tag.params)}"


def test_gradients_of_a_dtype_that_are_ready_together_share_an_all_reduce():
    gm = lowered(ParamSpec((4, 2)), ParamSpec((6,)), pipeline="zero2-one-ahead")
    (started,) = operators(gm, "all_reduce")
    assert len(started.args[0]) == 2
    assert tag_of(started).params == ("p1", "p0")
    params = ParamSpec((4, 2), reduce_dtype=torch.bfloat16), ParamSpec((6,))
    gm = lowered(*params, pipeline="zero2-one-ahead")
    dtypes = [each.dtypes for _, each in collectives(gm.graph) if "all_reduce" in each.op]
    assert sorted(dtypes) == [("bfloat16",), ("float32",)]


def test_a_rank_without_rows_and_one_replica_send_nothing():
    assert not operators(lowered(ParamSpec((1, 2))), "all_reduce")
    with fake_world(1):
        gm = joint_graph([ParamSpec((4, 2), replicate_group="0")])
        graph = run_pipeline(gm, "reduce-grads,average-replicas").graph
    assert [each.op for _, each in collectives(graph.graph)] == ["unshard"]


def test_sums_of_reads_are_averaged_once_and_sums_of_averages_after_both():
    gm = lowered(ParamSpec((4, 2), reads=3), pipeline=MergeReads())
    assert len(calls(gm.graph, AVERAGE_GRAD)) == len(calls(gm.graph, REDUCE_GRAD)) == 1
    gm = lowered(ParamSpec((4,), reads=2), pipeline="average-replicas")
    gm.graph.lint()
    assert len(operators(gm, "all_reduce")) == 2


@few_examples
@given(joint_recipes(max_params=3, **WORLDS), pipelines(lowered=False))
def test_pipelines_keep_the_bits_of_drawn_graphs(recipe, pipeline):
    before, after = recipe.run_pipeline(f"{pipeline},average-replicas".lstrip(","))
    # With larger values, sums of all reads and ranks are not exact in bfloat16.
    assert_equal_bits(before, after, random_inputs(before, bound=1), recipe.groups())
    assert not any(calls(gm.graph, AVERAGE_GRAD) for gm in after)


@pytest.mark.parametrize("mode", ["coalesced", "flat"])
def test_the_result_owns_memory_of_its_size_whatever_reduced_it(mode):
    params = ParamSpec((3, 2)), ParamSpec((5, 2))
    gm = lowered(
        *params, pipeline=f"reduce-grads,schedule{{plan=single,mode={mode}}},average-replicas"
    )
    results = [node for node in gm.graph.output_node().args[0][2:] if node is not None]
    assert results
    for node in results:
        value = node.meta["val"]
        assert value.untyped_storage().nbytes() == value.nbytes


def test_a_pass_that_drops_an_average_fails():
    recipe = JointRecipe((ParamSpec((4, 2)),), 4, replicas=2)

    class Drop(AverageReplicas):
        def rewrite(self, graph):
            for node in calls(graph, AVERAGE_GRAD):
                node.replace_all_uses_with(node.all_input_nodes[0])
                graph.erase_node(node)
            return 1

    graph, *_ = recipe.graphs()
    with recipe.world(0), pytest.raises(PassError):
        run_pipeline(graph, Drop(), verify="simulate")


def test_the_note_of_schedule_says_that_averages_take_no_time_there(caplog):
    for replicas in (1, 2):
        caplog.clear()
        with caplog.at_level("INFO", logger="zpasses"):
            pipeline = "reduce-grads,schedule,average-replicas"
            lowered(*[ParamSpec((64, 64))] * 3, replicas=replicas, pipeline=pipeline)
        notes = [each for each in caplog.messages if "in launches" in each]
        said = {"without the averages over replicas" in each for each in notes}
        assert said == {replicas == 2}
