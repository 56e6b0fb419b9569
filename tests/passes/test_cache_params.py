import torch
from torch import nn

from zpasses import Level
from zpasses.graph.cached_params import param_slots
from zpasses.graph.queries import collectives
from zpasses.passes import ZERO2, CacheParams
from zpasses.testing import (
    assert_equal_bits,
    capture_graphs,
    capture_ranks,
    listing,
    random_inputs,
)

X = torch.zeros(2, 6)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 5, bias=False), nn.Linear(5, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.up.weight.requires_grad_(False)

    def forward(self, x):
        return self.down(self.up(x).relu()) * self.scale


def test_full_parameters_are_marked_where_they_are_read():
    captured = capture_graphs(
        nn.Linear(6, 4, bias=False), (X,), world_size=3, pipeline="gather-params,cache-params"
    )
    before, after = listing(captured.before.forward), listing(captured.after.forward)
    full = "slice_tensor = slice(wait_tensor_default, 0, 0, 4)                          # f32[4, 6]"
    assert f"{full}; full: weight\n" in before
    assert after == before.replace("full: weight", "full: weight; cached")


NAMES = {"up.weight", "down.weight", "scale"}


def test_every_parameter_of_a_forward_graph_has_a_slot_and_backward_does_not_gather():
    captured = capture_graphs(Mlp(), (X,), world_size=2, pipeline="zero2")
    assert {slot.param for slot in param_slots(captured.after.forward.graph)} == NAMES
    backward = [each.op for _, each in collectives(captured.after.backward.graph)]
    assert "all_gather_into_tensor" not in backward
    (record,) = (record for record in captured.records if record.name == "cache-params")
    assert record.changes == 3
    assert record.nodes_before == record.nodes_after
    assert record.collectives_before == record.collectives_after


def test_without_the_pass_there_is_no_slot():
    pipeline = "gather-params,reduce-grads"
    captured = capture_graphs(Mlp(), (X,), world_size=2, pipeline=pipeline)
    assert param_slots(captured.after.forward.graph) == []


def test_inference_caches_parameters_too():
    captures = capture_ranks(Mlp(), (X,), world_size=2, pipeline="zero2", train=False)
    before = [each.before.inference for each in captures]
    after = [each.after.inference for each in captures]
    assert {slot.param for slot in param_slots(after[0].graph)} == NAMES
    assert_equal_bits(before, after, random_inputs(before))


def test_pass_belongs_to_the_forward_level():
    assert CacheParams() in ZERO2.at(Level.FORWARD)
    assert CacheParams() not in ZERO2.at(Level.BACKWARD)
