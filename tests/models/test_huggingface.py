"""Hugging Face models generate text on two ranks, and are saved, as unsharded ones."""

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


def _tokens(step, rank):
    return torch.randint(
        0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(100 * step + rank)
    )


def _build(name):
    torch.manual_seed(0)
    return MODELS[name]().train()


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_a_model_generates_and_is_saved_as_the_unsharded_one(name, tmp_path):
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
