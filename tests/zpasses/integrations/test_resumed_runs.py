"""A drawn run under a trainer that is resumed from a checkpoint, by new objects, ends as the run
that goes on, bit for bit, also with the optimizer's states on the host. On another number of ranks,
it begins with the values that were saved.
"""

import copy
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from zpasses.optim import state_plan
from zpasses.testing import run_on_ranks
from zpasses.tools.stress.drawn_models import WIDTH, Model, ModelChoice, draw_model

accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model  # noqa: E402

from tests.zpasses.checkpoint.checkpoint_models import assert_equal_values, values_of  # noqa: E402
from tests.zpasses.integrations import training  # noqa: E402
from zpasses.integrations import accelerate as for_accelerate  # noqa: E402
from zpasses.integrations import transformers as for_transformers  # noqa: E402
from zpasses.integrations.lightning import ZpassesStrategy  # noqa: E402

pytestmark = pytest.mark.processes

OPTIMIZERS = (
    ("SGD", {"momentum": 0.5}),
    ("SGD", {}),
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True}),
    ("Adam", {"fused": True}),
    ("RMSprop", {"momentum": 0.5}),
)


@dataclass(frozen=True)
class Run:
    seed: int
    trainer: str
    model: ModelChoice
    optimizer: tuple[str, dict[str, Any]]
    stage: int
    groups: int
    unused: bool
    """Whether a parameter of the optimizer never has a gradient."""
    scheduler: bool
    accumulate: int
    saved_at: int
    """Optimizer steps before the checkpoint."""
    steps: int
    dropout: bool
    """Whether the model draws random numbers, others on each rank."""
    adapter: bool
    """Whether adapters of PEFT are trained, and the rest is frozen."""
    thaws: bool
    """Whether every other parameter is frozen until the checkpoint. accelerate only."""
    codegen: str
    offloads: bool
    """Whether the states of the optimizer rest on the host."""


TRAINERS = ("accelerate", "lightning", "transformers")


def _draw(seed):
    chance = random.Random(f"resumed run {seed}")
    trainer, model = TRAINERS[seed % len(TRAINERS)], draw_model(chance)
    base_is_whole = True
    if trainer == "transformers":
        # Two limits of Trainer, with or without zpasses: it saves shared weights of models of
        # transformers only, and a checkpoint of adapters has no buffers of the base.
        model = replace(model, tied=False, repeated=False)
        base_is_whole = not {"buffers", "batch_norm"} & {*model.blocks}
    saved_at = chance.choice((1, 1, 2, 3))
    steps = saved_at + chance.choice((1, 2))
    more = random.Random(f"more of run {seed}")
    if trainer == "accelerate" and more.random() < 0.3:
        saved_at = 0  # before the first step
    adapter = chance.random() < 0.3 and base_is_whole
    return Run(
        seed,
        trainer,
        model,
        chance.choice(OPTIMIZERS),
        stage=chance.choice((2, 3)),
        groups=chance.choice((1, 1, 2)),
        unused=chance.random() < 0.4,
        scheduler=chance.random() < 0.5,
        accumulate=chance.choice((1, 1, 2)),
        saved_at=saved_at,
        steps=steps,
        dropout=chance.random() < 0.4,
        adapter=adapter,
        thaws=trainer == "accelerate" and not adapter and more.random() < 0.4,
        codegen="inductor" if more.random() < 0.15 else "eager",
        offloads=more.random() < 0.2,
    )


class _WithLoss(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.model = Model(run.model)
        self.dropout = nn.Dropout(0.2 if run.dropout else 0.0)
        self.unused = nn.Parameter(torch.randn(5, 3)) if run.unused else None

    def forward(self, x):
        return {"loss": self.dropout(self.model(x)).square().mean()}


def _model(run, shift):
    """`shift`: of the seed, because a model that loads has other values before."""
    # A checkpoint of adapters has no other weights.
    torch.manual_seed(run.seed + (0 if run.adapter else shift))
    model = _WithLoss(run).double()
    if run.adapter:
        torch.manual_seed(run.seed + shift)
        linear = [name for name, each in model.named_modules() if type(each) is nn.Linear]
        config = LoraConfig(r=2, target_modules=linear, init_lora_weights=False)
        model = get_peft_model(model, config).double()
    torch.manual_seed(run.seed + shift + 10 * dist.get_rank())  # of dropout
    return model


def _optimizer(run, model):
    name, arguments = run.optimizer
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": params[at :: run.groups], "lr": 0.01 * (1 + at)} for at in range(run.groups)
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = getattr(torch.optim, name)(groups, lr=0.01, **arguments)
    if run.offloads:
        zpasses.offload_optimizer(optimizer, bucket_bytes="1KiB", device_bytes="200B")
        assert state_plan(optimizer).host_bytes > 0 or run.optimizer == ("SGD", {})
    return optimizer


def _scheduler(run, optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7 if run.scheduler else 1.0)


def _samples(run):
    source = torch.Generator().manual_seed(run.seed)
    count = 2 * 2 * run.accumulate * run.steps
    return torch.randn(count, WIDTH, generator=source, dtype=torch.float64)


def _loader(run):
    # A loop over batches draws a number. Without a generator for it, that is one of the generator
    # of dropout, also in a run that resumes and has restored it.
    return DataLoader(list(_samples(run)), batch_size=2, generator=torch.Generator())


def _with_accelerate(run, folder, shift, loaded=None):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=run.accumulate)
    model = for_accelerate.prepare(accelerator, _model(run, shift), options=_options(run))
    optimizer = _optimizer(run, model)
    scheduler = _scheduler(run, optimizer)
    loader = _loader(run)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(scheduler)
    thawed = [each for each in model.parameters() if each.requires_grad][::2] if run.thaws else []

    def save():
        accelerator.save_state(str(folder / "state"))
        for param in thawed:
            param.requires_grad_(True)

    done = 0
    if loaded:
        accelerator.load_state(str(folder / "state"))
        loaded(model, optimizer.optimizer)
        loader = accelerator.skip_first_batches(loader, run.saved_at * run.accumulate)
        done = run.saved_at
    else:
        for param in thawed:
            param.requires_grad_(False)
        if run.saved_at == 0:
            save()
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x)["loss"])
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
                done += 1
            optimizer.zero_grad()
        if accelerator.sync_gradients and done == run.saved_at and not loaded:
            save()
    return model, optimizer.optimizer


class _Lit(lightning.LightningModule):
    def __init__(self, run, shift):
        super().__init__()
        self.run, self.net = run, _model(run, shift)

    def training_step(self, batch, index):
        # Lightning begins the data anew when it resumes.
        at = self.trainer.global_step * self.run.accumulate + index % self.run.accumulate
        rows = _samples(self.run).view(-1, 2, 2, WIDTH)[at, dist.get_rank() % 2]
        return self.net(rows)["loss"]

    def configure_optimizers(self):
        optimizer = _optimizer(self.run, self)
        return [optimizer], [{"scheduler": _scheduler(self.run, optimizer), "interval": "step"}]


class _LightningLoaded(lightning.Callback):
    """Calls a function when a checkpoint is loaded."""

    def __init__(self, call):
        self.call = call

    def on_train_start(self, trainer, module):
        self.call(module.net, trainer.optimizers[0])


def _with_lightning(run, folder, shift, loaded=None):
    # A run that resumes saves its checkpoint again, between two micro-batches.
    saves = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder / "again" if loaded else folder,
        filename="{step}",
        every_n_train_steps=run.saved_at,
        save_top_k=-1,
    )
    steps = {"max_steps": run.steps, "accumulate_grad_batches": run.accumulate}
    ranks = {"accelerator": "cpu", "devices": dist.get_world_size()}
    strategy = ZpassesStrategy(options=_options(run))
    # Both save: that gives every rank the buffers of rank 0.
    callbacks = [saves, *([_LightningLoaded(loaded)] if loaded else [])]
    trainer = lightning.Trainer(
        **ranks, strategy=strategy, callbacks=callbacks, **steps, **training.QUIET
    )
    module = _Lit(run, shift)
    path = folder / f"step={run.saved_at}.ckpt" if loaded else None
    trainer.fit(module, _loader(run), ckpt_path=path)
    return module.net, trainer.optimizers[0]


class _Samples(torch.utils.data.Dataset):
    def __init__(self, run):
        self.rows = _samples(run)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"x": self.rows[index]}


class _TrainerLoaded(transformers.TrainerCallback):
    """The same of Trainer."""

    def __init__(self, call):
        self.call = call

    def on_train_begin(self, args, state, control, model, optimizer, **_):
        self.call(model, getattr(optimizer, "optimizer", optimizer))


def _with_transformers(run, folder, shift, loaded=None):
    steps = {"max_steps": run.steps, "gradient_accumulation_steps": run.accumulate}
    steps |= {"save_strategy": "steps", "save_steps": run.saved_at, "max_grad_norm": 0.0}
    arguments = training.arguments(folder, **steps, remove_unused_columns=False)
    model = for_transformers.prepare(_model(run, shift), options=_options(run))
    optimizer = _optimizer(run, model)
    how = {"optimizers": (optimizer, _scheduler(run, optimizer))}
    how["callbacks"] = [_TrainerLoaded(loaded)] if loaded else []
    trainer = transformers.Trainer(model, arguments, train_dataset=_Samples(run), **how)
    checkpoint = str(folder / f"checkpoint-{run.saved_at}") if loaded else None
    training.quiet(trainer).train(resume_from_checkpoint=checkpoint)
    return model, optimizer


RUNS = {
    "accelerate": _with_accelerate,
    "lightning": _with_lightning,
    "transformers": _with_transformers,
}


def _options(run):
    return {"zero_stage": run.stage, "codegen": run.codegen}


def _full(model, optimizer):
    return {
        name: copy.deepcopy(value.full_tensor() if isinstance(value, DTensor) else value)
        for name, value in values_of(model, optimizer).items()
    }


def _resume(run, folder):
    """Train, resume, and compare. Stores the values that the second run began with. Returns what
    the first ended with.
    """
    training.as_started_by_torchrun()
    train, began = RUNS[run.trainer], {}
    expected = values_of(*train(run, folder, 0))
    training.as_started_by_torchrun()
    found = values_of(*train(run, folder, 1, lambda *each: began.update(_full(*each))))
    assert_equal_values(found, expected)
    if dist.get_rank() == 0:
        torch.save(began, folder / "began.pt")
    return expected


class _EnoughError(Exception):
    """Ends a run whose beginning is all that is compared."""


def _resume_elsewhere(run, folder):
    """Resume on other ranks, and compare what the run begins with."""
    training.as_started_by_torchrun()
    expected = torch.load(folder / "began.pt", weights_only=False)

    def compare(model, optimizer):
        assert_equal_values(_full(model, optimizer), expected)
        raise _EnoughError

    with pytest.raises(_EnoughError):
        RUNS[run.trainer](run, folder, 2, compare)


def _each(folder, seeds, part):
    for seed in seeds:
        run, own = _draw(seed), Path(folder, str(seed))
        own.mkdir(exist_ok=True)
        try:
            part(run, own)
        except Exception as error:
            raise AssertionError(f"{run}: {type(error).__name__}: {error}") from error
        finally:
            torch.compiler.reset()


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
@pytest.mark.parametrize("first", range(0, 180, 20))
def test_runs_end_as_without_a_stop(tmp_path, first):
    seeds = range(first, first + 20)
    run_on_ranks(_each, str(tmp_path), seeds, _resume, timeout_s=600)
    run_on_ranks(_each, str(tmp_path), seeds, _resume_elsewhere, ranks=3, timeout_s=600)


CHOICES = {"stage": 3, "groups": 2, "accumulate": 2, "saved_at": 2, "steps": 4, "codegen": "eager"}
YES = dict.fromkeys(("scheduler", "dropout"), True)
NO = dict.fromkeys(("unused", "adapter", "thaws", "offloads"), False)
FIXED = Run(0, "", ModelChoice(("feed",)), ("AdamW", {}), **CHOICES, **YES, **NO)


@pytest.mark.parametrize("trainer", some_quick(TRAINERS, ["accelerate"]))
@on_ranks(2, timeout_s=240)
def test_trainers_train_and_resume_with_offloaded_states_as_without(tmp_path, trainer):
    ends = []
    for offloads in (False, True):
        folder = tmp_path / str(offloads)
        folder.mkdir(exist_ok=True)
        ends.append(_resume(replace(FIXED, trainer=trainer, offloads=offloads), folder))
    assert_equal_values(*ends)
