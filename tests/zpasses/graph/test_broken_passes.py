"""Broken passes: the static check finds each, or it is listed as beyond the check and simulated
ranks find it.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.graphs import Param, joint
from zpasses import Level, Pass, PassError
from zpasses.graph.dialect import REDUCE_GRAD, UNSHARD
from zpasses.graph.queries import Editor, calls, collectives, replace_node, value_of
from zpasses.graph.tags import Tag, add_tag, retag, tag_of, tagged
from zpasses.passes import Bucket, GatherParams, ReduceGrads
from zpasses.pipeline.runner import run_passes
from zpasses.testing import fake_world

aten, F = torch.ops.aten, torch.ops._c10d_functional
WAIT = F.wait_tensor.default
GATHER, GATHERS = F.all_gather_into_tensor.default, F.all_gather_into_tensor_coalesced.default
GATHER_OUT = F.all_gather_into_tensor_out.default
SCATTER, SCATTERS = F.reduce_scatter_tensor.default, F.reduce_scatter_tensor_coalesced.default


@dataclass(frozen=True)
class Do(Pass):
    """Runs a function on the graph."""

    name: ClassVar[str] = "broken"
    level: ClassVar[Level] = Level.JOINT

    what: Any = field(default=None)

    def rewrite(self, graph):
        changes = self.what(graph)
        return 1 if changes is None else changes


# --- graphs ---------------------------------------------------------------------------------------
def dialect():
    return joint([Param((4, 2)), Param((4, 2))], 0, 2)


def lowered():
    gm = dialect()
    GatherParams()(gm.graph)
    ReduceGrads("reduce_scatter")(gm.graph)
    return gm


def all_reduced():
    gm = dialect()
    GatherParams()(gm.graph)
    ReduceGrads("all_reduce")(gm.graph)
    return gm


def _bucketed(mode):
    def make():
        gm = lowered()
        Bucket(mode=mode, memory_budget="1GiB")(gm.graph)
        return gm

    make.__name__ = mode
    return make


coalesced, flat = _bucketed("coalesced"), _bucketed("flat")


def by_hand(*shapes):
    """An empty graph with inputs."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "xyz"[: len(shapes)]]
    with FakeTensorMode() as mode:
        for node, shape in zip(inputs, shapes, strict=True):
            node.meta["val"] = mode.from_tensor(torch.zeros(shape))
    end = graph.output(())
    return graph, inputs, Editor(graph, before=end), end


def in_place():
    graph, (x, y), edit, end = by_hand((4, 2), (4, 2))
    buffer = edit.call(aten.clone.default, x)
    started = edit.call(F.all_reduce_.default, buffer, "sum", "0")
    other = edit.call(aten.mul.Tensor, y, 2)
    total = edit.call(WAIT, started)
    end.args = ((edit.call(aten.add.Tensor, total, other),),)
    return fx.GraphModule({}, graph)


def out_of_place():
    graph, (x, y), edit, end = by_hand((2, 2), (4, 2))
    buffer = edit.call(aten.empty.memory_format, [4, 2], device="cpu")
    source = edit.call(aten.clone.default, x)
    started = edit.call(GATHER_OUT, source, 2, "0", out=buffer)
    add_tag(started, Tag("gather", ("x",)))
    other = edit.call(aten.mul.Tensor, y, 2)
    full = edit.call(WAIT, started)
    add_tag(full, Tag("full", ("x",)))
    end.args = ((edit.call(aten.add.Tensor, full, other),),)
    return fx.GraphModule({}, graph)


# --- edits ----------------------------------------------------------------------------------------
def nodes(graph, *targets):
    return calls(graph, *targets)


def outputs(graph):
    return list(graph.output_node().args[0])


def return_(graph, values):
    graph.output_node().args = (tuple(values),)


def exchange(one, other, place=0):
    """Exchange an argument of two calls."""
    args = [list(each.args) for each in (one, other)]
    args[0][place], args[1][place] = args[1][place], args[0][place]
    one.args, other.args = map(tuple, args)


def before(node):
    return Editor(node.graph, before=node)


def replace_input(node, new, place=0):
    node.args = (*node.args[:place], new, *node.args[place + 1 :])


def tagged_copy(edit, like, target, *args):
    node = edit.call(target, *args)
    add_tag(node, tag_of(like))
    return node


# --- interface ------------------------------------------------------------------------------------
def drop_output(graph):
    return_(graph, outputs(graph)[:-1])


def add_output(graph):
    return_(graph, [*outputs(graph), outputs(graph)[0]])


def swap_outputs(graph):
    first, second, *rest = outputs(graph)
    return_(graph, [second, first, *rest])


def swap_gradients(graph):
    values = outputs(graph)
    places = [i for i, each in enumerate(values) if each is not None and i > 1]
    a, b = places[0], places[-1]
    values[a], values[b] = values[b], values[a]
    return_(graph, values)


def swap_copies_of_gradients(graph):
    values = outputs(graph)
    grads = [i for i, each in enumerate(values) if each is not None and i > 1]
    edit = before(graph.output_node())
    a, b = grads[0], grads[-1]
    copies = [edit.call(aten.clone.default, values[i]) for i in (b, a)]
    values[a], values[b] = copies
    return_(graph, values)


def replace_output_by_none(graph):
    return_(graph, [None, *outputs(graph)[1:]])


def replace_output_by_number(graph):
    return_(graph, [1.0, *outputs(graph)[1:]])


def replace_gradient_by_input(graph):
    values = outputs(graph)
    place = next(i for i, each in enumerate(values) if i > 1 and each is not None)
    return_(graph, [next(iter(graph.nodes)) if i == place else v for i, v in enumerate(values)])


def cast_output(graph):
    first, *rest = outputs(graph)
    cast = before(graph.output_node()).call(aten._to_copy.default, first, dtype=torch.float64)
    return_(graph, [cast, *rest])


def transpose_output_memory(graph):
    first, *rest = outputs(graph)
    edit = before(graph.output_node())
    turned = edit.call(aten.t.default, first)
    turned = edit.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return_(graph, [edit.call(aten.t.default, turned), *rest])


def shrink_output(graph):
    first, *rest = outputs(graph)
    part = before(graph.output_node()).call(aten.slice.Tensor, first, 0, 0, 1)
    return_(graph, [part, *rest])


def add_input(graph):
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        graph.placeholder("extra").meta["val"] = value_of(first)


def remove_input(graph):
    batch = [node for node in graph.nodes if node.op == "placeholder"][1]
    edit = before(nodes(graph, UNSHARD)[0])
    batch.replace_all_uses_with(edit.call(aten.zeros.default, [4, 2]))
    graph.erase_node(batch)


def reorder_inputs(graph):
    first = next(iter(graph.nodes))
    first.prepend(first.next)


def restate_input(graph):
    first = next(iter(graph.nodes))
    first.meta["val"] = first.meta["val"].to(torch.float64)


def delete_everything(graph):
    for node in reversed(graph.nodes):
        graph.erase_node(node)


# --- reported changes -----------------------------------------------------------------------------
def move_and_return_0(graph):
    second = nodes(graph, GATHER)[1]
    nodes(graph, GATHER)[0].prepend(second)
    return 0


def change_and_return_0(graph):
    replace_input(nodes(graph, aten.mul.Tensor)[0], 2, 1)
    return 0


def insert_and_return_0(graph):
    before(graph.output_node()).call(aten.neg.default, next(iter(graph.nodes)))
    return 0


def return_nothing(graph):
    return "three"


# --- values ---------------------------------------------------------------------------------------
def state_strides(graph):
    mul = nodes(graph, aten.mul.Tensor)[0]
    mul.meta["val"] = mul.meta["val"].t().contiguous().t()


def state_shape(graph):
    mul = nodes(graph, aten.mul.Tensor)[0]
    mul.meta["val"] = mul.meta["val"].new_empty(8, 2)


def state_dtype(graph):
    mul = nodes(graph, aten.mul.Tensor)[0]
    mul.meta["val"] = mul.meta["val"].to(torch.float16)


def state_nothing(graph):
    mul = nodes(graph, aten.mul.Tensor)[0]
    with graph.inserting_before(mul):
        replace_input(mul, graph.call_function(aten.neg.default, (mul.args[0],)))


def narrow_input(graph):
    mul = nodes(graph, aten.mul.Tensor)[0]
    replace_input(mul, before(mul).call(aten.slice.Tensor, mul.args[0], 0, 0, 3))


def use_before_definition(graph):
    mul = nodes(graph, aten.mul.Tensor)[0]
    next(iter(graph.nodes)).append(mul)


def drop_an_output_of_a_call(graph):
    started = nodes(graph, GATHERS)[0]
    started.meta["val"] = started.meta["val"][:1]


# --- collectives ----------------------------------------------------------------------------------
def remove_wait(graph):
    wait = nodes(graph, WAIT)[0]
    replace_node(wait, wait.args[0])


def await_twice(graph):
    wait, mul = nodes(graph, WAIT)[0], nodes(graph, aten.mul.Tensor)[0]
    replace_input(mul, tagged_copy(before(mul), wait, WAIT, wait.args[0]))


def peek(graph):
    wait, mul = nodes(graph, WAIT)[0], nodes(graph, aten.mul.Tensor)[0]
    replace_input(mul, before(mul).call(aten.clone.default, wait.args[0]))


def start_for_nobody(graph):
    started, mul = nodes(graph, GATHER)[0], nodes(graph, aten.mul.Tensor)[0]
    tagged_copy(before(mul), started, GATHER, *started.args)


def forget_tag(graph):
    wait = nodes(graph, WAIT)[0]
    edit = before(wait)
    started = edit.call(GATHER, *wait.args[0].args)
    replace_input(wait, started)


def fetch_one_of_two(graph):
    gone = nodes(graph, operator.getitem)[0]
    (wait,) = gone.users
    kept = nodes(graph, operator.getitem)[1]
    (other,) = kept.users
    other.append(wait)
    wait.replace_all_uses_with(other)
    graph.erase_node(wait)
    graph.erase_node(gone)


def fetch_one_twice(graph):
    first, second = nodes(graph, operator.getitem)[:2]
    replace_input(second, first.args[1], 1)


def swap_fetched(graph):
    exchange(*nodes(graph, operator.getitem)[:2], 1)


def await_fetched_twice(graph):
    fetched = nodes(graph, operator.getitem)[0]
    (wait,) = fetched.users
    mul = nodes(graph, aten.mul.Tensor)[-1]
    again = tagged_copy(before(mul), wait, WAIT, fetched)
    before(mul).call(aten.neg.default, again)


def name_unknown_group(graph):
    replace_input(nodes(graph, GATHER)[0], "nobody", 2)


def name_unknown_reduce_op(graph):
    replace_input(nodes(graph, SCATTER)[0], "median", 1)


def state_group_size(graph):
    started = nodes(graph, GATHER)[0]
    edit = before(started)
    half = edit.call(aten.slice.Tensor, started.args[0], 0, 0, 1)
    wrong = tagged_copy(edit, started, GATHER, half, 4, "0")
    replace_node(started, wrong)


# --- memory ---------------------------------------------------------------------------------------
def read_in_flight(graph):
    started, other = nodes(graph, F.all_reduce_.default)[0], nodes(graph, aten.mul.Tensor)[0]
    replace_input(other, started.args[0])


def read_view_in_flight(graph):
    started, other = nodes(graph, F.all_reduce_.default)[0], nodes(graph, aten.mul.Tensor)[0]
    edit = before(other)
    flat_view = edit.call(aten.view.default, started.args[0], [8])
    replace_input(other, edit.call(aten.view.default, flat_view, [4, 2]))


def move_wait_behind_reader(graph):
    wait, add = nodes(graph, WAIT)[0], nodes(graph, aten.add.Tensor)[0]
    replace_input(add, nodes(graph, F.all_reduce_.default)[0].args[0])
    add.append(wait)


def write_in_flight(graph):
    other = nodes(graph, aten.mul.Tensor)[0]
    before(other).call(aten.mul_.Tensor, nodes(graph, F.all_reduce_.default)[0].args[0], 2)


def write_gather_input_in_flight(graph):
    other = nodes(graph, aten.mul.Tensor)[0]
    before(other).call(aten.zero_.default, nodes(graph, GATHER_OUT)[0].args[0])


def write_functional_input_in_flight(graph):
    started = nodes(graph, GATHER)[0]
    edit = before(started)
    source = edit.call(aten.clone.default, started.args[0])
    replace_input(started, source)
    before(next(iter(started.users))).call(aten.zero_.default, source)


def read_buffer_in_flight(graph):
    other = nodes(graph, aten.mul.Tensor)[0]
    replace_input(other, nodes(graph, aten.empty.memory_format)[0])


def never_await(graph):
    wait = nodes(graph, WAIT)[0]
    replace_node(wait, wait.args[0])


def start_on_what_is_in_flight(graph):
    other = nodes(graph, aten.mul.Tensor)[0]
    buffer = nodes(graph, F.all_reduce_.default)[0].args[0]
    add_tag(before(other).call(F.all_reduce_.default, buffer, "sum", "0"), Tag("reduce", ("p",)))


def write_to_input(graph):
    mul = nodes(graph, aten.mul.Tensor)[0]
    before(mul).call(aten.mul_.Tensor, mul.args[1], 2)


def write_to_view_of_input(graph):
    mul = nodes(graph, aten.mul.Tensor)[0]
    edit = before(mul)
    edit.call(aten.zero_.default, edit.call(aten.slice.Tensor, mul.args[1], 0, 0, 1))


def reduce_input_in_place(graph):
    started = nodes(graph, F.all_reduce_.default)[0]
    replace_input(started, next(iter(graph.nodes)))


def write_to_gathered(graph):
    mul = nodes(graph, aten.mul.Tensor)[0]
    before(mul).call(aten.mul_.Tensor, mul.args[0], 2)


def write_to_gathered_buffer(graph):
    add = nodes(graph, aten.add.Tensor)[0]
    before(add).call(aten.zero_.default, nodes(graph, aten.empty.memory_format)[0])


def gather_uninitialised(graph):
    started = nodes(graph, GATHER)[0]
    replace_input(started, before(started).call(aten.empty_like.default, started.args[0]))


def gather_partly_filled(graph):
    started = nodes(graph, GATHER)[0]
    source = started.args[0]
    edit = before(started)
    buffer = edit.call(aten.new_empty.default, source, [2, 2])
    part = edit.call(aten.slice.Tensor, buffer, 0, 0, 1)
    edit.call(aten.copy_.default, part, edit.call(aten.slice.Tensor, source, 0, 0, 1))
    replace_input(started, buffer)


def reduce_uninitialised(graph):
    started = nodes(graph, SCATTER)[0]
    replace_input(started, before(started).call(aten.empty_like.default, started.args[0]))


def return_uninitialised(graph):
    first, *rest = outputs(graph)
    return_(graph, [before(graph.output_node()).call(aten.empty_like.default, first), *rest])


def unfill(graph):
    """Remove the only write to a buffer that a collective reads."""
    started = nodes(graph, GATHER_OUT)[0]
    source = started.args[0]
    edit = before(started)
    buffer = edit.call(aten.empty_strided.default, [2, 2], [2, 1], device="cpu")
    view = edit.call(aten.view.default, buffer, [4])
    replace_input(started, edit.call(aten.view.default, view, [2, 2]))
    graph.erase_node(source)


# --- parameters -----------------------------------------------------------------------------------
def swap_shards(graph):
    exchange(*nodes(graph, GATHER))


def gather_other_shard(graph):
    first, second = nodes(graph, GATHER)
    replace_input(first, second.args[0])


def gather_other_shard_in_the_dialect(graph):
    first, second = nodes(graph, UNSHARD)
    replace_input(first, second.args[0])


def gather_batch(graph):
    started = nodes(graph, GATHER)[0]
    batch = [node for node in graph.nodes if node.op == "placeholder"][1]
    replace_input(started, before(started).call(aten.slice.Tensor, batch, 0, 0, 2))


def swap_coalesced_shards(graph):
    started = nodes(graph, GATHERS)[0]
    replace_input(started, list(started.args[0])[::-1])


def swap_packed_shards(graph):
    packed = nodes(graph, aten.cat.default)[0]
    replace_input(packed, list(packed.args[0])[::-1])


def swap_packed_gradients(graph):
    packed = nodes(graph, aten.cat.default)[-1]
    replace_input(packed, list(packed.args[0])[::-1])


def retag_gather(graph):
    retag(nodes(graph, GATHER)[0], params=("p1",))


def retag_full(graph):
    full = next(node for node, _ in tagged(graph, "full"))
    retag(full, params=("p1",))


def swap_readers(graph):
    muls = nodes(graph, aten.mul.Tensor)[:2]
    muls[0].prepend(nodes(graph, UNSHARD)[1])
    exchange(*muls)


def repeat_shard(graph):
    """Remove a gather; the shard, twice, has the shape of the parameter."""
    started = nodes(graph, GATHER)[0]
    (wait,) = started.users
    shard = started.args[0]
    replace_node(wait, before(wait).call(aten.cat.default, [shard, shard]))
    graph.erase_node(started)


def repeat_shard_with_a_tag(graph):
    started = nodes(graph, GATHER)[0]
    (wait,) = started.users
    shard = started.args[0]
    replace_node(wait, tagged_copy(before(wait), wait, aten.cat.default, [shard, shard]))
    graph.erase_node(started)


def zeros_for_a_parameter(graph):
    read = nodes(graph, UNSHARD)[0]
    replace_node(read, before(read).call(aten.zeros.default, [4, 2]))


def skip_reduction(graph):
    """Return this rank's rows of its own gradient."""
    started = nodes(graph, SCATTER)[0]
    (wait,) = started.users
    mine = tagged_copy(before(wait), wait, aten.slice_copy.Tensor, started.args[0], 0, 0, 2)
    replace_node(wait, mine)
    graph.erase_node(started)


def skip_reduction_in_the_dialect(graph):
    node = nodes(graph, REDUCE_GRAD)[0]
    replace_node(node, before(node).call(aten.slice_copy.Tensor, node.args[0], 0, 0, 2))


def zeros_for_a_gradient(graph):
    node = nodes(graph, REDUCE_GRAD)[0]
    replace_node(node, before(node).call(aten.zeros.default, [2, 2]))


def swap_reduced_gradients(graph):
    first, second = nodes(graph, REDUCE_GRAD)
    late = second if list(graph.nodes).index(second) > list(graph.nodes).index(first) else first
    early = first if late is second else second
    late.prepend(early)
    exchange(first, second)


def lower_gradients_of_each_other(graph):
    swap_reduced_gradients(graph)
    ReduceGrads("reduce_scatter").rewrite(graph)


def reduce_other_gradient(graph):
    first, second = nodes(graph, REDUCE_GRAD)
    replace_input(second, first.args[0])


def swap_coalesced_gradients(graph):
    started = nodes(graph, SCATTERS)[0]
    replace_input(started, list(started.args[0])[::-1])


def swap_reduced_outputs(graph):
    exchange(*[node for node, _ in tagged(graph, "reduced") if node.target is operator.getitem], 1)


def swap_reduced_waits(graph):
    first, second = [
        node for node, _ in tagged(graph, "reduced", "shard_grad") if node.target is WAIT
    ]
    for each in [*(user for user in first.users if user.op != "output"), first]:
        second.append(each)
    exchange(first, second)


def reduce_input_of_model(graph):
    started = nodes(graph, SCATTER)[0]
    replace_input(started, next(each for each in graph.nodes if value_of(each).shape == (4, 2)))


# --- beyond a static check ------------------------------------------------------------------------
def double(graph):
    mul = nodes(graph, aten.mul.Tensor)[0]
    replace_input(mul, before(mul).call(aten.mul.Tensor, mul.args[1], 2), 1)


def negate_shard(graph):
    started = nodes(graph, GATHER)[0]
    replace_input(started, before(started).call(aten.neg.default, started.args[0]))


def sum_for_average(graph):
    replace_input(nodes(graph, SCATTER)[0], "sum", 1)


def maximum_for_average(graph):
    replace_input(nodes(graph, SCATTER)[0], "max", 1)


def reverse_rows(graph):
    mul = nodes(graph, aten.mul.Tensor)[0]
    replace_input(mul, before(mul).call(aten.flip.default, mul.args[0], [0]))


def rotate_rows(graph):
    """As if the ranks were gathered in another order."""
    mul = nodes(graph, aten.mul.Tensor)[0]
    replace_input(mul, before(mul).call(aten.roll.default, mul.args[0], [2], [0]))


def swap_slices(graph):
    """The parts of a flat buffer have equal shapes; the offsets say whose they are."""
    parts = [node for node in nodes(graph, aten.slice.Tensor) if tag_of(node) is None][:2]
    exchange(*parts, 2)
    exchange(*parts, 3)


def add_tangent(graph):
    started = nodes(graph, SCATTER)[0]
    source = started.args[0]
    replace_input(started, before(started).call(aten.add.Tensor, source, source))


def return_other_activation(graph):
    first, *rest = outputs(graph)
    return_(graph, [first.args[1], *rest])


def subtract_for_multiply(graph):
    nodes(graph, aten.mul.Tensor)[0].target = aten.sub.Tensor


def gather_local_mean(graph):
    started = nodes(graph, GATHER)[0]
    edit = before(started)
    mean = edit.call(aten.mean.dim, started.args[0], [0], True)
    replace_input(started, edit.call(aten.add.Tensor, started.args[0], mean))


def round_gradient(graph):
    started = nodes(graph, SCATTER)[0]
    edit = before(started)
    coarse = edit.call(aten.mul.Tensor, started.args[0], 1 / 3)
    coarse = edit.call(aten._to_copy.default, coarse, dtype=torch.bfloat16)
    coarse = edit.call(aten._to_copy.default, coarse, dtype=torch.float32)
    replace_input(started, edit.call(aten.mul.Tensor, coarse, 3))


BEYOND_STATIC: dict[Callable[[fx.Graph], object], str] = {
    double: "arithmetic on activations: only numbers show it",
    negate_shard: "a pass may prepare a gather's input by any computation, such as quantization",
    sum_for_average: "a pass may scale a sum itself",
    maximum_for_average: "the reduce op is known, and the check does not know what it should be",
    reverse_rows: "the order of rows is no part of shapes or tags",
    rotate_rows: "the order of ranks in a gather is no part of shapes or tags",
    swap_slices: "offsets into a flat buffer are not followed",
    add_tangent: "arithmetic on gradients: only numbers show it",
    return_other_activation: "an earlier value of the same kind, as no-op removal returns",
    subtract_for_multiply: "another operator with the same shapes",
    gather_local_mean: "the shard still reaches the gather",
    round_gradient: "precision is lost between casts to and fro",
}
"""Broken passes that only running them shows, and why."""

STATIC = [
    (dialect, drop_output, r"returns \d+ values, expected"),
    (dialect, add_output, r"returns \d+ values, expected"),
    (dialect, swap_outputs, r"output 0 is mul.*was output 1"),
    (dialect, swap_gradients, r"output 2 is .* expected .*was output 4"),
    (dialect, replace_output_by_none, r"output 0 is None, expected mul"),
    (dialect, replace_output_by_number, r"output 0 is 1.0, expected mul"),
    (dialect, cast_output, r"output 0 is _to_copy.*float64\[4, 2\].*expected mul.*float32"),
    (dialect, transpose_output_memory, r"output 0 is .*strides \[1, 4\].*expected.*\[2, 1\]"),
    (dialect, shrink_output, r"output 0 is slice.*\[1, 2\].*expected mul.*\[4, 2\]"),
    (dialect, add_input, r"added the graph input 'extra'"),
    (dialect, remove_input, r"removed the graph input"),
    (dialect, reorder_inputs, r"input 0 is .*, expected"),
    (dialect, restate_input, r"says float64.*callers pass float32"),
    (dialect, delete_everything, r"removed the output node"),
    (lowered, move_and_return_0, r"returned 0 changes, but moved %all_gather"),
    (lowered, change_and_return_0, r"returned 0 changes, but changed %mul"),
    (lowered, insert_and_return_0, r"returned 0 changes, but changed"),
    (lowered, return_nothing, r"returned 'three'; expected the number of changes"),
    (dialect, state_strides, r"strides \[2, 1\], but meta\['val'\] says .*strides \[1, 4\]"),
    (dialect, state_shape, r"computes float32\[4, 2\] on cpu, but .*\[8, 2\]"),
    (dialect, state_dtype, r"but meta\['val'\] says float16"),
    (dialect, state_nothing, r"without meta\['val'\]"),
    (dialect, narrow_input, r"%mul.* does not run on its inputs"),
    (dialect, use_before_definition, r"malformed graph"),
    (coalesced, drop_an_output_of_a_call, r"computes 2 tensors, but meta\['val'\] has 1"),
    (lowered, remove_wait, r"must be read by exactly one wait_tensor, but is read by mul"),
    (lowered, await_twice, r"exactly one wait_tensor, but is read by wait_tensor\w*, wait_tensor"),
    (lowered, peek, r"exactly one wait_tensor, but is read by wait_tensor\w*, clone"),
    (lowered, start_for_nobody, r"is read by nobody"),
    (lowered, forget_tag, r"made %all_gather.* without a tag"),
    (coalesced, fetch_one_of_two, r"has 2 outputs, .* output 0 is fetched by nobody"),
    (coalesced, fetch_one_twice, r"output 0 is fetched by getitem\w*, getitem"),
    (coalesced, swap_fetched, r"is tagged as gathered of 'p0', but holds p1"),
    (coalesced, await_fetched_twice, r"output 0 is read by wait_tensor\w*, wait_tensor"),
    (lowered, name_unknown_group, r"on group 'nobody', but this process is in '0'"),
    (lowered, name_unknown_reduce_op, r"reduces by 'median'; expected one of avg, band"),
    (lowered, state_group_size, r"group_size=4, but its group has 2 ranks"),
    (in_place, read_in_flight, r"%mul.* reads or writes what the collective all_reduce_"),
    (in_place, read_view_in_flight, r"%mul.* reads or writes what the collective all_reduce_"),
    (in_place, move_wait_behind_reader, r"%add.* reads or writes what the collective"),
    (in_place, write_in_flight, r"%mul_.* reads or writes what the collective"),
    (out_of_place, write_gather_input_in_flight, r"%zero_.* writes to the input of .* running"),
    (lowered, write_functional_input_in_flight, r"%zero_.* writes to the input of .* running"),
    (out_of_place, read_buffer_in_flight, r"%mul.* reads or writes what the collective"),
    (in_place, never_await, r"is never awaited|reads or writes what"),
    (in_place, start_on_what_is_in_flight, r"%all_reduce_\w*_1.* reads or writes what"),
    (dialect, write_to_input, r"%mul_.* writes to the graph input"),
    (dialect, write_to_view_of_input, r"%zero_.* writes to the graph input"),
    (in_place, reduce_input_in_place, r"%all_reduce_.* writes to the graph input x"),
    (lowered, write_to_gathered, r"%mul_.* writes to the gathered parameter wait_tensor"),
    (out_of_place, write_to_gathered_buffer, r"%zero_.* writes to the gathered parameter wait"),
    (lowered, gather_uninitialised, r"%all_gather.* reads empty_like.* uninitialised memory"),
    (lowered, gather_partly_filled, r"%all_gather.* reads new_empty.* uninitialised memory"),
    (lowered, reduce_uninitialised, r"%reduce_scatter.* reads empty_like.* uninitialised"),
    (lowered, return_uninitialised, r"the graph returns empty_like.* uninitialised memory"),
    (out_of_place, unfill, r"%all_gather.* uninitialised memory of %empty_strided"),
    (lowered, swap_shards, r"tagged as the gather of 'p0', but reads"),
    (lowered, gather_other_shard, r"tagged as the gather of 'p0', but reads"),
    (dialect, gather_other_shard_in_the_dialect, r"tagged as the gather of 'p0', but reads"),
    (lowered, gather_batch, r"tagged as the gather of 'p0', but reads .*; expected the shard"),
    (coalesced, swap_coalesced_shards, r"tagged as the gather of 'p0', but reads"),
    (flat, swap_packed_shards, r"tagged as the gather of 'p0', but reads"),
    (flat, swap_packed_gradients, r"tagged as the reduction of .*, but reads .*gradient of"),
    (lowered, retag_gather, r"tagged as the gather of 'p1', but reads"),
    (lowered, retag_full, r"tagged as full of 'p1', but holds p0"),
    (dialect, swap_readers, r"%mul.* must come from the gathered parameter 'p0'"),
    (lowered, repeat_shard, r"%mul.* must come from the gathered parameter 'p0'"),
    (lowered, repeat_shard_with_a_tag, r"%mul.* must come from the gathered parameter 'p0'"),
    (dialect, zeros_for_a_parameter, r"%mul.* must come from the gathered parameter 'p0'"),
    (dialect, swap_reduced_gradients, r"tagged as the reduction of .*, but reads .*gradient of"),
    (dialect, lower_gradients_of_each_other, r"tagged as the reduction of .*, but reads"),
    (dialect, reduce_other_gradient, r"tagged as the reduction of .*, but reads"),
    (coalesced, swap_coalesced_gradients, r"tagged as the reduction of .*, but reads"),
    (lowered, swap_copies_of_gradients, r"output 2 must be reduced from the gradient mul"),
    (coalesced, swap_copies_of_gradients, r"output 2 must be reduced from the gradient mul"),
    (flat, swap_copies_of_gradients, r"output 2 must be reduced from the gradient reshape"),
    (coalesced, swap_reduced_outputs, r"output 2 must be reduced from the gradient mul"),
    (lowered, swap_reduced_waits, r"output 2 must be reduced from the gradient mul"),
    (all_reduced, swap_reduced_waits, r"output 2 must be reduced from the gradient mul"),
    (lowered, reduce_input_of_model, r"output \d must be reduced from the gradient mul"),
    (lowered, replace_gradient_by_input, r"output 2 must be reduced over ranks"),
    (lowered, skip_reduction, r"output \d must be reduced over ranks"),
    (dialect, skip_reduction_in_the_dialect, r"output \d must be reduced over ranks"),
    (dialect, zeros_for_a_gradient, r"output \d must be reduced over ranks"),
]

ROW_7 = {
    fetch_one_of_two,
    move_and_return_0,
    drop_output,
    swap_outputs,
    swap_gradients,
    replace_output_by_none,
    add_input,
    remove_input,
    delete_everything,
    read_in_flight,
    write_gather_input_in_flight,
    write_to_input,
    write_to_gathered,
    name_unknown_reduce_op,
    name_unknown_group,
    repeat_shard,
    gather_other_shard,
    gather_uninitialised,
    state_strides,
}


@pytest.fixture(autouse=True)
def world():
    with fake_world(2):
        yield


def ids(table):
    return [f"{graph.__name__}-{broken.__name__}" for graph, broken, *_ in table]


@pytest.mark.parametrize(("graph", "broken", "message"), STATIC, ids=ids(STATIC))
def test_static_check_finds(graph, broken, message):
    with pytest.raises(PassError, match=f"(?s)pass 'broken'.*({message})"):
        run_passes(graph().graph, [Do(broken)])


@pytest.mark.parametrize("broken", BEYOND_STATIC, ids=lambda each: each.__name__)
def test_only_simulation_finds(broken):
    graphs = {
        "return_other_activation": dialect,
        "swap_slices": flat,
    }
    graph = graphs.get(broken.__name__, lowered)
    run_passes(graph().graph, [Do(broken)])
    with pytest.raises(PassError, match=r"pass 'broken': on simulated ranks, .*elements differ"):
        run_passes(graph().graph, [Do(broken)], verify="simulate")


@pytest.mark.parametrize("graph", [dialect, lowered, coalesced, flat, in_place, out_of_place])
def test_harmless_pass_is_accepted_and_simulated(graph):
    def copy_first_output(graph):
        first, *rest = outputs(graph)
        return_(graph, [before(graph.output_node()).call(aten.clone.default, first), *rest])

    assert run_passes(graph().graph, [Do(copy_first_output)], verify="simulate")[0].changes == 1


def test_table_holds_what_was_missed_and_more():
    tried = {broken for _, broken, _ in STATIC}
    assert tried >= ROW_7
    assert len(tried | set(BEYOND_STATIC)) >= 43 + 20


def test_what_was_wrong_before_the_pass_is_no_error_of_the_pass():
    """The same faults in the graph that the pass is given; the pass changes another node."""

    def elsewhere(graph):
        last = outputs(graph)[1 if len(outputs(graph)) > 1 else 0]
        Editor(graph, before=graph.output_node()).call(aten.neg.default, last)

    for graph, broken in [
        (lowered, await_twice),
        (coalesced, fetch_one_twice),
        (in_place, read_in_flight),
        (dialect, write_to_input),
        (lowered, write_to_gathered),
        (lowered, gather_uninitialised),
        (lowered, swap_shards),
        (lowered, repeat_shard),
        (lowered, skip_reduction),
        (dialect, state_strides),
    ]:
        gm = graph()
        broken(gm.graph)
        run_passes(gm.graph, [Do(elsewhere)])


def test_collectives_of_drawn_graphs_are_there():
    assert [each.op for _, each in collectives(lowered().graph)].count("reduce_scatter_tensor") == 2
    assert nodes(flat().graph, aten.cat.default)
