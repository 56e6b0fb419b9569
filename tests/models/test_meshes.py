"""Models of transformers, and that of the benchmark, on device meshes of 2 x 2."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import zpasses
from examples.capture_llama import tensor_parallel
from tests.models.test_huggingface import MODELS, VOCABULARY
from tests.zpasses.parallel_models import assert_near, whole
from zpasses.testing import assert_step_equals_reference, capture_ranks, run_on_ranks
from zpasses.tools.bench.model import GPT, ModelSize, ParallelBlock, parallelize

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.processes

STEPS = 10


def _qwen3():
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=32,
            tie_word_embeddings=False,
        )
    )


def _gpt():
    size = ModelSize(width=32, layers=2, heads=4, vocab=VOCABULARY, seq=7, batch=2)
    return GPT(size, ParallelBlock)


BUILDERS = {"llama": MODELS["llama"], "mixtral": MODELS["mixtral"], "qwen3": _qwen3, "gpt": _gpt}


def _tensor_parallel(model, mesh):
    if isinstance(model, GPT):
        parallelize(model, mesh)
        return
    tensor_parallel(model, mesh)
    if "qwen3" in type(model).__name__.lower():  # each rank norms its own heads
        norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        names = ("q_norm", "k_norm")
        plan = {f"model.layers.*.self_attn.{each}": norm for each in names}
        parallelize_module(model, mesh, plan)


def _sharded(model, kind, rows, columns=2):
    """Shards over a mesh of `rows` x `columns`.

    Returns:
        The place of this rank among those that see different data, and their number.
    """
    if kind == "tp":
        mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("dp", "tp"))
        _tensor_parallel(model, mesh["tp"])
        zpasses.shard(model, mesh=mesh["dp"])
        return mesh.get_local_rank("dp"), rows
    mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("replicate", "shard"))
    if kind == "experts":
        for layer in model.model.layers:
            zpasses.shard(layer.mlp, mesh=mesh)
        mesh = init_device_mesh("cpu", (rows * columns,))
    zpasses.shard(model, mesh=mesh)
    return dist.get_rank(), rows * columns


def _loss(model, tokens):
    if isinstance(getattr(model, "_orig_mod", model), GPT):
        return model(tokens[:, :-1], tokens[:, 1:])
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


class _Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return _loss(self.model, tokens)


def _train(name, kind, stage, windows, dtype=torch.float32):
    """Trains by SGD, and compares losses, gradients and parameters with the unsharded model."""
    unit = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    torch.manual_seed(0)
    plain = BUILDERS[name]().train().to(dtype)
    model = copy.deepcopy(plain)
    row, rows = _sharded(model, kind, 2)
    options = {"zero_stage": stage, "codegen": "eager", "backwards_per_step": windows}
    run = torch.compile(model, backend="zpasses", options=options)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (windows, rows, 2, 8), generator=generator)
        for part in tokens:
            loss = _loss(run, part[row])
            (loss / windows).backward()
            expected = [_loss(plain, each) for each in part]
            (sum(expected) / rows / windows).backward()
            torch.testing.assert_close(loss, expected[row], rtol=2e-6 * unit, atol=0)
        if step == STEPS - 1:
            mine = {n: whole(p.grad) for n, p in model.named_parameters()}
            assert_near(mine, {n: p.grad for n, p in plain.named_parameters()}, 2e-5 * unit)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    mine = {n: whole(p) for n, p in model.named_parameters()}
    assert_near(mine, dict(plain.named_parameters()), 2e-6 * unit)


def test_hybrid_sharding_of_experts():
    run_on_ranks(_train, "mixtral", "hybrid", 3, 1, ranks=4)


@pytest.mark.slow(quick="test_hybrid_sharding_of_experts")
@pytest.mark.parametrize(("stage", "windows"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("name", BUILDERS)
def test_hybrid_sharding(name, stage, windows):
    run_on_ranks(_train, name, "hybrid", stage, windows, ranks=4)


@pytest.mark.slow(quick="test_training_equals_the_unsharded_model of test_tensor_parallel.py")
@pytest.mark.parametrize(("stage", "windows"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("name", BUILDERS)
def test_tensor_parallelism(name, stage, windows):
    run_on_ranks(_train, name, "tp", stage, windows, ranks=4)


@pytest.mark.slow(quick="test_hybrid_sharding_of_experts")
@pytest.mark.parametrize("kind", ["hybrid", "tp"])
def test_differences_are_rounding_errors(kind):
    run_on_ranks(_train, "gpt", kind, 3, 2, torch.float64, ranks=4)


@pytest.mark.slow(quick="test_hybrid_sharding_of_experts")
@pytest.mark.parametrize(("stage", "windows"), [(1, 1), (2, 1), (3, 2)])
def test_experts_on_a_mesh_of_their_own(stage, windows):
    run_on_ranks(_train, "mixtral", "experts", stage, windows, ranks=4)


@pytest.mark.slow(quick="test_simulated_steps_equal_the_unlowered_graph of test_hybrid.py")
@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("kind", ["hybrid", "tp"])
@pytest.mark.parametrize("name", BUILDERS)
def test_more_simulated_ranks(name, kind, ranks):
    torch.manual_seed(0)
    model = BUILDERS[name]().train()
    tokens = torch.zeros(2, 8, dtype=torch.long)
    captures = capture_ranks(
        _Loss(model),
        [tokens],
        world_size=ranks,
        shard=lambda loss, _: _sharded(loss.model, kind, ranks // 2),
        pipeline="zero3",
    )
    assert_step_equals_reference(captures)
