"""Models of transformers, and that of the benchmark, on device meshes of 2 x 2."""

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import zpasses
from examples.capture_llama import tensor_parallel
from tests.models.three_models import MODELS, VOCABULARY, WIDTHS, model_of
from tests.on_ranks import on_ranks
from tests.zpasses.parallel_models import whole
from zpasses.testing import assert_step_equals_reference, capture_ranks
from zpasses.tools.bench.model import GPT, ModelSize, ParallelBlock, parallelize

pytest.importorskip("transformers")
pytestmark = pytest.mark.processes

STEPS = 10


_qwen3 = model_of("Qwen3ForCausalLM", **WIDTHS, head_dim=8, tie_word_embeddings=False)


def _gpt():
    size = ModelSize(width=32, layers=2, heads=4, vocab=257, seq=7, batch=2)  # 257 is prime
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


class DispatchedExperts(nn.Module):
    """The experts of a layer of Mixtral, some on each rank of a mesh: tokens go to them and back.

    Every expert has a place for every token, so shapes do not depend on the data.
    """

    def __init__(self, experts, mesh):
        super().__init__()
        self.group, self.act_fn = mesh.get_group(), experts.act_fn
        self.ranks, self.num_experts = mesh.size(), experts.num_experts
        for name, param in experts.named_parameters():
            own = param.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            piece = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(self, name, nn.Parameter(piece))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        chosen = nn.functional.one_hot(top_k_index, self.num_experts).to(hidden_states.dtype)
        weights = (chosen * top_k_weights.unsqueeze(-1)).sum(1).t().unsqueeze(-1)
        sent = self._exchange(chosen.sum(1).t().unsqueeze(-1) * hidden_states)
        sent = sent.unflatten(0, (self.ranks, -1)).transpose(0, 1).flatten(1, 2)
        gate_up, down = self.gate_up_proj.to_local(), self.down_proj.to_local()
        done = []
        for i, tokens in enumerate(sent.unbind()):
            gate, up = nn.functional.linear(tokens, gate_up[i]).chunk(2, dim=-1)
            done.append(nn.functional.linear(self.act_fn(gate) * up, down[i]))
        back = torch.stack(done).unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(0, 1)
        return (weights * self._exchange(back)).sum(0)

    def _exchange(self, tokens):
        return all_to_all_single_autograd(tokens.contiguous(), None, None, self.group)


def _sharded(model, kind, rows, columns=2):
    """Shards over a mesh of `rows` x `columns`: "tp" and "ep" have tensor and expert parallelism
    over the columns, "hybrid" shards over the columns, and "experts" does that for experts only.

    Returns:
        The place of this rank among those that see different data, and their number.
    """
    if kind == "tp":
        mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("dp", "tp"))
        _tensor_parallel(model, mesh["tp"])
        zpasses.shard(model, mesh=mesh["dp"])
        return mesh.get_local_rank("dp"), rows
    if kind == "ep":
        mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("dp", "ep"))
        for layer in model.model.layers:
            layer.mlp.experts = DispatchedExperts(layer.mlp.experts, mesh["ep"])
            zpasses.shard(
                layer.mlp.experts, mesh=mesh["dp"], grad_divide_factor=float(rows * columns)
            )
        zpasses.shard(model, mesh=init_device_mesh("cpu", (rows * columns,)))
        return dist.get_rank(), rows * columns
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


def _parallel_mesh(model, rows):
    """The mesh of a model that gets tensor parallelism, and no shards over data-parallel ranks."""
    mesh = init_device_mesh("cpu", (rows, 2), mesh_dim_names=("dp", "tp"))
    _tensor_parallel(model, mesh["tp"])
    return mesh


def _average_over(mesh, model, batches):
    """Sets the gradients of this rank's batches, averaged over the ranks of a mesh. What ranks of
    tensor parallelism add up is added first.
    """
    grads = []
    for part in batches:
        model.zero_grad()
        (_loss(model, part) / len(batches)).backward()
        grads.append([_placed_as(param, param.grad) for param in model.parameters()])
    for param, grad in zip(model.parameters(), _sum(grads), strict=True):
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        dist.all_reduce(local, group=mesh.get_group())
        local /= mesh.size()
        param.grad = grad


def _placed_as(param, grad):
    return grad.redistribute(placements=param.placements) if isinstance(grad, DTensor) else grad


def _tokens(step, windows, rows):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (windows, rows, 2, 8), generator=generator)


def _rounding(name, rows, windows):
    """Errors of the unsharded model in fp32, against itself in double precision."""
    torch.manual_seed(0)
    single = BUILDERS[name]().train()
    if name == "mixtral":  # the product of groups of tokens has no kernel for double precision
        single.set_experts_implementation("eager")
    double = copy.deepcopy(single).double()
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (single, double)]
    errors = _Errors()
    for step in range(STEPS):
        for each, optim in zip((single, double), optims, strict=True):
            _average(each, _tokens(step, windows, rows))
            optim.step()
        for mine, expected in zip(single.parameters(), double.parameters(), strict=True):
            errors.add("gradients", mine.grad, expected.grad)
    for mine, expected in zip(single.parameters(), double.parameters(), strict=True):
        errors.add("parameters", mine, expected)
    return errors


class _Errors(dict):
    """The largest errors of losses, gradients and parameters: |mine - expected| / |expected| in the
    Euclidean norm of each tensor, as multiples of what 1e-6 is to fp32.
    """

    def __init__(self, dtype=torch.float32):
        super().__init__(losses=0.0, gradients=0.0, parameters=0.0)
        self._unit = 1e-6 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps

    def add(self, what, mine, expected):
        mine, expected = (whole(each).detach().double() for each in (mine, expected))
        error = (mine - expected).norm() / expected.norm().clamp_min(1e-30) / self._unit
        assert math.isfinite(error), what
        self[what] = max(self[what], error.item())

    def check(self, most, rounding):
        """Fails on an error above `most`, unless fp32 itself makes one of this size.

        Args:
            most: the largest error.
            rounding: returns the errors of fp32.
        """
        if max(self.values()) > most:
            own = rounding()
            allowed = {what: max(most, 1.5 * own[what]) if most else 0.0 for what in self}
            assert all(self[what] <= allowed[what] for what in self), (self, own)


def _average(plain, tokens):
    """Sets the gradients of the unsharded model: added in the order in which the ranks of a mesh
    with two columns add theirs, and averaged.
    """
    grads = []
    for own in tokens.unbind(1):
        plain.zero_grad()
        for part in own:
            (_loss(plain, part) / len(own)).backward()
        grads.append([param.grad for param in plain.parameters()])
    rows = [_sum(grads[first : first + 2]) for first in range(0, len(grads), 2)]
    for param, grad in zip(plain.parameters(), _sum(rows), strict=True):
        param.grad = grad / len(grads)


def _sum(grads):
    return [functools.reduce(torch.add, each) for each in zip(*grads, strict=True)]


STAGES = ((1, 1), (2, 1), (3, 2))
"""ZeRO stages, and the backwards per step."""

EXACT = [
    pytest.param(name, kind, *each, torch.float32, True, id=f"{name}-{kind}-exact-{each[0]}")
    for kind in ("hybrid", "tp")
    for name in BUILDERS
    for each in STAGES
]
NEAR = [
    *((name, "tp", 3, 2, torch.float32, False) for name in BUILDERS),
    *(
        ("mixtral", kind, *each, torch.float32, False)
        for kind in ("ep", "experts")
        for each in STAGES
    ),
    ("gpt", "tp", 3, 2, torch.float64, False),  # differences are rounding errors
]


@pytest.mark.slow(quick="test_experts_as_plain_parameters")
@pytest.mark.parametrize(("name", "kind", "stage", "windows", "dtype", "exact"), [*EXACT, *NEAR])
@on_ranks(4)
def test_training_equals_the_unsharded_model_on_four_ranks(
    name, kind, stage, windows, dtype, exact
):
    """Trains by SGD, and compares losses, gradients and parameters with the unsharded model.

    Sums over ranks are exact where the unsharded model adds in the same order: the gradients of
    each rank's batches, then those of the ranks of a replica, then those of the replicas. What is
    left is what other kernels round: of operators that AOTAutograd decomposes, of products that
    tensor parallelism splits, and of experts that compute the tokens of several ranks at once.

    Args:
        exact: compare bit for bit. The other model then runs the operators of AOTAutograd, too,
            and has the same tensor parallelism. Otherwise an error may be 1e-6, or 1.5 times that
            of the unsharded model in fp32, against double precision.
    """
    torch.manual_seed(0)
    plain = BUILDERS[name]().train().to(dtype)
    model = copy.deepcopy(plain)
    row, rows = _sharded(model, kind, 2)
    options = {"zero_stage": stage, "codegen": "eager", "backwards_per_step": windows}
    run = torch.compile(model, backend="zpasses", options=options)
    parallel = _parallel_mesh(plain, rows) if exact and kind == "tp" else None
    other = torch.compile(plain, backend="aot_eager") if exact else plain
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    errors = _Errors(dtype)
    for step in range(STEPS):
        tokens = _tokens(step, windows, rows)
        for part in tokens:
            loss = _loss(run, part[row])
            (loss / windows).backward()
            errors.add("losses", loss, _loss(other, part[row]))
        if parallel is None:
            _average(other, tokens)
        else:
            _average_over(parallel["dp"], other, tokens[:, row])
        for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
            errors.add("gradients", mine.grad, expected.grad)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        errors.add("parameters", mine, expected)
    errors.check(0.0 if exact else 1.0, lambda: _rounding(name, rows, windows))


@pytest.mark.timeout(1800)
@pytest.mark.slow(quick="test_training_equals_the_unsharded_model of test_hybrid.py")
@pytest.mark.parametrize("kind", ["hybrid", "tp"])
@pytest.mark.parametrize("name", BUILDERS)
def test_graphs_of_16_simulated_ranks_equal_the_reference(name, kind):
    torch.manual_seed(0)
    model = BUILDERS[name]().train()
    captures = capture_ranks(
        _Loss(model),
        [torch.zeros(2, 8, dtype=torch.long)],
        world_size=16,
        shard=lambda loss, _: _sharded(loss.model, kind, 8),
        pipeline="zero3",
    )
    assert_step_equals_reference(captures)
