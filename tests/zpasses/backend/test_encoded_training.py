"""Encoded communication on real ranks, through Inductor with default options."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.zpasses.parallel_models import mesh_2d
from zpasses import Facts, Level, Pass, Pipeline
from zpasses.testing import world_mesh

STAGE3 = "zero3{gather-params.encode=int8,gather-params.exact_below_kib=0}"
STAGE2 = STAGE3.replace("zero3", "zero2").replace("int8", "mxfp8")
BOTH = STAGE3[:-1] + ",reduce-grads.encode=int8,reduce-grads.exact_below_kib=0}"
HOISTED = (
    "gather-params{encode=fp8,exact_below_kib=0},reduce-grads{encode=fp8,exact_below_kib=0},"
    "reshard-after-forward,defer-reduction"
)
CASES = [
    ({"pipeline": BOTH}, 1),
    ({"pipeline": STAGE2}, 1),
    ({"pipeline": BOTH.replace("zero3", "zero2"), "backwards_per_step": 2}, 2),
    ({"pipeline": HOISTED, "prefetch": "auto", "codegen": "eager"}, 1),
]
SLOW = pytest.mark.slow(quick="the first case, and the drawn graphs of test_encoded_averages.py")
AVERAGE = "average-replicas{encode=int8,exact_below_kib=0}"
REPLICAS = [
    (f"gather-params,reduce-grads,reshard-after-forward,schedule,{AVERAGE},defer-reduction", 1),
    (f"gather-params,reduce-grads,cache-params,schedule,{AVERAGE},defer-reduction", 2),
    (f"gather-params,reduce-grads,schedule,{AVERAGE},defer-reduction{{part=average}}", 2),
    (HOISTED.replace("defer-reduction", f"{AVERAGE},defer-reduction"), 1),
]


@dataclass(frozen=True)
class Declared(Pass):
    """Leaves the dialect unlowered, with what a pipeline declares to change of its values."""

    name: ClassVar[str] = "declared"
    level: ClassVar[Level] = Level.JOINT

    text: str

    @property
    def facts(self):
        return Facts(changes_values=Pipeline.parse(self.text).changes_values)

    def rewrite(self, graph):
        Pipeline.parse(self.text).changes_values(graph)
        return 1


def declared(text, last="defer-reduction"):
    """The dialect; windows also need the passes that leave and defer reductions."""
    return Pipeline((Declared(text), *Pipeline.parse(last)))


class Layers(nn.Module):
    """Without sums whose order generated code may change."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 31, bias=False)
        self.last = nn.Linear(31, 24, bias=False)
        self.frozen = nn.Parameter(torch.randn(24, 24), requires_grad=False)

    def forward(self, x):
        return self.last(F.relu(self.first(x))) @ self.frozen


def outcome(options, steps=2, backwards=1, mesh=None):
    """Outputs, gradients and parameters of some steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zpasses.shard(Layers(), mesh=mesh or world_mesh())
    step = torch.compile(model, backend="zpasses", options=options, fullgraph=True)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.01), []
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(steps):
        for _ in range(backwards):
            output = step(torch.randn(4, 24, generator=generator))
            output.sum().backward()
            seen += [output.detach().clone()]
        seen += [each.grad.full_tensor() for each in model.parameters() if each.requires_grad]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(each.full_tensor().detach() for each in model.parameters())]


@pytest.mark.inductor
@pytest.mark.parametrize(("options", "backwards"), some_quick(CASES, [CASES[0], CASES[3]]))
@on_ranks(2, timeout_s=240)
def test_training_equals_the_dialect_bit_for_bit(options, backwards):
    """Also of a window, which encodes the sum of its gradients once."""
    dialect = {"pipeline": declared(options["pipeline"]), "codegen": "eager"}
    ours = outcome(options, backwards=backwards)
    reference = outcome(options | dialect, backwards=backwards)
    for got, expected in zip(ours, reference, strict=True):
        assert torch.equal(got, expected)
    exact = outcome({"zero_stage": 3, "codegen": "eager"})
    assert not torch.equal(ours[0], exact[0])
    torch.testing.assert_close(ours[0], exact[0], rtol=0, atol=0.5)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("pipeline", "backwards"),
    [REPLICAS[3], *(pytest.param(*each, marks=SLOW) for each in REPLICAS[:3])],
)
@on_ranks(2, timeout_s=240)
def test_averages_over_replicas_equal_the_dialect_bit_for_bit(pipeline, backwards):
    mesh = mesh_2d(2, 1, ("replicate", "shard"))
    options = {"pipeline": pipeline, "backwards_per_step": backwards}
    if "fp8" in pipeline:
        options |= {"prefetch": "auto", "codegen": "eager"}
    kept = "defer-reduction{part=average}" if "part=average" in pipeline else "defer-reduction"
    dialect = {"pipeline": declared(pipeline, kept), "codegen": "eager"}
    ours = outcome(options, backwards=backwards, mesh=mesh)
    reference = outcome(options | dialect, backwards=backwards, mesh=mesh)
    for got, expected in zip(ours, reference, strict=True):
        assert torch.equal(got, expected)
    exact = outcome({"zero_stage": 3, "codegen": "eager"}, mesh=mesh)
    assert not torch.equal(ours[-1], exact[-1]) or not torch.equal(ours[-3], exact[-3])


@on_ranks(2)
def test_verify_simulate_compares_with_what_is_declared():
    outcome({"pipeline": BOTH, "codegen": "eager", "verify": "simulate"}, steps=1)


@on_ranks(2)
def test_uncompiled_reads_and_checkpoints_are_exact():
    torch.manual_seed(0)
    plain = Layers()
    weights = [each.detach().clone() for each in plain.parameters()]
    model = zpasses.shard(plain, mesh=world_mesh())
    options = {"pipeline": STAGE3, "codegen": "eager"}
    step, x = torch.compile(model, backend="zpasses", options=options), torch.ones(2, 24)
    with torch.no_grad():
        assert not torch.equal(step(x), model(x))
        for (_, ours), theirs in zip(model.named_parameters(), weights, strict=True):
            assert torch.equal(ours.full_tensor(), theirs)


@on_ranks(2)
def test_programs_with_other_encodings_share_no_gathered_copy():
    torch.manual_seed(0)
    model = zpasses.shard(Layers(), mesh=world_mesh())
    texts = ["zero2", *(STAGE2.replace("mxfp8", name) for name in ("int8", "fp8", "mxfp8"))]
    options = ({"pipeline": text, "codegen": "eager"} for text in texts)
    steps = [torch.compile(model.forward, backend="zpasses", options=each) for each in options]
    x = torch.ones(2, 24)
    with torch.no_grad():
        first = [step(x) for step in steps]
        assert len({float(each.sum()) for each in first}) == len(steps)
        for step, expected in zip(steps[::-1], first[::-1], strict=True):
            assert torch.equal(step(x), expected)


@on_ranks(2)
def test_ranks_that_encode_differently_are_told():
    name = ("int8", "fp8")[torch.distributed.get_rank()]
    # Blocks that no other test has: ranks do not compare twice what they have agreed on.
    passes = f"gather-params{{encode={name},block=24,exact_below_kib=0}},reduce-grads"
    with pytest.raises(Exception, match=r"uint8\[.*as int8/24.*uint8\[.*as fp8/24"):
        outcome({"pipeline": passes, "codegen": "eager"}, steps=1)
