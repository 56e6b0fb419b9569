"""Parameters step inside of a backward graph when nothing after it reads them."""

import torch
from hypothesis import assume, given, settings

from tests.graphs import drawn_examples
from zpasses.graph.aliases import view_base
from zpasses.graph.queries import Editor, returned_values
from zpasses.graph.tags import Reduction, Tag, add_tag, tagged
from zpasses.graph.verifier.order import find_races
from zpasses.runtime.backward_variants import BackwardVariant, build_backward_variant
from zpasses.runtime.grad_slots import grad_slots, mark_deferrable
from zpasses.runtime.graph_steps import STEP_PARAMS
from zpasses.testing import fake_world, trace_joint
from zpasses.testing.strategies import joint_recipes, pipelines

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def stepping(gm):
    """The variant of a joint graph in which all parameters step that can be deferred, and their
    slots.
    """
    mark_deferrable(gm.graph)
    slots = grad_slots(gm.graph)
    saved = {node.name: tag.params for node, tag in tagged(gm.graph, "shard")}
    variant = BackwardVariant(stepped=frozenset(range(len(slots))))
    return build_backward_variant(gm, variant, saved)[0], slots


def steps_of(graph):
    """Number of a slot -> the node that steps it, and its gradient."""
    found = {}
    for node in graph.find_nodes(op="call_function", target=STEP_PARAMS):
        grads, _, numbers = node.args
        for number, grad in zip(numbers, grads, strict=True):
            assert number not in found
            found[number] = node, grad
    return found


@given(joint_recipes(world_sizes=(1, 2, 3), replicas=(1, 2)), pipelines(lowered=True))
@settings(max_examples=drawn_examples(15), deadline=None)
def test_nothing_reads_a_parameter_after_its_step(recipe, pipeline):
    _, graphs = recipe.run_pipeline(pipeline)
    gm, slots = stepping(graphs[0])
    assume(slots)
    found = steps_of(gm.graph)
    assert sorted(found) == list(range(len(slots)))
    order = {node: at for at, node in enumerate(gm.graph.nodes)}
    bases = {tag.params[0]: node for node, tag in tagged(gm.graph, "shard")}
    for number, slot in enumerate(slots):
        step, grad = found[number]
        assert grad not in returned_values(gm.graph)
        readers = [
            reader
            for reader in gm.graph.nodes
            if reader.op == "call_function"
            and reader is not step
            and any(view_base(each) is bases[slot.param] for each in reader.all_input_nodes)
        ]
        assert all(order[reader] < order[step] for reader in readers)
    # Gathers read shards until they are awaited. The graph was free of races without the steps.
    before = {str(race.buffer) for race in find_races(graphs[0].graph)}
    assert {str(race.buffer) for race in find_races(gm.graph)} <= before


def gathered_late(shares=False):
    """A graph whose parameter is gathered after its gradient has been reduced."""

    def fn(shard, value):
        return shard * 2.0, value * 2.0

    shapes = ((2, 3), (4, 3))
    gm = trace_joint(fn, [torch.zeros(shape, requires_grad=True) for shape in shapes])
    output = gm.graph.output_node()
    edit = Editor(gm.graph, output)
    shard = next(iter(gm.graph.nodes))
    add_tag(shard, Tag("shard", ("p",), origin="test"))

    def call(role, target, *args):
        node = edit.call(target, *args)
        reduction = Reduction(4, torch.float32, None, "0") if role == "shard_grad" else None
        add_tag(node, Tag(role, ("p",), origin="test", reduction=reduction))
        return node

    gradient = returned_values(gm.graph)[-1]
    started = call("reduce", c10d.reduce_scatter_tensor.default, gradient, "avg", 2, "0")
    reduced = call("shard_grad", c10d.wait_tensor.default, started)
    gather = call("gather", c10d.all_gather_into_tensor.default, shard, 2, "0")
    full = call("full", c10d.wait_tensor.default, gather)
    used = edit.call(aten.mul.Tensor, full, 2.0)
    other = call("reduce", c10d.reduce_scatter_tensor.default, used, "avg", 2, "0")
    last = edit.call(c10d.wait_tensor.default, other)
    output.args = ((reduced, last, *[reduced] * shares),)
    gm.recompile()
    return gm


def test_a_parameter_steps_when_its_last_gather_has_been_awaited():
    with fake_world(2):
        gm = gathered_late()
        built, slots = stepping(gm)
        assert [slot.param for slot in slots] == ["p"]
        (step,) = built.graph.find_nodes(op="call_function", target=STEP_PARAMS)
        order = [node.name for node in built.graph.nodes]
        gathered, *_ = [node for node, tag in tagged(built.graph, "full")]
        assert order.index(gathered.name) < order.index(step.name)
        # The graph awaits its last collective after the step, which fills that time.
        assert step.next.target is c10d.wait_tensor.default
        assert find_races(built.graph) == []
        gathered.prepend(step)
        (race,) = find_races(built.graph)
        assert race.launch.target is c10d.all_gather_into_tensor.default


def test_a_gradient_that_the_graph_returns_elsewhere_too_is_returned():
    with fake_world(2):
        built, _ = stepping(gathered_late(shares=True))
        assert not built.graph.find_nodes(op="call_function", target=STEP_PARAMS)
        assert None not in returned_values(built.graph)
