"""What holds for every pass: it keeps the bits on all ranks, it does the same on each run, it
leaves graphs alone that it has nothing to do with, and it refuses wrong options.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import some_quick
from tests.foreign import captured_ranks
from tests.graphs import (
    Param,
    few_examples,
    joint,
    rewritten,
)
from tests.passes.odd_model import Model
from zpasses import OptionError, Pipeline
from zpasses.graph.queries import collectives
from zpasses.pipeline.pipeline import catalogue
from zpasses.ranks.agree import simulated_answers
from zpasses.testing import (
    assert_deterministic,
    assert_equal_bits,
    assert_step_equals_reference,
    capture_ranks,
    fake_world,
    listing,
    random_inputs,
    trace_joint,
)
from zpasses.testing.drawing import WORLD_SIZES
from zpasses.testing.strategies import param_lists

pytestmark = pytest.mark.usefixtures("mi300x")

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
LOWER = [f"gather-params,reduce-grads{{form={form}}}" for form in ("reduce_scatter", "all_reduce")]
SDMA = "sdma{gathers=all}"
BUCKETS = [
    f"schedule{{plan=single,mode={mode},memory_budget=1GiB}}" for mode in ("coalesced", "flat")
]
ONE_AHEAD = "schedule{plan=one-ahead,cap_mb=0}"
JOINT = [
    "merge-reads",
    "merge-reads{max_hold_mb=0.0}",
    "gather-params",
    *(text.removeprefix("gather-params,") for text in LOWER),
    *(f"{lower},{bucket}" for lower in LOWER for bucket in BUCKETS),
    f"{LOWER[0]},{ONE_AHEAD}",
    f"{LOWER[1]},schedule{{memory_budget=1GiB}}",
    f"{LOWER[1]},{ONE_AHEAD},{SDMA}",
    f"{LOWER[0]},{BUCKETS[0]},{SDMA}",
]
ODD = [
    Param((4, 3), reads=3),
    Param((7, 3), param_dtype=BF16, reduce_dtype=F32),
    Param((7, 2), param_dtype=BF16, reduce_dtype=F32, reads=2),
    Param((7, 3), param_dtype=BF16),
    Param((5,), reduce_dtype=F64),
    Param(()),
    Param((), reads=2),
    Param((), param_dtype=BF16, reduce_dtype=F64),
    Param((0, 3)),
    Param((0, 3), reads=2),
    Param((3, 0)),
    Param((5, 3), frozen=True),
    Param((5, 1), frozen=True, param_dtype=F64),
    Param((5,), frozen=True, reads=2),
    Param((2, 3)),  # an empty shard on the last of three ranks and more
    Param((6, 2, 2), reads=2),
    Param((6, 3)),
]


def assert_pipelines_keep_the_bits(world_size, params, interleaved):
    before, after = [], {text: [] for text in JOINT}
    for rank in range(world_size):
        with fake_world(world_size, rank):
            before.append(joint(params, rank, world_size, interleaved=interleaved))
    for text, graphs in after.items():
        with simulated_answers():  # all ranks take the plan of the first
            for rank in range(world_size):
                with fake_world(world_size, rank):
                    graphs.append(rewritten(before[rank], *Pipeline.parse(text)))
    inputs = random_inputs(before)
    for graphs in after.values():
        assert_equal_bits(before, graphs, inputs)


@pytest.mark.parametrize("world_size", some_quick(WORLD_SIZES, [3]))
def test_bits_of_odd_parameters_are_kept_on_all_ranks(world_size):
    assert_pipelines_keep_the_bits(world_size, ODD, interleaved=world_size % 2 == 1)


@few_examples
@given(param_lists(), st.sampled_from([1, 2, 3, 5]), st.booleans())
def test_bits_of_random_graphs_are_kept(params, world_size, interleaved):
    assert_pipelines_keep_the_bits(world_size, params, interleaved)


def test_order_does_not_depend_on_addresses():
    with fake_world(3, 1):
        gm = joint(ODD[:7], 1, 3, interleaved=True)
        for text in JOINT:
            *first, last = Pipeline.parse(text)
            assert_deterministic(last, rewritten(gm, *first))


@pytest.mark.parametrize(
    "text", [f"{LOWER[0]},{ONE_AHEAD}", "gather-params,cache-params", f"{ONE_AHEAD},{SDMA}"]
)
def test_a_second_run_changes_nothing(text):
    passes = [*Pipeline.parse(LOWER[0]), *Pipeline.parse(text.removeprefix(LOWER[0] + ","))]
    with fake_world(2):
        once = rewritten(joint([Param((4, 2)), Param((6, 2))], 0, 2), *passes)
        assert listing(rewritten(once, passes[-1])) == listing(once)


@pytest.mark.parametrize("name", [n for n, each in catalogue().items() if isinstance(each, type)])
def test_graphs_without_parameters_are_unchanged(name):
    with fake_world(2):
        gm = trace_joint(lambda x: (x * 2).relu(), [torch.ones(3, requires_grad=True)])
        before = listing(gm)
        assert catalogue()[name]().rewrite(gm.graph) == 0
    assert listing(gm) == before


@pytest.mark.parametrize("name", ["cache-params", "merge-reads", "schedule", "sdma"])
def test_graphs_with_nothing_to_change_are_unchanged(name):
    with fake_world(2):
        gm = joint([Param((4, 2)), Param((6, 2))], 0, 2)
        before = listing(gm)
        assert catalogue()[name]().rewrite(gm.graph) == 0
    assert listing(gm) == before


# --- whole steps ----------------------------------------------------------------------------------


RESHARD = "reshard-after-forward{keep=nothing}"


STEPS = [
    (LOWER[1], BUCKETS[1]),
    (LOWER[0], f"schedule{{plan=one-ahead,mode=coalesced}},{SDMA}"),
    (LOWER[0], BUCKETS[0]),
    (LOWER[1], "schedule{plan=one-ahead,cap_mb=0.0002,memory_budget=1GiB}"),
    (LOWER[0], "schedule{memory_budget=1GiB}"),
]


@pytest.mark.parametrize(("lower", "last"), some_quick(STEPS, STEPS[:2]))
def test_steps_equal_the_dialect(lower, last):
    pipeline = f"merge-reads,{lower},{RESHARD},{last}"
    captures = capture_ranks(Model(), (torch.zeros(2, 6),), world_size=3, pipeline=pipeline)
    name = str(Pipeline.parse(last).passes[-1]).partition("{")[0]
    assert all(each.changes for each in captures[0].records if each.name == name)
    assert_step_equals_reference(captures)


GATHER = "all_gather_into_tensor"


OF_OTHERS = [
    ("reshard-after-forward", BF16, [GATHER] * 2),
    (BUCKETS[1], None, [GATHER]),
    (SDMA, None, ["sdma_all_gather"] * 2),
    (BUCKETS[0], None, [f"{GATHER}_coalesced"]),
    (ONE_AHEAD, None, [GATHER] * 2),
    ("schedule{memory_budget=1GiB}", None, None),
]


@pytest.mark.parametrize(("text", "dtype", "gathers"), some_quick(OF_OTHERS, OF_OTHERS[:3]))
def test_graphs_of_other_libraries_are_rewritten(text, dtype, gathers):
    """A model that is sharded as SimpleFSDP does it."""
    captures = captured_ranks(text, dtype)
    assert any(record.changes for record in captures[0].records)
    found = [each.op for _, each in collectives(captures[0].after.forward.graph)]
    assert gathers is None or found == gathers
    assert_step_equals_reference(captures)


# --- options --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reduce-grads{form=scatter}", r"'reduce_scatter' or 'all_reduce'"),
        ("schedule{cap_mb=-1}", r"pass 'schedule', option 'cap_mb': got -1.0; expected MiB >= 0"),
        ("schedule{cap_mb=big}", r"option 'cap_mb': got 'big' \(str\); expected float"),
        ("zero3{schedule.cap_mb=4}", r"'cap_mb': got 4.0 with plan=auto, .*plan=one-ahead"),
        ("schedule{memory_budget=lots}", r"'memory_budget': got 'lots'; expected how far the peak"),
        ("schedule{budget=5%}", r"pass 'schedule' has no option 'budget'"),
        ("schedule{plan=two-ahead}", r"got 'two-ahead' .*'auto' or 'one-ahead' or 'single'"),
        ("schedule{mode=flatt}", r"option 'mode': got 'flatt' .*'auto' or 'coalesced' or 'flat'"),
        ("sdma{gathers=large}", r"option 'gathers': got 'large' .*'gaining' or 'all'"),
        ("gather-params{encode=int4}", "got 'int4' .*'int8' or 'fp8' or 'mxfp8' or none"),
        ("gather-params{block=64}", "block=64 without 'encode' has no effect. Give a format"),
        ("gather-params{encode=int8,block=0}", "'block': got 0; expected values per scale"),
        ("gather-params{exact_below_kib=-1}", "'exact_below_kib': got -1.0; expected KiB >= 0"),
        ("gather-params{exact_below_kib=4}", "exact_below_kib=4 without 'encode' has no effect"),
        ("reduce-grads{encode=mxfp8}", "got 'mxfp8' .*'int8' or 'fp8' or none"),
        ("reduce-grads{encode=int8,form=all_reduce}", "exclude each other.*Leave form out"),
        ("average-replicas{encode=mxfp8}", "got 'mxfp8' .*'int8' or 'fp8' or none"),
        ("average-replicas{block=64}", "block=64 without 'encode' has no effect. Give a format"),
    ],
)
def test_wrong_options_say_what_is_expected(text, message):
    with pytest.raises(OptionError, match=message):
        Pipeline.parse(text)
