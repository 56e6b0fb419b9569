"""Error feedback on real ranks: residuals of parameters, from step to step."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zpasses
from tests.on_ranks import on_ranks
from tests.zpasses.backend import test_encoded_training
from tests.zpasses.parallel_models import mesh_2d
from zpasses.backend.step_trials import StepTrials
from zpasses.graph.encoding import Encoding, decode, encode
from zpasses.pipeline.events import listen
from zpasses.runtime.windows import grad_state_of
from zpasses.testing import capture_graphs, world_mesh

INT8 = Encoding("int8", 16)
EXACT = "reduce-grads{encode=int8,block=16,exact_below_kib=0}"
FEEDBACK = EXACT.replace("}", ",feedback=on}")
STAGE1 = f"gather-params,{FEEDBACK},cache-params,schedule,defer-reduction"
STAGE3 = f"gather-params,{FEEDBACK},reshard-after-forward,schedule,defer-reduction"
NEVER_DEFERS = STAGE3.replace(",defer-reduction", "")
EAGER = {"pipeline": STAGE3, "codegen": "eager"}
SLOW = pytest.mark.slow(quick="test_training_equals_plain_torch_bit_for_bit[stage 3]")


class Layers(test_encoded_training.Layers):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(8, 8, bias=False)


class Reference:
    """Plain SGD, whose gradients are the mean of what each rank's codes stand for."""

    def __init__(self, model, group=None, every=None, *, feedback=True):
        self.model, self.group, self.every, self.feedback = model, group, every, feedback
        self.ranks = dist.get_world_size(group)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.lost = {name: torch.zeros_like(each) for name, each in model.named_parameters()}

    def step(self):
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                param.grad = self.averaged(self.sent(self.lost[name], param.grad))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sent(self, lost, grad):
        """What this rank's codes stand for."""
        total = grad + lost if self.feedback else grad
        rows = -(-total.shape[0] // self.ranks)
        shape = [rows, *total.shape[1:]]
        parts = [
            decode(encode(each, rows * total.shape[1], 1, INT8), shape, 1, total.dtype, INT8)
            for each in total.split(rows)
        ]
        sent = torch.cat(parts)[: total.shape[0]]
        lost.copy_(torch.where((total - sent).isfinite(), total - sent, 0))
        return sent

    def averaged(self, value):
        for group in (self.group, self.every):
            if group is not None or self.every is None:
                each = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
                dist.all_gather(each, value, group=group)
                value = sum(each[1:], each[0]) / len(each)
            if self.every is None:
                break
        return value


def models(mesh=None, made=Layers, **reference):
    """An unsharded model in the reference, and the same as a sharded one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = made()
    model = zpasses.shard(copy.deepcopy(plain), mesh=mesh or world_mesh())
    return Reference(plain, **reference), model


class Run:
    """Trains a sharded model and its reference."""

    def __init__(self, options=None, *, fullgraph=False, **given):
        self.reference, self.model = models(**given)
        options = {**EAGER, **(options or {})}
        how = {"backend": "zpasses", "options": options, "fullgraph": fullgraph}
        self.step = torch.compile(self.model, **how)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def backward(self, x):
        self.step(x).sum().backward()
        self.reference.model(x).sum().backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.reference.step()
        theirs = self.reference.model.parameters()
        for (name, ours), each in zip(self.model.named_parameters(), theirs, strict=True):
            assert torch.equal(ours.full_tensor(), each), name

    def steps(self, xs, backwards=1):
        """Compares the parameters after each step."""
        for batches in xs.split(backwards):
            for x in batches:
                self.backward(x)
            self.update()


def inputs(steps, *shape):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(steps, *(shape or (4, 24)), generator=generator)


def residuals(model):
    """Parameter -> its residual, if it has one."""
    found = {name: grad_state_of(each).residuals for name, each in model.named_parameters()}
    assert all(len(each) <= 1 for each in found.values())
    return {name: next(iter(each.values())) for name, each in found.items() if each}


def gradient(model, name):
    return dict(model.named_parameters())[name].grad.full_tensor()


CODE = {"codegen": "inductor"}
INDUCTOR = [pytest.mark.inductor, SLOW]


@pytest.mark.parametrize(
    ("options", "backwards"),
    [
        pytest.param({}, 1, id="stage 3"),
        pytest.param(CODE, 1, id="Inductor", marks=INDUCTOR),
        pytest.param({**CODE, "pipeline": STAGE1}, 1, id="stage 1", marks=INDUCTOR),
        pytest.param({**CODE, "backwards_per_step": 2}, 2, id="window", marks=INDUCTOR),
        pytest.param({"pipeline": NEVER_DEFERS}, 1, id="never defers", marks=SLOW),
        pytest.param({"verify": "simulate"}, 1, id="simulated", marks=SLOW),
    ],
)
@on_ranks(2, timeout_s=240)
def test_training_equals_plain_torch_bit_for_bit(options, backwards):
    run = Run(options, fullgraph=True)
    run.steps(inputs(4 * backwards), backwards)
    assert sorted(residuals(run.model)) == ["first.weight", "last.weight"]
    for name, ours in residuals(run.model).items():
        rows, columns = run.reference.lost[name].shape
        padded = ours.reshape(2, -1)[:, : -(-rows // 2) * columns].reshape(-1, columns)
        assert torch.equal(padded[:rows], run.reference.lost[name])
        assert ours.numel() * 4 == ours.untyped_storage().nbytes()


@SLOW
@on_ranks(2)
def test_feedback_changes_what_is_trained():
    trained = []
    for pipeline in (STAGE3, STAGE3.replace(FEEDBACK, EXACT)):
        run = Run({"pipeline": pipeline})
        for x in inputs(2):
            run.step(x).sum().backward()
        trained.append(gradient(run.model, "first.weight"))
        assert bool(residuals(run.model)) == ("feedback" in pipeline)
    assert not torch.equal(*trained)


@pytest.mark.inductor
@SLOW
@on_ranks(2, timeout_s=240)
def test_the_end_of_a_window_encodes_the_sum_once():
    """Also one whose backwards come from two graphs of different shapes, and one in eager code."""
    run = Run(CODE)
    for number in range(3):
        with zpasses.coalesce_grad_reduction(run.model):
            for x in inputs(2, 4 + number % 2, 24) + number:
                run.backward(x)
        run.update()


@pytest.mark.inductor
@SLOW
@on_ranks(4, timeout_s=240)
def test_replicas_have_residuals_of_their_own():
    mesh = mesh_2d(2, 2, ("replicate", "shard"))
    groups = mesh.get_group("shard"), mesh.get_group("replicate")
    pipeline = STAGE3.replace("schedule", "schedule,average-replicas")
    run = Run({**CODE, "pipeline": pipeline}, mesh=mesh, group=groups[0], every=groups[1])
    run.steps(inputs(3))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.inductor
@SLOW
@on_ranks(2, timeout_s=240)
def test_blocks_that_share_code_share_no_residuals():
    run = Run(made=Stack)
    zpasses.compile_blocks(run.model, "layers.*", pipeline=STAGE3)
    run.step = run.model
    run.steps(inputs(4))
    assert len(residuals(run.model)) == 3


class Broken(nn.Module):
    """Two graphs read the same parameter."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(24, 24, bias=False)

    def forward(self, x):
        x = self.shared(x)
        torch._dynamo.graph_break()
        return self.shared(x)


@SLOW
@on_ranks(2)
def test_two_graphs_of_a_step_hand_on_the_residual():
    run = Run(made=Broken)
    reference, lost = run.reference, run.reference.lost["shared.weight"]
    for x in inputs(3):
        run.step(x).sum().backward()
        weight = reference.model.shared.weight.detach()
        first, second = (weight.clone().requires_grad_(True) for _ in range(2))
        (x @ first.T @ second.T).sum().backward()
        sent = [reference.averaged(reference.sent(lost, each.grad)) for each in (second, first)]
        assert torch.equal(gradient(run.model, "shared.weight"), sent[0] + sent[1])
        run.model.zero_grad()


@SLOW
@on_ranks(2)
def test_other_calls_leave_residuals_alone():
    """Evaluation, new shapes, gradients that nobody gets, copies, and loaded weights."""
    run = Run()
    model = run.model
    run.steps(inputs(1))
    before = {name: each.clone() for name, each in residuals(model).items()}
    with torch.no_grad():
        run.step(inputs(1)[0])
    x = inputs(1)[0].requires_grad_(True)
    torch.autograd.grad(run.step(x).sum(), x)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert not residuals(copy.deepcopy(model))
    for name, each in residuals(model).items():
        assert torch.equal(each, before[name])
        assert each.any()
    for rows in (6, 7, 8):  # recompiles, for any number of rows
        run.steps(inputs(1, rows, 24))


@SLOW
@on_ranks(2)
def test_a_run_that_resumes_begins_with_zeros(tmp_path):
    run = Run()
    run.steps(inputs(1))
    dcp.save(zpasses.training_state(run.model, run.optimizer), checkpoint_id=tmp_path)
    assert all(each.any() for each in residuals(run.model).values())
    zpasses.load_training_state(tmp_path, run.model, run.optimizer)
    assert not residuals(run.model)
    for lost in run.reference.lost.values():
        lost.zero_()
    run.steps(inputs(2))


@SLOW
@on_ranks(2)
def test_a_residual_is_lost_with_a_gradient_that_is_not_finite():
    run = Run()
    run.steps(inputs(1))
    x = inputs(1)[0]
    x[0, 0] = float("inf") if dist.get_rank() else x[0, 0]
    run.backward(x)
    assert not gradient(run.model, "first.weight").isfinite().all()
    run.reference.step()
    run.optimizer.zero_grad()  # as gradient scaling skips the step
    theirs = run.reference.model.parameters()
    for ours, each in zip(run.model.parameters(), theirs, strict=True):
        each.data.copy_(ours.full_tensor())
    assert all(each.isfinite().all() for each in residuals(run.model).values())
    run.steps(inputs(2))


@SLOW
@on_ranks(2)
def test_ranks_with_other_feedback_are_told():
    feedback = ("off", "on")[dist.get_rank()]
    # Blocks that no other test has: ranks do not compare twice what they have agreed on.
    options = f"encode=int8,block=20,exact_below_kib=0,feedback={feedback}"
    run = Run({"pipeline": f"gather-params,reduce-grads{{{options}}}"})
    with pytest.raises(Exception, match=r"as int8/20\).*as int8/20/feedback\)"):
        run.step(inputs(1)[0]).sum().backward()


# --- memory ---------------------------------------------------------------------------------------
def limits(feedback, budget):
    """What a budget allows the graphs, and what residuals hold beside them."""
    found = []
    options = f"encode=int8,exact_below_kib=0,feedback={feedback}"
    given = {f"reduce-grads.{each}" for each in options.split(",")}
    with listen(StepTrials, lambda each: found.append((each.limit_bytes(budget), each))):
        pipeline, options = f"zero3{{{','.join(sorted(given))}}}", {"memory_budget": budget}
        x = (torch.zeros(4, 24),)
        capture_graphs(Stack(), x, world_size=2, pipeline=pipeline, options=options)
    return found[0][0], found[0][1].residual_bytes


HELD = 3 * 24 * 24 * 4  # of the three matrices of Stack


def test_a_memory_budget_counts_residuals():
    assert limits("on", "1MiB") == ((1 << 20) - HELD, HELD)


@pytest.mark.slow(quick="test_a_memory_budget_counts_residuals")
def test_a_budget_that_residuals_exhaust_says_so():
    assert limits("off", "1MiB") == (1 << 20, 0)
    said = r"more than the budget has beside .* KiB of residuals of error feedback\. At its peak"
    with pytest.raises(Exception, match=said):
        limits("on", f"{HELD}B")
