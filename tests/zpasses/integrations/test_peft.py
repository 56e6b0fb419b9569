"""Trainer and SFTTrainer train adapters of PEFT over a prepared model as with DDP."""

import pytest
import torch

import zpasses
from zpasses.testing import run_on_ranks

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", minversion="5.0")

from safetensors.torch import load_file  # noqa: E402

from tests.zpasses.integrations import training  # noqa: E402
from zpasses.integrations.transformers import prepare  # noqa: E402

pytestmark = pytest.mark.processes
NAMES = ("loss", "grad_norm")


def _config():
    return peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "v_proj"])


def _adapted(base_dtype):
    torch.manual_seed(0)
    model = peft.get_peft_model(training.llama().to(base_dtype), _config())
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param.data, std=0.1)
    return model


def _train(folder, prepared, base_dtype=torch.float32, resume=None, **changes):
    training.as_started_by_torchrun()
    args = training.arguments(folder, gradient_accumulation_steps=2, **changes)
    model = _adapted(base_dtype)
    if prepared:
        prepare(model, options=training.OPTIONS)
    samples = training.Samples(training.llama)
    trainer = training.quiet(transformers.Trainer(model, args, train_dataset=samples))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _lora(folder):
    plain = _train(folder, False, max_steps=4)
    ours = _train(folder, True, save_strategy="steps", save_steps=2, max_steps=4)
    resumed = _train(folder, True, resume=str(folder / "checkpoint-2"), max_steps=4)
    ours.model.save_pretrained(folder / "adapter")
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(training.llama(), folder / "adapter").eval()
    ids = torch.arange(3, 10)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            ours.model.eval()(input_ids=ids).logits, loaded(input_ids=ids).logits
        )
    return [training.logged(each, *NAMES) for each in (plain, ours, resumed)]


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
def test_lora_trains_saves_and_resumes(tmp_path):
    for plain, ours, resumed in run_on_ranks(_lora, tmp_path):
        assert ours == pytest.approx(plain, rel=1e-5)
        assert resumed == ours
    saved = tmp_path / "checkpoint-2" / "adapter_model.safetensors"
    assert saved.stat().st_size < 3000  # the adapters, without the base


def _frozen_bf16(folder):
    both = [_train(folder, prepared, torch.bfloat16, bf16=True) for prepared in (False, True)]
    return [training.logged(each, *NAMES) for each in both]


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
def test_frozen_base_in_bf16_as_with_qlora(tmp_path):
    for plain, ours in run_on_ranks(_frozen_bf16, tmp_path, timeout_s=240):
        assert ours == pytest.approx(plain, rel=3e-3)


def _tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<eos>": 1, **{chr(97 + i): i + 3 for i in range(26)}}
    model = tokenizers.models.WordLevel(words, unk_token="<pad>")
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>"
    )


def _fine_tune(folder, prepared, adapters):
    import datasets
    import trl

    training.as_started_by_torchrun()
    datasets.disable_progress_bars()
    texts = [" ".join(chr(97 + (i * j) % 26) for j in range(8)) for i in range(32)]
    args = training.arguments(
        folder, kind=trl.SFTConfig, max_length=16, gradient_accumulation_steps=2, bf16=False
    )
    torch.manual_seed(0)
    model = training.llama()
    if prepared:
        prepare(model, options=training.OPTIONS)
    torch.manual_seed(5)
    trainer = trl.SFTTrainer(
        model,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=_tokenizer(),
        peft_config=_config() if adapters else None,  # added to a model that is sharded already
    )
    training.quiet(trainer).train()
    return training.logged(trainer, *NAMES)


def _fine_tunes(folder, adapters):
    return [_fine_tune(folder, prepared, adapters) for prepared in (False, True)]


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
@pytest.mark.parametrize("adapters", [False, True])
def test_sft_trainer_trains_like_ddp(tmp_path, adapters):
    pytest.importorskip("trl")
    for plain, ours in run_on_ranks(_fine_tunes, tmp_path, adapters, timeout_s=240):
        assert ours == pytest.approx(plain, rel=1e-5)


PROMPTS = {
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8
    ),
}


def _tune_prompt(folder, kind, options, resume=None):
    training.as_started_by_torchrun()
    torch.manual_seed(0)
    model = peft.get_peft_model(training.llama(), PROMPTS[kind]())
    if options is not None:
        prepare(model, options=options)
    saves = {"save_strategy": "steps", "save_steps": 2}
    args = training.arguments(folder, gradient_accumulation_steps=2, **saves)
    samples = training.Samples(training.llama)
    trainer = training.quiet(transformers.Trainer(model, args, train_dataset=samples))
    trainer.train(resume_from_checkpoint=resume)
    return training.logged(trainer, *NAMES)


def _tune_prompts(folder, kind, options):
    results = [
        _tune_prompt(folder / str(prepared), kind, options if prepared else None)
        for prepared in (False, True)
    ]
    plain, ours = (
        load_file(folder / str(prepared) / "checkpoint-3" / "adapter_model.safetensors")
        for prepared in (False, True)
    )
    torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-5)
    return results


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
@pytest.mark.parametrize("kind", sorted(PROMPTS))
@pytest.mark.parametrize("stage", [2, 3])
def test_prompt_learning_trains_and_saves_like_ddp(tmp_path, kind, stage):
    options = {"zero_stage": stage}
    for plain, ours in run_on_ranks(_tune_prompts, tmp_path, kind, options, timeout_s=240):
        assert ours == pytest.approx(plain, rel=1e-4)


def _resume_prompts(folder, kind):
    whole = _tune_prompt(folder, kind, training.OPTIONS)
    if kind == "p":  # PEFT does not save its network
        with pytest.raises(zpasses.OptionError, match="cannot go on from its file"):
            _tune_prompt(folder, kind, training.OPTIONS, str(folder / "checkpoint-2"))
        return
    assert _tune_prompt(folder, kind, training.OPTIONS, str(folder / "checkpoint-2")) == whole


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
@pytest.mark.parametrize("kind", sorted(PROMPTS))
def test_prompt_learning_resumes_or_is_refused(tmp_path, kind):
    run_on_ranks(_resume_prompts, tmp_path, kind)


def _letters(completions, **_):
    return [float(sum(map(ord, text)) % 7) for text in completions]


def _reinforce(folder, prepared, adapted):
    import datasets
    import trl

    training.as_started_by_torchrun()
    datasets.disable_progress_bars()
    prompts = [" ".join(chr(97 + (i * j) % 26) for j in range(4)) for i in range(16)]
    args = training.arguments(
        folder,
        kind=trl.GRPOConfig,
        beta=0.1,
        num_generations=2,
        max_completion_length=4,
        bf16=False,
    )
    torch.manual_seed(0)
    model = _adapted(torch.float32) if adapted else training.llama()
    if prepared:
        prepare(model, options=training.OPTIONS)
    torch.manual_seed(5)
    trainer = trl.GRPOTrainer(
        model,
        _letters,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=_tokenizer(),
        peft_config=None if adapted else _config(),
    )
    training.quiet(trainer).train()
    return training.logged(trainer, *NAMES, "kl")


def _reinforces(folder, adapted):
    return [_reinforce(folder, prepared, adapted) for prepared in (False, True)]


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
@pytest.mark.parametrize("adapted", [False, True])
def test_grpo_with_a_reference_adapter_trains_like_ddp(tmp_path, adapted):
    """The reference is a copy of the adapter, or the model without it."""
    pytest.importorskip("trl")
    for plain, ours in run_on_ranks(_reinforces, tmp_path, adapted, timeout_s=240):
        assert ours == pytest.approx(plain, rel=1e-4, abs=1e-9)


def _prefer(folder, prepared, how):
    import datasets
    import trl

    training.as_started_by_torchrun()
    datasets.disable_progress_bars()
    prompts = [" ".join(chr(97 + (i * j) % 26) for j in range(4)) for i in range(16)]
    samples = {"prompt": prompts, "chosen": [" a b c"] * 16, "rejected": [" d e"] * 16}
    args = training.arguments(folder, kind=trl.DPOConfig, beta=0.1, max_length=16, bf16=False)
    models = []
    for _ in range(2 if how == "reference" else 1):
        torch.manual_seed(0)
        model = _adapted(torch.float32) if how == "adapted" else training.llama()
        models.append(prepare(model, options=training.OPTIONS) if prepared else model)
    torch.manual_seed(5)
    trainer = trl.DPOTrainer(
        models[0],
        ref_model=models[1] if len(models) > 1 else None,
        args=args,
        train_dataset=datasets.Dataset.from_dict(samples),
        processing_class=_tokenizer(),
        peft_config=_config() if how == "adapters" else None,
    )
    training.quiet(trainer).train()
    return training.logged(trainer, *NAMES)


def _prefers(folder, how):
    return [_prefer(folder, prepared, how) for prepared in (False, True)]


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
@pytest.mark.parametrize("how", ["adapted", "adapters", "reference"])
def test_dpo_with_a_reference_trains_like_ddp(tmp_path, how):
    """The reference is a copy of the adapter, the model without it, or another prepared model."""
    pytest.importorskip("trl")
    for plain, ours in run_on_ranks(_prefers, tmp_path, how, timeout_s=240):
        assert ours == pytest.approx(plain, rel=1e-4)
