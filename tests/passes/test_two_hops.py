"""`reduce-grads{encode=...,hops=...}` over several nodes: graphs, choices and values."""

import contextlib
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from tests.cases import some_quick
from tests.graphs import Param, expect_listing, few_examples
from tests.on_ranks import on_ranks
from zpasses import AgreementError, OptionError, Pipeline, compat
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.time.roofline import ring_collective_us
from zpasses.cost.time.step_time import collective_timing, step_time
from zpasses.cost.time.target import Target, use_target
from zpasses.graph.dialect import AVERAGE_GRAD
from zpasses.graph.encoding import ENCODE as ENCODE_OPERATOR
from zpasses.graph.encoding import Encoding, decode, encode
from zpasses.graph.error_feedback import residual_bytes, residuals_of
from zpasses.graph.queries import calls, collective_of, collectives
from zpasses.graph.tags import Reduction, tagged
from zpasses.passes.writers.two_hops import Nodes
from zpasses.pipeline.runner import run_passes
from zpasses.ranks.agree import simulated_answers
from zpasses.ranks.new_groups import node_groups
from zpasses.runtime.codegen import eager_codegen
from zpasses.runtime.flush import GraphLowering
from zpasses.runtime.grad_slots import grad_slots
from zpasses.simulate.simulator import simulate
from zpasses.testing import (
    JointRecipe,
    assert_equal_bits,
    assert_step_equals_reference,
    capture_ranks,
    fake_world,
    joint_graph,
    listing,
    random_inputs,
)
from zpasses.testing.strategies import joint_recipes

BF16, F32 = torch.bfloat16, torch.float32
ENCODE = "reduce-grads{encode=int8,exact_below_kib=0}"
ENCODED_TWICE = ENCODE.replace("}", ",hops=two-encoded}")
TAILS = [
    "schedule{plan=single,mode=coalesced,memory_budget=1GiB}",
    "schedule{plan=single,mode=flat,memory_budget=1GiB}",
    "schedule{plan=one-ahead,cap_mb=0}",
    "schedule",
    "schedule{reduction_group=own}",
]


def target(per_node, changes=""):
    return Target.parse(f"h100,ranks_per_node={per_node}{changes}")


def groups_of(nodes, per_node):
    """Process group -> its ranks, as `simulate` takes them."""
    ranks = range(nodes * per_node)
    inside = [ranks[at : at + per_node] for at in ranks[::per_node]]
    across = [ranks[at::per_node] for at in range(per_node)]
    return {
        "0": ranks,
        **{f"0.in_node_{each[0]}_{each[-1]}": each for each in inside},
        **{f"0.across_nodes_{each[0]}_{each[-1]}": each for each in across},
    }


def lowered(params, nodes=2, per_node=2, text=f"{ENCODE},average-replicas", changes=""):
    """Returns the graphs of all ranks before, with what passes declare to change, and after."""
    recipe = JointRecipe(tuple(params), nodes * per_node)
    with use_target(target(per_node, changes)), simulated_answers():
        return recipe.run_pipeline(text)


def used(gm):
    """What a graph reduces with: operators, and kinds of groups."""
    return [
        (each.op.removesuffix("_coalesced"), compat.group_suffix(each.group))
        for _, each in collectives(gm.graph)
        if "gather" not in each.op and each.op != "unshard"
    ]


@contextlib.contextmanager
def world(nodes=2, per_node=2):
    """A world that has the groups of its nodes."""
    with fake_world(nodes * per_node), use_target(target(per_node)):
        node_groups("0", per_node)
        yield


TWO = [("reduce_scatter_tensor", ".in_node"), ("all_to_all_single", ".across_nodes")]
ONE = [("all_to_all_single", "")]
TWICE = [("all_to_all_single", ".in_node"), ("all_to_all_single", ".across_nodes")]


def test_a_reduction_becomes_exact_sums_and_an_exchange_of_codes():
    before, after = lowered([Param((7, 20), param_dtype=BF16, reduce_dtype=F32)])
    expect_listing(
        "\n".join(listing(before[0]).splitlines()[6:]),
        """\
constant_pad_nd_default = constant_pad_nd(mul_1, [0, 0, 0, 1], 0.0)                                         # bf16[8, 20]; reduce_input: p0
view_default = view(constant_pad_nd_default, [2, 2, 2, 20])                                                 # bf16[2, 2, 2, 20]; reduce_input: p0
permute_default = permute(view_default, [1, 0, 2, 3])                                                       # bf16[2, 2, 2, 20]; reduce_input: p0
_to_copy_default = _to_copy(permute_default, dtype=f32, memory_format=contiguous_format)                    # f32[2, 2, 2, 20]; reduce_input: p0
view_default_1 = view(_to_copy_default, [8, 20])                                                            # f32[8, 20]; reduce_input: p0
reduce_grad_default = zpasses.reduce_grad(view_default_1, 8, 4, f32, None, '0.in_node_0_1')                 # f32[4, 20]; reduce: p0
average_grad_default = zpasses.average_grad(reduce_grad_default, f32, '0.across_nodes_0_2', 'int8/128', 2)  # f32[2, 20]; reduce: p0
return [mul, average_grad_default, None]
""",  # noqa: E501
    )
    expect_listing(
        "\n".join(listing(after[0]).splitlines()[6:]),
        """\
constant_pad_nd_default = constant_pad_nd(mul_1, [0, 0, 0, 1], 0.0)                                      # bf16[8, 20]; reduce_input: p0
view_default = view(constant_pad_nd_default, [2, 2, 2, 20])                                              # bf16[2, 2, 2, 20]; reduce_input: p0
permute_default = permute(view_default, [1, 0, 2, 3])                                                    # bf16[2, 2, 2, 20]; reduce_input: p0
_to_copy_default = _to_copy(permute_default, dtype=f32, memory_format=contiguous_format)                 # f32[2, 2, 2, 20]; reduce_input: p0
view_default_1 = view(_to_copy_default, [8, 20])                                                         # f32[8, 20]; reduce_input: p0
reduce_scatter_tensor_default = reduce_scatter_tensor(view_default_1, 'avg', 2, '0.in_node_0_1')         # f32[4, 20]; reduce: p0
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default)                                         # f32[4, 20]; shard_grad: p0
encode_default = zpasses.encode(wait_tensor_default, 40, 2, 'int8/128')                                  # u8[96]; reduce_input: p0
all_to_all_single_default = all_to_all_single(encode_default, [48, 48], [48, 48], '0.across_nodes_0_2')  # u8[96]; reduce: p0
wait_tensor_default_1 = wait_tensor(all_to_all_single_default)                                           # u8[96]; reduced: p0
decode_mean_default = zpasses.decode_mean(wait_tensor_default_1, [2, 20], 40, 2, f32, 'int8/128')        # f32[2, 20]; shard_grad: p0
return [mul, decode_mean_default, None]
""",  # noqa: E501
    )


def test_codes_within_a_node_are_written_in_the_order_of_places():
    _, after = lowered([Param((7, 20), param_dtype=BF16)], text=f"{ENCODED_TWICE},average-replicas")
    expect_listing(
        "\n".join(listing(after[0]).splitlines()[7:]),
        """\
view_default = view(constant_pad_nd_default, [2, 2, 2, 20])                                                  # bf16[2, 2, 2, 20]; reduce_input: p0
permute_default = permute(view_default, [1, 0, 2, 3])                                                        # bf16[2, 2, 2, 20]; reduce_input: p0
encode_default = zpasses.encode(permute_default, 80, 2, 'int8/128')                                          # u8[192]; reduce_input: p0
all_to_all_single_default = all_to_all_single(encode_default, [96, 96], [96, 96], '0.in_node_0_1')           # u8[192]; reduce: p0
wait_tensor_default = wait_tensor(all_to_all_single_default)                                                 # u8[192]; reduced: p0
decode_mean_default = zpasses.decode_mean(wait_tensor_default, [1, 2, 2, 20], 80, 2, f32, 'int8/128')        # f32[1, 2, 2, 20]; shard_grad: p0
view_default_1 = view(decode_mean_default, [4, 20])                                                          # f32[4, 20]; reduced: p0
encode_default_1 = zpasses.encode(view_default_1, 40, 2, 'int8/128')                                         # u8[96]; reduce_input: p0
all_to_all_single_default_1 = all_to_all_single(encode_default_1, [48, 48], [48, 48], '0.across_nodes_0_2')  # u8[96]; reduce: p0
wait_tensor_default_1 = wait_tensor(all_to_all_single_default_1)                                             # u8[96]; reduced: p0
decode_mean_default_1 = zpasses.decode_mean(wait_tensor_default_1, [2, 20], 40, 2, f32, 'int8/128')          # f32[2, 20]; shard_grad: p0
return [mul, decode_mean_default_1, None]
""",  # noqa: E501
    )


ODD = [
    Param((7, 20), param_dtype=BF16),
    Param((7, 20), reduce_dtype=F32, reads=2),
    Param((2, 40)),  # no rows on the last ranks
    Param((1, 64)),
    Param((6, 5, 4)),
    Param((9,)),
    Param(()),
    Param((0, 30)),
]
WORLDS = [(2, 2), (2, 4), (3, 2)]


@pytest.mark.parametrize("tail", some_quick(TAILS, TAILS[1:2]))
@pytest.mark.parametrize(("nodes", "per_node"), some_quick(WORLDS, WORLDS[2:]))
@pytest.mark.parametrize(("encode", "expected"), [(ENCODE, TWO), (ENCODED_TWICE, TWICE)])
def test_bits_of_odd_gradients_on_all_ranks(nodes, per_node, tail, encode, expected):
    text = f"gather-params,{encode},{tail},average-replicas,defer-reduction"
    before, after = lowered(ODD, nodes, per_node, text)
    assert_equal_bits(before, after, random_inputs(before), groups_of(nodes, per_node))
    assert set(expected) <= set(used(after[0]))
    assert not calls(after[0].graph, AVERAGE_GRAD)
    assert len({str(used(gm)) for gm in after}) == 1


@few_examples
@given(
    joint_recipes(world_sizes=[4, 6]),
    st.sampled_from(["int8", "fp8"]),
    st.sampled_from([1, 3, 32]),
    st.sampled_from(["", "schedule,"]),
    st.sampled_from(["two", "two-encoded"]),
)
def test_bits_of_drawn_graphs(recipe, name, block, schedule, hops):
    encode = f"reduce-grads{{encode={name},block={block},exact_below_kib=0,hops={hops}}}"
    text = f"gather-params,{encode},{schedule}average-replicas,defer-reduction"
    with use_target(target(2)), simulated_answers():
        before, after = recipe.run_pipeline(text)
    groups = groups_of(recipe.world_size // 2, 2)
    assert_equal_bits(before, after, random_inputs(before, bound=1), groups)


@few_examples
@given(
    rows=st.integers(1, 13),
    inner=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    world=st.sampled_from(WORLDS),
    dtype=st.sampled_from([F32, BF16]),
    hops=st.sampled_from(["two", "two-encoded"]),
    seed=st.integers(0, 100),
)
def test_values_are_means_of_the_codes_of_each_nodes_mean(rows, inner, world, dtype, hops, seed):
    """A formula of plain torch, that knows nothing of permutations or groups."""
    (nodes, per_node), shape = world, (rows, *inner)
    param = Param(shape, param_dtype=dtype, reduce_dtype=F32)
    how, size = Encoding("int8", 8), nodes * per_node
    text = f"reduce-grads{{encode=int8,block=8,exact_below_kib=0,hops={hops}}},average-replicas"
    _, after = lowered([param], nodes, per_node, text)
    if not any("to_all" in op for op, _ in used(after[0])):
        return  # records would be larger than exact values
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        [param.shard(rank, size).detach(), *torch.randn(2, *shape, generator=generator).to(dtype)]
        for rank in range(size)
    ]
    ours = [run.outputs[1] for run in simulate(after, inputs, groups_of(nodes, per_node))]
    grads = [(x * tangent).to(F32) for _, x, tangent in inputs]
    block = -(-rows // size)
    for rank, got in enumerate(ours):
        wanted = torch.zeros(got.shape)
        for node in range(nodes):
            members = grads[node * per_node : (node + 1) * per_node]
            if hops == "two-encoded":  # one record has the rows of all ranks with this place
                members = [_decoded_rows(each, rank % per_node, world, how) for each in members]
            mine = (sum(members[1:], members[0]) / per_node)[rank * block : (rank + 1) * block]
            records = encode(mine, block * mine[0:0].new_empty(shape[1:]).numel(), 1, how)
            wanted += decode(records, [block, *inner], 1, F32, how)[: len(got)]
        torch.testing.assert_close(got, wanted / nodes, rtol=1e-6, atol=1e-7)


def _decoded_rows(grad, place, world, how):
    """What a rank sends to the one with a place on its node, as rows of the gradient."""
    (nodes, per_node), (rows, *inner) = world, grad.shape
    block = -(-rows // (nodes * per_node))
    whole = torch.zeros(nodes, per_node, block, *inner)
    whole.view(-1, *inner)[:rows] = grad
    mine = whole[:, place].reshape(nodes * block, *inner)
    records = encode(mine, mine.numel(), 1, how)
    whole[:, place] = decode(records, mine.shape, 1, F32, how).view(nodes, block, *inner)
    return whole.view(-1, *inner)[:rows]


def test_scalars_vectors_and_small_gradients_stay_exact_and_take_one_hop():
    params = [Param(()), Param((64,)), Param((2, 4)), Param((64, 64))]
    text = "reduce-grads{encode=int8,exact_below_kib=4},average-replicas"
    gm = lowered(params, text=text)[1][0]
    assert sorted(used(gm)) == sorted(
        [("all_reduce", ""), *[("reduce_scatter_tensor", "")] * 2, *TWO]
    )


# --- which reductions -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ranks", "per_node", "changes", "expected"),
    [
        (4, 2, "", TWO),
        (4, 2, ",link_gb_s=0.1", ONE),  # within a node, exact sums take longer than codes
        (4, 4, "", ONE),
        (4, 1, "", ONE),
        (3, 2, "", ONE),  # the second node has one rank
        (1, 1, "", []),
    ],
)
def test_auto_takes_what_is_predicted_to_be_faster(ranks, per_node, changes, expected):
    with use_target(target(per_node, changes)):
        gm = JointRecipe((Param((64, 64)),), ranks).run_pipeline(f"{ENCODE},average-replicas")[1][0]
        exact = JointRecipe((Param((64, 64)),), ranks).run_pipeline("reduce-grads")[1][0]
    assert used(gm) == expected
    assert (listing(gm) == listing(exact)) == (ranks == 1)


def test_hops_can_be_chosen():
    one = ENCODE.replace("}", ",hops=one}")
    assert used(lowered([Param((64, 64))], text=f"{one},average-replicas")[1][0]) == ONE
    two, slow = ENCODE.replace("}", ",hops=two}"), ",link_gb_s=0.1"
    assert (
        used(lowered([Param((64, 64))], text=f"{two},average-replicas", changes=slow)[1][0]) == TWO
    )


def test_replicas_reduce_in_one_hop():
    recipe = JointRecipe((Param((64, 64)),), 8, replicas=2)
    with use_target(target(2)):
        gm = recipe.run_pipeline(f"{ENCODE},average-replicas")[1][0]
        assert used(gm) == [*ONE, ("all_reduce", "")]
        for hops in ("two", "two-encoded"):
            said = rf"got {hops}, but .* has replicas; expected .*no replicas"
            with pytest.raises(OptionError, match=said):
                recipe.run_pipeline(ENCODE.replace("}", f",hops={hops}}}"))


@pytest.mark.parametrize(
    ("per_node", "said"),
    [
        (4, r"has 4 ranks on 1 nodes \(target h100 with 4 ranks per node\)"),
        (1, r"has 4 ranks on 4 nodes \(target h100 with 1 ranks per node\)"),
        (3, r"has 4 ranks on 2 nodes \(target h100 with 3 ranks per node\)"),
    ],
)
def test_two_hops_where_they_are_impossible_are_refused(per_node, said):
    with use_target(target(per_node)), pytest.raises(OptionError, match=said):
        JointRecipe((Param((64, 64)),), 4).run_pipeline(ENCODE.replace("}", ",hops=two}"))


@pytest.mark.parametrize("hops", ["one", "two"])
def test_hops_without_an_encoding_are_refused(hops):
    said = f"hops={hops} without 'encode' has no effect. Give a format"
    with pytest.raises(OptionError, match=said):
        Pipeline.parse(f"reduce-grads{{hops={hops}}}")


def test_ranks_of_a_node_must_be_neighbours():
    with fake_world(4), use_target(target(2)):
        assert Nodes.of("0", target(2)).have_two_hops
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mixed = torch.distributed.new_group([0, 2, 1, 3], sort_ranks=False)
        assert not Nodes.of(mixed.group_name, target(2)).have_two_hops
        for dim, nodes in (("a", 2), ("b", 1)):
            found = Nodes.of(mesh.get_group(dim).group_name, target(2))
            assert (found.nodes, found.have_two_hops) == (nodes, False)


def test_groups_are_made_once():
    with fake_world(8, rank=5):
        first = node_groups("0", 4)
        assert (first.inside, first.across) == ("0.in_node_4_7", "0.across_nodes_1_5")
        assert node_groups("0", 4) == first
        assert compat.group_ranks(first.inside) == [4, 5, 6, 7]
        assert compat.group_ranks(first.across) == [1, 5]
        assert {compat.parent_group(each) for each in vars(first).values()} == {"0"}
        assert node_groups("0", 2).inside == "0.in_node_4_5"


@on_ranks(2)
def test_groups_between_nodes_on_real_ranks():
    name = torch.distributed.group.WORLD.group_name
    lost = mock.patch("zpasses.compat.make_group", side_effect=RuntimeError("lost"))
    with lost, pytest.raises(AgreementError, match=r"could not connect process group .*lost"):
        node_groups(name, 1)
    made = node_groups(name, 1)  # by names that were not tried before
    assert made == node_groups(name, 1)
    assert made.across.endswith("across_nodes_0_1-1")
    # Collectives have the time limit of their group.
    groups = [compat.process_group(each) for each in (name, made.across)]
    with compat.limited_timeouts([name], 5.0):
        found = [compat.collective_timeout(each).total_seconds() for each in groups]
    assert found == [5.0, 5.0]
    value = torch.full((2,), float(torch.distributed.get_rank()))
    total = compat.functional.all_reduce(value, "sum", made.across)
    assert compat.functional.wait_tensor(total).tolist() == [1.0, 1.0]


# --- what the rest of a pipeline does with them ---------------------------------------------------
def test_windows_defer_the_whole_reduction():
    """The end of a window reduces over the group, and its passes choose hops again."""
    text = f"{ENCODE},schedule,average-replicas,defer-reduction"
    gm = lowered([Param((7, 20), reduce_dtype=F32), Param((9,))], text=text)[1][0]
    slots = {each.param: each for each in grad_slots(gm.graph)}
    assert slots["p0"].reduction == Reduction(7, F32, F32, "0")
    assert slots["p0"].shape == (7, 20)
    assert slots["p1"].reduction == Reduction(9, F32, None, "0")


def test_ranks_without_a_graph_end_a_window_for_the_same_target():
    """They get the passes as text. With another target, they would take other hops."""
    pipeline = Pipeline.parse(f"{ENCODE},average-replicas")
    ours = GraphLowering(pipeline, eager_codegen, target="h100,ranks_per_node=4")
    theirs = GraphLowering.of(ours.text)
    assert theirs.text == ours.text != GraphLowering(pipeline, eager_codegen).text
    assert theirs._target == Target.parse("h100,ranks_per_node=4")


def test_memory_counts_full_blocks_on_all_ranks():
    text = f"{ENCODE},average-replicas"
    graphs = lowered([Param((7, 20))], text=text)[1]
    for gm in graphs:
        (blocks,) = [tag.block_bytes for _, tag in tagged(gm.graph, "shard_grad")][1:]
        assert blocks == 2 * 20 * 4
    # The copy in another order is there beside the gradient, and the sums beside the copy.
    with world():
        found = {each.node.name: each for each in liveness(graphs[0].graph).buffers}
    grad, copy, sums, records, mine = (
        found[name]
        for name in (
            "constant_pad_nd_default",
            "clone_default",
            "reduce_scatter_tensor_default",
            "encode_default",
            "decode_mean_default",
        )
    )
    sizes = [each.nbytes for each in (grad, copy, sums, records, mine)]
    assert sizes == [8 * 20 * 4, 8 * 20 * 4, 4 * 20 * 4, 2 * 48, 2 * 20 * 4]
    assert grad.last >= copy.first
    assert copy.last >= sums.first
    assert sums.last >= records.first > copy.last


def test_codes_within_a_node_need_no_copy_of_the_gradient():
    gm = lowered([Param((64, 64))], text=f"{ENCODED_TWICE},average-replicas")[1][0]
    assert {node.target for node, _ in tagged(gm.graph, "reduce_input")} <= {
        torch.ops.aten.view.default,
        torch.ops.aten.permute.default,
        ENCODE_OPERATOR,
    }
    with world():
        sizes = {each.node.name: each.nbytes for each in liveness(gm.graph).buffers}
    record = Encoding("int8", 128).record_bytes(64 * 64 // 2)
    assert sizes["encode_default"] == 2 * record
    assert sizes["decode_mean_default"] == 64 * 64 * 4 // 2


@pytest.mark.parametrize("encode", [ENCODE, ENCODED_TWICE])
def test_error_feedback_holds_what_the_second_hop_encodes(encode):
    text = f"{encode[:-1]},feedback=on}}"
    joint = lowered([Param((64, 64))], nodes=2, per_node=4, text=text)[1][0]
    gm = lowered([Param((64, 64))], nodes=2, per_node=4, text=f"{text},average-replicas")[1][0]
    (residual,) = residuals_of(gm.graph)
    assert residual.nbytes == 64 * 64 * 4 // 4  # one of the four ranks of each node
    with world(per_node=4):
        assert residual_bytes(joint.graph) == residual_bytes(gm.graph) == residual.nbytes


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize(("encode", "expected"), [(ENCODE, TWO), (ENCODED_TWICE, TWICE)])
def test_simulation_checks_the_lowering(nodes, encode, expected):
    with fake_world(2 * nodes, 3), use_target(target(2)):
        gm = joint_graph([Param((7, 40)), Param((6, 40), param_dtype=BF16)])
        passes = f"gather-params,{encode},schedule,average-replicas"
        run_passes(gm.graph, Pipeline.parse(passes), verify="simulate")
        assert set(used(gm)) == set(expected)


STEPS = [("reshard-after-forward", BF16), ("cache-params", None)]


@pytest.mark.slow(quick="test_bits_of_odd_gradients_on_all_ranks")
@pytest.mark.parametrize(("tail", "dtype"), STEPS)
def test_a_step_equals_the_dialect_on_six_ranks(tail, dtype):
    text = (
        "gather-params{encode=int8,exact_below_kib=0},"
        f"{ENCODE},{tail},schedule,average-replicas,defer-reduction"
    )
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 50, bias=False))
    options = {"world_size": 6, "pipeline": text, "shard": {"param_dtype": dtype}}
    with use_target(target(2)):
        ranks = capture_ranks(model, (torch.ones(4, 40, dtype=dtype),), **options)
    assert calls(ranks[0].before.joint.graph, AVERAGE_GRAD)
    assert set(TWO) <= set(used(ranks[0].after.backward))
    assert_step_equals_reference(ranks)


# --- costs ----------------------------------------------------------------------------------------
def test_each_rank_of_a_node_exchanges_with_its_own_share_of_the_network():
    """All ranks of a node exchange at once, each over its adapter."""
    h100 = Target.parse("h100")
    codes = 64 << 20  # of one rank's rows, for all nodes
    took = ring_collective_us("all_to_all", codes, 64, h100, 64)
    sent = codes * 63 / 64 / (h100.network_gb_s * 1e3)
    assert took == pytest.approx(sent + h100.launch_us + 63 * h100.network_hop_us)
    with use_target(target(2)):
        gm = lowered([Param((64, 64))])[1][0]
        with world():
            (exchange,) = [node for node in gm.graph.nodes if "all_to_all" in node.name]
            (sums,) = [node for node in gm.graph.nodes if "reduce_scatter" in node.name][:1]
            links = {
                node: collective_timing(node, collective_of(node), target(2)).channel.link
                for node in (exchange, sums)
            }
    assert links == {exchange: "network", sums: "node"}


def test_two_hops_are_predicted_to_take_less_time_than_one():
    texts = [f"{ENCODE[:-1]},hops={hops}}},schedule,average-replicas" for hops in ("one", "two")]
    params = [Param((4096, 2048), param_dtype=BF16)] * 4
    times = []
    for text in texts:
        with fake_world(64), use_target(target(8)):
            gm = joint_graph(params)
            run_passes(gm.graph, Pipeline.parse(text))
            times.append(step_time([gm.graph], target(8)).total_us)
    assert times[1] < 0.8 * times[0]


def test_codes_within_a_node_take_half_the_time_of_exact_sums_in_bf16():
    params, took = [Param((16384, 8192), param_dtype=BF16)], []
    for text in (ENCODE, ENCODED_TWICE):
        with fake_world(64), use_target(target(8)):
            gm = joint_graph(params)
            run_passes(gm.graph, Pipeline.parse(f"{text},average-replicas"))
            timings = [
                collective_timing(node, each, target(8)) for node, each in collectives(gm.graph)
            ]
        took.append(sum(each.duration_us for each in timings if each.channel.link == "node"))
    assert 0.4 * took[0] < took[1] < 0.6 * took[0]


@pytest.mark.slow(quick="test_replicas_reduce_in_one_hop")
def test_hybrid_sharding_of_a_model_takes_one_hop():
    def shard(model, mesh):
        names = ("replicate", "shard")
        zpasses.shard(model, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=names))

    text = f"gather-params,{ENCODE},schedule,average-replicas,defer-reduction"
    options = {"world_size": 8, "pipeline": text, "shard": shard}
    model = nn.Linear(40, 30, bias=False)
    with use_target(target(2)):
        ranks = capture_ranks(model, (torch.ones(4, 40),), **options)
    assert used(ranks[0].after.backward) == [*ONE, ("all_reduce", "")]
