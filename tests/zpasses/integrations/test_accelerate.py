"""A training loop with accelerate trains a prepared model as it trains the plain model with DDP."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from tests.on_ranks import on_ranks
from zpasses.testing import run_on_ranks

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.zpasses.integrations import snapshots, training  # noqa: E402
from zpasses.integrations.accelerate import FOLDER, prepare  # noqa: E402
from zpasses.integrations.joint_states import METADATA  # noqa: E402

pytestmark = pytest.mark.processes


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))


def _train(prepared, load=None, save=None, batch=2):
    """Four steps of two backwards, saved or loaded after two."""
    training.as_started_by_torchrun()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = _model()
    if prepared:
        prepare(accelerator, model, options=training.OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = [torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(32)]
    loader = torch.utils.data.DataLoader(data, batch_size=batch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if load is not None:
        accelerator.load_state(str(load))
        loader = accelerator.skip_first_batches(loader, 4)
    norms = []
    for x in loader:
        before = training.reductions()
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
            else:
                assert training.reductions() == before, "only the last backward may reduce"
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if save is not None and len(norms) == 2:
            accelerator.save_state(str(save))
            save = None
    return accelerator, model, norms


def _compare(folder):
    _, plain, expected = _train(False)
    accelerator, model, norms = _train(True, save=folder / "state")
    assert norms == pytest.approx(expected, rel=1e-6)
    state = accelerator.get_state_dict(model)
    assert list(state) == (list(_model().state_dict()) if accelerator.is_main_process else [])
    for name, value in state.items():
        torch.testing.assert_close(value, plain.module.state_dict()[name])
    accelerator.save_model(model, folder / "model")
    return norms


def _resume_on_one_rank(folder):
    return _train(True, load=folder / "state", batch=4)[2]


def test_accumulation_clipping_and_checkpoints(tmp_path):
    norms, same = run_on_ranks(_compare, tmp_path)
    assert norms == same
    assert set(training.weights_of(tmp_path / "model")) == set(_model().state_dict())
    (resumed,) = run_on_ranks(_resume_on_one_rank, tmp_path, ranks=1)
    assert resumed == pytest.approx(norms[2:], rel=1e-5)


@on_ranks(2)
def test_hooks_of_save_state_and_load_state_get_the_models(tmp_path):
    training.as_started_by_torchrun()
    accelerator = accelerate.Accelerator(cpu=True)
    model = prepare(accelerator, _model(), options=training.OPTIONS)
    model, other = accelerator.prepare(model, nn.Linear(2, 2))
    seen = []

    def save(models, weights, path):
        full = accelerator.get_state_dict(models[0])
        if accelerator.is_main_process:
            torch.save(full, f"{path}/own.pt")
        seen.append([list(models), list(map(list, weights)), path])

    def load(models, path):
        own = models.pop(0)
        assert own is model
        own.load_state_dict(torch.load(f"{path}/own.pt"))
        seen.append([list(models), path])

    saving = accelerator.register_save_state_pre_hook(save)
    path = str(tmp_path / "state")
    accelerator.save_state(path)
    saving.remove()
    names = [list(_model().state_dict()), ["weight", "bias"]]
    assert seen.pop() == [[model, other.module], names, path]
    assert {each.name for each in (tmp_path / "state").glob("*.safetensors")} == {
        "model.safetensors"
    }
    before = zpasses.full_state_dict(model)
    for hooked in (False, True):
        with torch.no_grad():
            for each in (*model.parameters(), *other.parameters()):
                each.zero_()
        if hooked:
            accelerator.register_load_state_pre_hook(load)
        accelerator.load_state(path)
        torch.testing.assert_close(zpasses.full_state_dict(model), before)
        assert all(each.abs().sum() > 0 for each in other.parameters())
    assert seen == [[[other.module], path]]
    assert len(accelerator._models) == 2


@on_ranks(2)
def test_states_from_before_the_first_step_and_no_sync(tmp_path):
    training.as_started_by_torchrun()
    accelerator = accelerate.Accelerator(cpu=True)
    model = prepare(accelerator, _model(), options=training.OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.save_state(str(tmp_path))
    weights = []
    for x in (torch.zeros(2, 5), torch.ones(2, 5), torch.ones(2, 5)):
        accelerator.load_state(str(tmp_path))
        assert not optimizer.optimizer.state, "a state from before the first step has no steps"
        accelerator.backward(model(x).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        assert {int(each["step"]) for each in optimizer.optimizer.state.values()} == {1}
        weights.append(zpasses.full_state_dict(model))
    torch.testing.assert_close(weights[1], weights[2], rtol=0, atol=0)

    x, before = torch.ones(2, 5), training.reductions()
    with accelerator.no_sync(model):
        accelerator.backward(model(x).sum())
        assert training.reductions() == before
        assert all(param.grad is None for param in model.parameters())
    accelerator.backward(model(x).sum())
    summed = [param.grad.full_tensor() for param in model.parameters()]
    model.zero_grad()
    accelerator.backward(model(x).sum())
    for param, both in zip(model.parameters(), summed, strict=True):
        torch.testing.assert_close(2 * param.grad.full_tensor(), both)
    with pytest.raises(ValueError, match="mine"), accelerator.no_sync(model):
        raise ValueError("mine")
    accelerator.backward(model(x).sum())  # the window is closed


def _save_states(folder):
    for number, steps in enumerate((2, 4)):
        training.as_started_by_torchrun()
        accelerator = accelerate.Accelerator(cpu=True)
        model = prepare(accelerator, _model(), options=training.OPTIONS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(steps):
            accelerator.backward(model(torch.ones(2, 5)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        with snapshots.recorded(folder / "out", folder / "states", number == 1):
            accelerator.save_state(str(folder / "out"))
        weights = zpasses.full_state_dict(model)
        torch.save(weights, folder / f"weights{number}.{dist.get_rank()}.pt")
    outcomes = set()
    dist.barrier()
    for state in snapshots.states(folder / "states"):
        if not (state / FOLDER / METADATA).exists():
            with pytest.raises(zpasses.ZpassesError, match="is incomplete"):
                accelerator.load_state(str(state))
            outcomes.add("refused")
            continue
        accelerator.load_state(str(state))
        loaded = zpasses.full_state_dict(model)
        for number in range(2):
            saved = torch.load(folder / f"weights{number}.{dist.get_rank()}.pt")
            if all(torch.equal(loaded[name], saved[name]) for name in saved):
                outcomes.add(number)
                break
        else:
            raise AssertionError(f"{state} is a mixture")
    return outcomes


@pytest.mark.slow(quick="test_accumulation_clipping_and_checkpoints")
def test_kill_during_save_state_leaves_a_state_that_is_complete_or_refused(tmp_path):
    assert run_on_ranks(_save_states, tmp_path, timeout_s=240) == [{0, 1, "refused"}] * 2


def _scaled(prepared, overflows):
    """Train with a GradScaler, as accelerate does for fp16 on accelerators. On one rank, gradients
    of the second step are infinite."""
    training.as_started_by_torchrun()
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    model = _model()
    if prepared:
        prepare(accelerator, model, options=training.OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    scales, skipped = [], []
    for step in range(4):
        for each in range(2):
            with accelerator.no_sync(model) if each == 0 else contextlib.nullcontext():
                x = torch.full((2, 5), 1.0 + step + dist.get_rank())
                loss = model(x).square().mean()
                if overflows and step == 1 and dist.get_rank() == 1:
                    loss = loss * 1e38
                accelerator.backward(loss)
        accelerator.scaler.unscale_(optimizer.optimizer)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(accelerator.scaler.get_scale())
        skipped.append(optimizer.step_was_skipped)
    weights = zpasses.full_state_dict(model) if prepared else model.module.state_dict()
    return weights, scales, skipped


@pytest.mark.slow(quick="test_states_from_before_the_first_step_and_no_sync")
@on_ranks(2)
def test_scaled_gradients_overflow_on_all_ranks_together():
    for overflows in (False, True):
        weights, scales, skipped = _scaled(False, overflows)
        ours, our_scales, our_skipped = _scaled(True, overflows)
        assert (our_scales, our_skipped) == (scales, skipped)
        assert skipped == [False, overflows, False, False]
        torch.testing.assert_close(ours, dict(weights))


@on_ranks(2)
def test_wrong_uses_are_refused():
    training.as_started_by_torchrun()
    accelerator = accelerate.Accelerator(cpu=True, dynamo_backend="inductor")
    with pytest.raises(zpasses.OptionError, match="Leave dynamo_backend"):
        prepare(accelerator, _model())
    training.as_started_by_torchrun()
    accelerator = accelerate.Accelerator(cpu=True)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(accelerator, model, options=training.OPTIONS)
    with pytest.raises(zpasses.ShardingError, match="Create the optimizer after prepare"):
        accelerator.prepare(model, optimizer)
