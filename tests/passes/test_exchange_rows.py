"""`exchange-rows`: which tables are exchanged, and that graphs keep their bits on all ranks."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.graphs import expect_listing, few_examples, rewritten
from zpasses import Pipeline, compat
from zpasses.cost.memory.collective_memory import scratch_bytes
from zpasses.graph.dialect import REDUCE_GRAD, UNSHARD, rows_per_rank
from zpasses.graph.queries import calls, collectives, nbytes, value_of
from zpasses.graph.row_exchange import (
    ALL_TO_ALL_GRAD_ROWS,
    ALL_TO_ALL_ROWS,
    DISTINCT_ROWS,
    expected_distinct,
)
from zpasses.graph.tags import params_of, tagged
from zpasses.passes import ExchangeRows, GatherParams, MergeReads
from zpasses.pipeline.runner import run_passes
from zpasses.ranks.agree import simulated_answers
from zpasses.simulate.simulator import SimulationError, simulate
from zpasses.testing import (
    assert_equal_bits,
    assert_step_equals_reference,
    capture_ranks,
    fake_world,
    listing,
    random_inputs,
    trace_joint,
)

aten = torch.ops.aten
BF16, F32 = torch.bfloat16, torch.float32
ON = ExchangeRows(rows="on")
STAGE = "zero3{exchange-rows.rows=on,merge-reads.max_hold_mb=0}"


class DecomposedEmbedding(torch.autograd.Function):
    """An embedding whose gradient is what Inductor decomposes it to."""

    @staticmethod
    def forward(ctx, table, ids, padding):
        ctx.save_for_backward(ids)
        ctx.sizes = (table.shape[0], padding)
        return torch.embedding(table, ids, padding)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        of_table = compat.inductor_decompositions()[aten.embedding_dense_backward.default]
        return of_table(grad, ids, *ctx.sizes, False), None, None


def joint(
    rank=0,
    ranks=2,
    *,
    rows=7,
    tokens=((2, 2),),
    width=3,
    padding=-1,
    dtype=None,
    reduce_dtype=None,
    tied=False,
    scales=False,
    decomposed=False,
    hold_mb=0.0,
):
    """The joint graph of lookups in one table, each by a read of its own, of another parameter, and
    of a head that is tied to the table, after `merge-reads`.
    """

    def read(shard, rows):
        return torch.ops.zpasses.unshard(shard, rows, dtype, reduce_dtype, "0")

    def step(shard, other, *ids):
        results = []
        for each in ids:
            table = read(shard, rows)
            if decomposed:
                looked_up = DecomposedEmbedding.apply(table, each, padding)
            else:
                looked_up = torch.embedding(table, each, padding, scales)
            results.append(looked_up * read(other, width))
        if tied:
            results.append(results[0] @ read(shard, rows).t())
        return tuple(results)

    held = max(0, min(rows_per_rank(rows, ranks), rows - rank * rows_per_rank(rows, ranks)))
    others = max(0, min(rows_per_rank(width, ranks), width - rank * rows_per_rank(width, ranks)))
    shard, other = (torch.zeros(shape, requires_grad=True) for shape in ((held, width), (others,)))
    ids = [torch.zeros(shape, dtype=torch.int64) for shape in tokens]
    gm = trace_joint(step, (shard, other, *ids), {0: "table", 1: "other"})
    return rewritten(gm, MergeReads(max_hold_mb=hold_mb))


def worlds(ranks, *passes, tokens=None, **options):
    """Returns the graphs of all ranks before and after passes. Ranks may have other tokens."""
    before, after = [], []
    for rank in range(ranks):
        given = {} if tokens is None else {"tokens": tokens[rank]}
        with fake_world(ranks, rank):
            before.append(joint(rank, ranks, **given, **options))
            after.append(rewritten(before[-1], *passes))
    return before, after


def exchanged(*passes, ranks=2, **options):
    """Returns how many reads and gradients of tables are exchanged."""
    gm = worlds(ranks, *passes, **options)[1][0]
    return len(calls(gm.graph, ALL_TO_ALL_ROWS)), len(calls(gm.graph, ALL_TO_ALL_GRAD_ROWS))


def test_a_table_becomes_its_rows():
    (before, _), (after, _) = worlds(2, ON, rows=1000, padding=5)
    assert calls(before.graph, UNSHARD)
    expect_listing(
        listing(after),
        """\
primals_1: f32[500, 3]                                                                                                                                  # shard: table
primals_2: f32[2]                                                                                                                                       # shard: other
primals_3: i64[2, 2]
tangents_1: f32[2, 2, 3]
distinct_rows_default = zpasses.distinct_rows([primals_3], 1000, 2)                                                                                     # (u8[142], i64[2, 2])
getitem = getitem(distinct_rows_default, 0)                                                                                                             # u8[142]
getitem_1 = getitem(distinct_rows_default, 1)                                                                                                           # i64[2, 2]
all_to_all_single_default = all_to_all_single(getitem, [71, 71], [71, 71], '0')                                                                         # u8[142]; rows: table
wait_tensor_default = wait_tensor(all_to_all_single_default)                                                                                            # u8[142]; rows: table
all_to_all_rows_default = zpasses.all_to_all_rows(primals_1, getitem, wait_tensor_default, 4, 1000, f32, '0')                                           # f32[4, 3]; gather: table
wait_tensor_default_1 = wait_tensor(all_to_all_rows_default)                                                                                            # f32[4, 3]; rows: table
embedding = embedding(wait_tensor_default_1, getitem_1)                                                                                                 # f32[2, 2, 3]
unshard_1 = zpasses.unshard(primals_2, 3, None, None, '0')                                                                                              # f32[3]; gather: other
mul = mul(embedding, unshard_1)                                                                                                                         # f32[2, 2, 3]
mul_1 = mul(tangents_1, embedding)                                                                                                                      # f32[2, 2, 3]
mul_2 = mul(tangents_1, unshard_1)                                                                                                                      # f32[2, 2, 3]
sum_1 = sum(mul_1, [0, 1], True)                                                                                                                        # f32[1, 1, 3]
view = view(sum_1, [3])                                                                                                                                 # f32[3]
reduce_grad = zpasses.reduce_grad(view, 3, 2, f32, None, '0')                                                                                           # f32[2]; reduce: other
eq_scalar = eq(primals_3, 5)                                                                                                                            # bool[2, 2]
unsqueeze_default = unsqueeze(eq_scalar, -1)                                                                                                            # bool[2, 2, 1]
masked_fill_scalar = masked_fill(mul_2, unsqueeze_default, 0.0)                                                                                         # f32[2, 2, 3]
embedding_dense_backward_default = embedding_dense_backward(masked_fill_scalar, getitem_1, 4, -1, False)                                                # f32[4, 3]
all_to_all_grad_rows_default = zpasses.all_to_all_grad_rows(embedding_dense_backward_default, getitem, wait_tensor_default, 1000, 500, f32, None, '0')  # f32[500, 3]; reduce: table
wait_tensor_default_2 = wait_tensor(all_to_all_grad_rows_default)                                                                                       # f32[500, 3]; shard_grad: table
return [mul, wait_tensor_default_2, reduce_grad, None]
""",  # noqa: E501
    )
    sent = [(tag.role, tag.nbytes) for _, tag in tagged(after.graph) if tag.nbytes]
    assert sent[0] == ("rows", 142)


@few_examples
@given(st.data())
def test_bits_of_drawn_tables(data):
    """Ranks have different numbers of tokens, blocks of rows are uneven, and some are empty."""
    ranks = data.draw(st.integers(1, 4))
    lookups = data.draw(st.integers(1, 2))
    shapes = st.lists(st.integers(1, 4), min_size=0, max_size=2).map(tuple)
    of_rank = st.lists(shapes, min_size=lookups, max_size=lookups)
    tokens = data.draw(st.lists(of_rank, min_size=ranks, max_size=ranks))
    rows = data.draw(st.integers(1, 20))
    drawn = {
        "width": st.integers(1, 3),
        "padding": st.integers(-1, rows - 1),
        "dtype": st.sampled_from([None, BF16]),
        "reduce_dtype": st.sampled_from([None, F32]),
        "tied": st.booleans(),
        "decomposed": st.booleans(),
    }
    options = {name: data.draw(values) for name, values in drawn.items()}
    before, after = worlds(ranks, ON, rows=rows, tokens=tokens, **options)
    assert bool(calls(after[0].graph, ALL_TO_ALL_ROWS)) == (ranks > 1)
    inputs = random_inputs(before, bound=rows, seed=data.draw(st.integers(0, 9)))
    assert_equal_bits(before, after, inputs)


# --- what is exchanged ----------------------------------------------------------------------------
@pytest.mark.parametrize("decomposed", [False, True])
def test_the_gradient_of_a_tied_head_stays_one_of_the_table(decomposed):
    assert exchanged(ON, decomposed=decomposed) == (1, 1)
    assert exchanged(ON, decomposed=decomposed, tied=True) == (1, 0)


def test_several_lookups_share_an_exchange():
    two = [(2, 2), (3,)]
    (before, _), (after, _) = worlds(2, ON, tokens=[two, two])
    assert len(calls(before.graph, UNSHARD)) == 4
    assert len(calls(after.graph, DISTINCT_ROWS)) == len(calls(after.graph, ALL_TO_ALL_ROWS)) == 1
    assert value_of(calls(after.graph, ALL_TO_ALL_ROWS)[0]).shape == (7, 3)
    assert len(calls(after.graph, ALL_TO_ALL_GRAD_ROWS)) == 1


def test_what_is_left_alone():
    assert exchanged(ExchangeRows(rows="off")) == (0, 0)
    assert exchanged(ON, ranks=1) == (0, 0)
    assert exchanged(ON, rows=0, tokens=[[(0,)]] * 2) == (0, 0)
    assert exchanged(ON, scales=True) == (1, 0)  # its gradient counts tokens in the table
    assert exchanged(ON, tied=True, hold_mb=1.0) == (0, 0)  # one read for both


@pytest.mark.parametrize("lowers", [False, True])
def test_a_pass_that_is_asked_and_changes_nothing_says_so(caplog, lowers):
    before = (GatherParams(),) if lowers else ()
    with caplog.at_level(logging.INFO, logger="zpasses"):
        worlds(2, *before, ON)
    assert ("exchange-rows: no rows to exchange" in caplog.text) == lowers


def test_indices_that_come_from_the_table_are_left_alone():
    def step(shard, ids):
        first = torch.ops.zpasses.unshard(shard, 8, None, None, "0")
        found = torch.embedding(first, ids)
        second = torch.ops.zpasses.unshard(shard, 8, None, None, "0")
        return torch.embedding(second, found.sum(-1).long())

    with fake_world(2):
        ids = torch.zeros(3, dtype=torch.int64)
        gm = trace_joint(step, (torch.zeros(4, 3, requires_grad=True), ids), {0: "table"})
        assert not calls(rewritten(gm, ON).graph, DISTINCT_ROWS)


def test_indices_that_are_computed_late_move_before_the_first_lookup():
    def step(shard, ids):
        first = torch.ops.zpasses.unshard(shard, 8, None, None, "0")
        found = torch.embedding(first, ids)
        second = torch.ops.zpasses.unshard(shard, 8, None, None, "0")
        return found + torch.embedding(second, (ids + 1) % 8)

    before, after = [], []
    for rank in range(2):
        with fake_world(2, rank):
            ids = torch.zeros(3, dtype=torch.int64)
            shard = torch.zeros(4, 3, requires_grad=True)
            before.append(trace_joint(step, (shard, ids), {0: "table"}))
            after.append(rewritten(before[-1], MergeReads(max_hold_mb=0.0), ON))
    assert len(calls(after[0].graph, ALL_TO_ALL_ROWS)) == 1
    assert_equal_bits(before, after, random_inputs(before, bound=8))


# --- the choice -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "target",
    [
        "h100",
        *(
            pytest.param(each, marks=pytest.mark.slow(quick="h100"))
            for each in ("cpu", "h100,ranks_per_node=1")
        ),
    ],
)
def test_auto_exchanges_where_it_takes_less_time(target, monkeypatch):
    monkeypatch.setenv("ZPASSES_TARGET", target)
    auto = ExchangeRows()
    large, small = {"rows": 2_000_000, "width": 64}, {"rows": 50, "width": 8}
    assert exchanged(auto, **large) == (1, 1)
    assert exchanged(auto, **small) == (0, 0)
    assert exchanged(auto, tied=True, **large) == (1, 0)


def test_ranks_take_the_choice_of_the_first(monkeypatch):
    monkeypatch.setenv("ZPASSES_TARGET", "h100")
    few, many = [(4,)], [(1 << 22,)]
    for tokens, expected in (([few, many], 1), ([many, few], 0)):
        with simulated_answers():
            after = worlds(2, ExchangeRows(), rows=2_000_000, width=64, tokens=tokens)[1]
        found = [len(calls(gm.graph, ALL_TO_ALL_ROWS)) for gm in after]
        assert found == [expected, expected]


def test_expected_number_of_rows():
    generator = torch.Generator().manual_seed(0)
    for rows, tokens in ((1, 5), (10, 1), (50, 100), (1000, 300)):
        drawn = torch.randint(0, rows, (2000, tokens), generator=generator)
        mean = sum(len(each.unique()) for each in drawn) / len(drawn)
        assert expected_distinct(rows, tokens) == pytest.approx(mean, rel=0.02)


def test_bytes():
    """Marks are a bit per row and 8 bytes per rank, and the rest is rows."""
    (before, _), (after, _) = worlds(2, ON, rows=10_000, width=64, tokens=[[(16,)]] * 2)
    sent = {
        each.op: each.nbytes
        for node, each in collectives(after.graph)
        if params_of(node) == ("table",)
    }
    rows = 16 * 64 * 4
    assert sent == {
        "all_to_all_single": 10_000 // 8 + 2 * 8,
        "all_to_all_rows": rows,
        "all_to_all_grad_rows": rows,
    }
    assert {scratch_bytes(*calls(after.graph, ALL_TO_ALL_ROWS))} == {rows}
    table = sum(each.nbytes for _, each in collectives(before.graph)) - 2 * 64 * 4
    assert table == 2 * 10_000 * 64 * 4
    assert nbytes(value_of(calls(before.graph, REDUCE_GRAD)[0])) > 0


# --- checks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [0, 2])
def test_simulation_checks_the_pass(rank):
    """The last of three ranks holds fewer rows than its block has."""
    with fake_world(3, rank):
        gm = joint(rank, 3, decomposed=True, padding=2)
        run_passes(gm.graph, [ON], verify="simulate")
        assert calls(gm.graph, ALL_TO_ALL_GRAD_ROWS)


def test_marks_that_do_not_match_are_an_error_of_the_simulation():
    _, after = worlds(2, ON)
    for gm in after:
        (fetch,) = calls(gm.graph, ALL_TO_ALL_ROWS)
        fetch.args = (fetch.args[0], fetch.args[1], fetch.args[1], *fetch.args[3:])
        gm.recompile()
    with pytest.raises(SimulationError, match="was asked for other rows"):
        simulate(after, random_inputs(after, seed=1, bound=7))


class Model(nn.Module):
    """Two lookups in a table, and a head that may be tied to it."""

    def __init__(self, tied=False):
        super().__init__()
        self.table, self.up = nn.Embedding(37, 8, padding_idx=2), nn.Linear(8, 8)
        self.head = nn.Linear(8, 37, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.up(self.table(ids)).relu() + self.up(self.table(ids.flip(0)))
        return self.head(x)


@pytest.mark.parametrize(
    "tied", [False, pytest.param(True, marks=pytest.mark.slow(quick="the untied model"))]
)
def test_a_step_equals_the_dialect(tied):
    ids = torch.zeros(2, 5, dtype=torch.int64)
    captures = capture_ranks(Model(tied), (ids,), world_size=2, pipeline=STAGE)
    for each in captures:
        assert len(calls(each.after.forward.graph, ALL_TO_ALL_ROWS)) == 1
        found = calls(each.after.backward.graph, ALL_TO_ALL_GRAD_ROWS)
        assert len(found) == (0 if tied else 1)
        assert not calls(each.after.backward.graph, ALL_TO_ALL_ROWS)
    assert_step_equals_reference(captures)


def test_names_and_stages():
    assert str(Pipeline.parse("exchange-rows{rows=on}")) == "exchange-rows{rows=on}"
    (default,) = [each for each in Pipeline.parse("zero3") if isinstance(each, ExchangeRows)]
    assert default.rows == "off"
    (auto,) = [
        each
        for each in Pipeline.parse("zero3{exchange-rows.rows=auto}")
        if isinstance(each, ExchangeRows)
    ]
    assert auto.rows == "auto"
