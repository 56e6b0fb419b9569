"""What a dump says of each buffer, and of the lines that nodes come from."""

import pytest

from tests.zpasses.inspect.real import dump_training_step
from zpasses.inspect import open as open_dump

COALESCED = (
    "gather-params,reduce-grads,reshard-after-forward{keep=nothing},"
    "bucket{memory_budget=1MiB,mode=coalesced}"
)


@pytest.fixture(scope="module")
def coalesced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coalesced")
    dump_training_step(folder, pipeline=COALESCED)
    return open_dump(folder)


def buckets(inspection, graph):
    return [
        node
        for node in inspection.step_of(graph).snapshot.nodes
        if node.collective is not None and "coalesced" in node.collective.kind
    ]


@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_each_buffer_of_a_coalesced_bucket_holds_one_parameter(coalesced, graph):
    found = buckets(coalesced, graph)
    assert found
    for node in found:
        made = [buffer for buffer in node.buffers if buffer.kind == "bucket"]
        assert [buffer.params for buffer in made] == [(name,) for name in node.params]


def test_a_parameter_that_is_no_longer_needed_holds_no_memory_of_its_bucket(coalesced):
    snapshot = coalesced.step_of("forward").snapshot
    (node,) = buckets(coalesced, "forward")
    first, *_, last = sorted(
        (each for each in node.buffers if each.kind == "bucket"),
        key=lambda each: snapshot.position[each.last],
    )
    assert snapshot.position[first.last] < snapshot.position[last.last]
    at = snapshot.by_id[last.last].name
    held = coalesced.memory_of("forward", at=at).by_parameter
    assert last.params[0] in held
    assert first.params[0] not in held


def test_nodes_of_a_bucket_have_the_line_of_their_parameter_or_none(coalesced):
    snapshot = coalesced.step_of("forward").snapshot
    (node,) = buckets(coalesced, "forward")
    assert node.source is None
    modules = {
        each.params[0]: each.source.module
        for each in snapshot.nodes
        if each.tag is not None and each.tag.bucket is not None and len(each.params) == 1
    }
    assert modules == {f"layers.{at}.weight": f"layers.{at}" for at in range(3)}


def test_full_parameters_that_stage_2_keeps_for_backward_are_parameters(tmp_path):
    dump_training_step(tmp_path, pipeline=None, zero_stage=2)
    found = open_dump(tmp_path).memory_of("backward", 0, at="output")
    snapshot = found.snapshot
    kept = [
        buffer
        for node in snapshot.nodes
        if node.op == "placeholder"
        for buffer in node.buffers
        if buffer.nbytes == 64 * 64 * 4
    ]
    assert {buffer.kind for buffer in kept} == {"parameter"}
    # The first layer's input needs no gradient, so its weight is not kept.
    assert {buffer.params for buffer in kept} == {(f"layers.{at}.weight",) for at in (1, 2)}
