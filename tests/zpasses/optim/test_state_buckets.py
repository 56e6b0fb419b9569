"""Which states stay on the device, and in which buckets the others travel."""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zpasses
from tests.zpasses.optim.offloading import Lion
from zpasses.errors import OptionError, ZpassesError
from zpasses.optim.expected_states import expected_layouts
from zpasses.optim.state_buckets import nbytes_of, plan_states, plan_states_beside
from zpasses.option_values import format_size, parse_size
from zpasses.runtime.partial_step import PartialStep


def test_states_stay_in_the_order_of_the_parameters_while_they_fit():
    plan = plan_states([100, 300, 100, 50], device_bytes=210, bucket_bytes=1000)
    assert plan.resident == (0, 2)
    assert plan.buckets == ((1, 3),)
    assert (plan.device_bytes, plan.host_bytes, plan.total_bytes) == (200, 350, 550)


def test_a_parameter_that_is_larger_than_a_bucket_has_one_of_its_own():
    plan = plan_states([10, 500, 10, 10], device_bytes=0, bucket_bytes=25)
    assert plan.buckets == ((0,), (1,), (2, 3))
    assert plan.in_flight_bytes == 500 + 20


def test_what_comes_with_states_is_in_flight_and_they_do_not_stay():
    plan = plan_states([10, 20, 30], device_bytes=100, bucket_bytes=25, more=[8, 0, 6])
    assert (plan.resident, plan.buckets) == ((1,), ((0,), (2,)))
    assert (plan.device_bytes, plan.host_bytes, plan.in_flight_bytes) == (20, 40, 18 + 36)
    beside = plan_states_beside([10, 20, 30], 73, 200, 25, more=[8, 0, 6])
    assert beside.resident == ()  # 54 bytes come and go


sizes = st.lists(st.integers(0, 1000), max_size=30)


@given(sizes, st.integers(0, 5000), st.integers(1, 3000))
def test_every_parameter_is_in_one_place_and_no_limit_is_exceeded(sizes, device, bucket):
    plan = plan_states(sizes, device, bucket)
    members = [*plan.resident, *(at for each in plan.buckets for at in each)]
    assert sorted(members) == list(range(len(sizes)))
    assert plan.device_bytes == sum(sizes[at] for at in plan.resident) <= device
    assert plan.host_bytes + plan.device_bytes == plan.total_bytes == sum(sizes)
    totals = [sum(sizes[at] for at in each) for each in plan.buckets]
    assert all(
        total <= bucket or len(each) == 1 for total, each in zip(totals, plan.buckets, strict=True)
    )
    pairs = [a + b for a, b in itertools.pairwise(totals)] or totals or [0]
    assert max(pairs) <= plan.in_flight_bytes <= 2 * max(totals, default=0)


@given(
    st.lists(st.integers(0, 30), max_size=8),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(1, 90),
)
def test_as_many_states_stay_as_fit_beside_a_step(sizes, usable, peak, bucket):
    def fits(plan):
        held = plan.device_bytes + plan.in_flight_bytes
        return held + max(peak, plan.in_flight_bytes) <= usable

    found = plan_states_beside(sizes, usable - peak, usable, bucket)
    every = [plan_states(sizes, most, bucket) for most in range(sum(sizes) + 1)]
    fitting = [each.device_bytes for each in every if fits(each)]
    if found is None:
        assert not fits(every[0])
    else:
        assert fits(found)
        assert found in every
    if sum(sizes) + peak <= usable:
        assert found.host_bytes == 0
    elif found is not None and fitting:
        # The buckets of the leanest plan are the largest.
        assert found.device_bytes >= max(fitting) - every[0].in_flight_bytes - max(sizes)


# --- what an optimizer will hold ------------------------------------------------------------------
def parameters():
    return [
        {"params": [nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(6, 5))]},
        {"params": [nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(()))]},
    ]


@pytest.mark.parametrize(
    ("make", "vectors"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.AdamW(p, fused=True), 2),
        (lambda p: torch.optim.SGD(p, lr=1.0), 0),
        (lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), 1),
        (lambda p: torch.optim.Adagrad(p), 1),  # which makes its state when it is built
    ],
    ids=["amsgrad", "fused", "SGD", "momentum", "Adagrad"],
)
def test_the_optimizer_says_what_it_will_hold_and_nothing_of_it_changes(make, vectors):
    optimizer = make(parameters())
    before = torch.get_rng_state(), len(optimizer.state)
    layouts = expected_layouts(optimizer)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert len(optimizer.state) == before[1]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(torch.equal(param, torch.ones_like(param)) for param in params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert layouts == expected_layouts(optimizer)
    assert [len(layouts[param]) for param in params] == [vectors] * 3 + [0]
    assert nbytes_of(layouts[params[0]]) == vectors * 128  # 6 * 5 * 4 bytes, in steps of 64


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_steps_on_meta_is_asked_there(fused):
    optimizer = torch.optim.AdamW(parameters(), fused=fused)
    with mock.patch.object(torch, "zeros_like", wraps=torch.zeros_like) as made:
        expected_layouts(optimizer)
    for call in made.call_args_list:
        assert str(call.kwargs.get("device", call.args[0].device)) == "meta"
    assert all(group["fused"] is fused for group in optimizer.param_groups)


def test_frozen_parameters_need_nothing():
    frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    optimizer = torch.optim.AdamW([frozen, nn.Parameter(torch.ones(4))])
    assert frozen not in expected_layouts(optimizer)


def test_an_optimizer_that_cannot_step_one_parameter_is_refused():
    optimizer = torch.optim.SparseAdam([nn.Parameter(torch.ones(4))])
    with pytest.raises(ZpassesError, match="SparseAdam cannot step a parameter by itself"):
        zpasses.offload_optimizer(optimizer)


def test_an_optimizer_of_one_vector_is_refused_by_name():
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(4))])
    with pytest.raises(ZpassesError, match="LBFGS steps all parameters as one vector") as error:
        zpasses.offload_optimizer(optimizer)
    assert "Leave its states on the device, or use" in str(error.value)
    assert "TypeError" not in str(error.value)


# --- steps of a part ------------------------------------------------------------------------------
class Counting(torch.optim.Optimizer):
    """Counts its steps in a group and in an attribute, as schedule-free optimizers do."""

    steps = 0

    def __init__(self, params):
        super().__init__(params, {"count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                param.add_(param.grad, alpha=group["count"] + self.steps)


def test_a_step_in_parts_counts_once_and_every_part_sees_the_same_count():
    optimizer = Counting(parameters())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        parts = PartialStep(optimizer)
        parts.run({0: params[:1]})
        parts.run({0: params[1:2], 1: params[2:3]})
        parts.finish()
    assert optimizer.steps == 2
    assert [group["count"] for group in optimizer.param_groups] == [2, 2]
    assert [float(param.detach().max()) for param in params] == [7, 7, 7, 1]


def test_parts_that_write_other_settings_are_refused():
    """As of an optimizer that does so in a later step only."""
    params = [nn.Parameter(torch.full((2,), value)) for value in (3.0, 5.0)]
    for param in params:
        param.grad = torch.ones_like(param)
    parts = PartialStep(Together(params, "settings"))
    parts.run({0: params[:1]})
    with pytest.raises(ZpassesError, match="computes 'scale' from all parameters together"):
        parts.run({0: params[1:]})


def test_a_part_has_the_names_of_its_parameters():
    named = [("a", nn.Parameter(torch.ones(2))), ("b", nn.Parameter(torch.ones(2)))]
    optimizer = torch.optim.SGD(named, lr=1.0)
    part = PartialStep(optimizer).on({0: [named[1][1]]})
    assert part.param_groups[0]["param_names"] == ["b"]
    assert optimizer.param_groups[0]["param_names"] == ["a", "b"]


# --- steps on trial -------------------------------------------------------------------------------
class Together(torch.optim.Optimizer):
    """Reads all gradients before the first parameter steps, or all parameters, or writes to its
    settings what it found.
    """

    def __init__(self, params, how):
        super().__init__(params, {"how": how, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["how"] == "norm":
                scale = torch.stack([param.grad.norm() for param in params] or [torch.ones(())])
                scale = scale.norm()
            elif group["how"] == "states":
                for param in params:
                    self.state[param]["share"] = param.norm() / sum(map(torch.norm, params))
                scale = 1.0
            elif group["how"] == "settings":
                scale = 1.0
                group["scale"] = max([group["scale"], *(float(param.max()) for param in params)])
            else:  # at least one
                scale = max(param.dim() for param in params)
            for param in params:
                param.sub_(param.grad / scale)


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("norm", "gives other results"),
        ("states", "gives other results"),
        ("settings", "gives other results"),
        ("any", r"fails \(ValueError: max.*empty sequence\)"),
    ],
)
def test_an_optimizer_that_steps_parameters_together_is_refused(how, found):
    params = [param for group in parameters() for param in group["params"]]
    optimizer = Together(params, how)
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ZpassesError, match=rf"Together steps parameters together: .*{found}\. "):
        zpasses.offload_optimizer(optimizer)
    optimizer.step()  # nothing has changed
    assert optimizer.param_groups[0]["scale"] == 1.0


@pytest.mark.parametrize("make", [Lion, Counting, zpasses.optim.Adafactor])
def test_an_optimizer_that_steps_each_parameter_by_itself_is_taken(make):
    params = [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(7))]
    zpasses.offload_optimizer(make(params))


def test_nothing_is_known_of_an_optimizer_that_cannot_step_small_parameters():
    class Large(Lion):
        def step(self, closure=None):
            if any(param.numel() < 64 for group in self.param_groups for param in group["params"]):
                raise ValueError
            super().step(closure)

    zpasses.offload_optimizer(Large([nn.Parameter(torch.ones(8, 8))]))


# --- sizes ----------------------------------------------------------------------------------------
def test_sizes_are_read_and_written():
    read = {"0B": 0, "2KiB": 2 << 10, "1.5 MiB": 3 << 19, "3GiB": 3 << 30}
    assert {text: parse_size(text, "") for text in read} == read
    written = {0: "0 B", 512: "512 B", 1536: "1.5 KiB", 5 << 20: "5 MiB", 3 << 40: "3072 GiB"}
    assert {size: format_size(size) for size in written} == written


@pytest.mark.parametrize("text", ["5%", "+1GiB", "2GB", "", "GiB", 1024, None])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(OptionError, match=r"here: got .*expected a size such as '2GiB'"):
        parse_size(text, "here")
