"""Exchanges of rows between real ranks: equal, bit for bit, to gathers and reductions of tables."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from tests.on_ranks import needs, on_ranks
from zpasses import compat
from zpasses.graph.dialect import rows_per_rank
from zpasses.graph.queries import calls
from zpasses.graph.row_exchange import ALL_TO_ALL_GRAD_ROWS, ALL_TO_ALL_ROWS, mark_bytes
from zpasses.pipeline.events import observe_graphs
from zpasses.runtime import exchanged_rows
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh

pytestmark = pytest.mark.processes

OFF = "zero3{merge-reads.max_hold_mb=0}"
ON = "zero3{merge-reads.max_hold_mb=0,exchange-rows.rows=on}"
BF16, F32 = torch.bfloat16, torch.float32
ROWS, WIDTH = 20_011, 64  # odd, so not divisible by the number of ranks


# --- operators ------------------------------------------------------------------------------------
def _compare(rows, ids, dtype, reduce_dtype, generator):
    """Compares an exchange with an embedding of the whole table, and with its reduced gradient."""
    ops, wait = torch.ops.zpasses, compat.functional.wait_tensor
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    block = rows_per_rank(rows, size)
    shard = torch.randn(max(0, min(block, rows - rank * block)), 3, generator=generator)
    marks, places = ops.distinct_rows([ids], rows, size)
    splits = [mark_bytes(rows, size)] * size
    asked = wait(compat.functional.all_to_all_single(marks, splits, splits, group))
    capacity = min(len(ids), rows)
    fetched = wait(ops.all_to_all_rows(shard, marks, asked, capacity, rows, dtype, group))
    table = ops.unshard(shard, rows, dtype, reduce_dtype, group)
    assert torch.equal(torch.embedding(fetched, places), torch.embedding(table, ids))

    grads = torch.randn(capacity, 3, generator=generator).to(table.dtype)
    grads[grads.abs() < 0.5] = -0.0
    named = ids.unique()
    whole = torch.zeros_like(table).index_copy(0, named, grads[: len(named)])
    arguments = (rows, len(shard), F32, reduce_dtype, group)
    mine = wait(ops.all_to_all_grad_rows(grads, marks, asked, *arguments))
    expected = ops.reduce_grad(whole, *arguments)
    assert torch.equal(mine.view(torch.int32), expected.view(torch.int32))


def _compare_all():
    generator = torch.Generator().manual_seed(dist.get_rank())
    for rows in (1, 3, 17):
        for tokens in (0, 40):
            ids = torch.randint(0, rows, (tokens,), generator=generator)
            for dtype, reduce_dtype in ((None, None), (BF16, None), (BF16, F32)):
                _compare(rows, ids, dtype, reduce_dtype, generator)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow(quick="two ranks"))])
def test_rows_equal_those_of_the_table(ranks):
    run_on_ranks(_compare_all, ranks=ranks)


@pytest.mark.parametrize("wrong", [-1, 7])
def test_an_index_that_is_no_row_is_named_on_every_rank(wrong):
    assert run_on_ranks(_asked_for, wrong) == [f"is asked for row {wrong} on rank 1"] * 2


def _asked_for(wrong):
    ids = torch.tensor([0, wrong] if dist.get_rank() else [5, 6])
    with pytest.raises(IndexError) as expected:
        torch.embedding(torch.zeros(7, 3), torch.tensor([wrong]))
    with pytest.raises(IndexError) as found:
        _compare(7, ids, None, None, torch.Generator())
    assert str(found.value).startswith(f"{expected.value}: an embedding of 7 rows, [7, 3], ")
    return str(found.value).rpartition(", ")[2]


# --- training -------------------------------------------------------------------------------------
class Table(nn.Module):
    def __init__(self, rows=ROWS, padding=None):
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, padding_idx=padding)

    def forward(self, ids):
        return self.table(ids).square()


class Language(nn.Module):
    """Two lookups, padding, and a head that may be tied to the table."""

    def __init__(self, tied=False, rows=997):
        super().__init__()
        self.table, self.up = nn.Embedding(rows, 16, padding_idx=3), nn.Linear(16, 16)
        self.head = nn.Linear(16, rows, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.up(self.table(ids)).relu() + self.up(self.table((ids + 1) % 997))
        return self.head(x).square().mean()


def _llama():
    import transformers

    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=997, **config, **heads, **ends)
    )


def _gpt2():
    import transformers

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": 997, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **ends))


def _t5():
    import transformers

    sizes = {"vocab_size": 997, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    config = transformers.T5Config(**sizes, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "untied": Language,
    "tied": lambda: Language(tied=True),
    "llama": _llama,
    "gpt2": _gpt2,
    "t5": _t5,
}


def _loss(run, name, ids):
    if name in ("llama", "gpt2", "t5"):
        return run(input_ids=ids, labels=ids, use_cache=False).loss
    return run(ids)


def trained(name, pipeline, steps=2, lengths=(8, 8), backwards=1, window=False, **options):
    """Returns losses and gradients of some steps, and how many exchanges of both kinds the graphs
    have.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    model = zpasses.shard(MODELS[name]().train(), mesh=world_mesh())
    found, counts = [], [0, 0]

    def count(observed):
        if observed.kind in ("forward", "backward"):
            for at, target in enumerate((ALL_TO_ALL_ROWS, ALL_TO_ALL_GRAD_ROWS)):
                counts[at] += len(calls(observed.graph, target))

    run = torch.compile(model, backend="zpasses", options={"pipeline": pipeline, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe_graphs(count):
        for step in range(steps):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            length = lengths[dist.get_rank()] + step
            for number in range(backwards):
                ids = torch.randint(0, 990, (2, length), generator=generator)
                ids[:, :3] = 3
                if window and number == 0:
                    context = zpasses.coalesce_grad_reduction(model)
                    context.__enter__()
                loss = _loss(run, name, ids)
                loss.backward()
                found.append(loss.detach())
            if window:
                context.__exit__(None, None, None)
            found += [each.grad.to_local().clone() for each in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return found, counts


def compared(name, expected_counts, on=ON, **options):
    """Trains with exchanges and without, and compares the bits."""
    expected, none = trained(name, OFF, **options)
    found, counts = trained(name, on, **options)
    assert none == [0, 0]
    assert [bool(each) for each in counts] == expected_counts
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@on_ranks(2, timeout_s=300)
def test_default_code_equals_eager_reads_and_moves_as_many_bytes_as_computed():
    torch.manual_seed(0)
    models = [zpasses.shard(Table(padding=5), mesh=world_mesh()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(0, ROWS, (2, 30), generator=torch.Generator().manual_seed(dist.get_rank()))
    ids[0, :4] = 5
    options = {"pipeline": "zero3{exchange-rows.rows=auto}"}
    run = torch.compile(models[0], backend="zpasses", options=options)
    exchange = mock.Mock(wraps=dist.all_to_all_single)
    with mock.patch.object(exchanged_rows.dist, "all_to_all_single", exchange):
        squares = run(ids)
        squares.sum().backward()
    expected = models[1](ids)
    expected.sum().backward()
    assert torch.equal(squares, expected)
    grads = [next(each.parameters()).grad.to_local() for each in models]
    assert torch.equal(*(each.view(torch.int32) for each in grads))

    fetch, reduction = exchange.call_args_list
    received, sent = fetch.args[0].nbytes, reduction.args[1].nbytes
    assert received == sent == len(ids.unique()) * WIDTH * 4


@pytest.mark.slow(quick="test_default_code_equals_eager_reads_and_moves_as_many_bytes_as_computed")
@on_ranks(2, timeout_s=300)
def test_ranks_with_other_numbers_of_tokens():
    """The second step is compiled anew, for dynamic shapes."""
    compared("untied", [True, True], lengths=(5, 9), codegen="eager")


@pytest.mark.slow(quick="test_default_code_equals_eager_reads_and_moves_as_many_bytes_as_computed")
@on_ranks(2, timeout_s=900)
@pytest.mark.parametrize(("name", "counts"), [("untied", [True, True]), ("tied", [True, False])])
def test_ranks_with_other_numbers_of_tokens_and_generated_code(name, counts):
    compared(name, counts, lengths=(5, 9))


@needs("transformers")
@pytest.mark.slow(quick="test_default_code_equals_eager_reads_and_moves_as_many_bytes_as_computed")
@on_ranks(2, timeout_s=900)
@pytest.mark.parametrize(
    ("name", "counts"), [("llama", [True, True]), ("gpt2", [True, True]), ("t5", [True, True])]
)
def test_models_of_hugging_face(name, counts):
    """GPT-2's head is tied, and the gradient of its positions is exchanged. T5 reads one table in
    both halves and the head, and has tables of relative positions.
    """
    compared(name, counts)


@pytest.mark.slow(quick="test_default_code_equals_eager_reads_and_moves_as_many_bytes_as_computed")
@on_ranks(2, timeout_s=600)
def test_each_backward_of_a_window_exchanges_rows():
    """Gradients of tables are reduced in each backward, as they are without a window."""
    options = {"steps": 1, "backwards": 2, "codegen": "eager"}
    (*_, table, _, _, _), counts = trained("untied", ON, window=True, **options)
    (*_, expected, _, _, _), _ = trained("untied", OFF, **options)
    assert all(counts)
    assert table.shape[1] == 16
    assert table.shape[0] >= 498  # the table's rows, before up.weight, up.bias and head.weight
    assert torch.equal(table.view(torch.int32), expected.view(torch.int32))


@pytest.mark.slow(quick="test_an_index_that_is_no_row_is_named_on_every_rank")
@on_ranks(2, timeout_s=300)
def test_training_goes_on_after_an_index_that_is_no_row():
    model = zpasses.shard(Language(rows=997), mesh=world_mesh())
    run = torch.compile(model, backend="zpasses", options={"pipeline": ON})
    ids = torch.zeros(2, 4, dtype=torch.int64)
    before = run(ids)
    before.backward()
    with pytest.raises(IndexError, match="row 5000 on rank 1"):
        run(ids.masked_fill(ids == 0, 5000 if dist.get_rank() else 1))
    after = run(ids)
    after.backward()
    assert torch.equal(after, before)


def _one_rank_asks_for_no_row():
    options = {"pipeline": OFF, "codegen": "eager", "agreement_timeout_s": 5}
    model = zpasses.shard(Language(rows=100), mesh=world_mesh())
    run = torch.compile(model, backend="zpasses", options=options)
    run(torch.zeros(2, 4, dtype=torch.int64)).backward()
    if dist.get_rank() == 1:
        with pytest.raises(IndexError, match="out of range"):
            run(torch.full((2, 4), 100))
        time.sleep(10)
    else:
        with pytest.raises(zpasses.AgreementError, match=r"Rank 1 .* \(IndexError: index out of r"):
            run(torch.zeros(2, 4, dtype=torch.int64)).backward()


@pytest.mark.slow(quick="test_an_index_that_is_no_row_is_named_on_every_rank")
def test_ranks_learn_what_the_graph_of_another_rank_raised():
    """In processes of its own, because gloo closes connections of a group that timed out."""
    for each in run_in_fresh_ranks(_one_rank_asks_for_no_row):
        assert each.result is None
