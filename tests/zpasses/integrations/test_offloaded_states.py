"""Trainers train, save and resume with offloaded states as they do without, bit for bit."""

import pytest
import torch
from torch import nn

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.0")

from tests.zpasses.integrations import training  # noqa: E402
from zpasses.integrations.accelerate import prepare as prepare_with  # noqa: E402
from zpasses.integrations.transformers import prepare  # noqa: E402
from zpasses.optim import state_plan  # noqa: E402

OPTIONS = {"bucket_bytes": "1KiB", "device_bytes": "200B"}


def _offloaded(optimizer, offloads):
    if offloads:
        zpasses.offload_optimizer(optimizer, **OPTIONS)
        assert state_plan(optimizer).host_bytes > 0
    return optimizer


def _with_accelerate(folder, offloads, resumes):
    training.as_started_by_torchrun()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 3))
    prepare_with(accelerator, model, options=training.OPTIONS)
    optimizer = _offloaded(torch.optim.AdamW(model.parameters(), lr=1e-2), offloads)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resumes:
        accelerator.load_state(str(folder))
        loader = accelerator.skip_first_batches(loader, 4)
    for number, x in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == 3 and not resumes:
            accelerator.save_state(str(folder))
    return zpasses.full_state_dict(model)


def _with_trainer(folder, offloads, resumes):
    training.as_started_by_torchrun()
    args = training.arguments(
        folder,
        gradient_accumulation_steps=2,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
    )
    torch.manual_seed(0)
    model = prepare(training.llama(), options=training.OPTIONS)
    optimizer = _offloaded(torch.optim.AdamW(model.parameters(), lr=1e-2), offloads)
    samples = training.Samples(training.llama)
    trainer = transformers.Trainer(model, args, train_dataset=samples, optimizers=(optimizer, None))
    training.quiet(trainer).train(f"{folder}/checkpoint-2" if resumes else None)
    return zpasses.full_state_dict(model)


def _with_lightning(folder, offloads, resumes):
    pytest.importorskip("lightning")
    from tests.zpasses.integrations import test_lightning as trained

    class Offloading(trained.Module):
        def configure_optimizers(self):
            return _offloaded(super().configure_optimizers(), offloads)

    path = folder / "state.ckpt"
    trainer, module = trained._fit(
        trained._zpasses(),
        Offloading,
        path if resumes else None,
        steps=5 if resumes else 3,
        accumulate=2,
    )
    if not resumes:
        trainer.save_checkpoint(path)
    return zpasses.full_state_dict(module)


TRAINERS = (_with_accelerate, _with_trainer, _with_lightning)


@pytest.mark.parametrize("train", some_quick(TRAINERS, [_with_accelerate]))
@on_ranks(2, timeout_s=240)
def test_trainers_train_and_resume_with_the_same_bits(tmp_path, train):
    for resumes in (False, True):
        plain, ours = (train(tmp_path / str(offloads), offloads, resumes) for offloads in (0, 1))
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)
