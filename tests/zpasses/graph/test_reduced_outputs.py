"""The check of reduced outputs accepts passes that reduce the same gradients in another way."""

import pytest
import torch
from torch import fx

from tests.zpasses.graph.rewrites import Do
from zpasses import PassError
from zpasses.graph.dialect import REDUCE_GRAD
from zpasses.graph.queries import Editor, calls, erase_dead, replace_node
from zpasses.graph.tags import Tag, add_tag, tag_of, tagged
from zpasses.passes import GatherParams, MergeReads, ReduceGrads, Schedule
from zpasses.pipeline.runner import run_passes
from zpasses.testing import trace_joint

pytestmark = pytest.mark.usefixtures("two_ranks")

aten, F = torch.ops.aten, torch.ops._c10d_functional
WAIT, SCATTER = F.wait_tensor.default, F.reduce_scatter_tensor.default


def read(shard):
    return torch.ops.zpasses.unshard(shard, 4, None, None, "0")


def model(x, a, b, c, d):
    """The gradients of `a` and `b` are one value. `d` is read twice."""
    return x @ (read(a) + read(b)), x @ read(c), (x * 2) @ read(d), x @ read(d)


def dialect():
    shards = [torch.zeros(2, 4, requires_grad=True) for _ in "abcd"]
    inputs = [torch.zeros(8, 4), *shards]
    return trace_joint(model, inputs, {1: "a", 2: "b", 3: "c", 4: "d"}).graph


def lowered(form="reduce_scatter"):
    graph = dialect()
    run_passes(graph, [GatherParams(), ReduceGrads(form)])
    return graph


def accepted(graph, *passes):
    run_passes(graph, passes, verify="simulate")
    return graph


def starts(graph):
    return calls(graph, SCATTER, F.all_reduce.default)


def replace_gradient(started, gradient):
    started.args = (gradient, *started.args[1:])


def reduced(graph, gradient, place, *like):
    """Insert a reduction before another one, with the parameters of that one or of `like`."""
    edit = Editor(graph, before=place)
    params = tuple(name for each in like or (place,) for name in tag_of(each).params)
    started = edit.call(SCATTER, gradient, "avg", 2, "0")
    add_tag(started, Tag("reduce", params))
    done = edit.call(WAIT, started)
    add_tag(done, Tag("reduced", params))
    return done


def wait_of(started):
    (wait,) = started.users
    return wait


# --- shared reductions ---------------------------------------------------------------------------
def merge_equal_reductions(graph):
    """As the partitioner merges common subexpressions."""
    seen = {}
    for node in list(graph.nodes):
        role = tag_of(node).role if tag_of(node) else None
        if role in ("reduce", "reduced", "shard_grad"):
            first = seen.setdefault((node.target, node.args), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def shared(form="reduce_scatter"):
    graph = lowered(form)
    run_passes(graph, [Do(merge_equal_reductions)], verify="simulate")
    *_, a, b, _, _ = graph.output_node().args[0]
    assert a is b
    return graph


@pytest.mark.parametrize("form", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("mode", ["flat", "coalesced"])
def test_a_shared_reduction_may_join_a_bucket(form, mode):
    graph = accepted(shared(form), Schedule("single", mode=mode, memory_budget="1GiB"))
    *_, a, b, _, _ = graph.output_node().args[0]
    (bucket,) = {tag.params for _, tag in tagged(graph, "reduce") if len(tag.params) > 1}
    assert a is b
    assert {"a", "b"} & set(bucket)
    assert "c" in bucket


# --- other forms of one reduction ----------------------------------------------------------------
def test_reductions_of_two_reads_may_become_the_reduction_of_a_sum():
    before = len(calls(dialect(), REDUCE_GRAD))
    graph = accepted(dialect(), MergeReads(max_hold_mb=1.0))
    assert len(calls(graph, REDUCE_GRAD)) == before - 1


def scale_behind(graph):
    """Double the reduced block instead of the gradient."""
    started = starts(graph)[0]
    half = Editor(graph, before=started).call(aten.mul.Tensor, started.args[0], 0.5)
    done, wait = reduced(graph, half, started), wait_of(started)
    replace_node(wait, Editor(graph, before=wait).call(aten.mul.Tensor, done, 2))
    erase_dead(graph, [started])


def recompute_gradient(graph):
    """A new product of the same factors, while something else reads the old one."""
    started = starts(graph)[0]
    gradient = started.args[0]
    assert gradient.target is aten.mm.default
    edit, cast = Editor(graph, before=started), aten._to_copy.default
    wide = [edit.call(cast, each, dtype=torch.float64) for each in gradient.args]
    product = edit.call(aten.mm.default, *wide)
    replace_gradient(started, edit.call(cast, product, dtype=torch.float32))
    edit.call(aten.neg.default, gradient)


def transpose_product(graph):
    """Another product, of other views of the factors; the old one is gone."""
    started = starts(graph)[0]
    gradient = started.args[0]
    edit = Editor(graph, before=started)
    a, b = (edit.call(aten.t.default, each) for each in gradient.args)
    product = edit.call(aten.t.default, edit.call(aten.mm.default, b, a))
    product = edit.call(aten.clone.default, product, memory_format=torch.contiguous_format)
    replace_gradient(started, product)
    erase_dead(graph, [gradient])


def pack_in_place(graph):
    """Two gradients are copied into one buffer of zeros."""
    first, second = starts(graph)[:2]
    late = max((first, second), key=list(graph.nodes).index)
    edit = Editor(graph, before=late)
    buffer = edit.call(aten.zeros.default, [2, 2, 2, 4])
    for i, started in enumerate((first, second)):
        part = edit.call(aten.select.int, buffer, 1, i)
        source = edit.call(aten.view.default, started.args[0], [2, 2, 4])
        edit.call(aten.copy_.default, part, source)
    done = reduced(graph, edit.call(aten.view.default, buffer, [8, 4]), late, first, second)
    for i, old in enumerate((first, second)):
        rows = edit.call(aten.slice_copy.Tensor, done, 0, 2 * i, 2 * i + 2)
        add_tag(rows, Tag("shard_grad", tag_of(old).params))
        wait = wait_of(old)
        wait.replace_all_uses_with(rows)
        graph.erase_node(wait)
        graph.erase_node(old)


def scatter_by_all_to_all(graph):
    """A reduction out of another collective and a local mean."""
    started = starts(graph)[0]
    edit = Editor(graph, before=started)
    sent = edit.call(F.all_to_all_single.default, started.args[0], [2, 2], [2, 2], "0")
    add_tag(sent, Tag("reduce", tag_of(started).params))
    got = edit.call(WAIT, sent)
    add_tag(got, Tag("reduced", tag_of(started).params))
    parts = edit.call(aten.view.default, got, [2, 2, 4])
    replace_node(wait_of(started), edit.call(aten.mean.dim, parts, [0]))
    erase_dead(graph, [started])


def copy_everything(graph):
    """Every node anew, as a pass that traces the graph again."""
    values = {}
    end = graph.output_node()
    for node in list(graph.nodes):
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda each: values.get(each, each)
            )
            with graph.inserting_before(end):
                values[node] = graph.node_copy(node, lambda each: values.get(each, each))
            values[node].args, values[node].kwargs = args, kwargs
    end.args = fx.node.map_arg(end.args, lambda each: values.get(each, each))
    erase_dead(graph, list(values))


FORMS = [scale_behind, recompute_gradient, transpose_product, pack_in_place]
FORMS += [scatter_by_all_to_all, copy_everything]


@pytest.mark.parametrize("correct", FORMS, ids=lambda each: each.__name__)
def test_another_form_of_a_reduction_is_accepted(correct):
    accepted(lowered(), Do(correct))


def test_an_operator_that_changes_nothing_may_go():
    graph = lowered()

    def choose_between_equals(graph):
        started = starts(graph)[0]
        edit, gradient = Editor(graph, before=started), started.args[0]
        mask = edit.call(aten.gt.Scalar, gradient.args[1], 0)
        mask = edit.call(aten.slice_copy.Tensor, mask, 0, 0, 4)
        replace_gradient(started, edit.call(aten.where.self, mask, gradient, gradient))

    def choose_nothing(graph):
        (choice,) = calls(graph, aten.where.self)
        choice.replace_all_uses_with(choice.args[1])
        erase_dead(graph, [choice])

    accepted(graph, Do(choose_between_equals))
    accepted(graph, Do(choose_nothing))


def test_an_equal_gradient_may_take_the_place_of_another():
    graph = lowered()

    def compute_twice(graph):
        started = starts(graph)[0]
        gradient = started.args[0]
        edit = Editor(graph, before=started)
        replace_gradient(started, edit.call(gradient.target, *gradient.args))
        edit.call(aten.neg.default, gradient)

    def merge(graph):
        started = starts(graph)[0]
        equal = next(iter(calls(graph, aten.neg.default))).args[0]
        Editor(graph, before=started).call(aten.neg.default, started.args[0])
        replace_gradient(started, equal)

    accepted(graph, Do(compute_twice))
    accepted(graph, Do(merge))


def test_a_gradient_that_is_constant_needs_no_reduction():
    graph = lowered()

    def make_constant(graph):
        started = starts(graph)[-1]
        ones = Editor(graph, before=started).call(aten.full.default, [4, 4], 1.0)
        replace_gradient(started, ones)

    run_passes(graph, [Do(make_constant)], verify="off")

    def skip(graph):
        started = starts(graph)[-1]
        wait = wait_of(started)
        replace_node(wait, Editor(graph, before=wait).call(aten.full.default, [2, 4], 1.0))
        erase_dead(graph, [started])

    accepted(graph, Do(skip))


# --- wrong ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", [5, 6])
def test_another_gradient_for_either_parameter_of_a_shared_reduction_is_found(place):
    """The tag of the reduction names only one of them."""

    def other(graph):
        values = list(graph.output_node().args[0])
        used = starts(graph)[-1]
        last = max(starts(graph), key=list(graph.nodes).index)
        values[place] = reduced(graph, starts(graph)[0].args[0], last)
        graph.output_node().args = (tuple(values),)
        assert used.args[0] is not starts(graph)[0].args[0]

    with pytest.raises(PassError, match=rf"output {place} must be reduced from the gradient mm"):
        run_passes(shared(), [Do(other)])
