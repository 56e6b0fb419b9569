"""`average-replicas{encode=...}`: what is encoded, and that lowered graphs equal the dialect."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from tests.graphs import few_examples
from zpasses import Pipeline
from zpasses.graph.dialect import AVERAGE_GRAD
from zpasses.graph.queries import calls, collectives
from zpasses.graph.tags import tagged
from zpasses.passes import AverageReplicas
from zpasses.passes.writers import encode_options
from zpasses.testing import (
    JointRecipe,
    ParamSpec,
    assert_equal_bits,
    assert_step_equals_reference,
    capture_ranks,
    listing,
    random_inputs,
)
from zpasses.testing.strategies import joint_recipes

BF16 = torch.bfloat16
ALL = "encode=int8,exact_below_kib=0"


def lowered(*params, replicas=2, world_size=4, options=ALL, before="reduce-grads"):
    """Returns the graph of the first rank after a pipeline."""
    recipe = JointRecipe(tuple(params), world_size, replicas=replicas)
    return recipe.run_pipeline(f"{before},average-replicas{{{options}}}")[1][0]


def launches(gm):
    """Returns the operators that communicate averages."""
    made = {node for node, tag in tagged(gm.graph) if tag.origin == AverageReplicas.name}
    return [each.op for node, each in collectives(gm.graph) if node in made]


def test_an_average_is_an_exchange_and_a_gather_of_codes():
    gm = lowered(ParamSpec((16, 20)), ParamSpec((40, 20)))
    nodes = [
        f"{node.target.overloadpacket.__name__} {','.join(tag.params)} {tag.encoding}".strip()
        for node, tag in tagged(gm.graph, "reduce_input", "reduce", "reduced", "shard_grad")
    ]
    exchange = ["encode {}", "all_to_all_single {} int8/128"]
    gather = ["decode_mean {}", "encode {}", "all_gather_into_tensor {} int8/128"]
    done = ["wait_tensor {}", "decode {}", "view {}"]
    of_p0, of_p1 = (
        [[each.format(param) for each in part] for part in (exchange, gather, done)]
        for param in ("p0", "p1")
    )
    assert nodes[2:] == [
        *(*of_p1[0], "reduce_scatter_tensor p0", "wait_tensor p0", *of_p0[0]),
        # the gather of one average starts beside the next exchange
        *("wait_tensor p1", *of_p1[1], *of_p1[2]),
        *("wait_tensor p0", *of_p0[1], *of_p0[2]),
    ]


def test_gradients_that_are_ready_together_share_launches():
    one_bucket = "reduce-grads,schedule{plan=single}"
    gm = lowered(ParamSpec((16, 20)), ParamSpec((40, 20)), before=one_bucket)
    assert launches(gm) == ["all_to_all_single", "all_gather_into_tensor"]
    by_dtype = ParamSpec((16, 20), reduce_dtype=BF16), ParamSpec((40, 20))
    assert len(launches(lowered(*by_dtype, before=one_bucket))) == 4


def test_each_option_changes_the_graph():
    params = ParamSpec((512, 64)), ParamSpec((64, 64))
    options = (
        "exact_below_kib=16",
        "encode=int8",
        "encode=fp8",
        "encode=int8,block=64",
        "encode=int8,exact_below_kib=4",
    )
    assert len({listing(lowered(*params, options=each)) for each in options}) == len(options)


def test_scalars_vectors_small_and_double_gradients_stay_exact():
    f64 = torch.float64
    params = ParamSpec((4096,)), ParamSpec((2, 4)), ParamSpec((64, 64), param_dtype=f64, dtype=f64)
    gm = lowered(*params, ParamSpec((64, 64)), options="encode=int8,exact_below_kib=1")
    encoded = [tag.params for _, tag in tagged(gm.graph, "reduce") if tag.encoding]
    assert encoded == [("p3",)] * 2


@pytest.mark.parametrize(
    ("replicas", "shape", "dtype", "said"),
    [
        (2, (64, 64), torch.float32, []),
        (1, (64, 64), torch.float32, ["average-replicas"]),
        (2, (64,), torch.float32, ["average-replicas", "gather-params", "reduce-grads"]),
        (2, (64, 64), torch.float64, ["average-replicas", "gather-params", "reduce-grads"]),
    ],
)
def test_a_pass_that_encodes_nothing_says_so(caplog, replicas, shape, dtype, said):
    params = (ParamSpec(shape, param_dtype=dtype, dtype=dtype),)
    how = "{encode=int8,exact_below_kib=1}"
    encode_options.warn_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="zpasses"):
        JointRecipe(params, 2 * replicas, replicas=replicas).run_pipeline(
            f"gather-params{how},reduce-grads{how},average-replicas{how}"
        )

    def passes_of(level):
        texts = [each.getMessage() for each in caplog.records if each.levelno == level]
        found = [each for each in texts if "encode=int8 encodes nothing" in each]
        return sorted({each.partition(":")[0] for each in found})

    assert passes_of(logging.INFO) == said
    # Without replicas, nothing is exact that was to be encoded.
    assert passes_of(logging.WARNING) == (said if replicas > 1 else [])


def test_ranks_with_fewer_rows_make_the_same_choice():
    recipe = JointRecipe((ParamSpec((5, 64)),), 4, replicas=2)
    text = "reduce-grads,average-replicas{encode=int8,exact_below_kib=0.6}"
    graphs = recipe.run_pipeline(text)[1]  # 3 rows have 768 bytes, and 2 have 512
    assert {tuple(launches(gm)) for gm in graphs} == {
        ("all_to_all_single", "all_gather_into_tensor")
    }


# --- the same bits --------------------------------------------------------------------------------
@few_examples
@given(
    joint_recipes(world_sizes=[4, 6], replicas=[2, 3]),
    st.sampled_from(["int8", "fp8"]),
    st.sampled_from([1, 3, 32]),
    st.sampled_from(["", "schedule,"]),
)
def test_bits_of_drawn_graphs(recipe, name, block, schedule):
    average = AverageReplicas(encode=name, block=block, exact_below_kib=0)
    first = Pipeline.parse(f"merge-reads,gather-params,reduce-grads,{schedule}".rstrip(","))
    before, after = recipe.run_pipeline(Pipeline((*first, average)))
    assert_equal_bits(before, after, random_inputs(before, bound=1), recipe.groups())
    assert not any(calls(gm.graph, AVERAGE_GRAD) for gm in after)


@pytest.mark.slow(quick="test_bits_of_drawn_graphs")
@pytest.mark.parametrize("dtype", [None, BF16])
def test_a_step_equals_the_dialect_on_six_ranks(dtype):
    def shard(model, mesh):
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=names)
        zpasses.shard(model, mesh=mesh, param_dtype=dtype)

    text = (
        "gather-params{encode=int8,exact_below_kib=0},reduce-grads{encode=fp8,exact_below_kib=0},"
        f"reshard-after-forward,schedule,average-replicas{{{ALL}}},defer-reduction"
    )
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 51, bias=False))
    options = {"world_size": 6, "shard": shard, "pipeline": text}
    ranks = capture_ranks(model, (torch.ones(4, 40, dtype=dtype),), **options)
    assert_step_equals_reference(ranks)
