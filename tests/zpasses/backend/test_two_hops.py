"""Encoded reductions in two hops on real ranks: two nodes of two ranks each."""

import contextlib
import copy
import logging
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zpasses
from tests.on_ranks import on_ranks
from tests.zpasses.backend.cache.starts import COLD, starts, words
from zpasses import AgreementError, compat
from zpasses.graph.encoding import Encoding, decode, decode_mean, encode
from zpasses.graph.queries import collectives
from zpasses.pipeline.events import observe_graphs
from zpasses.runtime.windows import grad_state_of
from zpasses.testing import run_in_fresh_ranks, world_mesh

pytestmark = pytest.mark.processes

INT8 = Encoding("int8", 16)
NODES, PER_NODE = 2, 2
TARGET = f"h100,ranks_per_node={PER_NODE}"  # and not that of this machine, which has other nodes
EXACT = "reduce-grads{encode=int8,block=16,exact_below_kib=0,hops=two}"
FEEDBACK = EXACT.replace("}", ",feedback=on}")
LAST = "schedule,average-replicas,defer-reduction"
STAGE1 = f"gather-params,{EXACT},cache-params,{LAST}"
STAGE3 = f"gather-params,{EXACT},reshard-after-forward,{LAST}"
DEFAULT = "zero3{reduce-grads.encode=int8,reduce-grads.block=16,reduce-grads.exact_below_kib=0}"
TWICE = STAGE3.replace("hops=two", "hops=two-encoded")
SLOW = pytest.mark.slow(quick="the tests of passes/test_two_hops.py, on simulated ranks")


class Layers(nn.Module):
    """Without sums whose order generated code may change."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 31, bias=False)
        self.last = nn.Linear(31, 24, bias=False)
        self.short = nn.Linear(24, 2, bias=False)  # two ranks have no rows

    def forward(self, x):
        return self.short(self.last(F.relu(self.first(x))))


class Reference:
    """Plain SGD: the gradients are the mean of what the codes of each node's mean stand for."""

    def __init__(self, model, *, feedback, twice):
        self.model, self.feedback, self.twice = model, feedback, twice
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.lost = {
            name: [torch.zeros_like(each) for _ in range(NODES)]
            for name, each in model.named_parameters()
        }

    def step(self):
        for name, param in self.model.named_parameters():
            param.grad = self.averaged(param.grad, self.lost[name])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def averaged(self, grad, lost):
        ranks = [torch.empty_like(grad) for _ in range(NODES * PER_NODE)]
        dist.all_gather(ranks, grad)
        sent = []
        for node in range(NODES):
            first, *others = ranks[node * PER_NODE : (node + 1) * PER_NODE]
            mean = self.decoded([first, *others]) if self.twice else sum(others, first) / PER_NODE
            sent.append(self.sent(mean, lost[node]))
        return sum(sent[1:], sent[0]) / NODES

    def decoded(self, grads):
        """The mean of what the ranks of a node decode: one record for each place on the nodes."""
        rows, width = grads[0].shape
        block = -(-rows // (NODES * PER_NODE))
        whole = torch.zeros(len(grads), NODES, PER_NODE, block, width)
        whole.view(len(grads), -1, width)[:, :rows] = torch.stack(grads)
        mean = torch.empty(NODES, PER_NODE, block, width)
        for place in range(PER_NODE):
            mine = whole[:, :, place]
            count = mine[0].numel()
            records = torch.cat([encode(each, count, 1, INT8) for each in mine])
            mean[:, place] = decode_mean(
                records, mine[0].shape, count, len(grads), mean.dtype, INT8
            )
        return mean.view(-1, width)[:rows]

    def sent(self, mean, lost):
        """What the codes of a node stand for: one record for each rank's rows."""
        total = mean + lost if self.feedback else mean
        rows = -(-total.shape[0] // (NODES * PER_NODE))
        shape = [rows, *total.shape[1:]]
        parts = [
            decode(encode(each, rows * total.shape[1], 1, INT8), shape, 1, total.dtype, INT8)
            for each in total.split(rows)
        ]
        sent = torch.cat(parts)[: total.shape[0]]
        lost.copy_(total - sent)
        return sent


def train(options, backwards, *, feedback=False, twice=False, blocks=None):
    """Trains for some steps, compares each with the reference, and returns which groups reduced."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Layers()
    model, reference = copy.deepcopy(plain), Reference(plain, feedback=feedback, twice=twice)
    zpasses.shard(model, mesh=world_mesh())
    given = {"target": TARGET, **options}
    graphs = []
    with observe_graphs(lambda observed: graphs.append((observed.kind, observed.graph))):
        step = model
        if blocks is None:
            step = torch.compile(model, backend="zpasses", options=given, fullgraph=True)
        else:
            zpasses.compile_blocks(model, blocks, **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            # Either the last backward reduces, or the end of the window.
            every = "backwards_per_step" in options or backwards == 1
            window = zpasses.coalesce_grad_reduction(model)
            with contextlib.nullcontext() if every else window:
                for _ in range(backwards):
                    x = torch.randn(4, 24, generator=generator)
                    step(x).sum().backward()
                    reference.model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
            pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
            for (name, ours), theirs in pairs:
                assert torch.equal(ours.full_tensor(), theirs), name
    first = dict(model.named_parameters())["first.weight"]
    held = grad_state_of(first).residuals.values()  # of one of two ranks per node
    assert [each.shape for each in held] == [(NODES, 12, 16)] * feedback
    return {
        (each.op, compat.group_suffix(each.group))
        for kind, graph in graphs
        for _, each in collectives(graph.graph if hasattr(graph, "graph") else graph)
        if kind == "backward" and each.op != "all_gather_into_tensor"
    }


TWO_HOPS = {
    ("reduce_scatter_tensor", ".in_node"),
    ("all_to_all_single", ".across_nodes"),
}


@pytest.mark.parametrize(
    ("options", "backwards"),
    [
        pytest.param({"pipeline": STAGE3, "codegen": "eager"}, 1, id="stage 3", marks=SLOW),
        pytest.param({"pipeline": DEFAULT}, 1, id="defaults", marks=[pytest.mark.inductor, SLOW]),
        pytest.param({"pipeline": STAGE1}, 1, id="stage 1", marks=[pytest.mark.inductor, SLOW]),
        pytest.param(
            {"pipeline": STAGE3, "backwards_per_step": 2},
            2,
            id="window",
            marks=[pytest.mark.inductor, SLOW],
        ),
        pytest.param(
            {"pipeline": DEFAULT, "codegen": "eager"}, 3, id="end of a window", marks=SLOW
        ),
        pytest.param(
            {"pipeline": STAGE3.replace("schedule,", ""), "prefetch": "auto", "codegen": "eager"},
            1,
            id="hoisted, as by compile_blocks",
            marks=SLOW,
        ),
        pytest.param(
            {"pipeline": STAGE3.replace(EXACT, FEEDBACK)},
            1,
            id="feedback",
            marks=[pytest.mark.inductor, SLOW],
        ),
    ],
)
@on_ranks(4, timeout_s=280)
def test_training_equals_plain_torch_bit_for_bit(options, backwards):
    used = train(options, backwards, feedback="feedback" in options["pipeline"])
    assert {(op.replace("_coalesced", ""), group) for op, group in used} == TWO_HOPS


@pytest.mark.parametrize(
    ("options", "backwards"),
    [
        pytest.param({"pipeline": TWICE, "codegen": "eager"}, 1, id="eager", marks=SLOW),
        pytest.param({"pipeline": TWICE}, 1, id="inductor", marks=[pytest.mark.inductor, SLOW]),
        pytest.param(
            {"pipeline": TWICE.replace("}", ",feedback=on}", 1)},
            1,
            id="feedback",
            marks=[pytest.mark.inductor, SLOW],
        ),
        pytest.param({"pipeline": TWICE, "codegen": "eager"}, 3, id="end of a window", marks=SLOW),
    ],
)
@on_ranks(4, timeout_s=280)
def test_training_with_codes_within_nodes_equals_plain_torch(options, backwards):
    used = train(options, backwards, feedback="feedback" in options["pipeline"], twice=True)
    assert used == {("all_to_all_single", ".in_node"), ("all_to_all_single", ".across_nodes")}


@pytest.mark.inductor
@SLOW
@on_ranks(4, timeout_s=280)
def test_blocks_that_are_compiled_one_by_one_train_alike():
    used = train({"pipeline": DEFAULT}, 1, blocks="first,last,short")
    assert {(op.replace("_coalesced", ""), group) for op, group in used} == TWO_HOPS


# --- the compile cache ----------------------------------------------------------------------------
WARM = {"pipeline": DEFAULT, "target": TARGET}


@pytest.mark.inductor
@pytest.mark.slow(quick="test_the_second_start_takes_the_graph_from_the_cache")
def test_a_warm_start_makes_the_groups_before_the_graph_runs(tmp_path):
    cold, said = starts(tmp_path, WARM, ranks=4)
    assert [words(each) for each in said] == [COLD] * 4
    warm, said = starts(tmp_path, WARM, ranks=4)
    assert said == [["hit"]] * 4
    assert warm == cold
    without, said = starts(tmp_path, {**WARM, "cache": False}, ranks=4)
    assert without == cold


# --- ranks that differ ----------------------------------------------------------------------------
def train_with_other_hops(target):
    """The last rank takes one hop, or has other nodes."""
    logging.getLogger("zpasses").setLevel(logging.ERROR)
    pipeline, is_last = STAGE3, dist.get_rank() == 3
    if is_last and target is None:
        pipeline = STAGE3.replace("hops=two", "hops=one")
    options = {"pipeline": pipeline, "codegen": "eager", "agreement_timeout_s": 20}
    options["target"] = target if is_last and target is not None else TARGET
    model = zpasses.shard(nn.Linear(24, 16, bias=False), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options=options)
    try:
        step(torch.ones(2, 24)).sum().backward()
    except Exception as error:
        causes = [error, error.__cause__, getattr(error, "inner_exception", None)]
        return "\n".join(str(each) for each in causes if isinstance(each, AgreementError))
    return "trained"


@pytest.mark.slow(quick="test_ranks_that_choose_different_agreed_graphs_get_an_error")
@pytest.mark.parametrize(
    ("target", "said"),
    [
        (None, "pipeline is .*hops=two.* on rank 0 and .*hops=one.* on rank 3"),
        ("h100,ranks_per_node=1", "process groups of nodes of 2 ranks|hops"),
    ],
)
def test_ranks_with_other_hops_get_an_error_before_they_communicate(target, said):
    outcomes = run_in_fresh_ranks(train_with_other_hops, target, ranks=4, timeout_s=100)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    found = [outcome.result for outcome in outcomes]
    assert "trained" not in found
    for each in found[:3]:
        assert re.search(said, each), each


# --- dumps ----------------------------------------------------------------------------------------
