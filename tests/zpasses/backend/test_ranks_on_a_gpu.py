"""Tests that need a GPU: ranks that share it train as the unsharded model, with Inductor's code."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zpasses
from tests.on_ranks import on_ranks
from tests.zpasses.backend.shared_gpu import gpu_mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ENCODED = "zero3{gather-params.encode=%s,reduce-grads.encode=%s}"


class Block(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (4, -1)).transpose(1, 2)
            for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(1001, 256)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(256, 1001)

    def forward(self, x):
        return F.cross_entropy(self.head(self.blocks(self.tokens(x))).flatten(0, 1), x.flatten())


def _models():
    torch.manual_seed(0)
    model, plain = Text().cuda(), Text().cuda()
    plain.load_state_dict(model.state_dict())
    return model, plain


def _batch(rank, number):
    draw = torch.Generator().manual_seed(100 * rank + number)
    return torch.randint(1001, (4, 64), generator=draw).cuda()


def _worst(step, model, plain, *, backwards=1, steps=3):
    """Returns the largest relative difference of a gradient to the mean of all ranks'."""
    worst, me = 0.0, dist.get_rank()
    for number in range(0, steps * backwards, backwards):
        numbers = range(number, number + backwards)
        window = zpasses.coalesce_grad_reduction(model) if backwards > 1 else None
        with window or contextlib.nullcontext():
            for each in numbers:
                step(_batch(me, each)).backward()
        for rank in range(dist.get_world_size()):
            for each in numbers:
                (plain(_batch(rank, each)) / dist.get_world_size()).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if theirs.grad is None:
                continue
            got, expected = ours.grad.full_tensor(), theirs.grad
            if expected.norm() > 1e-5:
                worst = max(worst, float((got - expected).norm() / expected.norm()))
            with torch.no_grad():
                ours -= 0.05 * ours.grad
                theirs -= 0.05 * got  # what is compared is one step
        model.zero_grad()
        plain.zero_grad()
    return worst


def _compiled(model, **options):
    return torch.compile(model, backend="zpasses", options=options)


@on_ranks(2, timeout_s=300)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_train_as_one(stage):
    model, plain = _models()
    zpasses.shard(model, mesh=gpu_mesh())
    assert _worst(_compiled(model, zero_stage=stage), model, plain) < 1e-4


@on_ranks(2, timeout_s=300)
def test_a_window_equals_the_sum_of_its_backwards():
    model, plain = _models()
    zpasses.shard(model, mesh=gpu_mesh())
    step = _compiled(model, zero_stage=3)
    assert _worst(step, model, plain, backwards=3, steps=2) < 1e-4


@on_ranks(4, timeout_s=300)
def test_replicas_train_as_one():
    model, plain = _models()
    zpasses.shard(model, mesh=gpu_mesh(2, 2))
    assert _worst(_compiled(model, zero_stage=3), model, plain) < 1e-4


@on_ranks(2, timeout_s=300)
def test_rows_of_a_table_are_exchanged():
    model, plain = _models()
    zpasses.shard(model, mesh=gpu_mesh())
    step = _compiled(model, pipeline="zero3{exchange-rows.rows=on}")
    assert _worst(step, model, plain) < 1e-4


@on_ranks(2, timeout_s=300)
@pytest.mark.parametrize(
    ("pipeline", "most"),
    [
        (ENCODED % ("int8", "int8"), 0.05),
        (ENCODED % ("mxfp8", "fp8"), 0.2),
        ("zero3{reduce-grads.encode=int8,reduce-grads.feedback=on}", 0.02),
    ],
)
def test_codes_change_gradients_by_their_rounding(pipeline, most):
    model, plain = _models()
    zpasses.shard(model, mesh=gpu_mesh())
    worst = _worst(_compiled(model, pipeline=pipeline), model, plain)
    assert 1e-4 < worst < most


@on_ranks(2, timeout_s=300)
def test_a_base_rests_encoded():
    model, plain = _models()
    for each in (model, plain):
        each.blocks.requires_grad_(False)
    zpasses.shard(model, mesh=gpu_mesh())
    zpasses.encode_parameters(model.blocks, "nf4")
    for mine, theirs in zip(model.blocks.modules(), plain.blocks.modules(), strict=True):
        if isinstance(theirs, nn.Linear):
            theirs.weight.data.copy_(mine.weight)
    for name in ("tokens", "head"):  # `_worst` pairs parameters in order
        assert [*dict(getattr(model, name).named_parameters())] == [
            *dict(getattr(plain, name).named_parameters())
        ]
    assert _worst(_compiled(model, zero_stage=3), model, plain) < 1e-4


@on_ranks(2, timeout_s=300)
@pytest.mark.parametrize("blocks", [False, True])
def test_values_on_the_host(blocks):
    model, plain = _models()
    zpasses.shard(model, mesh=gpu_mesh())
    options = {"zero_stage": 3, "memory_budget": "24MiB", "host_memory": "256MiB"}
    if blocks:
        zpasses.compile_blocks(model, "blocks.*", **options)
    step = model if blocks else _compiled(model, **options)
    assert _worst(step, model, plain) < 1e-4


@on_ranks(2, timeout_s=300)
def test_shards_gradients_and_states_on_the_host():
    model, _ = _models()
    zpasses.shard(model, mesh=gpu_mesh())
    other, _ = _models()
    zpasses.shard(other, mesh=gpu_mesh())
    zpasses.offload_parameters(model, trained=True)
    losses = {}
    for each in (model, other):
        optimizer = torch.optim.AdamW(each.parameters())
        if each is model:
            zpasses.offload_optimizer(optimizer, bucket_bytes="1MiB")
        step = _compiled(each, zero_stage=3)
        losses[each] = []
        for number in range(4):
            loss = step(_batch(dist.get_rank(), number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[each].append(float(loss))
    assert losses[model] == pytest.approx(losses[other], rel=1e-5)
