import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.graphs import Param, few_examples, joint, rewritten
from zpasses.graph.queries import collective_of, collectives, is_wait
from zpasses.graph.tags import tag_of
from zpasses.passes import GatherParams, ReduceGrads
from zpasses.passes.bucket import Bucket
from zpasses.passes.overlap import Overlap
from zpasses.testing import (
    fake_world,
    listing,
)
from zpasses.testing.strategies import param_lists

ROOMY = "1GiB"
PARAMS = [Param((4, 2)), Param((6, 2)), Param((8, 2))]


def lower(form="reduce_scatter"):
    return GatherParams(), ReduceGrads(form)


def overlapped(*params, world_size=2, rank=0, form="reduce_scatter", passes=()):
    with fake_world(world_size, rank):
        plain = rewritten(joint(params, rank, world_size), *lower(form), *passes)
        return plain, rewritten(plain, Overlap())


def steps(gm):
    """Returns what happens, in order: starts and waits of collectives by parameter, and
    computation.
    """
    found = []
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        source = node.all_input_nodes[0] if is_wait(node) else node
        if is_wait(node) or collective_of(node) is not None:
            tag, verb = tag_of(source), "await" if is_wait(node) else "start"
            found.append(f"{verb} {tag.role} {','.join(tag.params)}")
        else:
            found.append(node.name)
    return found


def test_gathers_start_after_the_one_before_and_reductions_are_awaited_after_the_next():
    plain, moved = overlapped(*PARAMS)
    assert steps(plain) == [
        *("start gather p0", "await gather p0", "mul"),
        *("start gather p1", "await gather p1", "mul_1"),
        *("start gather p2", "await gather p2", "mul_2"),
        *("mul_3", "start reduce p2", "await reduce p2"),
        *("mul_4", "start reduce p1", "await reduce p1"),
        *("mul_5", "start reduce p0", "await reduce p0"),
    ]
    assert steps(moved) == [
        *("start gather p0", "await gather p0", "start gather p1", "mul"),
        *("await gather p1", "start gather p2", "mul_1"),
        *("await gather p2", "mul_2"),
        *("mul_3", "start reduce p2"),
        *("mul_4", "start reduce p1", "await reduce p2"),
        *("mul_5", "start reduce p0", "await reduce p1"),
        "await reduce p0",
    ]


def test_number_of_moves_is_counted():
    with fake_world(2):
        gm = rewritten(joint(PARAMS, 0, 2), *lower())
        assert Overlap().rewrite(gm.graph) == 4  # not the first gather, nor the last reduction
        single = rewritten(joint([Param((4, 2), frozen=True)], 0, 2), *lower())
        assert Overlap().rewrite(single.graph) == 0


def test_no_node_is_created_and_nothing_else_moves():
    cast = Param((7, 2), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, moved = overlapped(*PARAMS, cast, world_size=3, rank=2)
    assert sorted(listing(plain).splitlines()) == sorted(listing(moved).splitlines())
    moving = ("all_gather", "reduce_scatter", "wait", "_to_copy", "constant_pad", "slice")
    still = [
        [node.name for node in gm.graph.nodes if not node.name.startswith(moving)]
        for gm in (plain, moved)
    ]
    assert still[0] == still[1]


def test_casts_and_padding_start_early_with_their_gather():
    _, moved = overlapped(
        Param((4, 2)), Param((7, 2), param_dtype=torch.bfloat16), world_size=3, rank=2
    )
    names = [node.name for node in moved.graph.nodes if node.op == "call_function"]
    first = names.index("mul")
    wanted = ["_to_copy_default", "constant_pad_nd_default_1", "all_gather_into_tensor_default_1"]
    assert [name for name in names[:first] if name in wanted] == wanted


def test_slices_of_a_gradient_follow_its_wait():
    _, moved = overlapped(Param((7, 2)), Param((7, 3)), world_size=3, rank=1, form="all_reduce")
    names = [node.name for node in moved.graph.nodes if node.op == "call_function"]
    # the first gradient is awaited after the second has started, and its copy follows directly
    started = names.index("all_reduce_default_1")
    assert names[started + 1 : started + 3] == ["wait_tensor_default_2", "slice_copy_tensor"]


@pytest.mark.parametrize("mode", ["coalesced", "flat"])
def test_a_bucket_moves_as_a_whole(mode):
    bucket = Bucket(cap_mb=100 / (1 << 20), mode=mode, memory_budget=ROOMY)
    params = [Param((4, 2)), Param((6, 2)), Param((8, 2)), Param((2, 2))]
    plain, moved = overlapped(*params, passes=(bucket,))
    assert [each for _, each in collectives(plain.graph)] == [
        each for _, each in collectives(moved.graph)
    ]
    order = steps(moved)
    starts = [at for at, step in enumerate(order) if step.startswith("start gather")]
    assert len(starts) == 2
    assert starts[1] < order.index("mul")
    waits = [at for at, step in enumerate(order) if step.startswith("await reduce")]
    assert waits[0] > [at for at, step in enumerate(order) if step.startswith("start reduce")][1]


def in_flight(gm, kind):
    """Returns the largest number of collectives of a kind that are in flight at once."""
    most, pending = 0, set()
    for node in gm.graph.nodes:
        collective = collective_of(node)
        if collective is not None and kind in collective.op:
            pending.add(node)
        elif is_wait(node):
            pending.discard(node.all_input_nodes[0])
        most = max(most, len(pending))
    return most


@few_examples
@given(
    param_lists(max_size=5),
    st.sampled_from([2, 3]),
    st.sampled_from(["reduce_scatter", "all_reduce"]),
)
def test_at_most_one_gather_and_two_reductions_are_in_flight(params, world_size, form):
    _, moved = overlapped(*params, world_size=world_size, form=form)
    assert in_flight(moved, "gather") <= 1
    assert in_flight(moved, "reduce") <= 2
