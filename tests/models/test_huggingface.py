"""Unmodified Hugging Face models train on two ranks as they do unsharded."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import zpasses
from tests.models.three_models import MODELS, VOCABULARY
from tests.on_ranks import on_ranks
from zpasses.testing import world_mesh

pytest.importorskip("transformers")
pytestmark = pytest.mark.processes

RATE = 1e-3


def _tokens(step, rank):
    return torch.randint(
        0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(100 * step + rank)
    )


def _loss(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _build(name):
    torch.manual_seed(0)
    return MODELS[name]().train()


def _train(plain, run, model, steps=3):
    """Train both, comparing losses and gradients in each step and parameters at the end."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ours, theirs = (
        torch.optim.AdamW(model.parameters(), lr=RATE),
        torch.optim.AdamW(plain.parameters(), lr=RATE),
    )
    for step in range(steps):
        loss = _loss(run, _tokens(step, rank))
        loss.backward()
        # Every rank has the same number of tokens, so the loss of the concatenated batch is the
        # mean of the ranks' losses.
        expected = _loss(plain, torch.cat([_tokens(step, each) for each in range(world)]))
        expected.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        # Summing over ranks rounds differently from summing over one batch: by a few float32 steps,
        # for a loss of about 4.
        torch.testing.assert_close(total / world, expected.detach(), rtol=2e-6, atol=0)
        _compare_gradients(model, plain)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    # Where a gradient is about 0, its rounding determines how far Adam moves the parameter, by up
    # to the learning rate in each step. On average the parameters must agree far better than that.
    for (name, param), (_, expected) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        error = (param.full_tensor() - expected).abs().mean().item()
        assert error < 0.002 * RATE, f"{name} differs by {error} on average"


def _compare_gradients(model, plain):
    grads, expected = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(grads) == list(expected)
    for name, param in expected.items():
        if param.grad is None:
            assert grads[name].grad is None, name
            continue
        # Relative to the largest entry. Sums over tokens and ranks in another order differ by a few
        # float32 steps (measured: 6e-7); after a step they start from parameters that differ, by
        # what Adam makes of that where gradients are small (measured: 6e-6).
        scale = param.grad.abs().max().item()
        error = (grads[name].grad.full_tensor() - param.grad).abs().max().item()
        assert error <= 5e-5 * scale, (
            f"gradient of {name} differs by {error}; its largest entry is {scale}"
        )


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_eager_training_equals_the_unsharded_one(name, tmp_path):
    """Before it, the model generates the same text, and transformers saves and loads its state."""
    plain = _build(name)
    model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
    prompt = _tokens(0, 0)[:, :4]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for each in (plain, model):
        each.eval()
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path, state_dict=state)
    dist.barrier()
    loaded = type(plain).from_pretrained(tmp_path)
    torch.testing.assert_close(dict(loaded.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    for each in (plain, model):
        each.train()
    _train(plain, model, model, steps=2)
