"""Trainers train adapters of PEFT over a prepared model as with DDP."""

import pytest
import torch

import zpasses
from tests.on_ranks import needs, on_ranks

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", minversion="5.0")

from safetensors.torch import load_file  # noqa: E402

from tests.zpasses.integrations import training  # noqa: E402
from zpasses.integrations.transformers import prepare  # noqa: E402

QUICK = "test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks"
pytestmark = [pytest.mark.processes, pytest.mark.slow(quick=QUICK)]
NAMES = ("loss", "grad_norm")


def _config():
    return peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "v_proj"])


def _adapted(dtype=torch.float32):
    torch.manual_seed(0)
    model = peft.get_peft_model(training.llama().to(dtype), _config())
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param.data, std=0.1)
    return model


def _train(folder, model, options=None, resume=None, **changes):
    """Train with DDP, or with zpasses and options."""
    training.as_started_by_torchrun()
    args = training.arguments(folder, gradient_accumulation_steps=2, **changes)
    if options is not None:
        prepare(model, options=options)
    samples = training.Samples(training.llama)
    trainer = training.quiet(transformers.Trainer(model, args, train_dataset=samples))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@on_ranks(2, timeout_s=240)
def test_frozen_base_in_bf16_as_with_qlora(tmp_path):
    plain, ours = (
        training.logged(_train(tmp_path, _adapted(torch.bfloat16), options, bf16=True), *NAMES)
        for options in (None, training.OPTIONS)
    )
    assert ours == pytest.approx(plain, rel=3e-3)


# --- prompts --------------------------------------------------------------------------------------
PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
PROMPTS = {
    "prompt": lambda: peft.PromptTuningConfig(**PROMPT),
    "prefix": lambda: peft.PrefixTuningConfig(**PROMPT),
    "p": lambda: peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=8),
}


def _tune_prompt(folder, kind, options=None, resume=None):
    torch.manual_seed(0)
    model = peft.get_peft_model(training.llama(), PROMPTS[kind]())
    trainer = _train(folder, model, options, resume, save_strategy="steps", save_steps=2)
    return training.logged(trainer, *NAMES)


@pytest.mark.parametrize(("kind", "stage"), [("prompt", 2), ("prompt", 3), ("prefix", 3), ("p", 3)])
@on_ranks(2, timeout_s=240)
def test_prompts_train_like_ddp_and_resume_or_are_refused(tmp_path, kind, stage):
    """With code from Inductor."""
    options, folder = {"zero_stage": stage}, tmp_path / "ours"
    plain = _tune_prompt(tmp_path / "plain", kind)
    ours = _tune_prompt(folder, kind, options)
    assert ours == pytest.approx(plain, rel=1e-4)
    by_plain, by_ours = (
        load_file(tmp_path / each / "checkpoint-3" / "adapter_model.safetensors")
        for each in ("plain", "ours")
    )
    torch.testing.assert_close(by_ours, by_plain, rtol=1e-3, atol=1e-5)
    checkpoint = str(folder / "checkpoint-2")
    if kind == "p":  # PEFT does not save its network
        with pytest.raises(zpasses.OptionError, match="cannot go on from its file"):
            _tune_prompt(folder, kind, options, checkpoint)
    else:
        assert _tune_prompt(folder, kind, options, checkpoint) == ours


# --- trl ------------------------------------------------------------------------------------------
def _tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<eos>": 1, **{chr(97 + i): i + 3 for i in range(26)}}
    model = tokenizers.models.WordLevel(words, unk_token="<pad>")
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>"
    )


def _letters(completions, **_):
    return [float(sum(map(ord, text)) % 7) for text in completions]


def _fine_tune(folder, prepared, name, how):
    import datasets
    import trl

    training.as_started_by_torchrun()
    datasets.disable_progress_bars()
    texts = [" ".join(chr(97 + (i * j) % 26) for j in range(6)) for i in range(32)]
    pairs = {"chosen": [" a b c"] * 32, "rejected": [" d e"] * 32}
    generated = {"beta": 0.1, "num_generations": 2, "max_completion_length": 4}
    columns, changes = {
        "SFT": ({"text": texts}, {"max_length": 16, "gradient_accumulation_steps": 2}),
        "GRPO": ({"prompt": texts}, generated),
        "DPO": ({"prompt": texts, **pairs}, {"beta": 0.1, "max_length": 16}),
    }[name]
    args = training.arguments(folder, kind=getattr(trl, f"{name}Config"), bf16=False, **changes)
    models = []
    for _ in range(2 if how == "reference" else 1):
        torch.manual_seed(0)
        model = _adapted() if how == "adapted" else training.llama()
        models.append(prepare(model, options=training.OPTIONS) if prepared else model)
    given = {"reward_funcs": _letters} if name == "GRPO" else {}
    given |= {"ref_model": models[1]} if how == "reference" else {}
    torch.manual_seed(5)
    given |= {"peft_config": _config() if how == "adapters" else None}
    given |= {"train_dataset": datasets.Dataset.from_dict(columns)}
    given |= {"processing_class": _tokenizer()}
    trainer = getattr(trl, f"{name}Trainer")(models[0], args=args, **given)
    training.quiet(trainer).train()
    return training.logged(trainer, *NAMES, "kl")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("SFT", "whole"),
        ("SFT", "adapters"),
        ("GRPO", "adapters"),
        ("GRPO", "adapted"),
        ("DPO", "adapters"),
        ("DPO", "adapted"),
        ("DPO", "reference"),
    ],
)
@needs("trl")
@on_ranks(2, timeout_s=240)
def test_trainers_of_trl_train_like_ddp(tmp_path, name, how):
    """The trainer adds adapters to a model that is sharded, or gets an adapted one. The reference
    is a copy of the adapter, the model without it, or another prepared model.
    """
    plain, ours = (_fine_tune(tmp_path, prepared, name, how) for prepared in (False, True))
    assert ours == pytest.approx(plain, rel=1e-4, abs=1e-9)
