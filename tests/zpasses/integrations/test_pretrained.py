"""Models that accelerate trains are saved and generate as under DDP: `save_pretrained` in each
documented way, and `generate` on every rank."""

import copy
import functools
import time

import pytest
import torch
import torch.distributed as dist

import zpasses
from tests.on_ranks import on_ranks
from zpasses.testing import run_in_fresh_ranks, run_on_ranks

accelerate = pytest.importorskip("accelerate")
hub = pytest.importorskip("huggingface_hub")
peft = pytest.importorskip("peft", minversion="0.18")
pytest.importorskip("transformers", minversion="5.0")

from safetensors.torch import load_file  # noqa: E402

from tests.zpasses.integrations import training  # noqa: E402
from zpasses.integrations.accelerate import prepare  # noqa: E402

pytestmark = pytest.mark.processes

WAYS = ("all", "main", "state", "state on all", "state on main")
TASK = {"task_type": "CAUSAL_LM"}
PROMPT = {**TASK, "num_virtual_tokens": 3}
LORA = {**TASK, "r": 3, "target_modules": ["q_proj"]}
KINDS = {
    "lora": lambda: peft.LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "tokens": lambda: peft.LoraConfig(**LORA, trainable_token_indices=[1, 5]),
    "prompt": lambda: peft.PromptTuningConfig(**PROMPT),
    "prefix": lambda: peft.PrefixTuningConfig(**PROMPT),
    "p": lambda: peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=8),
    "none": lambda: None,
}


def _adapted(model, kind):
    config = KINDS[kind]()
    torch.manual_seed(1)
    return model if config is None else peft.get_peft_model(model, config)


def _llama():
    torch.manual_seed(0)
    return training.llama()


def _step(model, optimizer, number, rows=slice(None), backward=torch.Tensor.backward):
    source = torch.Generator().manual_seed(number)
    ids = torch.randint(3, training.VOCABULARY, (4, 8), generator=source)[rows]
    loss = model(input_ids=ids, labels=ids).loss
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _optimizer(model):
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)


def _plain(kind, folder):
    """What one process writes. Returns its losses."""
    model = _adapted(_llama(), kind)
    optimizer = _optimizer(model)
    losses = [_step(model, optimizer, number) for number in range(2)]
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    return [*losses, _step(model, optimizer, 2)]


def _prepared(kind, options, late=False):
    training.as_started_by_torchrun()
    accelerator = accelerate.Accelerator(cpu=True)
    model = _llama() if late else _adapted(_llama(), kind)
    prepare(accelerator, model, options=options)
    model = _adapted(model, kind) if late else model
    # Adapters that are added late are sharded here, so that the optimizer gets the shards.
    model = accelerator.prepare(model)
    return accelerator, model, accelerator.prepare(_optimizer(model))


def _save_in_each_way(accelerator, model, folder):
    model.save_pretrained(folder / "all")
    model.save_pretrained(folder / "main", is_main_process=accelerator.is_main_process)
    accelerator.unwrap_model(model).save_pretrained(
        folder / "state",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.unwrap_model(model).save_pretrained(
        folder / "state on all", state_dict=accelerator.get_state_dict(model)
    )
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder / "state on main", state_dict=state)


def _check(folder, kind, options, late):
    rank = dist.get_rank()
    expected = _plain(kind, folder / "plain")
    accelerator, model, optimizer = _prepared(kind, options, late)

    def step(number):
        rows = slice(2 * rank, 2 * rank + 2)
        loss = _step(model, optimizer, number, rows, accelerator.backward)
        return accelerator.reduce(loss, "mean")

    losses = [step(0), step(1)]
    _save_in_each_way(accelerator, model, folder)
    losses.append(step(2))
    torch.testing.assert_close(losses, expected)


def _files(folder):
    return {path.name: load_file(path) for path in folder.glob("*.safetensors")}


@pytest.mark.slow(quick="test_save_pretrained_on_one_rank_is_an_error_on_all")
@pytest.mark.parametrize(
    ("kind", "options", "late"),
    [
        *((kind, training.OPTIONS, False) for kind in KINDS),
        ("lora", {}, False),
        ("p", {}, False),
        ("lora", training.OPTIONS, True),
        ("prompt", training.OPTIONS, True),
    ],
)
def test_models_and_adapters_are_written_as_plain_ones(tmp_path, kind, options, late):
    """`late`: adapters that are added after prepare."""
    run_on_ranks(_check, tmp_path, kind, options, late, timeout_s=240)
    expected = _files(tmp_path / "plain")
    assert expected
    for each in WAYS:
        names = {path.name for path in (tmp_path / "plain").iterdir()}
        assert {path.name for path in (tmp_path / each).iterdir()} == names, each
        torch.testing.assert_close(_files(tmp_path / each), expected)


def _save_on_one_rank(folder, steps, goes_on=True):
    options = {**training.OPTIONS, "agreement_timeout_s": 12}
    accelerator, model, optimizer = _prepared("prompt", options)
    step = functools.partial(_step, model, optimizer, 0, backward=accelerator.backward)
    for _ in range(steps):
        step()
    save = functools.partial(model.save_pretrained, folder)
    if not (accelerator.is_main_process or goes_on):
        time.sleep(15)
        return
    advice = r"save_pretrained without state_dict \(call it on every rank.*get_state_dict\(model\)"
    with pytest.raises(zpasses.AgreementError, match=advice):
        (save if accelerator.is_main_process else step)()


def test_save_pretrained_on_one_rank_is_an_error_on_all(tmp_path):
    run_on_ranks(_save_on_one_rank, tmp_path, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow(quick="test_save_pretrained_on_one_rank_is_an_error_on_all")
@pytest.mark.parametrize("goes_on", [False, True])
def test_save_pretrained_on_one_rank_after_many_steps_is_an_error(tmp_path, goes_on):
    """Where all steps were equal so far, a rank takes the next one without a vote."""
    for rank in run_in_fresh_ranks(_save_on_one_rank, tmp_path, 24, goes_on):
        assert rank.ok, rank.error
    assert not list(tmp_path.iterdir())


class _OfHub(torch.nn.Module, hub.PyTorchModelHubMixin):
    """Its `save_pretrained` takes no `state_dict`, and reads that of the model."""

    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, 3)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.slow(quick="test_save_pretrained_on_one_rank_is_an_error_on_all")
@on_ranks(2)
def test_copies_models_of_the_hub_and_filtered_states_are_written(tmp_path):
    training.as_started_by_torchrun()
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = prepare(accelerator, _OfHub(5), options=training.OPTIONS)
    state = zpasses.full_state_dict(model)
    model.save_pretrained(tmp_path / "hub")
    copied = copy.deepcopy(model)
    with torch.no_grad(), zpasses.local_shards(copied):
        copied.linear.weight.mul_(2)
    copied.save_pretrained(tmp_path / "copy")

    accelerator, model, _ = _prepared("lora", training.OPTIONS)
    full = accelerator.get_state_dict(model)
    model.save_pretrained(tmp_path / "all")
    if accelerator.is_main_process:  # what users keep of a state
        kept = {k: v for k, v in full.items() if "lora" in k or "modules_to_save" in k}
        model.save_pretrained(tmp_path / "kept", state_dict=kept)
        for way, factor in (("hub", 1), ("copy", 2)):
            saved = load_file(tmp_path / way / "model.safetensors")
            torch.testing.assert_close(saved["linear.weight"], factor * state["linear.weight"])
            torch.testing.assert_close(saved["linear.bias"], state["linear.bias"])
        torch.testing.assert_close(_files(tmp_path / "kept"), _files(tmp_path / "all"))
