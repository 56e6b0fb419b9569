"""Lightning trains a module with ZpassesStrategy as with DDP."""

import contextlib
import logging
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zpasses
from tests.on_ranks import on_ranks
from zpasses.testing import run_on_ranks

lightning = pytest.importorskip("lightning")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from lightning.pytorch import callbacks  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402
from lightning.pytorch.utilities import grad_norm  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402

from tests.zpasses.integrations import snapshots, training  # noqa: E402
from zpasses.integrations.lightning import ZpassesStrategy  # noqa: E402

pytestmark = pytest.mark.processes


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
        self.scale = nn.Parameter(torch.ones(3))  # read outside of what is compiled
        self.losses = []

    def training_step(self, batch):
        loss = (self.model(batch[0]) * self.scale).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch):
        self.log("valid", (self.model(batch[0]) * self.scale).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ManualModule(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=index % 2 == 1):
            loss = super().training_step(batch)
            self.manual_backward(loss)
        if index % 2 == 1:
            self.clip_gradients(optimizer, 0.1)
            optimizer.step()
            optimizer.zero_grad()


def _trainer(strategy, ranks=2, steps=3, accumulate=1, **changes):
    training.as_started_by_torchrun()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    place = {"accelerator": "cpu", "devices": ranks, "strategy": strategy}
    given = {"max_steps": steps, "accumulate_grad_batches": accumulate}
    given |= {"gradient_clip_val": 0.1, "enable_checkpointing": False, **changes}
    return lightning.Trainer(**place, **training.QUIET, **given)


def _loader(batch=2):
    data = [torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(48)]
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.stack(data)), batch_size=batch
    )


def _zpasses():
    return ZpassesStrategy(options=training.OPTIONS)


def _fit(strategy, kind=Module, checkpoint=None, batch=2, **changes):
    trainer, module = _trainer(strategy, **changes), kind()
    trainer.fit(module, _loader(batch), ckpt_path=checkpoint)
    return trainer, module


def _both(kind=Module, rel=1e-6, **changes):
    """Train with DDP and with zpasses, and compare the losses."""
    _, plain = _fit("ddp", kind, **changes)
    trainer, ours = _fit(_zpasses(), kind, **changes)
    assert ours.losses == pytest.approx(plain.losses, rel=rel)
    return plain, trainer, ours


class _ReducesOnce(callbacks.Callback):
    """Checks that only the last backward of an optimizer step reduces."""

    def on_train_batch_start(self, *_):
        self.before = training.reductions()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        assert (training.reductions() > self.before) == (index % 4 == 3)


def _compare(folder):
    plain, trainer, ours = _both(accumulate=4, callbacks=[_ReducesOnce()])
    torch.testing.assert_close(zpasses.full_state_dict(ours), dict(plain.state_dict()))
    trainer.save_checkpoint(folder / "three.ckpt")
    before = trainer.validate(ours, _loader(), verbose=False)
    assert before == trainer.validate(
        ours, _loader(), ckpt_path=folder / "three.ckpt", verbose=False
    )
    return _fit(_zpasses(), accumulate=4, checkpoint=folder / "three.ckpt", steps=5)[1].losses


def _resume(folder):
    module = _fit(
        _zpasses(), checkpoint=folder / "three.ckpt", ranks=1, accumulate=4, steps=5, batch=4
    )[1]
    return module.losses


def test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks(tmp_path):
    pairs = run_on_ranks(_compare, tmp_path)
    (alone,) = run_on_ranks(_resume, tmp_path, ranks=1)
    assert len(alone) == len(pairs[0]) > 0
    assert not (tmp_path / "three.ckpt.part").exists()
    # A batch of one rank holds the samples of both ranks, in another order of micro-batches.
    assert sum(alone) == pytest.approx(sum(map(sum, pairs)) / 2, rel=1e-5)


class FrozenBackbone(Module):
    """`BackboneFinetuning` freezes the backbone, and adds it to the optimizer after an epoch."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = self.model, nn.Linear(3, 2)
        del self.model, self.scale

    def training_step(self, batch):
        loss = self.head(self.backbone(batch[0])).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2)


def _finetune(strategy, path):
    runs = []
    for steps, checkpoint in ((10, None), (14, path)):
        thaw = callbacks.BackboneFinetuning(1, lambda_func=lambda epoch: 1.5)
        # DDP does not reduce gradients of what is frozen at first. So ranks have the same batches.
        changes = {"limit_train_batches": 4, "use_distributed_sampler": False}
        changes |= {"max_epochs": 5, "callbacks": [thaw], "steps": steps}
        trainer, module = _fit(strategy(), FrozenBackbone, checkpoint, **changes)
        groups = trainer.optimizers[0].param_groups
        runs.append((module.losses, [(len(each["params"]), each["lr"]) for each in groups]))
        if checkpoint is None:
            trainer.save_checkpoint(path)
    return runs


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
@on_ranks(2)
def test_callbacks_that_add_groups_resume_as_with_ddp(tmp_path):
    expected = _finetune(lambda: "ddp", tmp_path / "ddp.ckpt")
    found = _finetune(_zpasses, tmp_path / "zpasses.ckpt")
    for (losses, groups), (ddp_losses, ddp_groups) in zip(found, expected, strict=True):
        assert len(groups) == 2
        assert groups == ddp_groups
        assert losses == pytest.approx(ddp_losses, rel=1e-6)


def _learning_rates():
    found = []
    for strategy in ("ddp", _zpasses()):
        module = Module()
        module.lr = 1e-3
        trainer = _trainer(strategy, steps=-1, max_epochs=1)
        finder = Tuner(trainer).lr_find(
            module, _loader(), min_lr=1e-4, max_lr=1e-1, num_training=10, early_stop_threshold=None
        )
        found.append((finder.results["loss"], module.lr))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert found[1][1] == pytest.approx(found[0][1])


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
def test_the_learning_rate_finder_suggests_what_it_does_with_ddp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it saves the module there, and loads it
    run_on_ranks(_learning_rates)


def _validate_inside_of_a_step(strategy, folder):  # `strategy()` is a new one
    saves = callbacks.ModelCheckpoint(folder, save_top_k=-1)
    changes = {"val_check_interval": 3, "limit_val_batches": 1, "enable_checkpointing": True}
    module = Module()
    trainer = _trainer(strategy(), steps=3, accumulate=2, callbacks=[saves], **changes)
    trainer.fit(module, _loader(), _loader())
    (path,) = folder.glob("epoch=0-step=1.ckpt")
    return module.losses, _fit(strategy(), accumulate=2, checkpoint=path)[1].losses


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
@on_ranks(2)
def test_checkpoints_between_two_micro_batches_are_as_of_ddp(tmp_path):
    expected = _validate_inside_of_a_step(lambda: "ddp", tmp_path / "ddp")
    warned = pytest.warns(UserWarning, match="between two micro-batches")
    with warned if dist.get_rank() == 0 else contextlib.nullcontext():
        found = _validate_inside_of_a_step(_zpasses, tmp_path / "zpasses")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


CALLBACKS = {
    "EMA": lambda: callbacks.EMAWeightAveraging(decay=0.5),
    "SWA": lambda: callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
}


def _averaged(strategy, which):
    changes = {"max_epochs": 3, "limit_train_batches": 2, "limit_val_batches": 2}
    trainer, module = (
        _trainer(strategy, steps=6, callbacks=[CALLBACKS[which]()], **changes),
        Module(),
    )
    trainer.fit(module, _loader(), _loader())  # validates the average
    return module, trainer.callback_metrics["valid"]


@on_ranks(2)
def test_callbacks_that_average_weights_give_what_they_give_with_ddp():
    for which in CALLBACKS:
        plain, expected = _averaged("ddp", which)
        ours, valid = _averaged(_zpasses(), which)
        assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
        torch.testing.assert_close(valid, expected)
        torch.testing.assert_close(zpasses.full_state_dict(ours), dict(plain.state_dict()))


class NormModule(Module):
    def on_before_optimizer_step(self, optimizer):
        self.norms = {
            name: norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()
            for name, param in self.named_parameters()
            if (norm := param.grad.norm()) is not None
        }
        if isinstance(self.scale, DTensor):
            said = r"Log param\.grad\.norm\(\)\.full_tensor\(\)"
            with pytest.raises(zpasses.ZpassesError, match=said):
                self.log_dict(grad_norm(self, norm_type=2))


@on_ranks(2)
def test_norms_of_gradients_are_read_by_full_tensor():
    plain, _, ours = _both(NormModule)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-5)


@pytest.mark.slow(quick="test_hooks_see_the_state_in_a_checkpoint_and_it_can_be_exported")
@on_ranks(2)
def test_weights_only_checkpoints_are_files_as_of_ddp(tmp_path):
    found = []
    for name, strategy in (("ddp", "ddp"), ("ours", _zpasses())):
        trainer, module = _fit(strategy)
        trainer.save_checkpoint(tmp_path / name, weights_only=True)  # as save_weights_only does
        trainer.strategy.barrier()
        loaded = Module.load_from_checkpoint(tmp_path / name)
        found.append(
            (dict(loaded.state_dict()), trainer.validate(module, _loader(), verbose=False))
        )
        trainer = _trainer("ddp" if name == "ddp" else _zpasses())
        again = trainer.validate(Module(), _loader(), ckpt_path=tmp_path / name, verbose=False)
        assert again == found[-1][1]
    torch.testing.assert_close(found[1][0], found[0][0])
    with pytest.raises(zpasses.ZpassesError, match="load them before fit"):
        _fit(_zpasses(), checkpoint=tmp_path / "ours")


class LanguageModule(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"])
        self.model = peft.get_peft_model(training.llama(), config)
        self.folder = folder

    def training_step(self, batch):
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def validation_step(self, batch):
        # The ranks generate different numbers of tokens.
        ids, more = batch[0][:1], 1 + self.global_rank
        self.texts = self.model.generate(input_ids=ids, max_new_tokens=more, do_sample=False)

    def on_train_end(self):
        self.model.save_pretrained(self.folder)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
@on_ranks(2)
def test_pretrained_models_generate_and_save_as_with_ddp(tmp_path):
    ids = torch.randint(3, training.VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(0))
    found = []
    for name, strategy in (("ddp", "ddp"), ("ours", _zpasses())):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=2)
        module = LanguageModule(tmp_path / name)
        _trainer(strategy, steps=2).fit(module, loader, loader)
        dist.barrier()
        found.append((module.texts, load_file(tmp_path / name / "adapter_model.safetensors")))
    torch.testing.assert_close(found[1], found[0])


class BatchNormModule(Module):
    def __init__(self):
        super().__init__()
        self.model.insert(1, nn.BatchNorm1d(7))


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
@on_ranks(2)
def test_the_best_checkpoint_validates_at_the_value_that_was_recorded(tmp_path):
    monitor = callbacks.ModelCheckpoint(
        tmp_path, monitor="valid", save_top_k=2, save_on_train_epoch_end=False
    )
    changes = {"enable_checkpointing": True, "callbacks": [monitor], "val_check_interval": 1}
    trainer, module = _trainer(_zpasses(), **changes), BatchNormModule()
    trainer.fit(module, _loader(), _loader())
    assert len(monitor.best_k_models) == 2
    for path, score in monitor.best_k_models.items():
        [found] = trainer.validate(module, _loader(), ckpt_path=path, verbose=False)
        assert found["valid"] == score.item()


class HookedModule(Module):
    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        self.seen = {name: value.full_tensor() for name, value in state.items()}
        checkpoint["mine"] = {"twice": 2 * state["scale"], "count": 5}
        del state["model.2.bias"]

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["mine"]["count"] == 5
        state = checkpoint["state_dict"]
        assert "model.2.bias" not in state
        self.seen = {name: value.full_tensor() for name, value in state.items()}
        self.twice = checkpoint["mine"]["twice"].full_tensor()
        state["model.2.bias"] = torch.full((3,), 5.0)


@on_ranks(2)
def test_hooks_see_the_state_in_a_checkpoint_and_it_can_be_exported(tmp_path):
    trainer, module = _fit(_zpasses(), HookedModule)
    trainer.save_checkpoint(tmp_path / "hooked.ckpt")
    full = zpasses.full_state_dict(module)
    torch.testing.assert_close(module.seen, full)
    again, loaded = _trainer(_zpasses()), HookedModule()
    again.validate(loaded, _loader(), ckpt_path=tmp_path / "hooked.ckpt", verbose=False)
    full["model.2.bias"].fill_(5.0)
    torch.testing.assert_close(zpasses.full_state_dict(loaded), full)
    torch.testing.assert_close(loaded.twice, 2 * full["scale"])
    del full["model.2.bias"]
    torch.testing.assert_close(loaded.seen, full)
    if dist.get_rank() == 0:
        dcp_to_torch_save(tmp_path / "hooked.ckpt" / "tensors", tmp_path / "export.pt")
        torch.testing.assert_close(torch.load(tmp_path / "export.pt")["state_dict"], full)


@pytest.mark.slow(quick="test_callbacks_that_average_weights_give_what_they_give_with_ddp")
@on_ranks(2)
def test_average_of_weights_resumes(tmp_path):
    found = []
    for checkpoint in (None, tmp_path / "four.ckpt"):
        saving = callbacks.ModelCheckpoint(
            tmp_path, "four", every_n_train_steps=4, save_top_k=-1, enable_version_counter=False
        )
        average = callbacks.EMAWeightAveraging(decay=0.5)
        _, module = _fit(
            _zpasses(),
            steps=6,
            checkpoint=checkpoint,
            limit_train_batches=2,  # an epoch, so that the fourth step ends one
            enable_checkpointing=True,
            callbacks=[average, saving],
        )
        found.append(zpasses.full_state_dict(module))
    torch.testing.assert_close(*found)


def _save_again(folder):
    (folder / "out").mkdir(exist_ok=True)
    path = folder / "out" / "last.ckpt"
    for number in range(2):
        trainer, _ = _fit(_zpasses(), steps=1 + number)
        with snapshots.recorded(folder / "out", folder / "states", number == 1):
            trainer.save_checkpoint(path)
        if dist.get_rank() == 0:
            shutil.copytree(path, folder / f"complete{number}")
        dist.barrier()


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
def test_kill_during_a_save_leaves_a_checkpoint_that_is_complete(tmp_path):
    run_on_ranks(_save_again, tmp_path)
    found = []
    for state in snapshots.states(tmp_path / "states"):
        complete = [
            number
            for number in range(2)
            for name in ("last.ckpt", "last.ckpt.earlier")
            if snapshots.is_copy(state / name, tmp_path / f"complete{number}")
        ]
        assert complete, state
        if (state / "last.ckpt").exists():  # never a part of one
            assert any(
                snapshots.is_copy(state / "last.ckpt", tmp_path / f"complete{number}")
                for number in range(2)
            )
        found.append(max(complete))
    assert set(found) == {0, 1}


def _manual():
    _, _, ours = _both(ManualModule, gradient_clip_val=None)
    assert len(ours.losses) == 6


def _precision():
    _, _, ours = _both(rel=2e-3, precision="bf16-mixed")
    assert ours.losses != _fit(_zpasses())[1].losses


@pytest.mark.slow(quick="test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks")
@pytest.mark.parametrize("body", [_manual, _precision])
def test_manual_optimization_and_autocast_train_like_ddp(body):
    run_on_ranks(body)


@on_ranks(2)
def test_checkpoints_of_other_strategies_are_refused(tmp_path):
    path = tmp_path / "plain.ckpt"
    torch.save({"state_dict": {}}, path)
    with pytest.raises(zpasses.ZpassesError, match="not a checkpoint that Zpasses"):
        _fit(_zpasses(), checkpoint=path)


def test_wrong_options_are_refused_at_once():
    with pytest.raises(zpasses.OptionError, match="zero_stag"):
        ZpassesStrategy(options={"zero_stag": 3})
