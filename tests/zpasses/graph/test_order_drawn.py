"""Property: on drawn graphs, the static check reports a race if and only if some order of the
simulated device lets an operator find other bytes than in program order.
"""

import operator
import random

import pytest
import torch
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem

from tests.graphs import drawn_examples
from tests.streams import GraphBuilder, races_and_difference
from zpasses.graph.queries import value_of
from zpasses.graph.verifier.order import group_stream, own_stream

pytestmark = pytest.mark.usefixtures("two_ranks")

aten, F, sdma = torch.ops.aten, torch.ops._c10d_functional, torch.ops.zpasses
WAIT = F.wait_tensor.default
GRAPHS = drawn_examples(60)


class Draw:
    """Draws a graph: compute, views, writes, launches of every kind, and waits that may
    be missing, early, late or for another launch.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.build = GraphBuilder("x", "y", z=(8, 2))
        self.values = {(4, 2): list(self.build.inputs[:2]), (8, 2): [self.build.inputs[2]]}
        self.started = []

    def pick(self, rows):
        return self.random.choice(self.values[rows, 2])

    def keep(self, node):
        self.values.setdefault(tuple(value_of(node).shape), []).append(node)

    def call(self, *args, **kwargs):
        node = self.build.call(*args, **kwargs)
        self.keep(node)
        return node

    def start(self, *args, **kwargs):
        self.started.append(self.call(*args, **kwargs))

    # --- steps ------------------------------------------------------------------------------------
    def compute(self):
        rows = self.random.choice((4, 8))
        self.call(aten.add.Tensor, self.pick(rows), self.pick(rows))

    def view(self):
        first = self.random.choice((0, 2, 4))
        self.call(aten.slice.Tensor, self.pick(8), 0, first, first + 4)

    def write(self):
        rows = self.random.choice((4, 8))
        self.call(aten.add_.Tensor, self.pick(rows), self.random.uniform(1, 2))

    def gather(self):
        targets = [
            (F.all_gather_into_tensor.default, 2, "0"),
            (sdma.sdma_all_gather.default, 2, "0"),
            (torch.ops.symm_mem._low_contention_all_gather.default, "0"),
        ]
        target, *rest = self.random.choice(targets)
        self.start(target, self.pick(4), *rest)

    def gather_out(self):
        targets = (F.all_gather_into_tensor_out.default, sdma.sdma_all_gather_out.default)
        self.start(self.random.choice(targets), self.pick(4), 2, "0", out=self.pick(8))

    def gather_two(self):
        targets = (
            F.all_gather_into_tensor_coalesced.default,
            sdma.sdma_all_gather_coalesced.default,
        )
        both = self.build.call(self.random.choice(targets), [self.pick(4), self.pick(4)], 2, "0")
        for place in (0, 1):
            self.start(operator.getitem, both, place)

    def reduce(self):
        self.start(F.reduce_scatter_tensor.default, self.pick(8), "sum", 2, "0")

    def reduce_in_place(self):
        rows = self.random.choice((4, 8))
        self.start(F.all_reduce_.default, self.pick(rows), "sum", "0")

    def wait(self):
        if self.started:
            self.call(WAIT, self.started.pop(self.random.randrange(len(self.started))))

    def wait_for_any(self):
        self.call(WAIT, self.pick(self.random.choice((4, 8))))

    def graph(self):
        steps = [self.compute, self.compute, self.view, self.write, self.gather, self.gather_out]
        steps += [self.gather_two, self.reduce, self.reduce_in_place, self.wait, self.wait]
        steps += [self.wait, self.wait, self.wait_for_any]
        for _ in range(self.random.randrange(3, 14)):
            self.random.choice(steps)()
        if self.random.random() < 0.7:
            while self.started:
                self.wait()
        known = [each for several in self.values.values() for each in several]
        return self.build.returns(*self.random.sample(known, 2))


@pytest.mark.parametrize("stream_of", [own_stream, group_stream])
def test_static_check_reports_a_race_if_and_only_if_runs_show_one(stream_of):
    counts = {True: 0, False: 0}
    for seed in range(GRAPHS):
        gm = Draw(seed).graph()
        races, difference, _ = races_and_difference(gm, stream_of=stream_of)
        text = "".join(f"\n  {each}" for each in races)
        assert bool(races) == bool(difference), (
            f"drawn graph {seed}: races: {text or 'none'}\nshown: {difference}\n{gm.graph}"
        )
        counts[bool(races)] += 1
    assert min(counts.values()) > GRAPHS // 10, counts
