"""Keys of the compile cache: everything that changes the code of a graph changes its key."""

import contextlib
import dataclasses
import functools
import importlib.util
import types
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import zpasses
from zpasses.backend.cache import key as key_module
from zpasses.backend.cache.key import graph_key, refusal, refusal_here
from zpasses.backend.captured import capture
from zpasses.cost.time.target import Target, use_target
from zpasses.pipeline import events
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.events import observe_graphs
from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Pipeline
from zpasses.testing import fake_world

X = torch.linspace(-1, 1, 24).view(4, 6)


class Net(nn.Module):
    def __init__(self, width=9, act=torch.tanh, scale=1.0, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(6, width, bias=bias), nn.Linear(width, 6)
        self.act, self.scale = act, scale

    def forward(self, x):
        return (self.down(self.act(self.up(x))) * self.scale - x).square().mean()


def captured(
    model=None, inputs=(X,), *, world=2, rank=0, dynamic=None, use=graph_key, shard=None, **given
):
    """What `use` makes of the captured graph of a model."""
    torch._dynamo.reset()
    options, found = Options.parse(given), []
    target = Target.parse(options.target) if options.target else None

    def backend(gm, example_inputs):
        read = capture(gm, example_inputs)
        with use_target(target):
            if use is refusal:
                found.append(refusal(read, options, options.passes()))
            else:
                found.append(graph_key(read, example_inputs, options, options.passes()))
        return lambda *args: (torch.zeros((), requires_grad=True),)

    with fake_world(world, rank) as mesh:
        model = zpasses.shard(Net() if model is None else model, mesh=mesh, **(shard or {}))
        torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
    return found[-1]


@pytest.fixture(autouse=True)
def no_observers(monkeypatch):
    """Without the observer of all tests, which keeps graphs out of the cache."""
    monkeypatch.setattr(events, "_listeners", [])


@pytest.fixture(scope="module")
def plain():
    return captured()


def test_keys_are_equal_for_equal_programs(plain):
    assert captured() == plain


class Checkpointed(Net):
    def forward(self, x):
        hidden = torch.utils.checkpoint.checkpoint(self.act, self.up(x), use_reentrant=False)
        return (self.down(hidden) * self.scale - x).square().mean()


class Selective(Net):
    def __init__(self, contexts):
        super().__init__()
        self.contexts = contexts

    def forward(self, x):
        hidden = torch.utils.checkpoint.checkpoint(
            self.act, self.up(x), use_reentrant=False, context_fn=self.contexts
        )
        return (self.down(hidden) * self.scale - x).square().mean()


def saving(ops):
    return functools.partial(create_selective_checkpoint_contexts, ops)


def saving_by_policy(saved):
    def policy(ctx, op, *args, **kwargs):
        chosen = op in saved
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    return saving(policy)


@pytest.mark.parametrize("contexts", [saving, lambda ops: saving_by_policy(set(ops))])
def test_the_policy_of_checkpoints_is_part_of_the_key(contexts):
    tanh, product = torch.ops.aten.tanh.default, torch.ops.aten.addmm.default
    first = captured(Selective(contexts([tanh])))
    assert captured(Selective(contexts([tanh]))) == first
    assert captured(Selective(contexts([product]))).digest != first.digest


def test_graphs_whose_policy_of_checkpoints_holds_an_object_are_not_cached():
    with pytest.raises(BackendCompilerFailed, match=r"policy of checkpoints, whose .* a Net"):
        captured(Selective(saving_by_policy(Net())))


@torch.library.custom_op("zpasses_test_cache::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


def test_inputs_that_share_memory_are_part_of_the_key():
    class Two(Net):
        def forward(self, x, y):
            return super().forward(x) + y.sum()

    memory = torch.ones(2, 4, 6)
    shared = captured(Two(), (memory[0], memory[1]))
    assert captured(Two(), (memory[0], memory[1].clone())).digest != shared.digest


CHANGES = {
    "zero_stage": 2,
    "pipeline": "merge-reads,gather-params,reduce-grads",
    "recompute_elementwise": False,
    "prefetch": 1,
    "target": "h100",
    "memory_budget": "1MiB",
    "verify": "off",
    "backwards_per_step": 2,
    "grad_accum_dtype": torch.float32,
    "grad_accum": "shards",
    "inductor": {"max_autotune": True},
}
"""Option -> another value. Options that only matter when code runs are in UNCHANGED."""

UNCHANGED = {
    "agreement": "first",
    "agreement_timeout_s": 7.0,
    "dump": "somewhere",
    "dump_ranks": "all",
    "cache": False,
    "codegen": "inductor",  # the only one that is cached
}


def test_every_option_is_in_one_of_the_tables():
    names = {*CHANGES, *UNCHANGED, "host_memory"}
    assert names == {each.name for each in dataclasses.fields(Options)}


def test_host_memory_beside_a_budget_is_part_of_the_key():
    budget = {"memory_budget": "1MiB"}
    assert captured(**budget).digest != captured(**budget, host_memory="1MiB").digest


def test_options_of_the_run_are_no_part_of_the_key(plain):
    for option in UNCHANGED.keys() - {"codegen"}:
        assert captured(**{option: UNCHANGED[option]}) == plain, option


def test_the_ranks_to_gather_again_from_are_part_of_the_key():
    keys = {
        captured(world=6, shard={} if size is None else {"reshard_after_forward": size})
        for size in (None, 2, 3)
    }
    assert len(keys) == 3


def test_worlds_and_ranks_have_keys_of_their_own_and_one_question(plain):
    other = captured(rank=1)
    assert other.digest != plain.digest
    assert other.question == plain.question
    assert captured(world=4).digest != plain.digest


@contextlib.contextmanager
def setting(name, value):
    """A setting of torch that has functions to read and to change it."""
    change = getattr(torch, f"set_{name}")
    before = getattr(torch, f"get_{name}")()
    change(value)
    try:
        yield
    finally:
        change(before)


@contextlib.contextmanager
def precision_of(backend, value):
    before, backend.fp32_precision = backend.fp32_precision, value
    try:
        yield
    finally:
        backend.fp32_precision = before


def returning(module, function, value):
    return mock.patch.object(module, function, return_value=value)


OTHER = {
    "another function": lambda: captured(Net(act=torch.relu)),
    "another constant": lambda: captured(Net(scale=2.0)),
    "a checkpoint": lambda: captured(Checkpointed()),
    "another width": lambda: captured(Net(width=10)),
    "no bias": lambda: captured(Net(bias=False)),
    "a frozen parameter": lambda: captured(Net().requires_grad_(requires_grad=False)),
    "another dtype": lambda: captured(Net().double(), (X.double(),)),
    "another size": lambda: captured(inputs=(torch.ones(5, 6),)),
    "other strides": lambda: captured(inputs=(torch.ones(6, 4).t(),)),
    "a gradient": lambda: captured(inputs=(torch.ones(4, 6, requires_grad=True),)),
    "dtype of reductions": lambda: captured(shard={"reduce_dtype": torch.float64}),
    "a dynamic size": lambda: captured(dynamic=True),
    **{name: lambda name=name: captured(**{name: CHANGES[name]}) for name in CHANGES},
}
"""Programs that differ from the plain one."""


@pytest.mark.parametrize("name", OTHER)
def test_the_program_is_part_of_the_key(plain, name):
    assert OTHER[name]().digest != plain.digest


BACKENDS = [
    getattr(SDPBackend, f"{name}_ATTENTION") for name in ("FLASH", "EFFICIENT", "CUDNN")
] + [SDPBackend.OVERRIDEABLE]

STATE = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no gradients": torch.no_grad,
    "default dtype": lambda: setting("default_dtype", torch.float64),
    "matmul precision": lambda: setting("float32_matmul_precision", "medium"),
    "threads": lambda: setting("num_threads", torch.get_num_threads() + 1),
    "kernels of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "order of kernels of attention": lambda: sdpa_kernel(
        [SDPBackend.MATH, *BACKENDS], set_priority=True
    ),
    "oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "precision of oneDNN": lambda: precision_of(torch.backends.mkldnn.matmul, "bf16"),
    "precision of cuBLAS": lambda: precision_of(torch.backends.cuda.matmul, "tf32"),
    "deterministic": lambda: setting("deterministic_debug_mode", "error"),
    "Inductor": lambda: torch._inductor.config.patch(max_fusion_size=3),
    "sources": lambda: returning(key_module, "package_digest", "other sources"),
    "environment": lambda: returning(torch.backends.cpu, "get_cpu_capability", "another one"),
}


@pytest.mark.parametrize("state", STATE.values(), ids=STATE)
def test_the_state_of_torch_is_part_of_the_key(plain, state):
    model = Net()
    with state():
        assert captured(model).digest != plain.digest


def test_only_the_parameters_and_the_gradient_mode_decide_the_question(plain):
    assert captured(inputs=(torch.ones(5, 6),)).question == plain.question
    assert captured(zero_stage=2).question == plain.question
    assert captured(Net(bias=False)).question != plain.question
    assert captured(Net(width=10)).question != plain.question
    with torch.no_grad():
        assert captured().question != plain.question


# --- refusals ------------------------------------------------------------------------------------
class Twice(Net):
    def forward(self, x):
        return super().forward(twice(x))


def test_the_source_of_a_custom_operator_is_part_of_the_key(tmp_path, monkeypatch):
    before = captured(Twice())
    assert captured(Twice()) == before
    # The file of the backward counts, too.
    source = tmp_path / "backward.py"
    source.write_text("def backward(ctx, grad):\n    return 2 * grad\n")
    spec = importlib.util.spec_from_file_location("backward", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    twice.register_autograd(module.backward)
    other = captured(Twice())
    assert other.digest != before.digest
    source.write_text(source.read_text() + "# changed\n")
    assert captured(Twice()).digest not in (before.digest, other.digest)


def backward_with(scale):
    return lambda ctx, grad: scale * grad


def decorated_with(scale):
    @functools.wraps(backward_with)
    def scaled(ctx, grad):
        return scale * grad

    return scaled


SETTINGS = types.ModuleType("zpasses_test_settings")
HOW = ["closure", "default", "global", "table", "module", "partial", "decorator"]


@pytest.mark.parametrize("how", HOW)
def test_what_the_formula_of_a_custom_operator_reads_is_part_of_the_key(how, monkeypatch):
    def digest_with(scale):
        monkeypatch.setitem(globals(), "SCALE", scale)
        monkeypatch.setattr(SETTINGS, "SCALES", (scale,), raising=False)
        monkeypatch.setitem(globals(), "TABLE", {"scale": [scale]})
        formula = {
            "closure": backward_with(scale),
            "default": lambda ctx, grad, scale=scale: scale * grad,
            "global": lambda ctx, grad: SCALE * grad,  # noqa: F821
            "table": lambda ctx, grad: TABLE["scale"][0] * grad,  # noqa: F821
            "module": lambda ctx, grad: SETTINGS.SCALES[0] * grad,
            "decorator": decorated_with(scale),
            "partial": functools.partial(lambda scale, ctx, grad: scale * grad, scale),
        }[how]
        twice.register_autograd(formula)
        return captured(Twice()).digest

    assert digest_with(1.0) == digest_with(1.0)
    assert digest_with(1.0) != digest_with(3.0)


def test_the_source_of_what_a_formula_calls_is_part_of_the_key(tmp_path):
    source = tmp_path / "helper.py"
    source.write_text("def helper(grad):\n    return 2 * grad\n")
    spec = importlib.util.spec_from_file_location("helper", source)
    helper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helper)
    called = helper.helper
    twice.register_autograd(lambda ctx, grad: called(grad))
    before = captured(Twice())
    source.write_text(source.read_text() + "# changed\n")
    assert captured(Twice()).digest != before.digest


class Formula:
    def backward(self, ctx, grad):
        return 2 * grad


@pytest.mark.parametrize(
    ("formula", "held"),
    [(backward_with(torch.ones(3)), "Tensor"), (Formula().backward, "Formula")],
)
def test_operators_whose_formula_holds_an_object_are_not_cached(formula, held):
    twice.register_autograd(formula)
    with pytest.raises(BackendCompilerFailed, match=rf"twice.*whose function .* holds a {held}"):
        captured(Twice())
    twice.register_autograd(backward_with(2.0))


def test_operators_of_unknown_source_are_not_cached():
    library = torch.library.Library("zpasses_test_cache", "FRAGMENT")
    library.define("thrice(Tensor x) -> Tensor")
    library.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
    library.impl("thrice", lambda x: torch.empty_like(x), "Meta")

    class Thrice(Net):
        def forward(self, x):
            return super().forward(torch.ops.zpasses_test_cache.thrice(x))

    with pytest.raises(BackendCompilerFailed, match=r"thrice, whose source is not known"):
        captured(Thrice())


@dataclasses.dataclass(frozen=True)
class OwnPass(Pass):
    name = "own-pass"
    level = Level.JOINT

    def rewrite(self, graph):
        return 0


REFUSED = {
    "codegen='eager'": {"codegen": "eager"},
    "verify='simulate'": {"verify": "simulate"},
    "pass 'own-pass' is not one of zpasses": {"pipeline": Pipeline((OwnPass(),))},
    "reduction_group=own": {"pipeline": "gather-params,reduce-grads,schedule{reduction_group=own}"},
    "joint_custom_post_pass": {"inductor": {"joint_custom_post_pass": OwnPass()}},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_cached_is_refused(reason):
    assert reason in captured(use=refusal, **REFUSED[reason])


def test_a_cacheable_graph_is_not_refused():
    assert captured(use=refusal) is None
    with torch._inductor.config.patch(force_disable_caches=True):
        assert "force_disable_caches" in captured(use=refusal)
    assert captured(use=refusal) is None


def test_a_rank_that_reads_the_graphs_of_a_compile_refuses_by_itself(monkeypatch):
    assert refusal_here(Options(), recorded=False) is None
    assert refusal_here(Options(cache=False), recorded=False) == "cache=False"
    assert "a dump" in refusal_here(Options(), recorded=True)
    with observe_graphs(print):
        assert "observer" in refusal_here(Options(), recorded=False)
    with monkeypatch.context() as patch:
        patch.setenv("ZPASSES_PROBE", "a folder")
        assert "`zpasses bisect`" in refusal_here(Options(), recorded=False)
    assert refusal_here(Options(), recorded=False) is None
