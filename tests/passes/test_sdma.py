import logging

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from tests.foreign import already_sharded, simple_fsdp
from tests.graphs import Param, drawn_examples, few_examples, joint, rewritten
from zpasses import OptionError, Pipeline, compat
from zpasses.cost.time.step_time import step_time
from zpasses.cost.time.target import Target, use_target
from zpasses.graph.queries import collectives
from zpasses.graph.tags import tag_of, tagged
from zpasses.passes import (
    ZERO3_ONE_AHEAD,
    ZERO3_SDMA,
    Bucket,
    GatherParams,
    Overlap,
    ReduceGrads,
    Sdma,
)
from zpasses.sdma.ops import SDMA_ALL_GATHER_OUT
from zpasses.testing import (
    assert_deterministic,
    assert_equal_bits,
    assert_step_equals_reference,
    capture_graphs,
    capture_ranks,
    fake_world,
    listing,
    random_inputs,
)
from zpasses.testing.strategies import param_lists

ALL = Sdma(min_mb=0.0, min_hidden=0.0)
LOWER = (GatherParams(), ReduceGrads("reduce_scatter"), Overlap())
fewer = settings(few_examples, max_examples=drawn_examples(4))
PARAMS = [Param((4, 2)), Param((6, 2)), Param((8, 2))]


@pytest.fixture(autouse=True)
def mi300x(monkeypatch):
    monkeypatch.setenv("ZPASSES_TARGET", "mi300x")


def replicated(model, mesh):
    ranks = mesh.size()
    whole = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    return zpasses.shard(model, mesh=whole)


def lowered(*params, world_size=2, rank=0, passes=()):
    with fake_world(world_size, rank):
        return rewritten(joint(params, rank, world_size), *LOWER, *passes)


def ops(gm):
    return [each.op for _, each in collectives(gm.graph)]


def decisions(gm, each, world_size=2, target="mi300x", rank=0):
    with fake_world(world_size, rank), use_target(Target.parse(target)):
        return each.decide(gm.graph)


# --- replaced gathers ----------------------------------------------------------------------------
def test_graph_after_the_pass():
    gm = lowered(Param((4, 2)), Param((6, 2), frozen=True), passes=(ALL,))
    lines = [
        line.partition(" # ")[0].rstrip() for line in listing(gm).splitlines() if "gather" in line
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
all_gather_into_tensor_default = zpasses.sdma_all_gather(primals_1, 2, '0')
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)
all_gather_into_tensor_default_1 = zpasses.sdma_all_gather(primals_3, 2, '0')
wait_tensor_default_1 = wait_tensor(all_gather_into_tensor_default_1)""",
    )


@pytest.mark.parametrize("mode", ["single", "coalesced", "flat"])
def test_single_coalesced_and_flat_gathers_are_swapped(mode):
    bucket = () if mode == "single" else (Bucket(cap_mb=1.0, mode=mode, memory_budget="1GiB"),)
    gm = lowered(*PARAMS, passes=(*bucket, ALL))
    name = "sdma_all_gather_coalesced" if mode == "coalesced" else "sdma_all_gather"
    assert [op for op in ops(gm) if "gather" in op] == [name] * (3 if mode == "single" else 1)
    assert not any("sdma" in op for op in ops(gm) if "reduce" in op)


def test_gathers_into_given_memory_are_swapped():
    """An all-gather as Inductor's bucketing makes it: this rank's part lies in the output."""
    graph = torch.fx.Graph()
    functional = torch.ops._c10d_functional
    with fake_world(2), torch._subclasses.FakeTensorMode():
        mine = graph.placeholder("mine")
        out = graph.call_function(torch.ops.aten.new_empty.default, (mine, [8, 2]))
        part = graph.call_function(torch.ops.aten.slice.Tensor, (out, 0, 0, 4))
        filled = graph.call_function(torch.ops.aten.copy_.default, (part, mine))
        gather = graph.call_function(
            functional.all_gather_into_tensor_out.default, (filled, 2, "0"), {"out": out}
        )
        done = graph.call_function(functional.wait_tensor.default, (gather,))
        graph.output((done,))
        mine.meta["val"] = torch.empty(4, 2)
        out.meta["val"] = gather.meta["val"] = done.meta["val"] = torch.empty(8, 2)
        part.meta["val"] = filled.meta["val"] = out.meta["val"][:4]
        gm = torch.fx.GraphModule({}, graph)
        after = rewritten(gm, ALL)
    (replaced,) = after.graph.find_nodes(op="call_function", target=SDMA_ALL_GATHER_OUT)
    assert (list(replaced.args[1:]), list(replaced.kwargs)) == ([2, "0"], ["out"])
    assert_equal_bits_of_out(gm, after)


def assert_equal_bits_of_out(before, after):
    # Rank 1 writes its part to rank 0's place and gathers it from there. It only matters that both
    # graphs do the same.
    assert_equal_bits(
        [before] * 2, [after] * 2, [[torch.full((4, 2), float(rank))] for rank in range(2)]
    )


@fewer
@given(
    param_lists(max_size=4), st.sampled_from([2, 3]), st.sampled_from(["auto", "coalesced", "flat"])
)
def test_random_graphs_stay_equal(params, world_size, mode):
    before, after = [], []
    for rank in range(world_size):
        with fake_world(world_size, rank):
            before.append(joint(params, rank, world_size))
            after.append(
                rewritten(before[-1], *LOWER, Bucket(mode=mode, memory_budget="1GiB"), ALL)
            )
            assert all(op.startswith("sdma") for op in ops(after[-1]) if "gather" in op)
    assert_equal_bits(before, after, random_inputs(before))


def test_step_of_a_model_equals_the_dialect():
    pipeline = "merge-reads,gather-params,reduce-grads,reshard-after-forward{keep=nothing},bucket{mode=coalesced},overlap,sdma{min_mb=0,min_hidden=0}"  # noqa: E501
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3)))
    captures = capture_ranks(model, (torch.zeros(2, 5),), world_size=3, pipeline=pipeline)
    assert [record.changes > 0 for record in captures[0].records if record.name == "sdma"] == [
        True,
        True,
    ]
    assert_step_equals_reference(captures)


@pytest.mark.parametrize(
    ("shard", "swapped"),
    [
        ({}, [False, False]),
        ({"reshard_after_forward": 2}, [False, True]),
        (replicated, [True, True]),
    ],
    ids=["all ranks", "backward from a node", "replicas of nodes"],
)
def test_gathers_within_a_node_are_swapped(monkeypatch, shard, swapped):
    """Four ranks on two nodes, after passes of stage 3; a step equals that of the dialect."""
    monkeypatch.setenv("ZPASSES_TARGET", "mi300x,ranks_per_node=2")
    pipeline = (
        "merge-reads,gather-params,reduce-grads,reshard-after-forward{keep=nothing},"
        "average-replicas,sdma{min_mb=0,min_hidden=0}"
    )
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    captures = capture_ranks(
        model, (torch.zeros(2, 8),), world_size=4, shard=shard, pipeline=pipeline
    )
    after = captures[0].after
    found = [[op for op in ops(gm) if "gather" in op] for gm in (after.forward, after.backward)]
    assert [{op.startswith("sdma") for op in each} for each in found] == [
        {each} for each in swapped
    ]
    assert_step_equals_reference(captures)


def test_gathers_of_other_libraries_are_swapped():
    captures = []
    for rank in range(2):
        with fake_world(2, rank) as mesh:
            captures.append(
                capture_graphs(
                    simple_fsdp(mesh),
                    (torch.ones(2, 6),),
                    shard=already_sharded,
                    pipeline=Pipeline((ALL,)),
                )
            )
    assert ops(captures[0].after.forward) == ["sdma_all_gather"] * 2
    assert_step_equals_reference(captures)


def gathering(fn, ranks=2):
    """Returns a graph with a gather of the result of `fn`."""

    def layer(x):
        started = torch.ops._c10d_functional.all_gather_into_tensor(fn(x), ranks, "0")
        return torch.ops._c10d_functional.wait_tensor(started) + 1

    return compat.trace_aten(layer, [torch.ones(2, 3)])


def test_gathers_of_activations_are_swapped_and_named():
    """Gathers as tensor parallelism makes them: their inputs are computed values."""
    with fake_world(2):
        gm = rewritten(gathering(lambda x: x * 2), ALL)
        assert ops(gm) == ["sdma_all_gather"]
        ((_, tag),) = tagged(gm.graph, "gather")
    assert (tag.params, tag.nbytes, tag.origin) == ((), 24, "sdma")
    assert tag.note.startswith("sdma replaced: ")


# --- gathers that stay --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("each", "target", "world_size", "outcome", "reason"),
    [
        (ALL, "h100", 2, "replaced", "by symm_mem, overlapping"),
        (ALL, "cpu", 2, "route missing", "cpu has no copy-engine route"),
        (ALL, "mi300x,ranks_per_node=1", 2, "group", "ranks 0 to 1 are not on one node of 1"),
        (ALL, "mi300x", 16, "group", "ranks 0 to 15 are not on one node of 8"),
        (ALL, "mi300x,ranks_per_node=16", 9, "group", "9 ranks; a route takes at most 8"),
        (Sdma(), "mi300x", 2, "too small", "of 16 MiB per rank"),
        (Sdma(min_mb=0.0), "mi300x", 2, "too little overlap", "overlapping 5 us of compute"),
        (
            Sdma(min_mb=0.0),
            "mi300x,kernel_us=150",
            2,
            "too little overlap",
            "overlapping 150 us of compute, would lose ",
        ),
    ],
)
def test_every_gather_gets_a_decision_with_its_reason(each, target, world_size, outcome, reason):
    first, second = decisions(lowered(*PARAMS[:2], world_size=world_size), each, world_size, target)
    assert first.outcome == second.outcome == outcome
    assert reason in second.reason, second.reason


def test_one_rank_has_nothing_to_gather():
    with fake_world(1):
        (decision,) = ALL.decide(gathering(lambda x: x * 2, ranks=1).graph)
    assert str(decision) == "group: one rank has nothing to gather"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_gathers_stay():
    gm = lowered(Param((4, 2)))
    (node,) = [node for node, each in collectives(gm.graph) if "gather" in each.op]
    node.args[0].meta["val"] = torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.qint8)
    assert [(each.outcome, each.reason) for each in decisions(gm, ALL)] == [
        ("dtype", "torch.qint8 is not plain bytes")
    ]


def test_a_gather_that_pays_is_swapped_and_one_that_cannot_hide_is_not():
    """Returns a graph with two gathers of 32 MiB per rank, 0.1 ms each. The first is awaited at
    once. The second overlaps with a product of 2 ms, or with almost no compute.
    """
    functional = torch.ops._c10d_functional

    def fn(a, b, x):
        first = functional.wait_tensor(functional.all_gather_into_tensor(a, 2, "0"))
        second = functional.all_gather_into_tensor(b, 2, "0")
        hidden = x @ x
        return first, functional.wait_tensor(second), hidden

    mode = compat.FakeTensorMode()
    with fake_world(2):
        with mode:
            inputs = [torch.empty(8 << 20), torch.empty(8 << 20), torch.empty(1024, 1024)]
        graph = compat.trace_aten(fn, inputs).graph
        quick, slow = decide(graph, "mi300x"), decide(graph, "mi300x,tflops=1")
    assert [each.outcome for each in quick] == ["too little overlap"] * 2
    assert [each.outcome for each in slow] == ["too little overlap", "replaced"]
    assert slow[1].gather_us < slow[1].compute_us
    assert slow[1].gain_us > 0
    assert slow[1].route in ("mori", "symm_mem")
    assert "32 MiB per rank in " in slow[1].reason


@fewer
@given(param_lists(max_size=6), st.sampled_from([20, 100, 500]), st.sampled_from([0.0, 4.0]))
def test_swaps_never_make_the_predicted_step_longer(params, kernel_us, launch_us):
    """Collectives share the links, so a gain for one gather can be a loss for another."""
    target = Target.parse(f"mi300x,kernel_us={kernel_us},hop_us=0.5,launch_us={launch_us or 0.5}")
    with fake_world(2), use_target(target):
        before = rewritten(joint(params, 0, 2), *LOWER)
        after = rewritten(before, Sdma(min_mb=0.0, min_hidden=0.01))
        assert (
            step_time([after.graph], target).total_us
            <= step_time([before.graph], target).total_us + 1e-6
        )


def decide(graph, target):
    with use_target(Target.parse(target)):
        return Sdma().decide(graph)


def test_decisions_are_in_the_tags_and_are_counted(caplog):
    with caplog.at_level(logging.INFO, logger="zpasses"):
        gm = lowered(
            *PARAMS, passes=(Sdma(min_mb=2e-5, min_hidden=0.0),)
        )  # 21 bytes: the first has 16, the others 24 and 32
    notes = [tag_of(node).note for node, each in collectives(gm.graph) if "gather" in each.op]
    assert [note.partition(":")[0] for note in notes] == [
        "sdma too small",
        "sdma replaced",
        "sdma replaced",
    ]
    assert "sdma: 3 gathers: 2 replaced, 1 too small" in caplog.messages


def test_gather_that_one_rank_would_not_swap_is_swapped_by_no_rank(monkeypatch):
    def others_refuse_the_second(group, question, mine, *_, **__):
        return [mine, [mine[0], [True, False, True]]]

    monkeypatch.setattr("zpasses.ranks.agree.exchange", others_refuse_the_second)
    gm = lowered(*PARAMS, passes=(ALL,))
    assert [op for op in ops(gm) if "gather" in op] == [
        "sdma_all_gather",
        "all_gather_into_tensor",
        "sdma_all_gather",
    ]
    assert any(
        "sdma other ranks: not all ranks would replace it" in tag.note
        for _, tag in tagged(gm.graph, "gather")
    )


def test_ranks_with_different_gathers_swap_nothing(monkeypatch):
    monkeypatch.setattr(
        "zpasses.ranks.agree.exchange",
        lambda group, question, mine, *_, **__: [mine, ["another", [True]]],
    )
    assert not any("sdma" in op for op in ops(lowered(*PARAMS, passes=(ALL,))))


def test_recompiled_gathers_get_the_earlier_decision(monkeypatch):
    """A rank that recompiles for other shapes must match the graphs that the other ranks keep."""
    monkeypatch.setattr(
        "zpasses.ranks.agree.exchange",
        lambda group, question, mine, *_, **__: [[mine[0], [True, False]]] * 2,
    )
    gm = lowered(*PARAMS[:2], passes=(Sdma(),))  # too small now
    assert [op for op in ops(gm) if "gather" in op] == ["sdma_all_gather", "all_gather_into_tensor"]
    notes = [tag.note for _, tag in tagged(gm.graph, "gather")]
    assert notes[0].startswith(
        "sdma replaced: as in an earlier compile of these gathers; this compile: too small: "
    )


def test_tag_names_the_route_if_it_is_already_chosen(monkeypatch):
    from zpasses.sdma import RouteChoice

    monkeypatch.setattr(
        "zpasses.passes.sdma.route_choice",
        lambda group: RouteChoice(group, "cuda", "c10d", "mori: rank 3: no"),
    )
    gm = lowered(Param((4, 2)), passes=(ALL,))
    ((_, tag),) = tagged(gm.graph, "gather")
    assert tag.note.endswith("; runs by c10d because mori: rank 3: no")


# --- agreement and options ----------------------------------------------------------------------
def test_swapping_twice_is_the_same_as_once_and_is_deterministic():
    once = lowered(*PARAMS, passes=(ALL,))
    with fake_world(2):
        assert ALL.rewrite(rewritten(once).graph) == 0
        assert_deterministic(ALL, lowered_again())


def lowered_again():
    return rewritten(joint(PARAMS, 0, 2), *LOWER)


def test_stage_3_for_copy_engines_ends_with_the_swap():
    assert str(ZERO3_SDMA.passes[-1]) == "sdma"
    assert [each.name for each in ZERO3_SDMA.passes[:-1]] == [
        each.name for each in ZERO3_ONE_AHEAD.passes
    ]
    assert Pipeline.parse("zero3-sdma") == ZERO3_SDMA


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sdma{min_mb=-1}", r"option 'min_mb': got -1.0; expected MiB >= 0"),
        (
            "sdma{min_hidden=-0.1}",
            r"option 'min_hidden': got -0.1; expected a fraction of a gather's time, >= 0",
        ),
        ("sdma{min_hidden=yes}", r"option 'min_hidden': got 'yes' \(str\); expected float"),
    ],
)
def test_wrong_options_say_what_is_expected(text, message):
    with pytest.raises(OptionError, match=message):
        Pipeline.parse(text)
