"""What kernels of Inductor's code write over, and what they compute in no memory."""

import operator

import pytest
import torch

from tests.zpasses.backend.inductor_code import allocations, built, calls_of, code_of
from zpasses import compat
from zpasses.compat import inductor_fused_order

pytestmark = [pytest.mark.inductor, pytest.mark.filterwarnings("ignore:dynamo_pgo")]

aten, prims = torch.ops.aten, torch.ops.prims


def test_a_kernel_that_runs_after_a_product_still_writes_over_it():
    """Also if it is kept from being fused with a kernel before the product."""

    code = code_of(compat.within_planned_peak({}), what="products")
    assert allocations(code) == 3  # not 4: the last one has none


def test_a_kernel_writes_over_a_part_of_what_an_operator_returns():
    """Such as the gradient of a convolution."""

    def graph(call, base):
        sorted_, order = (call(operator.getitem, call(aten.sort.default, base), i) for i in (0, 1))
        yield call(aten.sin.default, sorted_)
        yield call(aten.sum.default, order)

    with compat.observing_peaks() as peaks:
        calls_of(compat.within_planned_peak({}), lambda: built(graph, primals_base=(64, 64)))
    assert peaks[0] < 64 * 64 * (4 + 8) + 64


@pytest.mark.parametrize("first", ["random", "product"])
def test_a_kernel_writes_over_the_first_that_it_reads(first):
    """Random numbers in it are in memory of their own, so it takes none of a product then."""

    def graph(call, left, right):
        seeds = call(prims.inductor_seeds.default, 1, left.meta["val"].device)
        seed = call(prims.inductor_lookup_seed.default, seeds, 0)
        product = call(aten.mm.default, left, right)
        random = call(prims.inductor_random.default, [64, 64], seed, "rand")
        reads = (random, product) if first == "random" else (product, random)
        yield call(aten.mul.Tensor, *reads)

    shapes = {"primals_left": (64, 8), "primals_right": (8, 64)}
    with compat.observing_peaks() as peaks:
        code = code_of(compat.within_planned_peak({}), lambda: built(graph, **shapes))
    held = 2 if first == "random" else 1
    assert sum("= empty_strided_cpu((64, 64)" in line for line in code) == held
    assert peaks == [held * 4 * 64 * 64 + 8]  # and the seed


@pytest.mark.parametrize(("rows", "is_local"), [(64, True), (2, False)])
def test_what_common_outer_loops_compute_row_by_row_is_in_no_memory(rows, is_local, monkeypatch):
    """Inductor has such loops where there are enough rows."""
    monkeypatch.setattr(inductor_fused_order, "_MOST_TRIALS", 0)  # so that they stay together
    width = 1024

    def graph(call, left, right):
        product = call(aten.mm.default, left, right)
        most = call(aten.amax.default, product, [1], True)
        powers = call(aten.exp.default, call(aten.sub.Tensor, product, most))
        total = call(aten.sum.dim_IntList, powers, [1], True)
        yield call(aten.div.Tensor, powers, total)

    shapes = {"primals_left": (rows, 8), "primals_right": (8, width)}
    with compat.observing_peaks() as peaks:
        code = code_of(compat.within_planned_peak({}), lambda: built(graph, **shapes))
    whole = [line for line in code if f"= empty_strided_cpu(({rows}, {width})" in line]
    assert len(whole) == (2 if is_local else 3)
    assert peaks == [len(whole) * 4 * rows * width + 2 * 4 * rows]


def test_loops_inside_common_outer_ones_are_taken_apart_while_the_peak_is_exceeded(monkeypatch):
    """As those of a softmax that dropout follows, which writes over its input without them."""

    def graph(call, left, right, mask):
        product = call(aten.mm.default, left, right)
        most = call(aten.amax.default, product, [1], True)
        powers = call(aten.exp.default, call(aten.sub.Tensor, product, most))
        share = call(aten.div.Tensor, powers, call(aten.sum.dim_IntList, powers, [1], True))
        yield share
        yield call(aten.mul.Tensor, share, mask)

    shapes = {"primals_left": (64, 8), "primals_right": (8, 64), "primals_mask": (64, 64)}
    make = lambda: built(graph, **shapes)  # noqa: E731
    with compat.observing_peaks() as peaks:
        assert calls_of(compat.within_planned_peak({}), make) == ["product", "kernel", "kernel"]
    assert peaks == [2 * 4 * 64 * 64]
    monkeypatch.setattr(inductor_fused_order, "_MOST_TRIALS", 0)
    with compat.observing_peaks() as peaks:
        assert calls_of(compat.within_planned_peak({}), make) == ["product", "kernel"]
    assert peaks[0] > 3 * 4 * 64 * 64


def test_a_kernel_of_two_parts_writes_over_nothing_that_both_read():
    """So a second part that writes over `made` by itself takes memory of its own if it is fused."""

    def graph(call, row, left, right):
        made = call(aten.mm.default, left, right)
        product = call(aten.mm.default, row, call(aten.exp.default, made))
        return product, call(aten.sin.default, made)

    shapes = {"primals_row": (1, 8), "primals_left": (8, 8), "primals_right": (8, 8)}
    calls = calls_of(compat.within_planned_peak({}), lambda: built(graph, **shapes))
    assert calls == ["product", "kernel", "product", "kernel"]


def test_an_input_that_is_not_donated_is_not_written_over():
    """The peak is where it is read, so kernels before and after that stay apart."""

    def graph(call, saved, base, row, column, line):
        yield call(aten.mm.default, row, call(aten.exp.default, base))
        yield call(aten.mm.default, row, call(aten.sin.default, saved))
        yield call(aten.mm.default, row, call(aten.cos.default, base))
        yield call(aten.mm.default, row, call(aten.mm.default, column, line))

    shapes = {"base": (64, 64), "row": (1, 64), "column": (64, 1), "line": (1, 256)}
    shapes = {f"primals_{name}": shape for name, shape in shapes.items()}
    make = lambda: built(graph, saved=(64, 128), **shapes)  # noqa: E731
    kept = calls_of(compat.within_planned_peak({}), make)
    assert kept == ["kernel", "product"] * 3 + ["product", "product"]
