"""Contrastive learning over large batches with sentence-transformers' cached loss, sharded, with
one reduction per step.

    torchrun --nproc-per-node 2 examples/grad_cache.py
    torchrun --nproc-per-node 8 examples/grad_cache.py --device cuda

The loss embeds a large batch in mini-batches without gradients and computes the gradient of the
embeddings. A hook in the program's backward then runs forward and backward once more per
mini-batch. These are many backwards in one optimizer step, and `zpasses.coalesce_grad_reduction`
makes them reduce gradients once. It needs no change in the loss or the model.

The model is a small random BERT and the text is random, so nothing is downloaded. The last line
compares the losses with the same training without sharding and without a compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.models import Pooling
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import BertConfig, BertModel

import zpasses

WORDS = 97
LENGTH = 12


class Encoder(nn.Module):
    """First module of a SentenceTransformer: features in, features with token embeddings out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        heads = {
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "intermediate_size": 4 * width,
        }
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=width,
            max_position_embeddings=LENGTH,
            **heads,
            **no_dropout,
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        output = self.bert(
            input_ids=features["input_ids"], attention_mask=features["attention_mask"]
        )
        return {**features, "token_embeddings": output.last_hidden_state}


def build(width: int, layers: int) -> SentenceTransformer:
    torch.manual_seed(0)
    return SentenceTransformer(modules=[Encoder(width, layers), Pooling(width)], device="cpu")


def pairs(count: int, step: int, rank: int, device: str) -> list[dict[str, Tensor]]:
    """Anchors and positives: sentences of random words, and the same sentences with a few words
    replaced.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    anchors = torch.randint(WORDS, (count, LENGTH), generator=generator)
    noise = torch.randint(WORDS, (count, LENGTH), generator=generator)
    positives = torch.where(torch.rand((count, LENGTH), generator=generator) < 0.3, noise, anchors)
    return [
        {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}
        for ids in (anchors, positives)
    ]


def train(
    model: nn.Module,
    embed: nn.Module,
    window: Callable[[], AbstractContextManager[Any]],
    batches: Sequence[Sequence[list[dict[str, Tensor]]]],
    mini_batch: int,
) -> list[float]:
    """Run one step per item of `batches`; `embed` computes the embeddings. Returns the mean
    losses.
    """
    cached_loss = CachedMultipleNegativesRankingLoss(embed, mini_batch_size=mini_batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in batches:
        total = 0.0
        with window():
            for features in step:
                loss = cached_loss(features, torch.empty(0)) / len(step)
                loss.backward()  # a backward for every mini-batch of anchors and of positives
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def compare(
    steps: int,
    batch: int,
    mini_batch: int,
    device: str,
    width: int = 64,
    layers: int = 2,
    **options: Any,
) -> tuple[list[float], list[float]]:
    """Returns the losses of the sharded training, and of the same training without zpasses on the
    data of all ranks. Both are means over the ranks.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain = build(width, layers).to(device)
    model = copy.deepcopy(plain)
    zpasses.shard(model, mesh=init_device_mesh(device, (ranks,)))
    model.compile(backend="zpasses", options=options)

    def window() -> AbstractContextManager[Any]:
        return zpasses.coalesce_grad_reduction(model)

    own = train(
        model,
        model,
        window,
        [[pairs(batch, step, rank, device)] for step in range(steps)],
        mini_batch,
    )
    mean = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(mean)
    all_data = [
        [pairs(batch, step, each, device) for each in range(ranks)] for step in range(steps)
    ]
    return (mean / ranks).tolist(), train(
        plain, plain, contextlib.nullcontext, all_data, mini_batch
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="pairs per rank and step")
    parser.add_argument("--mini-batch", type=int, default=8, help="sentences in memory at a time")
    parser.add_argument("--zero-stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--codegen", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    if args.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    ours, plain = compare(
        args.steps,
        args.batch,
        args.mini_batch,
        args.device,
        zero_stage=args.zero_stage,
        codegen=args.codegen,
    )
    if dist.get_rank() == 0:
        worst = max(abs(a - b) for a, b in zip(ours, plain, strict=True))
        print(
            f"loss {ours[0]:.4f} -> {ours[-1]:.4f}; without sharding {plain[0]:.4f} -> "
            f"{plain[-1]:.4f}; largest difference {worst:.1e}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
