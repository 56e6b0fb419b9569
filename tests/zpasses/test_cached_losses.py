"""sentence-transformers' cached losses over the embeddings of all ranks, on padded batches.

These losses run forward and backward of each mini-batch in a hook of the program's backward.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from zpasses.testing import run_on_ranks, world_mesh

WIDTH, WORDS, LENGTH = 16, 50, 8
LOSSES = ("plain", "symmetric", "Matryoshka")


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, features):
        padding = features["attention_mask"] == 0
        mask = padding if padding.any() else None  # of one rank's batches only
        x = self.layer(self.words(features["input_ids"]), src_key_padding_mask=mask)
        return {**features, "token_embeddings": x}


def sentences(step):
    """Anchors and positives. Those of rank 1 differ in length, and are padded."""
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(10 * step + rank)
    for length in (LENGTH, LENGTH - 2 * rank):
        ids = torch.randint(WORDS, (4, length), generator=draw)
        lengths = torch.randint(2, length + 1, (4, 1), generator=draw) if rank else length
        yield {
            "input_ids": ids,
            "attention_mask": (torch.arange(length) < lengths).long() + ids * 0,
        }


def loss_of(kind, model):
    from sentence_transformers import losses

    options = {"mini_batch_size": 2, "gather_across_devices": True}
    if kind == "symmetric":
        return losses.CachedMultipleNegativesSymmetricRankingLoss(model, **options)
    plain = losses.CachedMultipleNegativesRankingLoss(model, **options)
    if kind == "plain":
        return plain
    return losses.MatryoshkaLoss(model, plain, [WIDTH, WIDTH // 2])


def compare(kind, options):
    """Train beside an unsharded model whose gradients are averaged, as DDP does."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = SentenceTransformer(modules=[Encoder(), Pooling(WIDTH)], device="cpu")
    plain = copy.deepcopy(model)
    zpasses.shard(model, mesh=world_mesh())
    model.compile(backend="zpasses", options=options)
    ours, other = loss_of(kind, model), loss_of(kind, plain)
    pairs = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, plain)]
    for step in range(2):
        with zpasses.coalesce_grad_reduction(model):
            loss = ours(sentences(step), torch.empty(0))
            loss.backward()
        expected = other(sentences(step), torch.empty(0))
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for param in plain.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-5)
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"zero_stage": stage, "codegen": "eager"}) for kind in LOSSES for stage in (2, 3)),
        ("plain", {"zero_stage": 2}),
    ],
    ids=str,
)
@pytest.mark.slow(quick="test_tasks_train_like_ddp_and_reduce_once_per_step")
def test_cached_losses_over_all_ranks_train_like_ddp(kind, options):
    pytest.importorskip("sentence_transformers")
    run_on_ranks(compare, kind, options, timeout_s=240)
