"""Broken passes: the static check finds each, or it is listed as beyond the check and simulated
ranks find it.
"""

import operator

import pytest
import torch

from tests.graphs import Param, joint
from tests.streams import GraphBuilder
from tests.zpasses.graph.rewrites import Do
from zpasses import PassError
from zpasses.graph.dialect import REDUCE_GRAD, UNSHARD
from zpasses.graph.queries import Editor, calls, replace_node, value_of
from zpasses.graph.tags import Tag, add_tag, retag, tag_of, tagged
from zpasses.passes import GatherParams, ReduceGrads, Schedule
from zpasses.pipeline.runner import run_passes

pytestmark = pytest.mark.usefixtures("two_ranks")

aten, F = torch.ops.aten, torch.ops._c10d_functional
ADD, MUL, MUL_, NEG = aten.add.Tensor, aten.mul.Tensor, aten.mul_.Tensor, aten.neg.default
CAT, CLONE, COPY_, EMPTY = aten.cat.default, aten.clone.default, aten.copy_.default, aten.empty
EMPTY_LIKE, SLICE, SLICE_COPY = aten.empty_like.default, aten.slice.Tensor, aten.slice_copy.Tensor
T, TO, VIEW = aten.t.default, aten._to_copy.default, aten.view.default
ZERO_, ZEROS = aten.zero_.default, aten.zeros.default
WAIT, ITEM, REDUCE_ = F.wait_tensor.default, operator.getitem, F.all_reduce_.default
GATHER, GATHERS = F.all_gather_into_tensor.default, F.all_gather_into_tensor_coalesced.default
GATHER_OUT = F.all_gather_into_tensor_out.default
SCATTER, SCATTERS = F.reduce_scatter_tensor.default, F.reduce_scatter_tensor_coalesced.default


# --- graphs ---------------------------------------------------------------------------------------
def dialect():
    return joint([Param((4, 2)), Param((4, 2))], 0, 2)


def rewritten_by(name, *passes):
    def make():
        gm = dialect()
        for each in passes:
            each(gm.graph)
        return gm

    make.__name__ = name
    return make


LOWER = (GatherParams(), ReduceGrads("reduce_scatter"))
lowered = rewritten_by("lowered", *LOWER)
all_reduced = rewritten_by("all_reduced", GatherParams(), ReduceGrads("all_reduce"))
coalesced, flat = (
    rewritten_by(mode, *LOWER, Schedule("single", mode=mode, memory_budget="1GiB"))
    for mode in ("coalesced", "flat")
)


def in_place():
    build = GraphBuilder("x", "y")
    started = build.call(REDUCE_, build.call(CLONE, build.inputs[0]), "sum", "0")
    other = build.call(MUL, build.inputs[1], 2)
    return build.returns(build.call(ADD, build.call(WAIT, started), other))


def out_of_place():
    build = GraphBuilder(x=(2, 2), y=(4, 2))
    buffer = build.call(EMPTY.memory_format, [4, 2], device="cpu")
    started = build.call(GATHER_OUT, build.call(CLONE, build.inputs[0]), 2, "0", out=buffer)
    add_tag(started, Tag("gather", ("x",)))
    other = build.call(MUL, build.inputs[1], 2)
    full = build.call(WAIT, started)
    add_tag(full, Tag("full", ("x",)))
    return build.returns(build.call(ADD, full, other))


# --- edits ----------------------------------------------------------------------------------------
def before(node):
    return Editor(node.graph, before=node)


def replace_input(node, new, place=0):
    node.args = (*node.args[:place], new, *node.args[place + 1 :])


def exchange(one, other, place=0):
    """Exchange an argument of two calls."""
    mine, theirs = one.args[place], other.args[place]
    replace_input(one, theirs, place)
    replace_input(other, mine, place)


def tagged_copy(edit, like, target, *args):
    node = edit.call(target, *args)
    add_tag(node, tag_of(like))
    return node


def reads(target, value, place=0, number=0):
    """The fault that a call reads `value(edit, node)` instead of an argument."""

    def fault(graph):
        node = calls(graph, target)[number]
        replace_input(node, value(before(node), node), place)

    return fault


def ahead_of(target, call, number=0):
    """The fault that `call(edit, node)` runs before a call."""

    def fault(graph):
        node = calls(graph, target)[number]
        call(before(node), node)

    return fault


def returns(values):
    """The fault that the graph returns `values(edit, *outputs)`."""

    def fault(graph):
        output = graph.output_node()
        output.args = (tuple(values(before(output), *output.args[0])),)

    return fault


def exchanged(target, place=0, numbers=(0, 1)):
    """The fault that two calls have each other's argument."""

    def fault(graph):
        exchange(*(calls(graph, target)[number] for number in numbers), place)

    return fault


def reversed_inputs(target, number=0):
    return reads(target, lambda _, node: node.args[0][::-1], number=number)


def states(value):
    """The fault that `meta["val"]` of a call is another one."""

    def fault(graph):
        mul = calls(graph, MUL)[0]
        mul.meta["val"] = value(mul.meta["val"])

    return fault


def primal(graph, number=0):
    return graph.find_nodes(op="placeholder")[number]


def source(graph, target):
    return calls(graph, target)[0].args[0]


# --- interface ------------------------------------------------------------------------------------
def add_input(graph):
    with graph.inserting_before(primal(graph)):
        graph.placeholder("extra").meta["val"] = value_of(primal(graph))


def remove_input(graph):
    batch = primal(graph, 1)
    batch.replace_all_uses_with(before(calls(graph, UNSHARD)[0]).call(ZEROS, [4, 2]))
    graph.erase_node(batch)


def restate_input(graph):
    primal(graph).meta["val"] = primal(graph).meta["val"].to(torch.float64)


def delete_everything(graph):
    for node in reversed(graph.nodes):
        graph.erase_node(node)


def move_and_return_0(graph):
    first, second = calls(graph, GATHER)
    first.prepend(second)
    return 0


def change_and_return_0(graph):
    replace_input(calls(graph, MUL)[0], 2, 1)
    return 0


def insert_and_return_0(graph):
    before(graph.output_node()).call(NEG, primal(graph))
    return 0


# --- values ---------------------------------------------------------------------------------------
def state_nothing(graph):
    mul = calls(graph, MUL)[0]
    with graph.inserting_before(mul):
        replace_input(mul, graph.call_function(NEG, (mul.args[0],)))


def halve_inputs(graph):
    mul = calls(graph, MUL)[0]
    part = before(mul).call(SLICE, mul.args[0], 0, 0, 1)
    mul.args = (part, part)


def drop_an_output_of_a_call(graph):
    started = calls(graph, GATHERS)[0]
    started.meta["val"] = started.meta["val"][:1]


# --- collectives ----------------------------------------------------------------------------------
def remove_wait(graph):
    wait = calls(graph, WAIT)[0]
    replace_node(wait, wait.args[0])


def await_untagged(graph):
    mul = calls(graph, MUL)[0]
    started = before(mul).call(F.all_reduce.default, mul.args[0], "sum", "0")
    add_tag(started, Tag("reduce", ("p0",)))
    replace_input(mul, before(mul).call(WAIT, started))


def fetch_one_of_two(graph):
    gone, kept = calls(graph, ITEM)[:2]
    (wait,), (other,) = gone.users, kept.users
    other.append(wait)
    replace_node(wait, other)
    graph.erase_node(gone)


def await_fetched_twice(graph):
    fetched = calls(graph, ITEM)[0]
    (wait,) = fetched.users
    edit = before(calls(graph, MUL)[-1])
    edit.call(NEG, tagged_copy(edit, wait, WAIT, fetched))


def state_group_size(graph):
    started = calls(graph, GATHER)[0]
    half = before(started).call(SLICE, started.args[0], 0, 0, 1)
    replace_node(started, tagged_copy(before(started), started, GATHER, half, 4, "0"))


# --- memory ---------------------------------------------------------------------------------------
def move_wait_behind_reader(graph):
    wait, add = calls(graph, WAIT)[0], calls(graph, ADD)[0]
    replace_input(add, source(graph, REDUCE_))
    add.append(wait)


def write_functional_input_in_flight(graph):
    started = calls(graph, GATHER)[0]
    copied = before(started).call(CLONE, started.args[0])
    replace_input(started, copied)
    before(next(iter(started.users))).call(ZERO_, copied)


def start_on_what_is_in_flight(edit, node):
    started = edit.call(REDUCE_, source(node.graph, REDUCE_), "sum", "0")
    add_tag(started, Tag("reduce", ("p",)))


def partly_filled(edit, node):
    buffer = edit.call(aten.new_empty.default, node.args[0], [2, 2])
    part = edit.call(SLICE, buffer, 0, 0, 1)
    edit.call(COPY_, part, edit.call(SLICE, node.args[0], 0, 0, 1))
    return buffer


def unfill(graph):
    """Remove the only write to a buffer that a collective reads."""
    started = calls(graph, GATHER_OUT)[0]
    filled, edit = started.args[0], before(started)
    buffer = edit.call(aten.empty_strided.default, [2, 2], [2, 1], device="cpu")
    replace_input(started, edit.call(VIEW, edit.call(VIEW, buffer, [4]), [2, 2]))
    graph.erase_node(filled)


# --- parameters -----------------------------------------------------------------------------------
def retag_full(graph):
    retag(next(node for node, _ in tagged(graph, "full")), params=("p1",))


def swap_readers(graph):
    muls = calls(graph, MUL)[:2]
    muls[0].prepend(calls(graph, UNSHARD)[1])
    exchange(*muls)


def replace_first_wait(target, make):
    """The fault that the result of a collective is `make(edit, wait, input)`."""

    def fault(graph):
        started = calls(graph, target)[0]
        (wait,) = started.users
        replace_node(wait, make(before(wait), wait, started.args[0]))
        graph.erase_node(started)

    return fault


def instead_of(target, make):
    """The fault that `make(edit, node)` takes the place of a call."""

    def fault(graph):
        node = calls(graph, target)[0]
        replace_node(node, make(before(node), node))

    return fault


def swap_reduced_gradients(graph):
    first, second = sorted(calls(graph, REDUCE_GRAD), key=list(graph.nodes).index)
    second.prepend(first)
    exchange(first, second)


def lower_gradients_of_each_other(graph):
    swap_reduced_gradients(graph)
    ReduceGrads("reduce_scatter").rewrite(graph)


def swap_reduced_outputs(graph):
    exchange(*[node for node, _ in tagged(graph, "reduced") if node.target is ITEM], 1)


def swap_reduced_waits(graph):
    first, second = [
        node for node, _ in tagged(graph, "reduced", "shard_grad") if node.target is WAIT
    ]
    for each in [*(user for user in first.users if user.op != "output"), first]:
        second.append(each)
    exchange(first, second)


# --- the tables -----------------------------------------------------------------------------------
OTHER_SHARD = reads(GATHER, lambda _, node: calls(node.graph, GATHER)[1].args[0])
SWAPPED_COPIES = returns(
    lambda e, a, b, c, n, d, m: (a, b, e.call(CLONE, d), n, e.call(CLONE, c), m)
)
READ_IN_FLIGHT = reads(MUL, lambda _, node: source(node.graph, REDUCE_))
WRITE_TO_INPUT = ahead_of(MUL, lambda edit, node: edit.call(MUL_, node.args[1], 2))
WRITE_TO_FULL = ahead_of(MUL, lambda edit, node: edit.call(MUL_, node.args[0], 2))
UNFILLED_GATHER = reads(GATHER, lambda edit, node: edit.call(EMPTY_LIKE, node.args[0]))
AWAITED_TWICE = reads(
    MUL, lambda e, node: tagged_copy(e, node.args[0], WAIT, calls(node.graph, GATHER)[0])
)
REPEATED_SHARD = replace_first_wait(GATHER, lambda edit, _, shard: edit.call(CAT, [shard, shard]))
NO_REDUCTION = replace_first_wait(
    SCATTER, lambda edit, wait, grad: tagged_copy(edit, wait, SLICE_COPY, grad, 0, 0, 2)
)
TRANSPOSED_STRIDES = states(lambda value: value.t().contiguous().t())

RUNNING = r"reads or writes what the collective"
WRONG_SHARD = r"tagged as the gather of 'p0', but reads"
WRONG_GRADIENT = r"tagged as the reduction of .*, but reads"
WRONG_OUTPUT = r"output 2 must be reduced from the gradient"
NOT_FULL = r"%mul.* must come from the gathered parameter 'p0'"
NOT_REDUCED = r"output \d must be reduced over ranks"

# fmt: off
STATIC = {
    # --- interface
    "drop an output": (dialect, returns(lambda _, *v: v[:-1]), r"returns \d+ values, expected"),
    "add an output": (dialect, returns(lambda _, *v: (*v, v[0])), r"returns \d+ values, expected"),
    "swap outputs": (
        dialect, returns(lambda _, a, b, *v: (b, a, *v)), r"output 0 is mul.*was output 1"),
    "swap gradients": (
        dialect, returns(lambda _, a, b, c, n, d, m: (a, b, d, n, c, m)),
        r"output 2 is .* expected .*was output 4"),
    "none": (dialect, returns(lambda _, a, *v: (None, *v)), r"output 0 is None, expected mul"),
    "number": (dialect, returns(lambda _, a, *v: (1.0, *v)), r"output 0 is 1.0, expected mul"),
    "cast output": (
        dialect, returns(lambda e, a, *v: (e.call(TO, a, dtype=torch.float64), *v)),
        r"output 0 is _to_copy.*float64\[4, 2\].*expected mul.*float32"),
    "transposed memory": (
        dialect, returns(lambda e, a, *v: (e.call(T, e.call(CLONE, e.call(T, a),
                         memory_format=torch.contiguous_format)), *v)),
        r"output 0 is .*strides \[1, 4\].*expected.*\[2, 1\]"),
    "part of an output": (
        dialect, returns(lambda e, a, *v: (e.call(SLICE, a, 0, 0, 1), *v)),
        r"output 0 is slice.*\[1, 2\].*expected mul.*\[4, 2\]"),
    "add an input": (dialect, add_input, r"added the graph input 'extra'"),
    "remove an input": (dialect, remove_input, r"removed the graph input"),
    "reorder inputs": (
        dialect, lambda graph: primal(graph).prepend(primal(graph, 1)), r"input 0 is .*, expected"),
    "restate an input": (dialect, restate_input, r"says float64.*callers pass float32"),
    "delete everything": (dialect, delete_everything, r"removed the output node"),
    # --- reported changes
    "move": (lowered, move_and_return_0, r"returned 0 changes, but moved %all_gather"),
    "change": (lowered, change_and_return_0, r"returned 0 changes, but changed %mul"),
    "insert": (lowered, insert_and_return_0, r"returned 0 changes, but changed"),
    "no number": (lowered, lambda _: "three", r"returned 'three'; expected the number of changes"),
    # --- values
    "strides": (
        dialect, TRANSPOSED_STRIDES,
        r"strides \[2, 1\], but meta\['val'\] says .*strides \[1, 4\]"),
    "shape": (
        dialect, states(lambda value: value.new_empty(8, 2)),
        r"computes float32\[4, 2\] on cpu, but meta\['val'\] says float32\[8, 2\] on cpu"),
    "dtype": (
        dialect, states(lambda value: value.to(torch.float16)), r"but meta\['val'\] says float16"),
    "no value": (
        dialect, state_nothing,
        r"made node .* without meta\['val'\]; build nodes with zpasses.graph.queries.Editor"),
    "narrow input": (
        dialect, reads(MUL, lambda e, node: e.call(SLICE, node.args[0], 0, 0, 3)),
        r"%mul.* does not run on its inputs"),
    "value of earlier inputs": (dialect, halve_inputs, r"computes float32\[1, 2\]"),
    "use before definition": (
        dialect, lambda graph: primal(graph).append(calls(graph, MUL)[0]), r"malformed graph"),
    "one of two values": (
        coalesced, drop_an_output_of_a_call, r"computes 2 tensors, but meta\['val'\] has 1"),
    # --- collectives
    "no wait": (
        lowered, remove_wait, r"must be read by exactly one wait_tensor, but is read by mul"),
    "two waits": (
        lowered, AWAITED_TWICE, r"exactly one wait_tensor, but is read by wait_tensor\w*, wait_"),
    "peek": (
        lowered, reads(MUL, lambda e, node: e.call(CLONE, source(node.graph, WAIT))),
        r"exactly one wait_tensor, but is read by wait_tensor\w*, clone"),
    "unread": (
        lowered, ahead_of(MUL, lambda e, node: tagged_copy(
            e, calls(node.graph, GATHER)[0], GATHER, *calls(node.graph, GATHER)[0].args)),
        r"is read by nobody"),
    "no tag": (
        lowered, reads(WAIT, lambda e, node: e.call(GATHER, *node.args[0].args)),
        r"made %all_gather.* without a tag; use zpasses.graph.tags.add_tag"),
    "no tag of a wait": (lowered, await_untagged, r"%wait_tensor_default.* without a tag"),
    "one of two fetched": (
        coalesced, fetch_one_of_two, r"has 2 outputs, .* output 0 is fetched by nobody"),
    "one fetched twice": (
        coalesced, reads(ITEM, lambda _, node: 0, 1, number=1),
        r"output 0 is fetched by getitem\w*, getitem"),
    "swap fetched": (
        coalesced, exchanged(ITEM, 1), r"is tagged as gathered of 'p0', but holds p1"),
    "fetched and awaited twice": (
        coalesced, await_fetched_twice, r"output 0 is read by wait_tensor\w*, wait_tensor"),
    "unknown group": (
        lowered, reads(GATHER, lambda *_: "nobody", 2),
        r"on group 'nobody', but this process is in '0'"),
    "unknown reduce op": (
        lowered, reads(SCATTER, lambda *_: "median", 1),
        r"reduces by 'median'; expected one of avg, band"),
    "group size": (lowered, state_group_size, r"group_size=4, but its group has 2 ranks"),
    # --- memory
    "read in flight": (in_place, READ_IN_FLIGHT, rf"%mul.* {RUNNING} all_reduce_"),
    "read a view in flight": (
        in_place, reads(MUL, lambda e, node: e.call(
            VIEW, e.call(VIEW, source(node.graph, REDUCE_), [8]), [4, 2])),
        rf"%mul.* {RUNNING} all_reduce_"),
    "wait behind the reader": (in_place, move_wait_behind_reader, rf"%add.* {RUNNING}"),
    "write in flight": (
        in_place, ahead_of(MUL, lambda e, node: e.call(MUL_, source(node.graph, REDUCE_), 2)),
        rf"%mul_.* {RUNNING}"),
    "write to an input in flight": (
        out_of_place, ahead_of(MUL, lambda e, node: e.call(ZERO_, source(node.graph, GATHER_OUT))),
        r"%zero_.* writes to the input of .* running"),
    "write to a functional input in flight": (
        lowered, write_functional_input_in_flight, r"%zero_.* writes to the input of .* running"),
    "read a buffer in flight": (
        out_of_place, reads(MUL, lambda _, node: calls(node.graph, EMPTY.memory_format)[0]),
        rf"%mul.* {RUNNING}"),
    "never await": (in_place, remove_wait, r"is never awaited|reads or writes what"),
    "start on what is in flight": (
        in_place, ahead_of(MUL, start_on_what_is_in_flight),
        r"%all_reduce_\w*_1.* reads or writes what"),
    "write to a graph input": (dialect, WRITE_TO_INPUT, r"%mul_.* writes to the graph input"),
    "write to a view of a graph input": (
        dialect, ahead_of(MUL, lambda e, node: e.call(ZERO_, e.call(SLICE, node.args[1], 0, 0, 1))),
        r"%zero_.* writes to the graph input"),
    "reduce a graph input in place": (
        in_place, reads(REDUCE_, lambda _, node: primal(node.graph)),
        r"%all_reduce_.* writes to the graph input x"),
    "write to a parameter": (
        lowered, WRITE_TO_FULL, r"%mul_.* writes to the gathered parameter wait_tensor"),
    "write to the buffer of a parameter": (
        out_of_place,
        ahead_of(ADD, lambda e, node: e.call(ZERO_, calls(node.graph, EMPTY.memory_format)[0])),
        r"%zero_.* writes to the gathered parameter wait"),
    "gather uninitialised": (
        lowered, UNFILLED_GATHER, r"%all_gather.* reads empty_like.* uninitialised memory"),
    "gather partly filled": (
        lowered, reads(GATHER, partly_filled),
        r"%all_gather.* reads new_empty.* uninitialised memory"),
    "reduce uninitialised": (
        lowered, reads(SCATTER, lambda e, node: e.call(EMPTY_LIKE, node.args[0])),
        r"%reduce_scatter.* reads empty_like.* uninitialised"),
    "return uninitialised": (
        lowered, returns(lambda e, a, *v: (e.call(EMPTY_LIKE, a), *v)),
        r"the graph returns empty_like.* uninitialised memory"),
    "unfill": (out_of_place, unfill, r"%all_gather.* uninitialised memory of %empty_strided"),
    # --- parameters
    "swap shards": (lowered, exchanged(GATHER), WRONG_SHARD),
    "another shard": (lowered, OTHER_SHARD, WRONG_SHARD),
    "another shard in the dialect": (
        dialect, reads(UNSHARD, lambda _, node: calls(node.graph, UNSHARD)[1].args[0]),
        WRONG_SHARD),
    "gather the batch": (
        lowered, reads(GATHER, lambda e, node: e.call(SLICE, primal(node.graph, 1), 0, 0, 2)),
        WRONG_SHARD + ".*; expected the shard"),
    "swap coalesced shards": (coalesced, reversed_inputs(GATHERS), WRONG_SHARD),
    "swap packed shards": (flat, reversed_inputs(CAT), WRONG_SHARD),
    "swap packed gradients": (flat, reversed_inputs(CAT, -1), WRONG_GRADIENT + ".*gradient of"),
    "retag a gather": (
        lowered, lambda graph: retag(calls(graph, GATHER)[0], params=("p1",)),
        r"tagged as the gather of 'p1', but reads"),
    "retag a parameter": (lowered, retag_full, r"tagged as full of 'p1', but holds p0"),
    "swap readers": (dialect, swap_readers, NOT_FULL),
    "repeat a shard": (lowered, REPEATED_SHARD, NOT_FULL),
    "repeat a shard with a tag": (
        lowered, replace_first_wait(
            GATHER, lambda e, wait, shard: tagged_copy(e, wait, CAT, [shard, shard])), NOT_FULL),
    "zeros for a parameter": (
        dialect, instead_of(UNSHARD, lambda e, _: e.call(ZEROS, [4, 2])), NOT_FULL),
    # --- gradients
    "swap reduced gradients": (
        dialect, swap_reduced_gradients, WRONG_GRADIENT + ".*gradient of"),
    "lower swapped gradients": (dialect, lower_gradients_of_each_other, WRONG_GRADIENT),
    "reduce another gradient": (
        dialect, reads(REDUCE_GRAD, lambda _, node: source(node.graph, REDUCE_GRAD), number=1),
        WRONG_GRADIENT),
    "swap coalesced gradients": (coalesced, reversed_inputs(SCATTERS), WRONG_GRADIENT),
    "swap copies": (lowered, SWAPPED_COPIES, WRONG_OUTPUT + " mul"),
    "swap copies of coalesced": (coalesced, SWAPPED_COPIES, WRONG_OUTPUT + " mul"),
    "swap copies of packed": (flat, SWAPPED_COPIES, WRONG_OUTPUT + " reshape"),
    "swap outputs of a reduction": (coalesced, swap_reduced_outputs, WRONG_OUTPUT + " mul"),
    "swap waits": (lowered, swap_reduced_waits, WRONG_OUTPUT + " mul"),
    "swap waits of all-reduces": (all_reduced, swap_reduced_waits, WRONG_OUTPUT + " mul"),
    "reduce an input of the model": (
        lowered, reads(SCATTER, lambda _, node: primal(node.graph, 1)),
        r"output \d must be reduced from the gradient mul"),
    "return an input for a gradient": (
        lowered, returns(lambda _, a, b, c, *v: (a, b, primal(c.graph), *v)), NOT_REDUCED),
    "no reduction": (lowered, NO_REDUCTION, NOT_REDUCED),
    "no reduction in the dialect": (
        dialect, instead_of(REDUCE_GRAD, lambda e, node: e.call(SLICE_COPY, node.args[0], 0, 0, 2)),
        NOT_REDUCED),
    "zeros for a gradient": (
        dialect, instead_of(REDUCE_GRAD, lambda e, _: e.call(ZEROS, [2, 2])), NOT_REDUCED),
}
# fmt: on


def swap_slices(graph):
    parts = [node for node in calls(graph, SLICE) if tag_of(node) is None][:2]
    exchange(*parts, 2)
    exchange(*parts, 3)


def subtract_for_multiply(graph):
    calls(graph, MUL)[0].target = aten.sub.Tensor


def plus_mean(edit, node):
    mean = edit.call(aten.mean.dim, node.args[0], [0], True)
    return edit.call(ADD, node.args[0], mean)


def rounded(edit, node):
    coarse = edit.call(TO, edit.call(MUL, node.args[0], 1 / 3), dtype=torch.bfloat16)
    return edit.call(MUL, edit.call(TO, coarse, dtype=torch.float32), 3)


# fmt: off
BEYOND_STATIC = {
    "arithmetic on activations": (lowered, reads(MUL, lambda e, n: e.call(MUL, n.args[1], 2), 1)),
    # A pass may prepare a gather's input by any computation, such as quantization.
    "negated shard": (lowered, reads(GATHER, lambda e, node: e.call(NEG, node.args[0]))),
    "mean added to the shard": (lowered, reads(GATHER, plus_mean)),
    # A pass may scale a sum itself, and the check does not know which operation is meant.
    "sum for average": (lowered, reads(SCATTER, lambda *_: "sum", 1)),
    "maximum for average": (lowered, reads(SCATTER, lambda *_: "max", 1)),
    # The order of rows and ranks is no part of shapes or tags.
    "reversed rows": (
        lowered, reads(MUL, lambda e, node: e.call(aten.flip.default, node.args[0], [0]))),
    "another order of ranks": (
        lowered, reads(MUL, lambda e, node: e.call(aten.roll.default, node.args[0], [2], [0]))),
    # Offsets into a flat buffer are not followed.
    "swapped slices": (flat, swap_slices),
    "arithmetic on gradients": (
        lowered, reads(SCATTER, lambda e, node: e.call(ADD, node.args[0], node.args[0]))),
    # An earlier value of the same kind, as the removal of no-ops returns it.
    "another activation": (dialect, returns(lambda _, a, *v: (a.args[1], *v))),
    "another operator": (lowered, subtract_for_multiply),
    # Precision is lost between casts to and fro.
    "rounded gradient": (lowered, reads(SCATTER, rounded)),
}
# fmt: on
"""Broken passes that only running them shows, and why."""


@pytest.mark.parametrize("fault", STATIC)
def test_static_check_finds(fault):
    graph, broken, message = STATIC[fault]
    with pytest.raises(PassError, match=f"(?s)^pass 'do'.*({message})"):
        run_passes(graph().graph, [Do(broken)])


@pytest.mark.parametrize("fault", BEYOND_STATIC)
def test_only_simulation_finds(fault):
    graph, broken = BEYOND_STATIC[fault]
    run_passes(graph().graph, [Do(broken)])
    with pytest.raises(PassError, match=r"pass 'do': on simulated ranks, .*elements differ"):
        run_passes(graph().graph, [Do(broken)], verify="simulate")


@pytest.mark.parametrize("graph", [dialect, lowered, coalesced, flat, in_place, out_of_place])
def test_harmless_pass_is_accepted_and_simulated(graph):
    copied = returns(lambda edit, first, *rest: (edit.call(CLONE, first), *rest))
    assert run_passes(graph().graph, [Do(copied)], verify="simulate")[0].changes == 1


def test_what_was_wrong_before_the_pass_is_no_error_of_the_pass():
    """The same faults in the graph that the pass is given; the pass changes another node."""

    def elsewhere(graph):
        last = graph.output_node().args[0][:2][-1]
        before(graph.output_node()).call(NEG, last)

    for graph, broken in [
        (lowered, AWAITED_TWICE),
        (coalesced, reads(ITEM, lambda *_: 0, 1, number=1)),
        (in_place, READ_IN_FLIGHT),
        (dialect, WRITE_TO_INPUT),
        (lowered, WRITE_TO_FULL),
        (lowered, UNFILLED_GATHER),
        (lowered, exchanged(GATHER)),
        (lowered, REPEATED_SHARD),
        (lowered, NO_REDUCTION),
        (dialect, TRANSPOSED_STRIDES),
    ]:
        gm = graph()
        broken(gm.graph)
        run_passes(gm.graph, [Do(elsewhere)])
