"""Models on a GPU, with the default options: one NCCL rank trains as the unsharded model."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zpasses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(64, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        return F.cross_entropy(self.head(self.layers(self.tokens(x))).flatten(0, 1), x.flatten())


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )

    def forward(self, x):
        return self.net(x).square().mean()


def _batch(kind, seed):
    draw = torch.Generator().manual_seed(seed)
    if kind is Text:
        return torch.randint(64, (4, 32), generator=draw).cuda()
    return torch.randn(4, 3, 16, 16, generator=draw).cuda()


@pytest.fixture(autouse=True)
def fresh_caches(tmp_path, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setenv("ZPASSES_CACHE_DIR", str(tmp_path / "zpasses"))


def _train(mesh, kind, backwards=1, **options):
    """Returns the largest relative difference of a gradient to that of the unsharded model."""
    torch.manual_seed(0)
    model = kind().cuda()
    plain = kind().cuda()
    plain.load_state_dict(model.state_dict())
    zpasses.shard(model, mesh=mesh)
    step = torch.compile(model, backend="zpasses", options=options)
    worst = 0.0
    for number in range(3):
        batches = [_batch(kind, 10 * number + each) for each in range(backwards)]
        window = zpasses.coalesce_grad_reduction(model) if backwards > 1 else None
        with window or contextlib.nullcontext():
            for batch in batches:
                step(batch).backward()
        for batch in batches:
            plain(batch).backward()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                got, expected = ours.grad.full_tensor(), theirs.grad
                if expected.norm() > 1e-5:  # before a normalisation, that of a bias is rounding
                    worst = max(worst, float((got - expected).norm() / expected.norm()))
                theirs -= 0.05 * expected
                ours.to_local().sub_(0.05 * expected.reshape_as(ours.to_local()))
        model.zero_grad()
        plain.zero_grad()
    return worst


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", [Text, Image])
def test_models_train_as_unsharded(one_gpu, kind, stage):
    assert _train(one_gpu, kind, zero_stage=stage) < 1e-4


@pytest.mark.parametrize("stage", [1, 3])
def test_windows_equal_the_sum_of_their_backwards(one_gpu, stage):
    assert _train(one_gpu, Text, backwards=3, zero_stage=stage) < 1e-4


def test_a_budget_and_static_checks(one_gpu):
    options = {"memory_budget": "+64MiB", "verify": "static"}
    assert _train(one_gpu, Text, zero_stage=3, **options) < 1e-4


def test_other_options_take_kernels_of_inductors_cache(one_gpu, tmp_path, monkeypatch):
    assert _train(one_gpu, Text, zero_stage=3) < 1e-4
    torch.compiler.reset()
    monkeypatch.setenv("ZPASSES_CACHE_DIR", str(tmp_path / "another"))
    assert _train(one_gpu, Text, zero_stage=3, verify="static") < 1e-4
