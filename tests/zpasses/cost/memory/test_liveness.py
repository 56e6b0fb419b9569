"""Compare the memory model with figures computed by hand."""

import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import zpasses
from tests.graphs import Param, joint, rewritten
from tests.streams import GraphBuilder
from tests.zpasses.cost.memory.allocations import one_by_one
from zpasses import compat
from zpasses.cost.memory.collective_memory import reinplaceable_all_reduces, scratch_bytes
from zpasses.cost.memory.liveness import bytes_within, liveness
from zpasses.cost.time.fused_kernels import use_fusion
from zpasses.cost.time.target import Target, use_target
from zpasses.graph.aliases import memory_root, root_output
from zpasses.graph.queries import collective_of, is_wait, saved_inputs
from zpasses.graph.tags import Tag, add_tag
from zpasses.passes import CacheParams, GatherParams, ReduceGrads, Schedule
from zpasses.pipeline.events import observe_graphs
from zpasses.runtime.codegen import eager_module
from zpasses.runtime.gloo import replace_gloo_collectives
from zpasses.testing import fake_world

aten = torch.ops.aten
UNIT = 4096
"""Bytes of the tensors below, which have 1024 floats."""


def built(*names):
    """Returns a builder of a graph whose inputs have 1024 floats each."""
    return GraphBuilder(**dict.fromkeys(names, (1024,)))


def live(build, *returned):
    """Returns the number of tensors alive during each call, and during the output."""
    with use_fusion(False):
        found = liveness(build.returns(*returned).graph)
    return [nbytes / UNIT for nbytes in found.live_bytes[len(build.inputs) :]]


LIVE = {
    "a value lives from its node to its last reader":
        ("a = sin(x); b = cos(a); returned = [add(a, b)]", [1, 2, 3, 1]),
    "memory of the caller does not count": ("returned = [add(x, y), x]", [1, 1]),
    "views keep their base alive and take no memory":
        ("part = slice(view(sin(x), [32, 32]), 0, 0, 1); b = cos(x); returned = [sum(part), b]",
         [1, 1, 1, 2]),
    "a copy of a slice does not keep its source alive":
        ("part = slice_copy(sin(x), 0, 0, 512); b = cos(x); returned = [part, b]",
         [1, 1.5, 1.5, 1.5]),
    "an op that returns what it writes to takes no memory":
        ("returned = [add_(sin(x), 1.0)]", [1, 1, 1]),
    # 512 floats each: the first output is freed after its reader, the second lives on.
    "outputs of one op have separate lifetimes":
        ("both = aminmax(view(x, [2, 512]), dim=0); a = item(both, 0); b = item(both, 1);"
         "returned = [sin(a), cos(b)]", [0, 1, 1, 1, 1.5, 1.5, 1]),
    "an unread value lives only during its node": ("sin(x); returned = [cos(x)]", [1, 1, 1]),
}  # fmt: skip
OPERATORS = {
    **{op: getattr(aten, op).default for op in ("sin", "cos", "view", "sum", "aminmax")},
    **{op: getattr(aten, op).Tensor for op in ("add", "add_", "slice", "slice_copy")},
    "item": operator.getitem,
}


@pytest.mark.parametrize("case", LIVE)
def test_values_live_as_long_as_they_are_needed(case):
    text, expected = LIVE[case]
    build = built("x", "y")
    names = {name: partial(build.call, op) for name, op in OPERATORS.items()}
    names.update(zip("xy", build.inputs, strict=True))
    exec(text, names)
    assert live(build, *names["returned"])[: len(expected)] == expected


def test_saved_values_die_at_their_last_use_in_a_backward_graph():
    build = built("primals_1", "saved", "tangents_1")
    primal, saved, tangent = build.inputs
    b = build.call(aten.mul.Tensor, build.call(aten.mul.Tensor, saved, tangent), primal)
    assert {node.name for node in saved_inputs(build.graph.nodes)} == {"saved", "tangents_1"}
    assert live(build, b) == [3, 2, 1]
    # Shards and inputs of the model belong to the caller.
    add_tag(saved, Tag("shard", ("p",)))
    assert [node.name for node in saved_inputs(build.graph.nodes)] == ["tangents_1"]


def test_saved_views_of_one_tensor_count_once_and_die_together():
    build = built("whole", "view", "tangents_1")
    whole, view, tangent = build.inputs
    view.meta["val"] = whole.meta["val"].view(32, 32)
    b = build.call(aten.neg.default, build.call(aten.mul.Tensor, whole, tangent))
    c = build.call(aten.sum.default, view)
    assert live(build, b, c)[:2] == [3, 3]  # whole, tangents, a; whole, a, b


def started(gm):
    return [node for node in gm.graph.nodes if collective_of(node) is not None]


def test_a_collective_holds_inputs_and_outputs_until_it_is_awaited():
    with fake_world(2):
        gm = rewritten(joint([Param((6, 2))], 0, 2), ReduceGrads("reduce_scatter"))
    (reduction,) = [node for node in started(gm) if "reduce_scatter" in node.name]
    (wait,) = reduction.users
    # The tangent is a saved value, and the output of the forward part lives on.
    own = (reduction, reduction.args[0])
    before = liveness(gm.graph).alive_at(wait)
    assert sorted(each.nbytes for each in before if each.node in own) == [24, 48]
    after = liveness(gm.graph).alive_at(gm.graph.output_node())
    assert [each.nbytes for each in after if each.node in own] == [24]


def two_params(*passes):
    return rewritten(joint([Param((4, 2)), Param((6, 2))], 0, 2), *passes)


def test_no_output_of_a_collective_is_freed_before_all_are_awaited():
    with fake_world(2):
        gm = two_params(GatherParams(), Schedule("single", memory_budget="1GiB"))
    (gather,) = [node for node in started(gm) if "coalesced" in node.name]
    waits = [node for node in gm.graph.nodes if is_wait(node)]
    held = [each for each in liveness(gm.graph).alive_at(waits[-1]) if each.node is gather]
    assert [each.nbytes for each in held] == [48, 32]


def test_gloo_takes_scratch_memory_until_the_wait(monkeypatch):
    bucket = Schedule("single", mode="coalesced", memory_budget="1GiB")
    with fake_world(2):
        gm = two_params(GatherParams(), ReduceGrads("all_reduce"), bucket)
        assert [scratch_bytes(node) for node in started(gm)] == [0, 0]
        plain = liveness(gm.graph)
        monkeypatch.setattr("zpasses.compat.is_gloo", lambda group, device=None: True)
        gather, reduction = started(gm)
        # The gather packs shards and gathers into a flat buffer. The reduction packs gradients and
        # reduces them in place.
        assert [scratch_bytes(gather), scratch_bytes(reduction)] == [40 + 80, 80]
        gloo = liveness(gm.graph)
    wait = next(iter(next(iter(gather.users)).users))
    at = gloo.nodes.index(wait)
    assert gloo.live_bytes[at] - plain.live_bytes[at] == 120
    assert gloo.live_bytes[at + 2] == plain.live_bytes[at + 2]


def test_operators_over_gloo_take_what_their_collectives_take(monkeypatch):
    monkeypatch.setattr("zpasses.compat.is_gloo", lambda group, device=None: True)
    bucket = Schedule("single", mode="coalesced", memory_budget="1GiB")
    with fake_world(2):
        gm = two_params(GatherParams(), ReduceGrads("reduce_scatter"), bucket)
        planned = [scratch_bytes(node) for node in started(gm)]
        called = started(replace_gloo_collectives(gm))
        assert [bytes_within(node) for node in called] == planned
    assert all(node.target.namespace == "zpasses" for node in called)
    assert min(planned) > 0


def _all_reduced(build, item):
    started = build.call(compat.functional.all_reduce.default, item, "sum", "0")
    return started, build.call(compat.functional.wait_tensor.default, started)


def test_an_all_reduce_overwrites_a_dead_value_of_the_graph():
    with fake_world(2):
        build = built("x")
        a = build.call(aten.sin.default, *build.inputs)
        _, reduced = _all_reduced(build, build.call(aten.view.default, a, [2, 512]))
        assert live(build, build.call(aten.cos.default, reduced)) == [1, 1, 1, 1, 2, 1]


@pytest.mark.parametrize("case", ["input", "read later", "view read later", "returned", "strided"])
def test_an_all_reduce_does_not_overwrite_values_that_are_read_later(case):
    with fake_world(2):
        build = built("x")
        a = build.call(aten.sin.default, *build.inputs)
        half = build.call(aten.view.default, a, [2, 512])
        turned = build.call(aten.t.default, half)
        item = {"input": build.inputs[0], "strided": turned}.get(case, a)
        started, reduced = _all_reduced(build, item)
        later = {"read later": a, "view read later": half}.get(case, reduced)
        last = build.call(aten.cos.default, later)
        build.returns(last, reduced, *([a] if case == "returned" else []))
        assert started not in reinplaceable_all_reduces(build.graph)
        assert any(buffer.node is started for buffer in liveness(build.graph).buffers)


@pytest.mark.parametrize("form", ["coalesced", "flat"])
def test_eager_codegen_reduces_in_place_and_does_not_change_the_graph(form):
    with fake_world(2):
        bucket = Schedule("single", mode=form, memory_budget="1GiB")
        gm = two_params(ReduceGrads("all_reduce"), bucket)
        before = [node.target for node in gm.graph.nodes]
        module = eager_module(gm)
        module.recompile()
    assert "all_reduce_" + ("coalesced_" if form == "coalesced" else "") + ".default" in module.code
    assert [node.target for node in gm.graph.nodes] == before


def test_cached_parameters_live_to_the_end():
    with fake_world(2):
        gathered = rewritten(joint([Param((6, 2))], 0, 2), GatherParams())
        kept = rewritten(gathered, CacheParams())
    assert liveness(kept.graph).live_bytes[-1] - liveness(gathered.graph).live_bytes[-1] == 48


def test_alive_at_lists_the_largest_first_and_adds_up():
    params, passes = [Param((7, 2)), Param((3, 2))], (GatherParams(), ReduceGrads("reduce_scatter"))
    with fake_world(3):
        found = liveness(rewritten(joint(params, 0, 3), *passes).graph)
    for node, total in zip(found.nodes, found.live_bytes, strict=True):
        sizes = [each.nbytes for each in found.alive_at(node)]
        assert sizes == sorted(sizes, reverse=True)
        assert sum(sizes) == total
    assert found.peak_bytes == sum(each.nbytes for each in found.alive_at(found.peak_node))


def test_bytes_of_overrides_the_bytes_of_a_node():
    build = built("x")
    assert liveness(build.graph).peak_bytes == 0
    a = build.call(aten.sin.default, *build.inputs)
    build.returns(a)
    assert liveness(build.graph, bytes_of=lambda node: 5 if node is a else None).peak_bytes == 5


# --- what Inductor's code allocates -------------------------------------------------------------
def decomposed(function, *shapes, device="cpu"):
    table = compat.inductor_decompositions()
    with compat.FakeTensorMode():
        inputs = [torch.empty(shape, device=device) for shape in shapes]
        return make_fx(function, table)(*inputs).graph


def peaks(graph):
    """The peak of fused kernels, and that of operators one by one."""
    return liveness(graph).peak_bytes // UNIT, one_by_one(graph) // UNIT


def test_a_value_that_is_inlined_takes_no_memory():
    graph = decomposed(lambda x: (x.exp() * x.sin()).sum(1), (32, 32))
    assert peaks(graph) == (0, 3)


def test_an_inlined_value_keeps_alive_what_it_is_computed_from():
    def function(x, y):
        product = x @ y
        late = product.exp()
        other = x @ x
        return late + other

    assert peaks(decomposed(function, (32, 32), (32, 32))) == (2, 3)


def test_a_kernel_writes_over_an_input_that_nothing_needs():
    def function(x, *, then):
        product = x @ x
        shifted = product + 1
        return shifted, then(x, product)

    nothing, later = (lambda x, product: x), (lambda x, product: x @ product)
    assert peaks(decomposed(partial(function, then=nothing), (32, 32))) == (1, 2)
    assert peaks(decomposed(partial(function, then=later), (32, 32))) == (3, 3)


def test_what_a_cat_joins_is_written_right_into_it():
    def function(x, y):
        return torch.cat([(x @ y).exp(), (y @ x).sin()], 1)

    graph = decomposed(function, (32, 32), (32, 32))
    with use_target(Target.parse("cpu")):
        assert peaks(graph) == (3, 4)  # the result and one product
    with use_target(Target.parse("h100")):
        assert peaks(graph) == (4, 4)  # one kernel reads both products


@pytest.mark.parametrize(
    ("parts", "held"),
    [
        (lambda x: (x.exp(), x.sin()), 2),
        (lambda x: (x.exp().t(), x.sin().t()), 2),  # views, computed where they are joined
        (lambda x: ((x @ x).t(), x.sin().t()), 3),  # of a product, which is copied
        (lambda x: (x.sum(1, keepdim=True).square().expand(32, 32), x.sin()), 2),
        (lambda x: (x[torch.arange(32)], x.sin()), 2),  # what indices take
    ],
)
def test_a_view_of_a_kernel_is_computed_where_a_cat_has_it(parts, held):
    graph = decomposed(lambda x: torch.cat(parts(x)), (32, 32))
    with use_target(Target.parse("cpu")):
        assert liveness(graph).peak_bytes // UNIT == held


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda y: y + 1, 1),
        (lambda y: y.t().contiguous(), 2),
        (lambda y: (y + 1).t().contiguous(), 2),
        (lambda y: y + y.t(), 2),
        (lambda y: y.gather(0, torch.zeros_like(y, dtype=torch.int64)), 2),
    ],
)
def test_a_kernel_writes_only_over_elements_that_it_reads_there(function, held):
    assert peaks(decomposed(lambda x: function(x @ x), (32, 32)))[0] == held


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda y: y * y.sum(0), 1),  # after the sum, which is a kernel of its own
        (lambda y: (y.sin(), y.cos()), 3),  # parts of one kernel
        (lambda y: y.view(4, 8, 32).sin(), 1),
        (lambda y: (y + y.sum(1, keepdim=True)).view(4, 8, 32).sin(), 1),
    ],
)
def test_a_kernel_writes_over_what_only_its_own_inputs_have_read(function, held):
    with use_target(Target.parse("cpu")):
        assert peaks(decomposed(lambda x: function(x @ x), (32, 32)))[0] == held


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda y: (y.sum(0), y.sin()), 1),
        (lambda y: (y.sin(), y.sum(0)), 2),  # which runs later
        (lambda y: (y.sum(1), y.sin()), 2),  # parts of one kernel
        (lambda y: (y.view(32, 32).sum(0), y.sin()), 2),  # as may be those of a square
        (lambda y: (y.sum(0), y * y.square().sum(1, keepdim=True)), 1),  # as of a norm
    ],
)
def test_a_kernel_writes_over_what_a_sum_of_columns_has_read(function, held):
    graph = decomposed(lambda x, w: function(x @ w), (64, 8), (8, 16))
    with use_target(Target.parse("cpu")):
        assert liveness(graph).peak_bytes // UNIT == held
    with use_target(Target.parse("h100")):
        assert liveness(graph).peak_bytes // UNIT == 2  # Triton code may have both in one


@pytest.mark.parametrize("dims", [[0], []])
def test_a_scalar_can_be_reduced(dims):
    assert peaks(decomposed(lambda x: aten.sum.dim_IntList(x.exp(), dims).sin(), ()))[0] == 0


def test_fused_kernels_hold_what_each_of_them_reads():
    def function(x):
        first, second = x @ x, x.t() @ x
        made = first * second
        return made, made.sin()

    # The first result is written over a product, and the second beside both.
    assert peaks(decomposed(function, (32, 32)))[0] == 3


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda x, y, kernel: (torch.cat([kernel, y]), y @ y), 3),
        (lambda x, y, kernel: (torch.cat([kernel, y]), kernel), 3),
        (lambda x, y, kernel: (torch.cat([kernel, y]), kernel @ y), 4),
        (lambda x, y, kernel: (kernel.view(1, 32, 32).bmm(x[None]), torch.cat([kernel, y])), 4),
        (lambda x, y, kernel: (torch.addmm(x[0], kernel, y), torch.cat([kernel, y])), 3),
    ],
)
def test_what_has_a_layout_before_a_cat_is_copied_there(function, held):
    graph = decomposed(lambda x, y: function(x, y, x.sin()), (32, 32), (32, 32))
    assert peaks(graph)[0] == held


def average_gradient(window, step, *, then):
    """The backward of an average over images, and their saved value."""
    graph = torch.fx.Graph()
    gradient, given = (graph.placeholder(name) for name in ("made", "saved"))
    call = aten.avg_pool2d_backward.default
    settings = [window] * 2, [step] * 2, [0, 0], False, True, None
    made = graph.call_function(call, (gradient, given, *settings))
    later = graph.call_function(then, (made, made) if then is aten.mul.Tensor else (made,))
    images, averages = (4, 1, 12, 12), 2 * ((12 - window) // step + 1,)
    after = images if then is aten.mul.Tensor else ()
    for node, shape in zip(
        (gradient, given, made, later), ((4, 1, *averages), images, images, after), strict=True
    ):
        node.meta["val"] = torch.empty(shape, device="meta")
    graph.placeholder("tangents_1").meta["val"] = torch.empty((), device="meta")
    graph.output((later,))
    return graph, given, made


@pytest.mark.parametrize(("window", "step", "reads"), [(2, 2, False), (6, 6, False), (6, 1, True)])
def test_the_gradient_of_an_average_needs_a_shape_alone(window, step, reads):
    """By a kernel. What code reads nowhere is never freed, and what an operator reads is."""
    graph, given, made = average_gradient(window, step, then=aten.sum.default)
    held = {each.node: each for each in liveness(graph).buffers}[given]
    at = list(graph.nodes).index(made)
    assert held.last == (at if reads else len(graph.nodes) - 1)


@pytest.mark.parametrize(("step", "inlined"), [(6, True), (1, False)])
def test_the_gradient_of_an_average_is_computed_in_its_readers(step, inlined):
    graph, _, made = average_gradient(6, step, then=aten.mul.Tensor)
    assert (made not in {each.node for each in liveness(graph).buffers}) == inlined


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda x: F.avg_pool2d(x.sin(), 2).cos(), 0.25),
        (lambda x: F.avg_pool2d(x[:, :1] * x[:, 1:], 2), 0.5 + 0.125),  # reads two values
        (lambda x: F.avg_pool2d(x.sin(), 6, 1).cos(), 1 + 49 / 144),  # an operator
    ],
)
def test_what_is_averaged_is_computed_where_it_is_read(function, held):
    graph = decomposed(function, (1, 2, 12, 12))
    assert liveness(graph).peak_bytes == held * 4 * 2 * 12 * 12


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.avg_pool2d(x.sin(), [3], [2]).cos(),
        lambda x: ((x @ x).to(torch.bfloat16).view(torch.int16) & -256).view(torch.bfloat16) + 1,
        lambda x: ((x @ x)[..., :0, :8].square() @ x[..., :8, :]) + 1,
    ],
    ids=["one size for both dimensions", "bits of another dtype", "no rows"],
)
def test_forms_that_torch_accepts_are_counted(function):
    assert liveness(decomposed(function, (1, 2, 12, 12))).peak_bytes > 0


def test_a_kernel_writes_over_what_it_reads_through_views_and_back():
    """As the gradients of experts, which are permuted there and back again."""

    def function(x, *, back):
        made = (x @ x).view(4, 8, 32).permute(1, 0, 2).sin()
        return (made.permute(1, 0, 2) if back else made).contiguous().view(32, 32)

    there_and_back, there = partial(function, back=True), partial(function, back=False)
    assert peaks(decomposed(there_and_back, (32, 32)))[0] == 1
    assert peaks(decomposed(there, (32, 32)))[0] == 2


def test_sizes_that_may_be_equal_are_not_compared():
    """A comparison of symbols would add a guard."""

    def function(x):
        return (x * x.sum(1).view(-1, 1)).sum(0)

    traced = make_fx(function, compat.inductor_decompositions(), tracing_mode="symbolic")(
        torch.empty(9, 9, 1)[..., 0]
    )
    shapes = next(iter(traced.graph.nodes)).meta["val"].fake_mode.shape_env
    before = len(shapes.guards)
    liveness(traced.graph)
    assert len(shapes.guards) == before


def test_backward_writes_over_no_gradient_and_no_output_of_the_model():
    def peak(name, **meta):
        graph = torch.fx.Graph()
        given, loss = graph.placeholder(name), graph.placeholder("tangents_9")
        given.meta |= meta
        made = graph.call_function(aten.sin.default, (given,))
        for node, shape in ((given, 1024), (loss, ()), (made, 1024)):
            node.meta["val"] = torch.empty(shape, device="meta")
        graph.output((made,))
        return liveness(graph).peak_bytes // UNIT

    assert peak("saved") == 1
    assert peak("tangents_1") == 2


@pytest.mark.parametrize("returns_logits", [False, True])
def test_what_the_model_returns_is_not_written_over(returns_logits):
    class Head(torch.nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            loss = logits.square().sum()
            return (loss, logits) if returns_logits else (loss,)

    graphs = {}
    with fake_world(2) as mesh:
        model = zpasses.shard(Head(8, 8), mesh=mesh)
        step = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
        with observe_graphs(lambda log: graphs.setdefault(log.kind, log.graph)):
            step(torch.ones(4, 8))[0].backward()
    saved = [
        node
        for node in graphs["backward"].find_nodes(op="placeholder")
        if not node.name.startswith(("primals", "tangents"))
    ]
    assert [compat.may_overwrite(node) for node in saved] == [not returns_logits]


def test_each_output_of_a_call_has_memory_of_its_own():
    build = built("x")
    (x,) = build.inputs
    call = build.call(aten.var_mean.correction, x, [0])
    first, second = (build.call(operator.getitem, call, at) for at in range(2))
    view = build.call(aten.view.default, second, [1])
    build.returns(first, view)
    assert [memory_root(each) for each in (first, view)] == [first, second]
    outputs = [root_output(memory_root(each)) for each in (first, view, x)]
    assert outputs == [(call, 0), (call, 1), (x, 0)]
    buffers = [each for each in liveness(build.graph).buffers if each.node is call]
    assert [each.output for each in buffers] == [0, 1]
    # Views share the memory of what they view, also if a call makes several.
    parts = build.call(aten.split.Tensor, x, 512)
    assert memory_root(build.call(operator.getitem, parts, 1)) is x
