"""Which values the cost model takes to be written to memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import inductor_prims
from torch.fx.experimental.proxy_tensor import make_fx

from zpasses import compat
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.time.fused_kernels import FusedKernels, use_fusion
from zpasses.cost.time.roofline import compute_us, durations_us
from zpasses.cost.time.target import Target, use_target

aten = torch.ops.aten
T = Target.parse("h100,memory_gb_s=1,tflops=1e9,kernel_us=1e-6")
KIB = 1024


@pytest.fixture(autouse=True)
def fusion():
    with use_fusion(True):
        yield


def traced(function, *shapes, dtype=torch.float32, decomposed=True):
    table = compat.inductor_decompositions() if decomposed else {}
    with compat.FakeTensorMode():
        given = [torch.empty(shape, dtype=dtype) for shape in shapes]
        return make_fx(function, table, tracing_mode="fake")(*given).graph


def moved(graph):
    """Name of each operator -> bytes that its kernel moves."""
    kernels = FusedKernels()
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return {node.name: kernels.moved_bytes(node) for node in calls}


def test_an_elementwise_result_between_elementwise_operators_is_never_written():
    graph = traced(lambda x, y: ((x + y).relu() * 2).sum(1), (KIB, 4), (KIB, 4))
    found = moved(graph)
    assert [found.pop(name) for name in ("add", "relu", "mul")] == [None] * 3
    assert list(found.values()) == [2 * 16 * KIB + 4 * KIB]  # both inputs, and the sums


def test_what_others_read_is_written_once_and_read_by_each():
    def function(x, w):
        y = x.exp()
        return y @ w, y + 1

    found = moved(traced(function, (32, 32), (32, 32)))
    assert found == {"exp": 2 * 4 * KIB, "mm": 3 * 4 * KIB, "add": 2 * 4 * KIB}


def test_an_exponential_on_a_cpu_is_not_computed_again_after_a_product():
    def function(x, w):
        y = torch.sigmoid(x)
        return y * (1 - y), (x + 1) @ w, (y - 1) @ w, y + 2

    graph = traced(function, (32, 32), (32, 32))
    for target, written in (("h100", None), ("cpu", 2 * 4 * KIB)):
        with use_target(Target.parse(target)):
            assert moved(graph)["sigmoid"] == written
    near = traced(lambda x: torch.sigmoid(x) * (1 - torch.sigmoid(x)), (32, 32))
    with use_target(Target.parse("cpu")):
        assert moved(near)["sigmoid"] is None


def test_a_value_that_nobody_reads_is_written():
    assert moved(traced(lambda x, y: x.copy_(y), (KIB,), (KIB,)))["copy_"] == 3 * 4 * KIB


def test_an_input_that_an_expression_reads_twice_is_loaded_once():
    found = moved(traced(lambda x: (x.exp() * x.sin()).sum(), (KIB,)))
    assert found["sum_1"] == 4 * KIB + 4


def test_expressions_of_many_tensors_become_kernels():
    def function(*values):
        return math.prod(values[1:], start=values[0]).relu()

    found = moved(traced(function, *[(KIB,)] * 12))
    assert [name for name, each in found.items() if each is not None] == ["mul_7", "relu"]
    assert found["mul_7"] == (9 + 1) * 4 * KIB
    assert found["relu"] == (1 + 3 + 1) * 4 * KIB  # the value of the first kernel, three inputs


@pytest.mark.parametrize("through", [lambda each: each, lambda each: each.view(-1, 4)])
def test_shared_expressions_become_kernels_sooner(through):
    """Also if a view of one has several readers."""

    def function(*values):
        shared = through(math.prod(values[1:], start=values[0]))
        return shared.exp() + 1, shared.sin() + 1

    for count, kernels in ((4, 2), (5, 3)):
        found = moved(traced(function, *[(KIB,)] * count))
        found.pop("view", None)
        assert sum(each is not None for each in found.values()) == kernels


def test_views_pass_on_what_is_read():
    def function(x, row):
        return (x.exp() * row.exp()[:, None].expand(64, 64)).sum(0)

    found = moved(traced(function, (64, 64), (64,)))
    kernels = {name: each for name, each in found.items() if each is not None and "sum" in name}
    assert list(kernels.values()) == [64 * 64 * 4 + 64 * 4 + 64 * 4]


def test_rows_that_are_looked_up_are_loaded_alone():
    rows = torch.zeros(8, dtype=torch.int64)
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        table, at = torch.empty(1000, 16), rows
        graph = make_fx(lambda table, at: F.embedding(at, table) @ table.t())(table, at).graph
    with use_fusion(False):
        one_by_one = moved(graph)["embedding"]
    assert moved(graph)["embedding"] == one_by_one == 8 * 8 + 2 * 8 * 16 * 4


def test_kernels_look_up_the_rows_that_they_read():
    """The table lives as long as the kernels that read its rows."""
    rows = torch.zeros(8, dtype=torch.int64)
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        table, at = torch.empty(1000, 16), rows
        graph = make_fx(lambda table, at: F.embedding(at, table) + 1)(table, at).graph
    assert moved(graph) == {"embedding": None, "add": 8 * 8 + 2 * 8 * 16 * 4}


def test_an_element_of_each_row_does_not_load_the_rows():
    def function(x):
        return x.exp().gather(1, torch.zeros(KIB, 1, dtype=torch.int64)).sum()

    found = moved(traced(function, (KIB, 64)))
    assert found["sum_1"] == KIB * 4 + 4


def test_zeros_into_which_rows_are_added_are_written_once():
    """The backward of an embedding: zeros, and the rows of its gradient."""

    def function(rows):
        at = torch.zeros(8, dtype=torch.int64)
        return torch.ops.aten.embedding_dense_backward(rows, at, 1000, -1, False)

    graph = traced(function, (8, 16))
    found, table = moved(graph), 1000 * 16 * 4
    assert sum(each or 0 for each in found.values()) < 1.2 * table
    assert liveness(graph).peak_bytes < 1.2 * table
    with use_fusion(False):
        assert sum(each or 0 for each in moved(graph).values()) > 2.9 * table
        assert liveness(graph).peak_bytes > 1.9 * table


@pytest.mark.parametrize(("dtype", "written"), [(torch.float32, 0), (torch.int64, 1)])
def test_a_kernel_computes_the_values_that_it_adds_to_rows(dtype, written):
    """An operator adds integers, and reads them from memory."""

    def function(rows):
        at = torch.zeros(8, dtype=torch.int64)
        made = aten.index_put(rows.new_zeros(1000, 16), [at], rows * 2 + 1, True)
        return made.view(-1)

    found = moved(traced(function, (8, 16), dtype=dtype, decomposed=False))
    assert sum(found[name] is not None for name in ("mul", "add")) == written


@pytest.mark.parametrize(
    ("read", "written"),
    [(lambda kept, x: (kept, kept * x), 0), (lambda kept, x: ((kept * x) @ x, kept * x + 1), 1)],
)
def test_random_numbers_are_made_once(read, written):
    """In the one kernel that reads them, or in one of their own."""
    graph = traced(
        lambda x, seed: read(inductor_prims.random([32, 32], seed, "rand") > 0.1, x), (32, 32), ()
    )
    assert (moved(graph)["inductor_random"] is not None) == written


def test_operators_that_run_one_by_one_all_have_kernels():
    graph = traced(lambda x, y: ((x + y).relu() * 2).sum(1), (KIB, 4), (KIB, 4))
    with use_fusion(False):
        assert list(moved(graph).values()) == [each * 16 * KIB for each in (3, 2, 2)] + [20 * KIB]


def test_long_chains_are_followed():
    def function(x):
        for _ in range(1500):
            x = x + 1
        return x

    graph = traced(function, (KIB,))
    last = list(graph.nodes)[-2]
    assert FusedKernels().moved_bytes(last) == 2 * 4 * KIB
    assert compute_us(last, T) == pytest.approx(8.192)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.gelu(x) @ x,
        lambda x: F.layer_norm(x, x.shape[1:]) @ x,
        lambda x: torch.softmax(x, -1) @ x,
        lambda x: F.log_softmax(x.float(), -1).sum(),
    ],
)
def test_decomposed_operators_take_about_as_long_as_whole_ones(function):
    whole, parts = (
        sum(durations_us(graph.nodes, T))
        for graph in (
            traced(function, (256, 256), decomposed=False),
            traced(function, (256, 256)),
        )
    )
    assert parts == pytest.approx(whole, rel=0.45)  # each of them alone: 2.5 and more


def test_memory_and_time_are_the_same_with_kernels_that_a_caller_has():
    def function(x, y):
        z = torch.relu(x) * 2
        return torch.softmax(z @ y, -1).sum() + z.t().contiguous().cos().sum()

    graph = traced(function, (64, 32), (32, 16))
    kernels = FusedKernels()
    shared, own = liveness(graph, kernels=kernels), liveness(graph)
    assert shared.live_bytes == own.live_bytes
    assert [vars(each) for each in shared.buffers] == [vars(each) for each in own.buffers]
    assert durations_us(graph.nodes, T, kernels) == durations_us(graph.nodes, T)
    assert {name: kernels.moved_bytes(n) for name, n in named(graph)} == moved(graph)


def named(graph):
    return [(node.name, node) for node in graph.nodes if node.op == "call_function"]
