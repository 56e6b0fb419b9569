"""Adapters of PEFT on sharded models, compared with the same adapters on the unsharded model."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.zpasses.checkpoint.checkpoint_models import sharded
from tests.zpasses.models import assert_same_values
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes

peft = pytest.importorskip("peft")


class Net(nn.Module):
    """5 and 7 rows: uneven on two ranks."""

    def __init__(self):
        super().__init__()
        self.embed, self.q, self.v = nn.Embedding(7, 6), nn.Linear(6, 5), nn.Linear(5, 7)

    def forward(self, tokens):
        return self.v(torch.tanh(self.q(self.embed(tokens))))


TOKENS = torch.arange(7).view(1, 7)


def _config(targets=("q", "v"), **options):
    return peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=list(targets), init_lora_weights=False, **options
    )


def _several():
    model = peft.get_peft_model(Net(), _config())
    model.add_adapter("other", _config(["v"]))
    model.base_model.set_adapter(["default", "other"])
    return model


def _mixed():
    model = peft.get_peft_model(Net(), _config(use_dora=True))
    model.add_adapter("other", _config(["embed", "v"]))
    model.base_model.set_adapter(["default", "other"])
    return model


ADAPTERS = {
    "LoRA": lambda: peft.get_peft_model(Net(), _config()),
    "LoRA of embeddings": lambda: peft.get_peft_model(Net(), _config(["embed", "q"])),
    "LoRA with bias": lambda: peft.get_peft_model(Net(), _config(lora_bias=True, bias="lora_only")),
    "DoRA": lambda: peft.get_peft_model(Net(), _config(use_dora=True)),
    "DoRA of embeddings": lambda: peft.get_peft_model(Net(), _config(["embed"], use_dora=True)),
    "IA3": lambda: peft.get_peft_model(
        Net(), peft.IA3Config(target_modules=["q", "v"], feedforward_modules=["v"])
    ),
    "several LoRA": _several,
    "DoRA and LoRA": _mixed,
    "modules to save": lambda: peft.get_peft_model(Net(), _config(["q"], modules_to_save=["v"])),
}
MOST_UNLIKE = ("LoRA", "DoRA of embeddings", "IA3", "modules to save")


def _pair(which):
    torch.manual_seed(0)
    plain = ADAPTERS[which]()
    return plain, sharded(plain)


def _same(model, plain):
    actual, expected = zpasses.full_state_dict(model), dict(plain.state_dict())
    assert list(actual) == list(expected)
    # Not to the last bit: products and norms of a shard may round in another order.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model(TOKENS), plain(TOKENS))
    for param in model.parameters():
        assert isinstance(param, DTensor)


# --- merging --------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", ADAPTERS)
@pytest.mark.slow(quick="test_merge_on_ranks_without_rows_is_seen_by_cached_parameters")
@on_ranks(2)
def test_merging_equals_the_unsharded_model(which):
    plain, model = _pair(which)
    _same(model, plain)
    for safe in (False, True):
        for each in (plain, model):
            each.merge_adapter(safe_merge=safe)
        _same(model, plain)
        if which != "IA3":
            assert not torch.equal(model(TOKENS), _pair(which)[0].unload()(TOKENS))
        for each in (plain, model):
            each.unmerge_adapter()
        _same(model, plain)


@pytest.mark.parametrize("which", some_quick(ADAPTERS, MOST_UNLIKE))
@on_ranks(2)
def test_unloading_equals_the_unsharded_model(which):
    for how in ("merge_and_unload", "unload"):
        plain, model = (getattr(each, how)() for each in _pair(which))
        assert not any("lora" in name for name, _ in model.named_parameters())
        _same(model, plain)
        model.requires_grad_(True)(TOKENS).sum().backward()  # a plain sharded model again


@on_ranks(2)
def test_one_of_several_adapters_is_merged():
    plain, model = _pair("several LoRA")
    for each in (plain, model):
        each.merge_adapter(adapter_names=["other"])
    _same(model, plain)
    for each in (plain, model):
        each.unmerge_adapter()
        each.base_model.set_adapter("default")
        for module in each.modules():
            if hasattr(module, "merge") and hasattr(module, "base_layer"):
                module.merge()  # one layer by itself
    _same(model, plain)


@on_ranks(2)
def test_merge_on_ranks_without_rows_is_seen_by_cached_parameters():
    torch.manual_seed(0)
    plain = peft.get_peft_model(nn.Sequential(nn.Linear(3, 1, bias=False)), _config(["0"]))
    model, x = sharded(plain), torch.ones(2, 3)
    run = torch.compile(model, backend="zpasses", options={"zero_stage": 2, "codegen": "eager"})
    run(x)
    plain.merge_adapter()
    model.merge_adapter()
    torch.testing.assert_close(run(x), plain(x))


# --- training, saving, loading --------------------------------------------------------------------
def _trained(model, run):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        run(TOKENS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    ("which", "stage"),
    some_quick(itertools.product(ADAPTERS, (None, 2, 3)), [("DoRA", 3)]),
)
@on_ranks(2)
def test_training_equals_the_unsharded_model(which, stage):
    plain, model = _pair(which)
    options = {"zero_stage": stage, "codegen": "eager"}
    run = torch.compile(model, backend="zpasses", options=options) if stage else model
    state = zpasses.full_state_dict(_trained(model, run))
    torch.testing.assert_close(state, dict(_trained(plain, plain).state_dict()))


@pytest.mark.parametrize("which", some_quick(["LoRA", "DoRA", "modules to save"], ["DoRA"]))
@on_ranks(2)
def test_adapters_are_saved_and_loaded(which, tmp_path):
    plain, model = _pair(which)
    with pytest.raises(zpasses.ShardingError, match=r"save_pretrained\(path, state_dict=state\)"):
        model.save_pretrained(tmp_path / "refused")
    state, first = zpasses.full_state_dict(model), dist.get_rank() == 0
    model.save_pretrained(tmp_path / "saved", state_dict=state, is_main_process=first)
    dist.barrier()
    torch.manual_seed(0)  # the base model is that of `plain`
    base = Net()
    again = peft.PeftModel.from_pretrained(base, tmp_path / "saved")
    assert_same_values(dict(again.state_dict()), dict(plain.state_dict()))

    # Into a base model that is sharded already.
    torch.manual_seed(0)
    late = peft.PeftModel.from_pretrained(sharded(Net()), tmp_path / "saved", is_trainable=True)
    zpasses.shard(late, mesh=world_mesh())
    _same(late, plain)

    # Into adapters that are sharded already.
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora" in name or "modules_to_save" in name:
                param.zero_()
    model.load_adapter(tmp_path / "saved", "default", is_trainable=True)
    _same(model, plain)


# --- adapters added after sharding ----------------------------------------------------------------
def _late(which="LoRA"):
    torch.manual_seed(0)
    base = sharded(Net())
    return peft.get_peft_model(base, _config(use_dora=which == "DoRA"))


@on_ranks(2)
def test_training_adapters_that_are_not_sharded_is_an_error():
    model = _late()
    for run in (model, torch.compile(model, backend="zpasses", options={"codegen": "eager"})):
        with pytest.raises(Exception, match=r"zpasses.shard\(model, mesh=...\) again") as caught:
            run(TOKENS)
        assert "lora_A.default.weight" in str(caught.value)
    with torch.no_grad():
        model(TOKENS)  # evaluation is correct


@pytest.mark.parametrize(("which", "stage"), [("DoRA", 3), ("LoRA", None)])
@on_ranks(2)
@pytest.mark.slow(quick="test_training_equals_the_unsharded_model")
def test_second_call_of_shard_finds_late_adapters(which, stage):
    model = _late(which)
    before = {name: p for name, p in model.named_parameters() if "lora" in name}
    assert not any(isinstance(param, DTensor) for param in before.values())
    torch.manual_seed(0)
    plain = peft.get_peft_model(Net(), _config(use_dora=which == "DoRA"))
    zpasses.shard(model, mesh=world_mesh())
    _same(model, plain)
    options = {"zero_stage": 3, "codegen": "eager"}
    run = torch.compile(model, backend="zpasses", options=options) if stage else model
    state = zpasses.full_state_dict(_trained(model, run))
    torch.testing.assert_close(state, dict(_trained(plain, plain).state_dict()))
    model, plain = model.merge_and_unload(), plain.merge_and_unload()
    torch.testing.assert_close(model(TOKENS), plain(TOKENS))


# --- edits by `.data` -----------------------------------------------------------------------------
@on_ranks(2)
def test_assignment_to_data_inside_local_shards_is_seen():
    plain = nn.Linear(4, 5)
    model = sharded(plain)
    with zpasses.local_shards(model):
        model.weight.data = model.weight.data * 2
        model.bias.data = torch.arange(5.0)
        with pytest.raises(zpasses.ShardingError, match=r"assigned torch.float64\[5\] to `.data`"):
            model.bias.data = torch.zeros(5, dtype=torch.float64)
    assert torch.equal(model.weight, plain.weight * 2)
    assert torch.equal(model.bias, torch.arange(5.0))
    assert_same_values(
        zpasses.full_state_dict(copy.deepcopy(model)), zpasses.full_state_dict(model)
    )
