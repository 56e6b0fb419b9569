"""What the plan of a step knows of a graph, and the turning point of its body."""

import re
from dataclasses import replace

import pytest
import torch
from torch import fx

from zpasses import compat
from zpasses.backend.block_steps import BlockStep, add_turning_point, graph_cost, turn_text
from zpasses.backend.hoisted_parts import by_engine
from zpasses.cost.plan.prefetch import GraphRun, MovableValue
from zpasses.cost.time.clock import Channel, CollectiveTiming
from zpasses.cost.time.target import Target
from zpasses.graph.hoisting import hoist_collectives
from zpasses.graph.queries import collective_of
from zpasses.option_values import parse_size
from zpasses.runtime.block_schedule import TURNING_POINT
from zpasses.runtime.grad_slots import returned_gradients
from zpasses.testing import JointRecipe, ParamSpec, fake_world

FAST_LINKS = Target.parse("cpu,link_gb_s=1e6,launch_us=0.01,hop_us=0.01")
SLOW_LINKS = Target.parse("cpu,link_gb_s=1e-6")
aten = torch.ops.aten
NOTHING = CollectiveTiming(0.0)


@pytest.fixture(scope="module")
def lowered():
    params = tuple(ParamSpec((64, 64)) for _ in range(2))
    return JointRecipe(params, 2).run_pipeline("zero2")[1][0]


@pytest.fixture(scope="module")
def gathering():
    """A graph that gathers two parameters in one launch."""
    params = tuple(ParamSpec((64, 64)) for _ in range(2))
    pipeline = "gather-params,reduce-grads,schedule{plan=single,cap_mb=25,mode=coalesced}"
    return JointRecipe(params, 2).run_pipeline(pipeline)[1][0]


@pytest.fixture(autouse=True)
def world(lowered):
    with fake_world(2, 0):
        yield


def backward(gm, target, products=4):
    """Returns the parts of a graph that reduces gradients, after a chain of matrix products."""
    hoisted = hoist_collectives(gm, returned_gradients(gm.graph))
    graph = hoisted.body.graph
    node = next(n for n in graph.nodes if getattr(n.meta.get("val"), "shape", None) == (64, 64))
    with graph.inserting_before(graph.output_node()):
        for _ in range(products):
            value = node.meta["val"]
            node = graph.call_function(aten.mm.default, (node, node))
            node.meta["val"] = value
    output = graph.output_node()
    output.args = ((*output.args[0], node),)
    add_turning_point(hoisted, target)
    return hoisted


def turning_points(hoisted):
    return hoisted.body.graph.find_nodes(op="call_function", target=TURNING_POINT)


def test_the_turning_point_is_behind_a_product_past_a_quarter_of_the_compute(lowered):
    hoisted = backward(lowered, FAST_LINKS)
    (point,) = turning_points(hoisted)
    assert point.prev is point.args[0]
    assert compat.flop_formula(point.args[0].target) is not None
    cost = graph_cost(hoisted, "backward", FAST_LINKS)
    assert 0.25 * cost.compute_us <= cost.turn_us < cost.compute_us
    assert cost.gathers_at_turn
    assert turn_text(hoisted, cost) == f", gathers and reductions at {point.args[0]}"


@pytest.mark.parametrize(("target", "products"), [(SLOW_LINKS, 4), (FAST_LINKS, 0)])
def test_long_reductions_and_bodies_without_products_have_no_turning_point(
    lowered, target, products
):
    hoisted = backward(lowered, target, products)
    assert turning_points(hoisted) == []
    cost = graph_cost(hoisted, "backward", target)
    assert (cost.turn_us, cost.gathers_at_turn) == (None, False)
    assert turn_text(hoisted, cost) == ""


def test_gathers_before_a_graph_may_take_each_route_that_reaches_the_group(gathering):
    hoisted = hoist_collectives(gathering)
    near = Target.parse("mi300x")
    run = graph_cost(hoisted, "forward", near, copy_engines=True)
    (mori,) = run.engines
    assert (mori.route, mori.timing.channel) == ("mori", Channel("node", "engines"))
    assert mori.timing.duration_us > run.gather.duration_us  # engines take longer to start
    assert mori.timing.compute_slowdown < run.gather.compute_slowdown
    assert mori.packed_bytes == 1.5 * run.gathered_bytes  # a copy of it, and of half of it sent
    assert graph_cost(hoisted, "forward", near).engines == ()
    far = Target.parse("mi300x,ranks_per_node=1")
    assert graph_cost(hoisted, "forward", far, copy_engines=True).engines == ()
    unmeasured = graph_cost(hoisted, "forward", Target.parse("h100"), copy_engines=True)
    assert [each.route for each in unmeasured.engines] == ["nccl_zero"]  # copy_engines=on
    swapped = by_engine(hoisted.gathers.graph, "mori")
    kinds = [
        [collective_of(node).op for node in gm.graph.nodes if collective_of(node)]
        for gm in (hoisted.gathers.graph, swapped)
    ]
    assert kinds == [["all_gather_into_tensor_coalesced"], ["sdma_all_gather_coalesced"]]
    assert by_engine(hoisted.gathers.graph, "") is hoisted.gathers.graph


def test_the_memory_before_and_after_the_turning_point_is_that_of_the_body(lowered):
    hoisted = backward(lowered, FAST_LINKS)
    cost = graph_cost(hoisted, "backward", FAST_LINKS)
    (point,) = turning_points(hoisted)
    hoisted.body.graph.erase_node(point)
    whole = graph_cost(hoisted, "backward", FAST_LINKS)
    assert max(cost.turn_peak_bytes, cost.peak_bytes) == whole.peak_bytes
    assert cost.turn_peak_bytes > 0


def test_the_turning_point_does_nothing_outside_of_a_backward():
    graph = fx.Graph()
    given = graph.placeholder("given")
    graph.call_function(TURNING_POINT, (given,))
    graph.output(given)
    value = torch.ones(2)
    assert fx.GraphModule({}, graph)(value) is value


def test_only_a_forward_saves_what_it_returns(lowered):
    hoisted = backward(lowered, FAST_LINKS)
    saved = [graph_cost(hoisted, kind, FAST_LINKS).saved_bytes for kind in ("forward", "inference")]
    assert saved[0] > 0 == saved[1]


def test_what_may_move_has_the_durations_of_its_copies(lowered):
    hoisted = backward(lowered, FAST_LINKS)
    at = len(hoisted.body.graph.output_node().args[0]) - 1
    size = 64 * 64 * 4
    fast = Target.parse("h100,host_out_gb_s=1,host_in_gb_s=2")
    cost = graph_cost(hoisted, "forward", fast, [at])
    (value,) = cost.movable
    assert value.nbytes == size
    assert value.out_us - value.in_us == pytest.approx(size / 2e3)
    assert not cost.copies_compute
    assert graph_cost(hoisted, "forward", FAST_LINKS, [at]).copies_compute


def test_steps_of_which_nothing_fits_say_what_rests_on_the_host():
    forward = GraphRun("f", False, 9.0, NOTHING, NOTHING, 0, 0, 1 << 20, 1 << 20)
    value = MovableValue(1 << 19, 1.0, 1.0)
    runs = [replace(forward, name=str(at), movable=(value,)) for at in range(4)]
    runs += [replace(forward, is_backward=True, saved_bytes=0)] * 4
    step = BlockStep(runs, host_bytes=1 << 30)
    assert "gathered ahead and 1 MiB rest on the host, and" in step.too_little_memory("1KiB", 1)
    assert "rest on the host" not in BlockStep(runs).too_little_memory("1KiB", 1)


def test_steps_of_which_nothing_fits_name_the_memory_of_the_host_that_helps():
    forward = GraphRun("f", False, 9.0, NOTHING, NOTHING, 0, 0, 1 << 20, 1 << 20)
    value = MovableValue(1 << 19, 1.0, 1.0)
    runs = [replace(forward, name=str(at), movable=(value,)) for at in range(4)]
    runs += [replace(forward, is_backward=True, saved_bytes=0)] * 4
    step = BlockStep(runs)
    least = step.planned(1).peak_bytes
    text = step.too_little_memory("some", least - 1)
    (advice,) = re.findall(r"With host_memory='([^']*)', some of what forward", text)
    assert "rests on the host, and a plan fits. Or use more ranks" in text
    given = replace(step, host_bytes=parse_size(advice, ""))
    assert given.planned(least - 1).peak_bytes < least
    text = step.too_little_memory("1KiB", 1)
    assert "With host_memory='1 MiB', some of what forward saves rests on the host, and the" in text
    text = replace(step, host_bytes=1 << 19).too_little_memory("1KiB", 1)
    assert (
        "With host_memory='1 MiB' in place of '512 KiB', more of what forward saves rests" in text
    )
    text = replace(step, host_bytes=1 << 30).too_little_memory("1KiB", 1)
    assert "With host_memory" not in text
    assert " are missing. Use more ranks" in text


@pytest.mark.parametrize(
    ("returned", "saved", "said"),
    [
        (((0, 100), (1, 900)), 1000, "are missing. Checkpoint the blocks, use more ranks"),
        (((0, 1000), (1, 8)), 1008, "are missing. Use more ranks"),  # a checkpoint inside of it
        (((0, 100), (1, 900)), 0, "are missing. Use more ranks"),  # around it
    ],
)
def test_checkpoints_are_advised_only_where_they_save_memory(returned, saved, said):
    block = GraphRun("f", False, 9.0, NOTHING, NOTHING, 0, 0, 9000, saved, returned=returned)
    again = replace(block, saved_bytes=1000)
    backward = replace(block, is_backward=True, saved_bytes=0, returned=())
    runs = [block, block, backward, again, backward]  # the second one runs again in backward
    assert said in BlockStep(runs).too_little_memory("1KiB", 1)
