"""Trainer trains a prepared model as it trains the plain model with DDP."""

import functools
import shutil

import pytest
import torch
import torch.distributed as dist

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from zpasses.testing import run_on_ranks, world_mesh

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.0")

from tests.models.families import of_transformers  # noqa: E402
from tests.models.sizes import ENCODER_DECODER  # noqa: E402
from tests.zpasses.integrations import snapshots, training  # noqa: E402
from zpasses.integrations.transformers import last_checkpoint, prepare  # noqa: E402

pytestmark = pytest.mark.processes


def _trainer(
    folder,
    task=training.llama,
    *,
    prepared=True,
    options=None,
    param_dtype=None,
    seed=0,
    callbacks=(),
    **changes,
):
    training.as_started_by_torchrun()
    args = training.arguments(folder, **changes)
    torch.manual_seed(seed)
    model = task()
    if prepared:
        prepare(model, options={**training.OPTIONS, **(options or {})}, param_dtype=param_dtype)
    data = {"train_dataset": training.Samples(task), "eval_dataset": training.Samples(task)}
    return training.quiet(transformers.Trainer(model, args, callbacks=[*callbacks], **data))


def _train(folder, task, prepared, **changes):
    callbacks = [_ReducesOnce()] if prepared else []
    trainer = _trainer(folder, task, prepared=prepared, callbacks=callbacks, **changes)
    trainer.train()
    return trainer


class _ReducesOnce(transformers.TrainerCallback):
    """Checks that only the last backward of an optimizer step reduces."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.before = training.reductions()

    def on_substep_end(self, args, state, control, **kwargs):
        assert training.reductions() == self.before

    def on_step_end(self, args, state, control, **kwargs):
        assert training.reductions() > self.before


SLOW = pytest.mark.slow(quick="test_tasks_train_like_ddp_and_reduce_once_per_step[llama-4-eager]")


@pytest.mark.parametrize(
    ("task", "steps", "codegen"),
    [
        (training.llama, 4, "eager"),
        pytest.param(training.t5, 4, "eager", marks=SLOW),
        pytest.param(training.vit, 4, "eager", marks=SLOW),
        pytest.param(training.llama, 1, "inductor", marks=[SLOW, pytest.mark.inductor]),
    ],
)
@on_ranks(2, timeout_s=240)
def test_tasks_train_like_ddp_and_reduce_once_per_step(tmp_path, task, steps, codegen):
    changes = {"options": {"codegen": codegen}, "gradient_accumulation_steps": steps}
    plain, ours = (
        training.logged(_train(tmp_path, task, prepared, **changes), "loss", "grad_norm")
        for prepared in (False, True)
    )
    assert ours == pytest.approx(plain, rel=1e-6)
    assert len(plain) == 6


class _StopBetweenBackwards(transformers.TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 1


def _stopped(folder, prepared):
    callbacks = [_StopBetweenBackwards()]
    first = _trainer(folder, prepared=prepared, callbacks=callbacks, gradient_accumulation_steps=4)
    data = {"train_dataset": first.train_dataset}
    second = training.quiet(transformers.Trainer(first.model, first.args, **data))
    losses = []
    for trainer in (first, second):
        trainer.train()
        losses += training.logged(trainer, "loss", "grad_norm")
    return losses


@pytest.mark.slow(quick="test_tasks_train_like_ddp_and_reduce_once_per_step")
@on_ranks(2)
def test_training_that_stopped_between_two_backwards_starts_anew(tmp_path):
    assert _stopped(tmp_path, True) == pytest.approx(_stopped(tmp_path, False), rel=1e-6)


# --- checkpoints ----------------------------------------------------------------------------------
SAVES = dict.fromkeys(("save_strategy", "eval_strategy"), "steps")
SAVES |= {"save_steps": 2, "eval_steps": 2, "max_steps": 4, "load_best_model_at_end": True}


def _save(folder):
    trainer = _train(folder, training.llama, True, gradient_accumulation_steps=2, **SAVES)
    trainer.save_model(str(folder / "best"))
    return training.logged(trainer, "loss", "grad_norm")


def _resume(folder, checkpoint, steps):
    # Another seed: the weights come from the checkpoint.
    trainer = _trainer(folder, seed=7, gradient_accumulation_steps=steps, max_steps=4)
    trainer.train(resume_from_checkpoint=checkpoint)
    return training.logged(trainer, "loss", "grad_norm")


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
def test_checkpoints_resume_on_any_number_of_ranks(tmp_path):
    expected, same = run_on_ranks(_save, tmp_path)
    assert same == expected
    for losses in run_on_ranks(_resume, tmp_path, tmp_path / "checkpoint-2", 2):
        assert losses == expected
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text("{")  # killed while saving
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    (one_rank,) = run_on_ranks(_resume, tmp_path, True, 4, ranks=1)
    assert one_rank == pytest.approx(expected, rel=1e-6)
    # The later checkpoint is the better one, and save_pretrained wrote it under its own names.
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "best")
    saved = training.weights_of(tmp_path / "checkpoint-4")
    assert saved.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(param, saved[name]) for name, param in model.named_parameters())


class _CopyComplete(transformers.TrainerCallback):
    """Copies each checkpoint when it is saved."""

    def __init__(self, target):
        self.target = target

    def on_save(self, args, state, control, **kwargs):
        name = f"checkpoint-{state.global_step}"
        if dist.get_rank() == 0:
            shutil.copytree(f"{args.output_dir}/{name}", self.target / name)
        dist.barrier()


def _save_twice(folder):
    """Two runs write into the same folder; the second one, which has other weights, is recorded."""
    for number in range(2):
        changes = {"save_steps": 1, "max_steps": 3 + number, "save_total_limit": 3}
        callbacks = [_CopyComplete(folder / f"complete{number}")]
        trainer = _trainer(
            folder / "out", seed=number, callbacks=callbacks, save_strategy="steps", **changes
        )
        with snapshots.recorded(folder / "out", folder / "states", number == 1):
            trainer.train()


@pytest.mark.slow(quick="test_incomplete_checkpoint_is_refused")
def test_kill_at_any_time_leaves_a_last_checkpoint_that_is_complete(tmp_path):
    run_on_ranks(_save_twice, tmp_path)
    states = snapshots.states(tmp_path / "states")
    found = []
    for state in states:
        last = last_checkpoint(state)
        number = next(
            number
            for number in range(2)
            if (copy := tmp_path / f"complete{number}" / last.rpartition("/")[2]).exists()
            and snapshots.is_copy(last, copy)
        )
        found.append((number, last.rpartition("-")[2]))
    assert len(states) > 20
    assert set(found) == {(0, "3"), (1, "2"), (1, "3"), (1, "4")}


@on_ranks(2)
def test_incomplete_checkpoint_is_refused(tmp_path):
    (tmp_path / "checkpoint-8").mkdir(exist_ok=True)
    with pytest.raises(zpasses.ZpassesError, match=r"checkpoint-8 is incomplete.*last_checkpoint"):
        _resume(tmp_path, tmp_path / "checkpoint-8", 2)
    with pytest.raises(zpasses.ZpassesError, match=r"checkpoint-8 is incomplete.*last_checkpoint"):
        _resume(tmp_path, True, 2)


@pytest.mark.slow(quick="test_a_callback_that_saves_on_one_rank_is_an_error_on_all")
@on_ranks(2)
def test_rank_that_cannot_write_fails_on_all_ranks(tmp_path):
    trainer = _trainer(tmp_path / "out", save_strategy="steps", save_steps=1)
    if dist.get_rank() == 0:

        def fail(*args, **kwargs):
            raise OSError("disk full")

        trainer.model.save_pretrained = fail
    with pytest.raises(zpasses.ShardingError, match=r"failed on rank 0: OSError: disk full"):
        trainer.train()


# --- methods of the model -------------------------------------------------------------------------
@on_ranks(2)
def test_generate_keeps_ranks_in_step_and_save_pretrained_gathers(tmp_path):
    training.as_started_by_torchrun()
    torch.manual_seed(0)
    plain = training.llama(eos_token_id=None).eval()
    torch.manual_seed(0)
    model = prepare(training.llama(eos_token_id=None), options=training.OPTIONS).eval()
    prompt = torch.arange(3, 8)[None]
    length = 4 + 3 * dist.get_rank()  # ranks finish at different times
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    ours = model.generate(prompt, max_new_tokens=length, do_sample=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert torch.equal(ours, plain.generate(prompt, max_new_tokens=length, do_sample=False))
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.state_dict().values(), again.state_dict().values(), strict=True)
    )


class _SaveOnOneRank(transformers.TrainerCallback):
    def __init__(self, event, folder):
        setattr(self, event, functools.partial(self._save, folder))

    def _save(self, folder, args, state, control, model=None, **_):
        if state.is_world_process_zero:
            model.save_pretrained(folder)


@pytest.mark.parametrize("event", some_quick(["on_save", "on_train_end"], ["on_save"]))
@on_ranks(2)
def test_a_callback_that_saves_on_one_rank_is_an_error_on_all(tmp_path, event):
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    callbacks = [_SaveOnOneRank(event, tmp_path / "own")]
    options = {"agreement_timeout_s": 20}
    trainer = _trainer(tmp_path, options=options, callbacks=callbacks, **changes)
    advice = r"save_pretrained without state_dict \(call it on every rank"
    with pytest.raises(zpasses.AgreementError, match=advice):
        trainer.train()


def _seq2seq(folder, prepared):
    training.as_started_by_torchrun()
    args = training.arguments(
        folder,
        kind=transformers.Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=8,
        label_smoothing_factor=0.1,
        learning_rate=1e-4,
    )
    torch.manual_seed(0)
    model = training.t5()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)  # otherwise it generates one token only
    model.generation_config.suppress_tokens = [0]
    if prepared:
        prepare(model, options=training.OPTIONS)

    def collate(batch):  # as DataCollatorForSeq2Seq does
        batch = transformers.default_data_collator(batch)
        shifted = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return {**batch, "decoder_input_ids": shifted}

    samples = training.Samples(training.t5, 13)  # the last batch of the second rank is padded
    trainer = training.quiet(
        transformers.Seq2SeqTrainer(
            model, args, train_dataset=samples, eval_dataset=samples, data_collator=collate
        )
    )
    trainer.train()
    predicted = trainer.predict(samples)
    losses = [*training.logged(trainer, "loss", "grad_norm"), predicted.metrics["test_loss"]]
    return losses, predicted.predictions.tolist()


@pytest.mark.slow(quick="test_generate_keeps_ranks_in_step_and_save_pretrained_gathers")
@on_ranks(2)
def test_seq2seq_trainer_predicts_with_generate_as_with_ddp(tmp_path):
    plain, expected = _seq2seq(tmp_path, False)
    ours, predicted = _seq2seq(tmp_path, True)
    assert ours == pytest.approx(plain, rel=1e-6)
    assert predicted == expected
    assert len({tuple(each) for each in predicted}) > 1


@pytest.mark.slow(quick="test_tasks_train_like_ddp_and_reduce_once_per_step")
@on_ranks(2)
def test_embeddings_are_resized_before_sharding():
    training.as_started_by_torchrun()
    size = training.VOCABULARY + 6
    model = prepare(training.llama(), options=training.OPTIONS)
    with pytest.raises(
        zpasses.ShardingError, match="Change shapes, as resize_token_embeddings does, before"
    ):
        model.resize_token_embeddings(size, mean_resizing=False)
    with (
        zpasses.local_shards(model),
        pytest.raises(zpasses.ShardingError, match="resize_token_embeddings does, before"),
    ):
        model.resize_token_embeddings(size, mean_resizing=False)
    model = training.llama()
    model.resize_token_embeddings(size, mean_resizing=False)
    prepare(model, options=training.OPTIONS)
    ids = torch.tensor([[size - 1, 3, 4]])
    model(input_ids=ids, labels=ids).loss.backward()
    grad = model.get_input_embeddings().get_parameter("weight").grad
    assert grad.full_tensor()[size - 1].abs().sum() > 0


def _skip_layers(layerdrop):
    training.as_started_by_torchrun()
    torch.manual_seed(0)
    sizes = {**ENCODER_DECODER, "vocab_size": training.VOCABULARY, "encoder_layers": 3}
    sizes |= {"encoder_layerdrop": layerdrop}
    model = of_transformers("BartForConditionalGeneration", **sizes).train()
    prepare(model, options=training.OPTIONS)
    torch.manual_seed(dist.get_rank())
    ids = torch.arange(3, 13)[None]
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()


def _skip_and_not():
    with pytest.raises(zpasses.AgreementError, match="layerdrop values of the configuration to 0"):
        _skip_layers(0.5)


@pytest.mark.slow(quick="test_tasks_train_like_ddp_and_reduce_once_per_step")
def test_layers_that_are_skipped_at_random_are_refused_by_name():
    run_on_ranks(_skip_and_not)
    run_on_ranks(_skip_layers, 0.0)


# --- precision ------------------------------------------------------------------------------------
@pytest.mark.slow(quick="test_tasks_train_like_ddp_and_reduce_once_per_step")
@on_ranks(2, timeout_s=240)
def test_bf16_is_autocast_and_param_dtype_gathers(tmp_path):
    def losses(prepared, **changes):
        changes = {"label_smoothing_factor": 0.1, "max_steps": 2, **changes}
        trainer = _train(tmp_path, training.llama, prepared, **changes)
        return training.logged(trainer, "loss", "grad_norm")

    exact, autocast = losses(True), losses(True, bf16=True)
    assert autocast == pytest.approx(losses(False, bf16=True), rel=2e-3)
    for lower in (autocast, losses(True, param_dtype=torch.bfloat16)):
        assert lower != exact
        assert lower == pytest.approx(exact, rel=2e-2)


# --- refusals -------------------------------------------------------------------------------------
COMPILE_OR_SHARD = [
    ({"torch_compile": True}, ("torch_compile=True", "prepare(model, options={...})")),
    ({"torch_compile_mode": "max-autotune"}, ("torch_compile_mode='max-autotune'", "inductor")),
    ({"fsdp": True}, ("fsdp=", "Leave fsdp out")),
]


def _refused_arguments(folder):
    for changes, words in COMPILE_OR_SHARD:
        with pytest.raises(zpasses.OptionError) as caught:
            _trainer(folder, **changes)
        assert all(word in str(caught.value) for word in (*words, "zpasses"))


def _named_as_backend(folder):
    training.as_started_by_torchrun()
    args = training.arguments(folder, torch_compile_backend="zpasses")
    samples = training.Samples(training.llama)
    sharded = zpasses.shard(training.llama(), mesh=world_mesh())
    prepared = prepare(training.llama(), options=training.OPTIONS)
    for model, words in (
        (training.llama(), "names of its own list"),
        (sharded, "zpasses"),
        (prepared, "has compiled the model in place"),
    ):
        with pytest.raises(
            zpasses.OptionError, match=rf"(?s)(?=.*prepare\()(?=.*zpasses).*{words}"
        ):
            transformers.Trainer(model, args, train_dataset=samples).train()
    training.as_started_by_torchrun()
    with pytest.raises(zpasses.OptionError, match=r"(?s)(?=.*prepare\().*zpasses"):
        accelerate.Accelerator(cpu=True, dynamo_backend="zpasses")
    with pytest.raises(ValueError, match="'OTHER' is not a valid DynamoBackend"):
        accelerate.Accelerator(cpu=True, dynamo_backend="other")


def _misused(folder):
    training.as_started_by_torchrun()
    model = prepare(training.llama(), options=training.OPTIONS)
    with pytest.raises(zpasses.ShardingError, match="prepared already"):
        prepare(model)
    with pytest.raises(zpasses.ShardingError, match="not compiled yet"):
        prepare(torch.compile(training.llama()))
    with pytest.raises(zpasses.OptionError, match="zero_stage"):
        prepare(training.llama(), options={"zero_stag": 3})
    late, args = training.llama(), training.arguments(folder)
    optimizer = torch.optim.SGD(list(late.parameters()), lr=0.1)
    prepare(late, options=training.OPTIONS)
    samples = training.Samples(training.llama)
    trainer = transformers.Trainer(late, args, train_dataset=samples, optimizers=(optimizer, None))
    with pytest.raises(zpasses.ShardingError, match="Create the optimizer after prepare"):
        trainer.train()
    training.as_started_by_torchrun()
    sharded = zpasses.shard(training.llama(), mesh=world_mesh())  # and not prepared
    trainer = transformers.Trainer(sharded, training.arguments(folder), train_dataset=samples)
    with pytest.raises(zpasses.ZpassesError, match=r"zpasses\."):
        trainer.train()
    with pytest.raises(zpasses.ZpassesError, match=r"zpasses\."):
        accelerate.Accelerator(cpu=True).prepare(sharded)


@pytest.mark.parametrize("use", [_refused_arguments, _named_as_backend, _misused])
def test_wrong_uses_are_refused_with_the_way_out(tmp_path, use):
    run_on_ranks(use, tmp_path)


def test_prepare_needs_a_process_group():
    with pytest.raises(zpasses.ShardingError, match=r"no process group.*TrainingArguments"):
        prepare(training.llama())
