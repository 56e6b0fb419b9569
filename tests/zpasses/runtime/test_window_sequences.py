"""Random programs of forwards, backwards, windows, failures and steps, compared with an unsharded
model and simple bookkeeping.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from tests.cases import some_quick
from tests.graphs import drawn_examples
from tests.zpasses.models import integers
from zpasses import ZpassesError
from zpasses.runtime.layout import layout_of
from zpasses.runtime.windows import grad_state_of
from zpasses.testing import run_on_ranks


class Net(nn.Module):
    """Layers of which each call runs some; one has a frozen weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x, which):
        for i in which:
            x = self.layers[i](x)
        return x.sum()


WHICH = st.sampled_from([(0,), (1,), (0, 1), (2, 0), (2, 2), (0, 1, 2)])
RARE = st.sampled_from(["autograd.grad", "last", "leave", "leave", "raise", "step", "zero_grad"])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from([None, 1, 2, 3])),
        st.tuples(st.sampled_from(["train", "train", "eager train", "eager train"]), WHICH),
        st.tuples(
            st.sampled_from(["forward", "eager forward", "forward without gradients"]), WHICH
        ),
        st.tuples(st.just("backward"), st.none()),
        st.tuples(RARE, st.none()),
    ),
    min_size=8,
    max_size=16,
)


class Program:
    """Runs actions on the sharded model, and tracks what an unsharded one would have in
    `param.grad`.
    """

    def __init__(self, model, step):
        self.model, self.step = model, step
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.losses, self.grads = [], [None] * len(self.params)
        self.window = self.context = None
        self.optimizer = torch.optim.SGD(self.params, lr=1.0)

    # --- the documented behaviour of windows
    def begin(self, backwards):
        self.backwards, self.count = backwards, 0
        self.announced = self.reduced = False
        self.pending = [None] * len(self.params)

    def counted(self, grads):
        """Account for a backward. Returns whether it is allowed."""
        if self.window is None:
            self.grads = plus(self.grads, grads)
            return True
        if self.reduced:
            return False
        self.count += 1
        self.pending = plus(self.pending, grads)
        self.reduced = self.announced or self.count == self.backwards
        if self.reduced:  # gradients that this backward does not produce are reduced on exit
            for at, grad in enumerate(grads):
                if grad is not None:
                    self.grads[at] = add(self.grads[at], self.pending[at])
                    self.pending[at] = None
        return True

    # --- actions
    def run(self, action, value):
        getattr(self, action.replace(" ", "_").replace(".", "_"))(value)

    def enter(self, backwards):
        context = zpasses.coalesce_grad_reduction(self.model, backwards)
        if self.window is not None:
            with pytest.raises(ZpassesError, match="open already"):
                context.__enter__()
            return
        self.context, self.window = context, context.__enter__()
        self.begin(backwards)

    def leave(self, _):
        if self.window is not None:
            self.context.__exit__(None, None, None)
            self.grads = plus(self.grads, self.pending)
            self.window = None

    def raise_(self, _=None):
        if self.window is not None:
            error = ValueError("mine")
            self.context.__exit__(ValueError, error, None)
            self.window = None

    def last(self, _):
        if self.window is None:
            return
        if self.backwards is not None or self.announced:
            with pytest.raises(ZpassesError, match="already determines the last"):
                self.window.last()
        else:
            self.window.last()
            self.announced = True

    def forward(self, which, run=None):
        batches = [
            integers(1, 3, seed=len(self.losses) + 10 * rank).requires_grad_()
            for rank in range(dist.get_world_size())
        ]
        plain = copy.copy(self.values())
        loss = (run or self.step)(batches[dist.get_rank()], which)
        self.losses.append((loss, lambda: mean([gradients(plain, x, which) for x in batches])))

    def eager_forward(self, which):
        self.forward(which, self.model)

    def train(self, which):
        self.forward(which)
        self.backward(None)

    def eager_train(self, which):
        self.eager_forward(which)
        self.backward(None)

    def forward_without_gradients(self, which):
        with torch.no_grad():
            self.step(integers(1, 3), which)

    def backward(self, _):
        if not self.losses:
            return
        loss, expected = self.losses.pop(0)
        if self.counted(expected()):
            loss.backward()
        else:
            with pytest.raises(ZpassesError, match="whose last backward was"):
                loss.backward()
            self.raise_()

    def autograd_grad(self, _):
        if not self.losses:
            return
        loss, expected = self.losses.pop(0)
        found = torch.autograd.grad(loss, self.params, allow_unused=True)
        same([None if each is None else each.full_tensor() for each in found], expected())

    def step_(self, _):
        if self.window is not None:
            with pytest.raises(ZpassesError, match="inside coalesce_grad_reduction"):
                self.optimizer.step()
            return
        self.losses = []
        self.optimizer.step()
        self.zero_grad(None)

    def zero_grad(self, _):
        self.optimizer.zero_grad()
        self.grads = [None] * len(self.params)

    # --- invariants after each action
    def values(self):
        return [param.detach().full_tensor().clone() for param in self.model.parameters()]

    def check(self):
        same(
            [None if param.grad is None else param.grad.full_tensor() for param in self.params],
            self.grads,
        )
        if self.window is None:
            assert not any(grad_state_of(param).pending for param in self.params)


def gradients(values, x, which):
    plain = Net()
    with torch.no_grad():
        for param, value in zip(plain.parameters(), values, strict=True):
            param.copy_(value)
    plain(x, which).backward()
    return [param.grad for param in plain.parameters() if param.requires_grad]


def mean(grads):
    """Mean over ranks."""
    return [None if each[0] is None else sum(each) / len(each) for each in zip(*grads, strict=True)]


def add(a, b):
    return b if a is None else a if b is None else a + b


def plus(left, right):
    return list(map(add, left, right))


def same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert theirs is None or torch.equal(ours, theirs)


def run_programs(examples, **options):
    """Run random programs, the same on all ranks. Each rank has its own data."""
    model = zpasses.shard(Net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    step = torch.compile(
        model, backend="zpasses", options={"codegen": "eager", **options}, dynamic=False
    )

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(actions=ACTIONS)
    def run(actions):
        with torch.no_grad():
            for seed, param in enumerate(model.parameters()):
                param.copy_(
                    zpasses.sharding.param_spec.shard_tensor(
                        integers(*param.shape, seed=seed).sign(), layout_of(param)
                    )
                )
                param.grad = None
        program = Program(model, step)
        with contextlib.ExitStack() as stack:
            stack.callback(program.raise_)
            for action, value in actions:
                program.run({"raise": "raise_", "step": "step_"}.get(action, action), value)
                program.check()
            program.leave(None)
            program.check()

    run()


def test_any_program_gives_the_gradients_of_a_plain_model(one_rank):
    run_programs(drawn_examples(60), zero_stage=2)


@pytest.mark.processes
@pytest.mark.parametrize("stage", some_quick([2, 3], [3]))
def test_any_program_gives_the_mean_of_the_gradients_on_two_ranks(stage):
    run_on_ranks(run_programs, drawn_examples(10), zero_stage=stage, timeout_s=240)
