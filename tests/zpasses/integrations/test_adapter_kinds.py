"""All kinds of adapters of PEFT train, save and load over a prepared model as over a plain one."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import zpasses
from tests.on_ranks import on_ranks
from zpasses.testing import run_on_ranks

peft = pytest.importorskip("peft", minversion="0.18")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402

from tests.zpasses.integrations import training  # noqa: E402
from zpasses.integrations.transformers import prepare  # noqa: E402

pytestmark = pytest.mark.processes

PROMPT = {"num_virtual_tokens": 3}
PLAIN = ("BEFT", "OSF", "SUPERTUNING", "TINYLORA", "UNILORA")
RANKS = {
    3: "LORA DEFT DELORA GLORA HIRA LILY LOHA LOKR SHIRA PEANUT PVERA RANDLORA VERA",
    4: "GRALORA HRA MISS PSOFT",
}
KINDS = {
    **{kind: {} for kind in PLAIN},
    **{kind: {"r": rank} for rank, kinds in RANKS.items() for kind in kinds.split()},
    **dict.fromkeys(("CARTRIDGE", "PROMPT_TUNING", "PREFIX_TUNING"), PROMPT),
    **{kind: {"n_frequency": 5} for kind in ("FOURIERFT", "WAVEFT")},
    "ADALORA": {"init_r": 3, "target_r": 1, "total_step": 10, "tinit": 1, "tfinal": 2},
    "ADAMSS": {"r": 4, "num_subspaces": 2},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 1, "target_modules": None},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "CPT": {"cpt_token_ids": [3, 4, 5], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    "FROD": {"progressbar": False},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "OFT": {"oft_block_size": 4},
    "MULTITASK_PROMPT_TUNING": {**PROMPT, "num_tasks": 2},
    "P_TUNING": {**PROMPT, "encoder_hidden_size": 8},
    "POLY": {"r": 4, "n_tasks": 2},
    "ROAD": {"group_size": 4},
    "SHADOW": {"target_modules": None},
    "TRAINABLE_TOKENS": {"token_indices": [3, 5, 7], "target_modules": None},
    "VBLORA": {"vector_length": 4, "num_vectors": 8},
    "XLORA": {"hidden_size": 16, "xlora_size": 8},
}


REFUSED = {
    "CPT": "parameter prompt_encoder.default.delta_embedding.weight has hooks",
    "OSF": r"parameter \S+q_proj.osf_svd_params.default.U_low has hooks",
}
"""Kinds whose parameters have hooks."""


def _config(kind, folder):
    config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    changes = dict(KINDS[kind])
    if "target_modules" in config.__dataclass_fields__:
        changes.setdefault("target_modules", ["q_proj", "v_proj"])
    if kind == "XLORA":
        changes["adapters"] = {"0": str(folder / "expert")}
    return config(task_type="CAUSAL_LM", **changes)


def _base():
    torch.manual_seed(0)
    return training.llama(use_cache=False)


def _adapted(kind, folder, prepared):
    model = peft.get_peft_model(_base(), _config(kind, folder))
    return prepare(model, options=training.OPTIONS) if prepared else model


def _forward(model, kind):
    ids = (torch.arange(20).reshape(2, 10) * 7) % 50 + 3
    several = kind in ("MULTITASK_PROMPT_TUNING", "POLY")
    extra = {"task_ids": torch.tensor([0, 1])} if several else {}
    return model(input_ids=ids, labels=ids, **extra)


def _trained(kind, folder, prepared):
    model = _adapted(kind, folder, prepared)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        loss = _forward(model, kind).loss
        loss.backward()
        optimizer.step()
        if kind == "ADALORA":
            model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def _loaded(kind, folder, prepared):
    if kind == "ADALORA":  # the file does not fit into a new adapter
        model = peft.PeftModel.from_pretrained(_base(), folder / "ours", is_trainable=True)
        return prepare(model, options=training.OPTIONS) if prepared else model
    model = _adapted(kind, folder, prepared)
    writable = kind == "CARTRIDGE" and prepared  # PEFT writes to what it reads
    with zpasses.local_shards(model) if writable else contextlib.nullcontext():
        model.load_adapter(folder / "ours", "default", is_trainable=True)
    return model


def _kinds():
    known = {each.value for each in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING}
    return sorted(known & KINDS.keys())


@pytest.mark.parametrize("kind", _kinds())
@pytest.mark.slow(quick="test_training_equals_the_unsharded_model of test_adapters.py")
@on_ranks(2)
def test_kind_trains_saves_and_loads_like_over_a_plain_model(tmp_path, kind):
    training.as_started_by_torchrun()
    if kind == "XLORA":
        if dist.get_rank() == 0:
            _adapted("LORA", tmp_path, False).save_pretrained(tmp_path / "expert")
        dist.barrier()
    if kind in REFUSED:
        with pytest.raises(zpasses.ShardingError, match=REFUSED[kind]):
            _adapted(kind, tmp_path, True)
        return
    plain, expected = _trained(kind, tmp_path, False)
    ours, losses = _trained(kind, tmp_path, True)
    assert losses == pytest.approx(expected, rel=1e-4)
    if kind == "XLORA":  # PEFT takes the layer 0 of its network for an adapter of this name
        assert not peft.get_peft_model_state_dict(plain)
        with pytest.raises(zpasses.ZpassesError, match="no tensor of adapter 'default'"):
            ours.save_pretrained(tmp_path / "ours")
        return
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
    ours.save_pretrained(tmp_path / "ours")
    dist.barrier()
    by_plain, by_ours = (
        load_file(tmp_path / each / "adapter_model.safetensors") for each in ("plain", "ours")
    )
    assert by_plain
    torch.testing.assert_close(by_ours, by_plain, rtol=1e-3, atol=1e-5)
    outputs = []
    for prepared in (False, True):
        loaded = _loaded(kind, tmp_path, prepared).eval()
        with torch.no_grad():
            outputs.append(_forward(loaded, kind).logits)
    torch.testing.assert_close(*outputs)


def test_every_kind_of_peft_is_tested():
    assert len(_kinds()) == len(peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING)


def _saves_nothing(folder):
    training.as_started_by_torchrun()
    model = _adapted("LORA", folder, True)
    with pytest.raises(zpasses.ZpassesError, match=r"no tensor of adapter.*selected_adapters"):
        model.save_pretrained(folder, selected_adapters=[])
    model.add_adapter("other", _config("LORA", folder))  # after prepare, so it is not sharded
    model.save_pretrained(folder, selected_adapters=["default"])
    dist.barrier()
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []
    model.save_pretrained(folder)


def test_save_pretrained_writes_the_adapters_that_were_selected(tmp_path):
    run_on_ranks(_saves_nothing, tmp_path)
    assert {path.parent.name for path in tmp_path.rglob("*.safetensors")} == {
        "other",
        tmp_path.name,
    }
