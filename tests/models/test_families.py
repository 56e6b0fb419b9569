"""Modules of torch train sharded as they do unsharded, both compiled by Inductor."""

import functools

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from tests.models.families import Family, cases, train
from tests.on_ranks import on_ranks
from zpasses.testing import run_in_fresh_ranks

pytestmark = [pytest.mark.processes, pytest.mark.inductor]

randn = torch.randn


class Calls(nn.Module):
    """Calls a function with itself and the batch."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, nn.Module):
                setattr(self, name, member)
            else:
                self.register_buffer(name, member)

    def forward(self, *batch):
        return self.function(self, *batch)


# --- recurrence -----------------------------------------------------------------------------------
def _cells(cell, hidden=lambda state: state, **options):
    """A loop over a cell. Inductor sums gradients of biases over steps and samples in one kernel,
    in an order of its own for each graph.
    """

    def loop(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(hidden(state))

    return Family(
        lambda: Calls(loop, cell=cell(3, 5), head=nn.Linear(5, 2)),
        lambda: randn(2, 3, 3),
        **options,
    )


class StateSpace(nn.Module):
    """Mamba's selective scan."""

    def __init__(self, scan, width=4, states=3):
        super().__init__()
        self.scan = scan
        self.decay = nn.Parameter(torch.rand(width, states))
        self.project = nn.Linear(width, width + 2 * states)
        self.width, self.states = width, states

    def forward(self, x):
        sizes = [self.width, self.states, self.states]
        delta, inward, outward = self.project(x).split(sizes, -1)
        delta = F.softplus(delta).unsqueeze(-1)
        decay = torch.exp(-delta * self.decay)
        states = self.scan(decay, delta * inward.unsqueeze(-2) * x.unsqueeze(-1))
        return (states * outward.unsqueeze(-2)).sum(-1)


def _loop(decay, inputs):
    state, states = torch.zeros_like(inputs[:, 0]), []
    for a, b in zip(decay.unbind(1), inputs.unbind(1), strict=True):
        state = a * state + b
        states.append(state)
    return torch.stack(states, 1)


def _associative(decay, inputs):
    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    return associative_scan(combine, (decay, inputs), 1, combine_mode="generic")[1]


# --- mixtures of experts --------------------------------------------------------------------------
class Experts(nn.Module):
    def __init__(self, mix, width=4, experts=3):
        super().__init__()
        self.mix, self.count = mix, experts
        self.route = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        weights, chosen = self.route(x).softmax(-1).topk(2)
        return self.mix(self, x, weights, chosen)


def _indexed(self, x, weights, chosen):
    """Numbers of tokens that depend on data, which break the graph."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        tokens, place = torch.where(chosen == number)
        out = out.index_add(0, tokens, expert(x[tokens]) * weights[tokens, place, None])
    return out


# --- attention ------------------------------------------------------------------------------------
class Attention(nn.Module):
    def __init__(self, attend, width=8, heads=2, groups=None):
        super().__init__()
        self.attend, self.heads, self.groups = attend, heads, groups or heads
        size = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, self.groups * size)
        self.value = nn.Linear(width, self.groups * size)

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (count, -1)).transpose(1, 2)
            for project, count in (
                (self.query, self.heads),
                (self.key, self.groups),
                (self.value, self.groups),
            )
        )
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


sdpa = F.scaled_dot_product_attention


def _masked(q, k, v):
    return sdpa(q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril())


def _by_products(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, is_causal=True)


def _attention(attend=sdpa, groups=None, **options):
    if options:
        attend = functools.partial(attend, **options)
    return Family(lambda: Attention(attend, groups=groups), lambda: randn(2, 5, 8))


def _padding(self, x):
    mask = torch.arange(5) >= torch.tensor([[5], [3]])
    return self.inner(x, x, x, key_padding_mask=mask)[0]


# --- buffers and numbers --------------------------------------------------------------------------
def _rotated(self, x):
    x = torch.view_as_complex(self.inner(x).unflatten(-1, (-1, 2)))
    return torch.view_as_real(x * self.turn).flatten(-2)


def _filtered(self, x):
    gain = torch.view_as_complex(self.gain.weight.unflatten(-1, (-1, 2)))
    return torch.fft.irfft(torch.fft.rfft(x) * gain, n=x.shape[-1])


def _counted(self, x):
    """Nothing is multiplied by what is counted: there, torch's compiled backward reads the count
    after the next change, and is wrong; that of zpasses is right.
    """
    self.calls += 1
    self.seen.index_add_(0, x.argmax(-1), torch.ones(len(x), dtype=torch.int64))
    return self.inner(x)[:, self.order] + self.calls


def _buffers():
    return {"order": torch.tensor([2, 0, 1]), "seen": torch.zeros(5, dtype=torch.int64)}


class Autocast(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def _laplacian(self, x):
    """Derivatives by the inputs, as in physics-informed networks."""
    value = lambda point: self.net(point).squeeze()  # noqa: E731
    return torch.func.vmap(lambda p: torch.func.hessian(value)(p).diagonal().sum())(x)


def _average(self, x):
    """The keys follow the queries, as in MoCo, in the compiled forward."""
    with torch.no_grad():
        for param, source in zip(self.keys.parameters(), self.queries.parameters(), strict=True):
            param.data = source.data * 0.5  # the same on all ranks
        keys = self.keys(x + 1)
    return self.queries(x) - keys


def _momentum_encoder():
    encoders = {"queries": nn.Linear(5, 3), "keys": nn.Linear(5, 3).requires_grad_(False)}
    return Calls(_average, **encoders)


def _activated(self, x, y):
    return self.act(self.inner(x, y))


def _checkpointed(self, x, reentrant):
    return self.after(checkpoint(self.inner, self.before(x), use_reentrant=reentrant))


def _checkpoints(reentrant):
    return Family(
        lambda: Calls(
            functools.partial(_checkpointed, reentrant=reentrant),
            before=nn.Linear(5, 5),
            inner=nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.Tanh(), nn.Linear(7, 5)),
            after=nn.Linear(5, 5),
        ),
        lambda: randn(4, 5),
    )


def _unet(self, x):
    inner = self.down(x)
    wide = F.interpolate(F.max_pool2d(inner, 2), scale_factor=2, mode="bilinear")
    return self.up(torch.cat([inner, wide], 1))


def _weighted_bags(self, words, starts, weights):
    return self.bag(words, starts, weights)


def _bag(mode):
    return Family(
        lambda: nn.Sequential(nn.EmbeddingBag(7, 5, mode=mode), nn.Linear(5, 3)),
        lambda: torch.randint(7, (4, 3)),
    )


def _chain(shape, modules, form=torch.contiguous_format):
    """The modules that a function makes, one after another. The batch is in a memory format."""
    return Family(lambda: nn.Sequential(*modules()), lambda: randn(shape).to(memory_format=form))


def _last(*modules):
    return [each.to(memory_format=torch.channels_last) for each in modules]


def _classifier(width):
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2)


def _normed(norm):
    return _chain((4, 5), lambda: [norm(nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 3)])


IMAGE = (2, 3, 6, 6)
LINE = (2, 3, 9)


def _solved(call, x):
    """The check of a solution is an effect, whose token comes before the inputs of a graph."""
    weight = call.mix.weight
    return call.mix(torch.linalg.solve(torch.eye(6) + weight - weight.mT, x.mT).mT)


def _chosen(self, x):
    return torch.cond(x.sum() > 0, self.first, self.second, (self.second(x).tanh(),))


FAMILIES = {
    "conv2d": _chain(
        IMAGE,
        lambda: [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3), *_classifier(3)],
    ),
    "channels last weights": _chain(
        IMAGE,
        lambda: _last(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3)),
        torch.channels_last,
    ),
    "conv3d": _chain((2, 2, 4, 4, 4), lambda: [nn.Conv3d(2, 3, 2), nn.ReLU(), nn.Conv3d(3, 2, 2)]),
    "transposed conv2d": _chain(
        IMAGE,
        lambda: [nn.ConvTranspose2d(3, 4, 2, stride=2), nn.ReLU(), nn.Conv2d(4, 2, 3, stride=2)],
    ),
    "u-net": Family(
        lambda: Calls(_unet, down=nn.Conv2d(3, 4, 3, padding=1), up=nn.Conv2d(8, 2, 3)),
        lambda: randn(IMAGE),
    ),
    "batch norm": _chain(
        (4, 5), lambda: [nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)]
    ),
    "instance norm": _chain(
        LINE,
        lambda: [
            nn.Conv1d(3, 4, 3),
            nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        ],
    ),
    "layer norm": _chain(
        (4, 5), lambda: [nn.Linear(5, 7), nn.LayerNorm(7), nn.RMSNorm(7), nn.Linear(7, 3)]
    ),
    "weight norm": _normed(nn.utils.parametrizations.weight_norm),
    "spectral norm": _normed(nn.utils.parametrizations.spectral_norm),
    "embedding bag sum": _bag("sum"),
    "weighted embedding bag": Family(
        lambda: Calls(_weighted_bags, bag=nn.EmbeddingBag(7, 5, mode="sum")),
        lambda: (torch.randint(7, (9,)), torch.tensor([0, 2, 5]), torch.rand(9)),
    ),
    "lstm cell": _cells(nn.LSTMCell, lambda state: state[0], rounding=1e-6),
    "multihead attention": Family(
        lambda: Calls(_padding, inner=nn.MultiheadAttention(8, 2, batch_first=True)),
        lambda: randn(2, 5, 8),
    ),
    "transformer": Family(
        lambda: nn.Transformer(8, 2, 1, 1, 12, batch_first=True),
        lambda: (randn(2, 5, 8), randn(2, 5, 8)),
    ),
    "attention": _attention(),
    "causal attention": _attention(is_causal=True),
    "masked attention": _attention(_masked),
    "attention by matrix products": _attention(_by_products),
    "grouped-query attention": _attention(groups=1, enable_gqa=True),
    "attention with dropout": _attention(dropout_p=0.2),
    "state space loop": Family(lambda: StateSpace(_loop), lambda: randn(2, 3, 4)),
    "state space associative scan": Family(
        lambda: StateSpace(_associative), lambda: randn(2, 4, 4)
    ),
    "indexed experts": Family(lambda: Experts(_indexed), lambda: randn(12, 4)),
    "complex buffer": Family(
        lambda: Calls(_rotated, inner=nn.Linear(4, 4), turn=torch.exp(torch.tensor([0.1j, 2j]))),
        lambda: randn(3, 4),
    ),
    "fourier filter": Family(lambda: Calls(_filtered, gain=nn.Linear(6, 1)), lambda: randn(3, 4)),
    "conditional layer": Family(
        lambda: Calls(_chosen, first=nn.Linear(5, 5), second=nn.Linear(5, 5)), lambda: randn(3, 5)
    ),
    "linear solve": Family(
        lambda: Calls(_solved, mix=nn.Linear(6, 6)), lambda: randn(3, 6), rounding=1e-5
    ),
    "orthogonal weight": Family(
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 5), orthogonal_map="cayley"),
        lambda: randn(3, 5),
        rounding=1e-5,
    ),
    "integer buffers": Family(
        lambda: Calls(_counted, inner=nn.Linear(5, 3), calls=torch.tensor(0), **_buffers()),
        lambda: randn(4, 5),
    ),
    "laplacian": Family(
        lambda: Calls(_laplacian, net=nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))),
        lambda: randn(4, 2),
        rounding=1e-6,
    ),
    "momentum encoder": Family(_momentum_encoder, lambda: randn(4, 5), rounding=1e-6),
    "dropout": _chain((4, 5), lambda: [nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 3)]),
    "checkpoint": _checkpoints(False),
    "reentrant checkpoint": _checkpoints(True),
    "autocast": _chain(
        (4, 5), lambda: [Autocast(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3))]
    ),
    "bilinear and prelu": Family(
        lambda: Calls(_activated, inner=nn.Bilinear(3, 4, 5), act=nn.PReLU()),
        lambda: (randn(2, 3), randn(2, 4)),
    ),
}


QUICK = {"conv2d": 3, "causal attention": 3}
"""Family -> the stage that `make test` trains. The others repeat what these show of the passes, and
were of use when they were new: `make test-all` runs them."""


@pytest.mark.parametrize(("name", "stages"), cases(FAMILIES, QUICK))
@on_ranks(2, timeout_s=600)
def test_a_module_trains_as_it_does_unsharded(name, stages):
    train(FAMILIES[name], *stages)


# --- flex attention -------------------------------------------------------------------------------
class FlexAttention(nn.Module):
    """torch has no backward of flex attention on CPUs, so its inputs are detached."""

    def __init__(self):
        super().__init__()
        self.project, self.head = nn.Linear(32, 96), nn.Linear(32, 32)
        self.slope = nn.Parameter(torch.rand(2))
        self.mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")

    def forward(self, x):
        projected, slope = self.project(x), self.slope.detach()
        q, k, v = (
            each.unflatten(-1, (2, -1)).transpose(1, 2) for each in projected.detach().chunk(3, -1)
        )
        mixed = flex_attention(
            q, k, v, lambda score, b, h, i, j: score - slope[h] * (i - j), self.mask
        )
        return projected[..., :32] + self.head(mixed.transpose(1, 2).flatten(2)) * self.slope.sum()


def _train_with_vector_instructions():
    """Inductor has no other code for flex attention on CPUs."""
    torch._inductor.config.cpp.vec_isa_ok = True
    torch._inductor.cpu_vec_isa.valid_vec_isa_list.cache_clear()
    train(Family(FlexAttention, lambda: randn(2, 16, 32)), 1, 2, 3)


@pytest.mark.slow(quick="test_a_module_trains_as_it_does_unsharded")
def test_flex_attention_trains_as_it_does_unsharded():
    for outcome in run_in_fresh_ranks(_train_with_vector_instructions, timeout_s=240):
        assert outcome.ok, outcome.error or outcome.output
