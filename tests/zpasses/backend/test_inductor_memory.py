"""How long Inductor's code holds what collectives read, and which kernels it fuses."""

import operator
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.utils import run_and_get_code

import zpasses
from tests.zpasses.backend.inductor_code import allocations, built, calls_of, code_of
from zpasses import compat
from zpasses.compat import inductor_fused_order, inductor_fusion
from zpasses.graph.queries import Editor
from zpasses.testing import fake_world

pytestmark = [pytest.mark.inductor, pytest.mark.filterwarnings("ignore:dynamo_pgo")]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def reduced_twice(*, coalesced):
    """A product is reduced and scattered, then averaged while another product runs."""
    graph, mode = torch.fx.Graph(), compat.FakeTensorMode()
    a, x = graph.placeholder("a"), graph.placeholder("x")
    with mode:
        for node in (a, x):
            node.meta["val"] = torch.empty(4, 4)
    output = graph.output(())
    edit = Editor(graph, before=output)
    part = edit.call(aten.mm.default, a, a)
    if coalesced:
        several = edit.call(c10d.reduce_scatter_tensor_coalesced.default, [part], "avg", 2, "0")
        shard = edit.call(operator.getitem, several, 0)
    else:
        shard = edit.call(c10d.reduce_scatter_tensor.default, part, "avg", 2, "0")
    shard = edit.call(c10d.wait_tensor.default, shard)
    if coalesced:
        several = edit.call(c10d.all_reduce_coalesced.default, [shard], "avg", "0")
        mean = edit.call(operator.getitem, several, 0)
    else:
        mean = edit.call(c10d.all_reduce.default, shard, "avg", "0")
    beside = edit.call(aten.mm.default, x, x)
    output.args = ((beside, edit.call(c10d.wait_tensor.default, mean)),)
    return torch.fx.GraphModule({}, graph), [a.meta["val"], x.meta["val"]]


@pytest.mark.parametrize("coalesced", [False, True])
def test_the_input_of_a_reduction_is_freed_when_the_average_of_its_result_starts(coalesced):
    patches = {"reorder_for_peak_memory": False, "force_disable_caches": True}
    with fake_world(2), torch.no_grad():
        gm, values = reduced_twice(coalesced=coalesced)

        def run():
            inputs = [torch.ones(4, 4), torch.ones(4, 4)]
            return compat.inductor_codegen_standalone(gm, values, patches)(inputs)

        (_, mean), (code,) = run_and_get_code(run)
    lines = [line.strip() for line in code[code.index("args.clear()") :].splitlines()]
    waits = [at for at, line in enumerate(lines) if "wait_tensor.default(" in line]
    (started,) = (at for at, line in enumerate(lines) if ".all_reduce_" in line)
    (reused,) = (at for at, line in enumerate(lines) if "del buf0  # reuse" in line)
    assert waits[0] < reused < waits[1]  # by the other product
    assert waits[0] < started < waits[1]
    assert mean.shape == (2, 4)
    assert not any("copy" in line or "cpp_fused" in line for line in lines)  # reduced in place


# --- the fusion of kernels ------------------------------------------------------------------------


def test_kernels_are_not_fused_where_that_raises_the_peak():
    assert calls_of({}, what="products") == ["product", "kernel", "product"]  # reads `h` once
    kept = calls_of(compat.within_planned_peak({}), what="products")
    assert kept == ["kernel", "product", "product", "kernel"]


@pytest.mark.parametrize("room", [False, True])
def test_fused_kernels_are_taken_apart_while_the_peak_is_exceeded(room, monkeypatch):
    """Before they are fused, only estimates are known of what that adds."""
    monkeypatch.setattr(inductor_fusion._Fusions, "restrict", lambda fusions: None)
    with compat.observing_peaks() as peaks:
        calls = calls_of(compat.within_planned_peak({}), what="products", room=room)
    fused, apart = ["product", "kernel", "product"], ["kernel", "product", "product", "kernel"]
    assert calls[:4] == ([*fused, "product"] if room else apart)
    monkeypatch.setattr(inductor_fused_order, "_MOST_TRIALS", 0)
    with compat.observing_peaks() as before:
        assert calls_of(compat.within_planned_peak({}), what="products", room=room)[:3] == fused
    assert (peaks == before) is room
    assert peaks[0] <= before[0]


def reads_before_a_write(turned, moved, given, factor):
    """A long kernel reads `moved`, which another one writes to. It is fused with `half`, which
    lives longer for it, beside the product.
    """
    product = factor @ factor
    half = torch.cos(turned).half()
    made = torch.tanh(moved + given)
    row = (product.view(64, 1024) * made.view(1, 1024)).sum(1)[:32, None] / 100
    long = torch.exp(given)
    for _ in range(45):
        long = torch.sin(long) * 1.1 + 0.3
    long = long + moved
    moved.copy_(made * row + turned)
    return half, made, long


def test_what_reads_a_buffer_that_is_written_to_is_not_taken_apart():
    """Inductor has dropped by then what orders the read before the write."""
    torch._dynamo.reset()
    shapes = [(32, 32)] * 3 + [(256, 256)]
    own, others = ([torch.randn(each) / 3 for each in shapes] for _ in range(2))
    for mine, other in zip(own, others, strict=True):
        other.copy_(mine)
    ours = dict.fromkeys(
        ("reorder_for_locality", "reorder_for_peak_memory", "allow_buffer_reuse"), False
    )
    options = {**ours, "fx_graph_cache": False, **compat.within_planned_peak({})}
    expected = reads_before_a_write(*own)
    for mine, other in zip(
        torch.compile(reads_before_a_write, options=options)(*others), expected, strict=True
    ):
        torch.testing.assert_close(mine, other)


class Part:
    """A part of a fused kernel, of one group of sizes."""

    scheduler = SimpleNamespace(get_backend=lambda device: None)

    def __init__(self, *sizes, reduces=False):
        self.group = "cuda:0", sizes
        self.is_reduction = lambda: reduces

    def get_device(self):
        return "cuda:0"


@pytest.mark.parametrize(
    ("parts", "fits"),
    [
        ([Part(64, 1), Part(64, 1)], True),
        ([Part(64, 1), Part(4096, 1)], False),  # what goes through a reduction, without it
        ([Part(64, 1), Part(4096, 1), Part(64, 64, reduces=True)], True),
        ([Part(32, 1), Part(64, 64, reduces=True)], False),
        ([Part(64, 64, reduces=True), Part(64, 32, reduces=True)], False),
    ],
)
def test_parts_are_one_kernel_if_their_sizes_are_those_of_one(parts, fits):
    assert inductor_fused_order._is_one_kernel(parts) is fits


@pytest.mark.parametrize("graph", [{"what": "products", "room": True}, {"what": "wait"}])
def test_kernels_are_fused_where_there_is_room(graph):
    calls = calls_of(compat.within_planned_peak({}), **graph)
    assert calls == calls_of({}, **graph)
    assert calls.count("kernel") == 1


def test_a_kernel_is_kept_apart_by_an_operator_that_no_fusion_moves():
    """The second kernel is fused with the first, so that `made` runs before both. What keeps the
    third one apart from them is a later product.
    """

    def graph(call, base, row, left, right, column, line):
        first = call(aten.exp.default, base)
        made = call(aten.mm.default, left, right)
        yield call(aten.mm.default, row, call(aten.mul.Tensor, base, made))
        yield call(aten.mm.default, row, first)
        yield first
        yield call(aten.sin.default, base)
        yield call(aten.mm.default, column, line)  # at the peak

    shapes = {f"primals_{name}": (8, 8) for name in ("base", "row", "left", "right")}
    shapes |= {"primals_row": (1, 8), "primals_column": (6, 1), "primals_line": (1, 10)}
    calls = calls_of(compat.within_planned_peak({}), lambda: built(graph, **shapes))
    assert calls == ["product", "kernel", "product", "product", "kernel", "product"]


def test_an_input_counts_once_however_often_its_elements_are_read():
    """The peak is not where Inductor's count has it, so kernels after it stay apart."""

    def graph(call, row, base, product, *saved):
        wide = [call(aten.expand.default, each, [8, 4, 16]) for each in saved]
        wide = [call(aten.clone.default, each) for each in wide]
        factors = [call(aten.view.default, each, [8, 64]) for each in wide]
        for each in factors:
            product = call(aten.mul.Tensor, product, each)
        yield call(aten.sum.dim_IntList, product, [1])
        yield call(aten.mm.default, row, call(aten.exp.default, base))
        yield call(aten.mm.default, row, call(aten.cos.default, base))

    shapes = {"primals_row": (1, 8), "primals_base": (8, 64), "primals_factor": (8, 64)}
    shapes |= dict.fromkeys(("first", "second", "third"), (8, 4, 1))
    calls = calls_of(compat.within_planned_peak({}), lambda: built(graph, **shapes))
    assert calls == ["kernel", "product", "kernel", "product"]


def test_kernels_are_not_fused_across_a_collective_where_that_raises_the_peak():
    """What the second one writes would live beside all that the collective needs."""

    def graph(call, base):
        first = call(aten.exp.default, base)
        part = call(c10d.reduce_scatter_tensor.default, first, "sum", 2, "0")
        yield call(c10d.wait_tensor.default, part)
        yield call(aten.sin.default, base)

    make = lambda: built(graph, primals_base=(64, 64))  # noqa: E731
    assert calls_of({}, make) == ["kernel"]
    assert calls_of(compat.within_planned_peak({}), make) == ["kernel", "kernel"]


def test_a_kernel_runs_where_the_graph_has_it():
    """Not right before the product that reads it, so that what it reads is freed early."""

    def graph(call, row, base, left, right):
        result = call(aten.sin.default, call(aten.mm.default, left, right))
        yield call(aten.mm.default, row, base)
        yield call(aten.mm.default, row, result)

    shapes = {f"primals_{name}": (8, 8) for name in ("row", "base", "left", "right")}
    make = lambda: built(graph, **shapes)  # noqa: E731
    assert calls_of({}, make) == ["product", "product", "kernel", "product"]
    kept = calls_of(compat.within_planned_peak({}), make)
    assert kept == ["product", "kernel", "product", "product"]


def test_a_kernel_is_a_part_of_the_one_kernel_that_reads_it():
    """Not of an earlier one, where what it makes lives across the products between."""

    def graph(call, base, row, left, right):
        yield call(aten.mm.default, row, call(aten.exp.default, base))
        made = call(aten.mm.default, left, right)
        factor = call(aten.sigmoid.default, base)  # read twice, so it is not inlined
        made = call(aten.mul.Tensor, call(aten.mul.Tensor, made, factor), factor)
        yield call(aten.mm.default, row, made)

    shapes = {f"primals_{name}": (8, 8) for name in ("base", "row", "left", "right")}
    shapes["primals_row"] = (1, 8)
    code = code_of(compat.within_planned_peak({}), lambda: built(graph, **shapes))
    assert allocations(code) == 4  # `exp`, `made` and what is returned


def test_a_part_of_a_kernel_is_kept_apart_by_what_another_part_waits_for():
    """The kernel of `factor` could be fused with the first one, that of its reader could not."""

    def graph(call, base, other, row, left):
        first = call(aten.exp.default, call(aten.mul.Tensor, base, other))
        made = call(aten.mm.default, first, left)
        factor = call(aten.sigmoid.default, call(aten.add.Tensor, base, other))
        made = call(aten.mul.Tensor, call(aten.mul.Tensor, made, factor), factor)
        yield call(aten.mm.default, row, made)

    shapes = {f"primals_{name}": (64, 64) for name in ("base", "other", "row", "left")}
    shapes["primals_row"] = (1, 64)
    code = code_of(compat.within_planned_peak({}), lambda: built(graph, **shapes))
    assert allocations(code) == 3  # `first`, `made` and what is returned


def test_a_kernel_is_no_part_of_one_that_reads_it_in_another_order():
    """Inductor does not fuse these, so the peak is where both of them live."""

    def graph(call, base, row, left, column, line):
        yield call(aten.mm.default, row, call(aten.exp.default, base))
        made = call(aten.mm.default, left, left)
        factor = call(aten.sigmoid.default, made)
        turned = call(aten.permute.default, factor, [1, 0])
        product = call(aten.mul.Tensor, call(aten.mul.Tensor, factor, turned), made)
        yield call(aten.mm.default, row, product)
        yield call(aten.mm.default, row, call(aten.cos.default, base))
        yield call(aten.mm.default, row, call(aten.mm.default, column, line))

    shapes = {"base": (64, 64), "row": (1, 64), "left": (64, 64), "column": (64, 1)}
    shapes = {f"primals_{name}": shape for name, shape in {**shapes, "line": (1, 160)}.items()}
    code = code_of(compat.within_planned_peak({}), lambda: built(graph, **shapes))
    starts = [line for line in code if line.startswith(("cpp_fused", "extern_kernels.mm("))]
    assert starts[0].count("buf") == 1  # `exp` alone


@pytest.mark.parametrize("workspace", [0, 1 << 20])
@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten._scaled_dot_product_flash_attention_for_cpu.default, ()),
        (aten.convolution.default, (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
    ],
    ids=["attention", "convolution"],
)
def test_what_an_operator_takes_within_its_call_counts(target, arguments, workspace):
    """Where the peak is within its call, nothing may live across it in addition."""

    def graph(call, base, row, column, line, query):
        yield call(aten.mm.default, row, call(aten.exp.default, base))
        given = (query, query) if arguments else (query, query, query)
        result = call(target, *given, *arguments)
        yield result if arguments else call(operator.getitem, result, 0)
        yield call(aten.mm.default, row, call(aten.cos.default, base))
        yield call(aten.mm.default, row, call(aten.mm.default, column, line))

    shapes = {"base": (64, 64), "row": (1, 64), "column": (64, 1), "line": (1, 256)}
    shapes = {f"primals_{name}": shape for name, shape in shapes.items()}
    patches = compat.within_planned_peak({}, lambda call: workspace if call.target is target else 0)
    calls = calls_of(patches, lambda: built(graph, **shapes, primals_query=(1, 1, 8, 8)))
    assert calls.count("kernel") == (2 if workspace else 1)


def test_what_rests_on_the_host_is_no_memory_that_fused_kernels_may_take():
    """It would count until the copy back, so the peak would be there and leave room later."""

    def graph(call, rest, row, base, left, right):
        host = torch.device("cpu")
        ticket = call(torch.ops.zpasses.reload.default, rest, host)
        came = call(torch.ops.zpasses.reload_wait.default, ticket, rest, host)
        yield call(aten.mm.default, row, came)
        yield call(aten.mm.default, left, call(aten.exp.default, base))
        yield call(aten.mul.Tensor, base, call(aten.mm.default, left, right))

    shapes = {f"primals_{name}": (8, 8) for name in ("base", "left", "right")}
    shapes = {"rest": (14, 8), "primals_row": (1, 14), **shapes}
    calls = calls_of(compat.within_planned_peak({}), lambda: built(graph, **shapes))
    assert calls == ["product", "kernel", "product", "product", "kernel"]


def test_a_copy_from_the_host_takes_memory_from_its_start():
    """Also beside what is free before its wait, of which it is an output."""

    def graph(call, rest, row, left, right):
        host = torch.device("cpu")
        ticket = call(torch.ops.zpasses.reload.default, rest, host)
        yield call(aten.sum.default, call(aten.mm.default, left, right))
        came = call(torch.ops.zpasses.reload_wait.default, ticket, rest, host)
        yield call(aten.mm.default, row, came)

    shapes = {"primals_row": (1, 64), "primals_left": (64, 8), "primals_right": (8, 64)}
    shapes = {"rest": (64, 64), **shapes}
    with compat.observing_peaks() as peaks:
        calls_of(compat.within_planned_peak({}), lambda: built(graph, **shapes))
    assert 2 * 4 * 64 * 64 <= peaks[0] < 2.1 * 4 * 64 * 64


def test_kernels_are_no_one_function_where_that_raises_the_peak():
    """What a function writes is allocated before all of it, and what it reads is freed after it."""

    def graph(call, small, large, column):
        products = [call(aten.mm.default, each, each) for each in (small, large)]
        row = call(aten.slice.Tensor, products[1], 0, 0, 1)
        factor = call(aten.mm.default, row, column)  # so that no product runs between the kernels
        for each, size in zip(products, (8, 16), strict=True):
            yield call(aten.mul.Tensor, call(aten.expand.default, each, [2, size, size]), factor)

    shapes = {"primals_small": (8, 8), "primals_large": (16, 16), "primals_column": (16, 1)}
    make = lambda: built(graph, **shapes)  # noqa: E731
    kept = calls_of(compat.within_planned_peak({}), make)
    assert kept == ["product"] * 3 + ["kernel"] * 2
    assert calls_of({}, make) == ["product"] * 3 + ["kernel"]


def test_a_function_of_kernels_goes_on_after_what_joins_its_results():
    """What a part of a `cat` is computed from is freed after the function, not after the part."""

    def graph(call, left, right, row, *larger):
        products = (call(aten.mm.default, each, each) for each in (left, right))
        joined = call(aten.cat.default, [call(aten.exp.default, each) for each in products], 1)
        scaled = call(aten.mul.Tensor, joined, call(aten.sum.dim_IntList, joined, [0], True))
        yield call(aten.mm.default, row, call(aten.permute.default, scaled, [1, 0]))
        if larger:  # at a peak that leaves room before
            yield call(aten.mm.default, *larger)

    shapes = {"primals_left": (8, 8), "primals_right": (8, 8), "primals_row": (1, 16)}
    kept = calls_of(compat.within_planned_peak({}), lambda: built(graph, **shapes))
    assert kept == ["product", "kernel"] * 2 + ["kernel", "product"]
    shapes |= {"primals_column": (64, 1), "primals_line": (1, 64)}
    roomy = calls_of(compat.within_planned_peak({}), lambda: built(graph, **shapes))
    assert roomy == ["product", "kernel"] * 2 + ["product"] * 2


class Recorded(CustomSchedulerPass):
    """A pass of a user."""

    def __init__(self):
        self.calls = 0

    def __call__(self, nodes):
        self.calls += 1
        return nodes

    def uuid(self):
        return "recorded"


HOOK = "_pre_fusion_custom_pass"


@pytest.mark.parametrize("place", ["options", "config"])
def test_a_pass_of_the_user_runs_before(place):
    own = Recorded()
    with torch._inductor.config.patch({HOOK: own if place == "config" else None}):
        patches = compat.within_planned_peak({HOOK: own} if place == "options" else {})
        kept = calls_of(patches, what="products")
    assert own.calls == 1
    assert kept == ["kernel", "product", "product", "kernel"]
    # Inductor caches code by it.
    assert patches[HOOK].uuid() != compat.within_planned_peak({})[HOOK].uuid()


@pytest.mark.parametrize("form", ["pass", "function"])
def test_a_pass_of_the_user_gets_the_kernels_as_they_run(form):
    own = Recorded()
    patches = compat.within_planned_peak(
        {"_post_fusion_custom_pass": own if form == "pass" else lambda nodes: own(nodes)}
    )
    kept = calls_of(patches, what="products")
    assert own.calls == 1
    assert kept == ["kernel", "product", "product", "kernel"]


def test_a_function_of_the_user_keeps_code_out_of_the_cache_of_inductor():
    calls = []
    patches = compat.within_planned_peak({HOOK: lambda nodes: calls.append(1) or nodes})
    assert calls_of(patches, what="products") == ["kernel", "product", "product", "kernel"]
    assert calls == [1]
    assert not isinstance(patches[HOOK], CustomSchedulerPass)


def test_options_of_the_user_are_kept():
    chosen = {HOOK: None, "max_fusion_size": 8}
    assert compat.within_planned_peak(chosen) == chosen


def test_code_that_reuses_buffers_can_be_made_of_kept_kernels():
    """Inductor's choice of buffers to reuse must not see what the pass has found out."""
    patches = compat.within_planned_peak({"allow_buffer_reuse": True})
    assert calls_of(patches, what="products") == ["kernel", "product", "product", "kernel"]


@pytest.mark.parametrize("options", [{}, {"memory_budget": "1GiB"}], ids=["free", "budget"])
def test_compiles_keep_the_peak_if_they_have_a_budget(options, monkeypatch):
    kept, codegen = [], compat.inductor_codegen

    def recorded(gm, inputs, patches, kwargs):
        kept.append((patches.get(HOOK) is not None, patches["allow_buffer_reuse"]))
        return codegen(gm, inputs, patches, kwargs)

    monkeypatch.setattr(compat, "inductor_codegen", recorded)
    with fake_world(2) as mesh:
        net = torch.nn.Linear(8, 8)
        zpasses.shard(net, mesh=mesh)
        step = torch.compile(net, backend="zpasses", options={"cache": False, **options})
        step(torch.ones(2, 8)).sum().backward()
    assert kept == [(bool(options), False)] * 2
