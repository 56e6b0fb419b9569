import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from tests.graphs import Param, drawn_examples, few_examples, joint, rewritten
from tests.streams import GraphBuilder
from zpasses import compat
from zpasses.cost.time.step_time import step_time
from zpasses.cost.time.target import Target, use_target
from zpasses.graph.queries import collectives
from zpasses.graph.tags import tag_of, tagged
from zpasses.passes import GatherParams, ReduceGrads, Schedule, Sdma
from zpasses.sdma.ops import SDMA_ALL_GATHER_OUT
from zpasses.testing import (
    assert_equal_bits,
    assert_step_equals_reference,
    capture_ranks,
    fake_world,
    listing,
)
from zpasses.testing.strategies import param_lists

pytestmark = pytest.mark.usefixtures("mi300x")

ALL = Sdma("all")
UNMERGED = Schedule("one-ahead", cap_mb=0, copy_engines="off")
LOWER = (GatherParams(), ReduceGrads("reduce_scatter"))
fewer = settings(few_examples, max_examples=drawn_examples(4))
PARAMS = [Param((4, 2)), Param((6, 2)), Param((8, 2))]


def replicated(model, mesh):
    ranks = mesh.size()
    whole = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    return zpasses.shard(model, mesh=whole)


def lowered(*params, world_size=2, rank=0, passes=(), schedule=UNMERGED):
    with fake_world(world_size, rank):
        return rewritten(joint(params, rank, world_size), *LOWER, schedule, *passes)


def ops(gm):
    return [each.op for _, each in collectives(gm.graph)]


def decisions(gm, each, world_size=2, target="mi300x", rank=0):
    with fake_world(world_size, rank), use_target(Target.parse(target)):
        return each.decide(gm.graph)


# --- replaced gathers ----------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["single", "coalesced", "flat"])
def test_single_coalesced_and_flat_gathers_are_swapped(mode):
    options = {"memory_budget": "1GiB", "copy_engines": "off"}
    merged = UNMERGED if mode == "single" else Schedule("one-ahead", mode=mode, **options)
    gm = lowered(*PARAMS, schedule=merged, passes=(ALL,))
    assert "= zpasses.sdma_all_gather" in listing(gm)
    name = "sdma_all_gather_coalesced" if mode == "coalesced" else "sdma_all_gather"
    assert [op for op in ops(gm) if "gather" in op] == [name] * (3 if mode == "single" else 1)
    assert not any("sdma" in op for op in ops(gm) if "reduce" in op)


def test_gathers_into_given_memory_are_swapped():
    """An all-gather as Inductor's bucketing makes it: this rank's part lies in the output."""
    aten, functional, build = torch.ops.aten, torch.ops._c10d_functional, GraphBuilder("mine")
    (mine,) = build.inputs
    with fake_world(2):
        out = build.call(aten.new_empty.default, mine, [8, 2])
        filled = build.call(aten.copy_.default, build.call(aten.slice.Tensor, out, 0, 0, 4), mine)
        gather = functional.all_gather_into_tensor_out.default
        started = build.call(gather, filled, 2, "0", out=out)
        gm = build.returns(build.call(functional.wait_tensor.default, started))
        after = rewritten(gm, ALL)
    (replaced,) = after.graph.find_nodes(op="call_function", target=SDMA_ALL_GATHER_OUT)
    assert (list(replaced.args[1:]), list(replaced.kwargs)) == ([2, "0"], ["out", "route"])
    assert replaced.kwargs["route"] == "mori"
    # Rank 1 writes its part to rank 0's place and gathers it from there. It only matters that both
    # graphs do the same.
    values = [[torch.full((4, 2), float(rank))] for rank in range(2)]
    assert_equal_bits([gm] * 2, [after] * 2, values)


@pytest.mark.parametrize(
    ("shard", "swapped"),
    [
        pytest.param({}, [False, False], marks=pytest.mark.slow(quick="the other cases")),
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
        "average-replicas,sdma{gathers=all}"
    )
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))
    options = {"world_size": 4, "shard": shard, "pipeline": pipeline}
    captures = capture_ranks(model, (torch.zeros(2, 8),), **options)
    after = captures[0].after
    found = [[op for op in ops(gm) if "gather" in op] for gm in (after.forward, after.backward)]
    for each, expected in zip(found, swapped, strict=True):
        assert {op.startswith("sdma") for op in each} == {expected}
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
        (ALL, "h100", 2, "replaced", "us by nccl_zero, "),
        (ALL, "cpu", 2, "route missing", "cpu has no copy-engine route"),
        (ALL, "mi300x,ranks_per_node=1", 2, "group", "ranks 0 to 1 are not on one node of 1"),
        (ALL, "mi300x", 16, "group", "ranks 0 to 15 are not on one node of 8"),
        (ALL, "mi300x,ranks_per_node=16", 9, "group", "9 ranks; a route takes at most 8"),
        (Sdma(), "mi300x", 2, "no gain", "us by mori, would lose "),
        (Sdma(), "mi300x,kernel_us=150", 2, "no gain", "us by mori, would lose "),
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
    (decision,) = decisions(gm, ALL)
    assert str(decision) == "dtype: torch.qint8 is not plain bytes"


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
    assert [each.outcome for each in quick] == ["no gain"] * 2
    assert [each.outcome for each in slow] == ["no gain", "replaced"]
    assert slow[1].reason.startswith("32 MiB per rank in ")
    assert " us by mori, gains " in slow[1].reason


@fewer
@given(param_lists(max_size=6), st.sampled_from([20, 100, 500]), st.sampled_from([0.0, 4.0]))
def test_swaps_never_make_the_predicted_step_longer(params, kernel_us, launch_us):
    """Collectives share the links, so a gain for one gather can be a loss for another."""
    target = Target.parse(f"mi300x,kernel_us={kernel_us},hop_us=0.5,launch_us={launch_us or 0.5}")
    with fake_world(2), use_target(target):
        before = rewritten(joint(params, 0, 2), *LOWER, UNMERGED)
        after = rewritten(before, Sdma())
        plain, swapped = (step_time([gm.graph], target).total_us for gm in (before, after))
        assert swapped <= plain + 1e-6


def decide(graph, target):
    with use_target(Target.parse(target)):
        return Sdma().decide(graph)


def test_decisions_are_in_the_tags_and_are_counted(caplog):
    with caplog.at_level(logging.INFO, logger="zpasses"):
        gm = lowered(*PARAMS, passes=(ALL,))
    notes = [tag_of(node).note for node, each in collectives(gm.graph) if "gather" in each.op]
    outcomes = [note.partition(":")[0] for note in notes]
    assert outcomes == ["sdma replaced"] * 3
    assert "sdma: 3 gathers: 3 replaced" in caplog.messages


def voted(monkeypatch, votes, passes=(ALL,)):
    """Returns the gathers after a vote, of which `votes(own)` are the answers, and their notes."""
    gm = lowered(*PARAMS)
    monkeypatch.setattr(
        "zpasses.ranks.agree.exchange",
        lambda _, __, mine, *_a, merge, **_k: merge(votes(mine)),
    )
    with fake_world(2):
        gm = rewritten(gm, *passes)
    gathers = [op for op in ops(gm) if "gather" in op]
    notes = [tag.note for _, tag in tagged(gm.graph, "gather")]
    return [op == "sdma_all_gather" for op in gathers], notes


def test_gather_that_one_rank_would_not_swap_or_otherwise_is_swapped_by_no_rank(monkeypatch):
    others = ["mori", "", "nccl_zero"]
    swapped, notes = voted(monkeypatch, lambda mine: [mine, [mine[0], others]])
    assert swapped == [True, False, False]
    said = "sdma other ranks: not all ranks would give it the same route"
    assert said in notes[1]
    assert said in notes[2]


def test_ranks_with_different_gathers_swap_nothing(monkeypatch):
    assert not any(voted(monkeypatch, lambda mine: [mine, ["another", [True]]])[0])


def test_recompiled_gathers_get_the_earlier_decision(monkeypatch):
    """A rank that recompiles for other shapes must match the graphs that the other ranks keep."""
    earlier = ["mori", "", ""]  # none gains now
    swapped, notes = voted(monkeypatch, lambda mine: [[mine[0], earlier]] * 2, (Sdma(),))
    assert swapped == [True, False, False]
    said = "sdma replaced: as in an earlier compile of these gathers; this compile: no gain: "
    assert notes[0].startswith(said)


def test_tag_names_the_route_if_it_is_already_chosen(monkeypatch):
    from zpasses.sdma import RouteChoice

    monkeypatch.setattr(
        "zpasses.sdma.engine_gathers.route_choice",
        lambda group, route: RouteChoice(group, "cuda", "c10d", f"{route}: rank 3: no"),
    )
    gm = lowered(Param((4, 2)), passes=(ALL,))
    ((_, tag),) = tagged(gm.graph, "gather")
    assert tag.note.endswith("; runs by c10d because mori: rank 3: no")


# --- agreement and options ----------------------------------------------------------------------
