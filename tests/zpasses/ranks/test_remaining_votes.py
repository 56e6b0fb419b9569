"""`agreement=False` turns off the votes that it can, and the log says which ones remain."""

import logging
from unittest import mock

import pytest
import torch
from torch import nn

import zpasses
from tests.fake_mori import Settings, installed
from tests.flattening import host_as_device
from zpasses.ranks import vote
from zpasses.testing import run_in_fresh_ranks, world_mesh

pytestmark = pytest.mark.processes

LIMIT_S = 77.0

GATHER_AND_REDUCE = "merge-reads,gather-params,reduce-grads"


class Flattens(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        flat = torch.cat([a.reshape(-1), b.reshape(-1)])
        return torch.ops.aten._to_copy.default(flat, device=torch.device("cpu"))


def _votes_and_log(pipeline, window):
    """The votes of a training step as (occasion, limit), and what is logged about them."""
    votes, lines = [], []
    run = vote._VoteRound.run

    def record(poll, *args):
        votes.append((poll.occasion, poll.timeout_s))
        return run(poll, *args)

    handler = logging.Handler()
    handler.emit = lambda line: lines.append(line.getMessage())
    log = logging.getLogger("zpasses")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    model = zpasses.shard(Flattens(), mesh=world_mesh())
    options = {"codegen": "eager", "agreement": False, "agreement_timeout_s": LIMIT_S}
    options |= {"pipeline": pipeline, "target": "mi300x"}
    step = torch.compile(model, backend="zpasses", options=options)
    with mock.patch.object(vote._VoteRound, "run", record), installed(Settings()), host_as_device():
        for _ in range(2):
            if window:
                with zpasses.coalesce_grad_reduction(model):
                    step(torch.ones(2, 8)).sum().backward()
            else:
                step(torch.ones(2, 8)).sum().backward()
    return votes, [line for line in lines if "agreement=False" in line]


BUCKETS = f"{GATHER_AND_REDUCE},schedule{{copy_engines=off}},defer-reduction"
COPY_ENGINES = f"{GATHER_AND_REDUCE},sdma{{gathers=all}},defer-reduction"
FLATTENING = f"{GATHER_AND_REDUCE},flatten-on-device{{group=0,free_bytes=1000000}},defer-reduction"


def _log_names(occasion):
    """What the log calls a vote."""
    if occasion in ("the end of a window", "compiling a graph"):
        return "in coalesce_grad_reduction blocks"
    if occasion.startswith("sdma: "):
        return "about the routes of gathers when they first run"
    names = {"the schedule": "schedule", "the choice of copy-engine gathers": "sdma"}
    voting = names.get(occasion) or occasion.partition("{")[0]
    return f"in {voting}, whose choices must be equal on all ranks"


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(GATHER_AND_REDUCE, marks=pytest.mark.slow(quick="copy engines"), id="none"),
        pytest.param(BUCKETS, marks=pytest.mark.slow(quick="copy engines"), id="buckets"),
        pytest.param(COPY_ENGINES, id="copy engines"),
        pytest.param(FLATTENING, marks=pytest.mark.slow(quick="copy engines"), id="flattening"),
    ],
)
@pytest.mark.slow(quick="test_options_that_differ_are_named")
def test_agreement_false_says_which_votes_remain_and_they_keep_the_limit(pipeline):
    for window in (False, True):
        for outcome in run_in_fresh_ranks(_votes_and_log, pipeline, window):
            assert outcome.ok, outcome
            votes, lines = outcome.result
            assert {limit for _, limit in votes} <= {LIMIT_S}
            (line,) = set(lines)
            said = line.removeprefix("agreement=False: ranks still vote ").partition(". They")[0]
            happened = {_log_names(occasion) for occasion, _ in votes}
            assert happened | {"in coalesce_grad_reduction blocks"} == set(said.split(", and "))
            assert ("in coalesce_grad_reduction blocks" in happened) == window
