"""Trial partitions: a plan's graphs save, keep and recompute what its trial and its choice say."""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.zpasses.backend.budgets import SCHEDULED, X, within_compile
from tests.zpasses.models import Blocks
from zpasses.backend.partition_plan import Choice
from zpasses.backend.step_trials import StepTrials
from zpasses.cost.plan.kept_params import StepProblem, keepable_params
from zpasses.cost.plan.schedule_problem import problem_of
from zpasses.cost.time.target import current_target
from zpasses.pipeline.events import listen
from zpasses.testing import capture_graphs


def names(graph):
    return sorted(node.name for node in graph.nodes)


KEPT_AND_CACHED = [(0, 0), (2, 0), (100, 0), (1, 2), (0, 100)]


@pytest.mark.parametrize("reshard", [None, 2])
@pytest.mark.slow(quick="test_less_activations_recompute_more")
def test_kept_parameters_change_nothing_but_their_gathers(reshard):
    """torch's activation budget counts kept parameters, and would recompute more for them."""

    def check(trials):
        for activations, (kept, cached) in itertools.product((1.0, 0.4, 0.1), KEPT_AND_CACHED):
            trial = trials.trial(activations)
            found = keepable_params(trial.step)
            chosen = found[:kept], found[kept : kept + cached]
            names = (frozenset(each.name for each in some) for some in chosen)
            graphs = trials.graphs(Choice(activations, *names, late=True))
            step = StepProblem(*(problem_of(each.graph, current_target()) for each in graphs))
            predicted = trial.step.keeping(*chosen)
            for actual, expected in zip(
                (step.forward, step.backward), (predicted.forward, predicted.backward), strict=True
            ):
                held = [[job.resident for job in each.jobs] for each in (actual, expected)]
                assert held[0] == held[1]
                assert sum(actual.work_us) == pytest.approx(sum(expected.work_us))
            assert step.peak_bytes() == predicted.peak_bytes()

    if reshard is None:
        within_compile(check)
    else:
        even = Blocks()
        even.head = torch.nn.Linear(32, 48)
        within_compile(check, even, world_size=4, shard={"reshard_after_forward": reshard})


def test_less_activations_recompute_more():
    def check(trials):
        work = [sum(trials.trial(each).step.backward.work_us) for each in (1.0, 0.4, 0.1)]
        assert work == sorted(work)
        assert work[0] < work[-1]

    within_compile(check)


class Checkpointed(nn.Module):
    """The result of each block is saved by default, because the next block reads it again."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(32, 32), nn.SiLU()) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def test_a_plan_saves_what_its_trial_saves_between_checkpoints():
    compared = []

    def check(trials):
        for count in range(1, 1 + len(trials.recomputable())):
            again = frozenset(each.name for each in trials.recomputable()[:count])
            trial = trials.trial(1.0, again)
            (kept, *_) = keepable_params(trial.step)
            for some in ((), (kept.name,)):
                graphs = trials.graphs(Choice(1.0, frozenset(some), frozenset(), recomputed=again))
                placeholders = graphs[1].graph.find_nodes(op="placeholder")
                found = {node.name for node in placeholders}
                assert not again & found
                compared.append(again)

    within_compile(check, Checkpointed(), x=torch.randn(2048, 32), fake=True)
    assert len(compared) >= 2


@pytest.mark.parametrize("fake", [False, True], ids=["eager", "generated"])
def test_random_numbers_are_drawn_once(fake):
    """Those that backward draws would be others. torch's partitioner lets it."""

    def check(trials):
        for activations in (0.4, 0.1):
            forward, backward = (each.graph for each in trials.trial(activations).graphs)
            assert sum(map(draws, forward.nodes))
            assert not sum(map(draws, backward.nodes))

    layers = (
        [nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 32), nn.Dropout(0.1)]
        for _ in range(2)
    )
    within_compile(check, nn.Sequential(*itertools.chain(*layers)), fake=fake)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return nn.functional.dropout((x * self.scale).exp().sin(), 0.2)


def test_draws_of_several_results_are_saved_one_by_one():
    """Where nothing but them may not be computed again, torch's partitioner saves them as a tuple,
    which autograd refuses.
    """

    def check(trials):
        forward = trials.trial(0.1).graphs[0].graph
        saved = [node.meta["val"] for node in forward.output_node().all_input_nodes]
        assert all(isinstance(value, torch.Tensor) for value in saved)

    within_compile(check, nn.Sequential(*(Scaled() for _ in range(4))))


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(32, 96), nn.Linear(32, 32), dropout

    def forward(self, x):
        split = self.qkv(x).view(2, 24, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*split, dropout_p=self.dropout)
        return self.out(y.transpose(1, 2).reshape(48, 32)).square()


@pytest.mark.parametrize(("dropout", "again"), [(0.0, True), (0.1, False)])
def test_attention_without_dropout_may_be_computed_again(dropout, again):
    """Although its operators have the tag of those that draw random numbers."""

    def check(trials):
        backward = trials.trial(0.1).graphs[1].graph
        assert any(map(draws, backward.nodes)) == again

    within_compile(check, nn.Sequential(Attention(dropout), Attention(dropout)))


def draws(node):
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


@pytest.mark.slow(quick="test_less_activations_recompute_more")
def test_trials_are_made_once_and_leave_the_joint_graph_alone():
    def check(trials):
        before = names(trials.gm.graph), [dict(node.meta) for node in trials.gm.graph.nodes]
        plans = [trials.fastest(limit) for limit in (1 << 30, 1 << 17, 1 << 16)]
        assert trials.trial(1.0) is plans[0].trial
        trials.graphs(replace(plans[0].choice, activation_budget=plans[1].choice.activation_budget))
        after = names(trials.gm.graph), [dict(node.meta) for node in trials.gm.graph.nodes]
        assert after == before

    within_compile(check)


@pytest.mark.slow(quick="test_less_activations_recompute_more")
def test_least_limit_fits_and_less_does_not():
    def check(trials):
        least = trials.least_bytes()
        assert trials.fastest(least).fits
        assert not trials.fastest(least - 1).fits
        assert trials.fastest(trials.most_bytes()).peak_bytes <= trials.most_bytes()

    within_compile(check)


def test_observers_are_called_only_inside_the_block():
    calls = []
    with contextlib.suppress(ZeroDivisionError), listen(StepTrials, calls.append):
        raise ZeroDivisionError
    capture_graphs(Blocks(), (X,), world_size=2, pipeline=SCHEDULED)
    assert calls == []


def test_values_that_cost_least_per_byte_are_computed_again():
    def check(trials):
        full, ranked = trials.trial(1.0), trials.recomputable()
        assert ranked
        names = frozenset(each.name for each in ranked[:2])
        trial = trials.trial(1.0, names)
        saved = {node.name for node in trial.graphs[1].graph.find_nodes(op="placeholder")}
        assert names.isdisjoint(saved)
        assert 0 < trial.saved_share < 1 == full.saved_share
        assert sum(trial.step.backward.work_us) > sum(full.step.backward.work_us)
        limit = trial.step.peak_bytes()
        plan = next(
            plan
            for plan in map(trials.fastest, range(limit, trials.most_bytes(), limit // 50))
            if plan.choice.recomputed and not plan.trial.offloaded
        )
        again = trials.graphs(replace(plan.choice, kept=frozenset(), cached=frozenset()))
        assert [names_of(each) for each in again] == [names_of(each) for each in plan.trial.graphs]

    within_compile(check, x=torch.ones(1024, X.shape[1]))


def names_of(gm):
    return names(gm.graph)
