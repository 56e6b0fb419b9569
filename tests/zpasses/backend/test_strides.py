"""Inductor chooses the strides of what forward saves: backward must be compiled for them."""

import contextlib
import copy

import pytest
import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing

import zpasses
from zpasses import compat
from zpasses.backend.variant_code import Template, _generated
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh

pytestmark = [pytest.mark.processes, pytest.mark.inductor]


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.mix = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.each = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x):
        return x + torch.relu(self.each(torch.relu(self.norm(self.mix(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3))).square().mean()


def _trained(model, step, window):
    """Returns the losses of two steps, and of an evaluation after each."""
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(2):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(i))
        with window():
            for part in (x, 2 * x):
                loss = step(part)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.item(), step(x).item()]
    return losses


def difference(options, window, per_block):
    """Trains a sharded model and the unsharded one. Returns how far losses and parameters are
    apart."""
    torch.manual_seed(0)
    plain = Net()
    model = Net()
    model.load_state_dict(plain.state_dict())
    zpasses.shard(model, mesh=world_mesh())
    step = model
    if per_block:
        zpasses.compile_blocks(model, "layers.*", **options)
    else:
        step = torch.compile(model, backend="zpasses", options=options)
    no_window = contextlib.nullcontext
    in_window = (lambda: zpasses.coalesce_grad_reduction(model)) if window else no_window
    found = _trained(model, step, in_window)
    expected = _trained(plain, plain, no_window)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    apart = [(own.full_tensor() - other).abs().max().item() for own, other in pairs]
    return max(apart + [abs(a - b) for a, b in zip(found, expected, strict=True)])


def _all_differences():
    found = []
    for case in CASES:
        torch._dynamo.reset()
        found.append(difference(*case))
    return found


CASES = [
    ({"zero_stage": 2}, True, False),
    ({"zero_stage": 3, "cache": False}, True, False),
    ({"zero_stage": 2}, False, True),
    ({"zero_stage": 3}, True, True),
]
"""Options, whether reductions wait for the end of a window, and whether blocks are compiled one by
one: variants, backwards that are compiled late, and collectives that leave their graphs."""


@pytest.mark.slow(quick="test_a_module_trains_as_it_does_unsharded of test_families.py")
def test_convolutions_train_as_without_sharding(tmp_path):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for _start in ("cold", "warm"):
        ranks = run_in_fresh_ranks(_all_differences, env=env, timeout_s=280)
        assert all(rank.ok for rank in ranks), "\n".join(map(str, ranks))
        assert all(rank.result == [pytest.approx(0, abs=1e-6)] * len(CASES) for rank in ranks)


def _saved_strides():
    """Strides of the 4-dimensional tensors that forward saves, with zpasses and without."""
    found = []
    for backend, options in (("inductor", None), ("zpasses", {"zero_stage": 2, "cache": False})):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        if options:
            zpasses.shard(model, mesh=world_mesh())
        loss = torch.compile(model, backend=backend, options=options)(torch.ones(2, 3, 9, 9)).sum()
        saved = loss.grad_fn.next_functions[0][0].saved_tensors
        activations = [each for each in saved if each.dim() == 4 and each.shape[0] == 2]
        found.append(sorted((tuple(each.shape), each.stride()) for each in activations))
        loss.backward()
    return found


def test_saved_activations_have_the_strides_that_inductor_prefers():
    for plain, sharded in run_on_ranks(_saved_strides):
        assert sharded == plain
        assert any(strides[1] == 1 for _, strides in plain)


@pytest.mark.parametrize(
    ("chosen", "is_told"), [((4, 1), True), ((1, 2), True), ((4, 1), False)], ids=str
)
def test_strides_are_demanded_of_a_variant_unless_it_returns_them_anyway(chosen, is_told):
    """To demand them of all would have Inductor compute values early."""
    graph = fx.Graph()
    mode = compat.FakeTensorMode()
    given = graph.placeholder("x")
    with mode:
        given.meta["val"] = torch.empty(2, 4)
    made = graph.call_function(torch.ops.aten.sin.default, (given,))
    made.meta["val"] = given.meta["val"]
    graph.output((made,))
    compiles = []

    def codegen(gm, inputs):
        demanded = gm.graph.output_node().meta.get("zpasses_output_strides", {})
        compiles.append(demanded)
        compat.report_output_strides([demanded.get(0, (4, 1))])
        return demanded

    with tracing(TracingContext(mode)) if is_told else contextlib.nullcontext():
        template = Template("forward", None, None, codegen, compat.CompilerState())
    code, strides, _ = _generated(template, fx.GraphModule({}, graph), (), (chosen,))
    assert strides == ([chosen] if is_told else [])
    assert compiles == ([{}] if chosen == (4, 1) and is_told else [{}, {0: chosen}])
    assert code is compiles[-1]


class OneKeyHead(nn.Module):
    """Attention whose heads share keys and values, as in Llama's family, after a learned prompt."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(3, 16))
        self.base = nn.ModuleList(nn.Linear(16, n, bias=False) for n in (16, 8, 8))
        self.base.requires_grad_(False)

    def forward(self, x):
        x = torch.cat([self.prompt.expand(x.shape[0], 3, 16), x], 1)
        query, key, value = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in self.base)
        key, value = (each.expand(-1, 2, -1, -1) for each in (key.sin(), value))
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _repeated_difference():
    found = []
    for backend, options in (("inductor", None), ("zpasses", {"zero_stage": 2, "cache": False})):
        torch.manual_seed(0)
        model = OneKeyHead()
        step = torch.compile(model, backend=backend, options=options)
        if options:
            zpasses.shard(model, mesh=world_mesh())
        window = zpasses.coalesce_grad_reduction(model) if options else contextlib.nullcontext()
        with window:
            for i in range(2):
                x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(i))
                step(x).square().mean().backward()
        grads = [dict(model.named_parameters())["prompt"].grad]
        found.append([each.full_tensor() if options else each for each in grads])
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


@pytest.mark.slow(quick="test_a_module_trains_as_it_does_unsharded of test_families.py")
def test_variants_save_tensors_that_repeat_their_memory():
    ranks = run_in_fresh_ranks(_repeated_difference)
    assert all(rank.ok for rank in ranks), "\n".join(map(str, ranks))
    assert all(rank.result == pytest.approx(0, abs=1e-6) for rank in ranks)


def _difference_of_sizes(shapes):
    """Trains with two forwards for each backward, on inputs of these shapes. Returns how far
    gradients are from those of plain torch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3, padding=1), nn.GELU(), nn.Conv2d(3, 4, 3), nn.GELU())
    plain = nn.Sequential(*layers, nn.Conv2d(4, 1, 1))
    model = copy.deepcopy(plain)
    zpasses.shard(model, mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"zero_stage": 2, "cache": False})
    for call in (plain, step):
        for shape in shapes:
            both = torch.randn(2, *shape, generator=torch.Generator().manual_seed(shape[0]))
            torch.stack([call(x).square().mean() for x in both]).sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs)


@pytest.mark.slow(quick="test_saved_activations_have_the_strides_that_inductor_prefers")
@pytest.mark.parametrize("shapes", [[(5, 1, 6, 6), (3, 1, 6, 6)], [(2, 1, 6, 9), (2, 1, 7, 8)]])
def test_variants_for_sizes_that_change_save_tensors_of_the_same_strides(shapes):
    assert run_on_ranks(_difference_of_sizes, shapes) == [pytest.approx(0, abs=1e-6)] * 2
