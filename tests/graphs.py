"""Checks for tests of passes, and short names for the graphs of `zpasses.testing`."""

import expecttest
import pytest
from hypothesis import HealthCheck, settings

from zpasses import Pipeline
from zpasses.graph.queries import collective_of, is_wait
from zpasses.graph.tags import tag_of
from zpasses.ranks.agree import simulated_answers
from zpasses.testing import (
    ParamSpec,
    copy_graph,
    fake_world,
    joint_graph,
)
from zpasses.testing.steps import number_of_outputs

Param, joint = ParamSpec, joint_graph


def drawn_examples(count):
    """Number of examples of a property test: `count`, or a fifth of it in `make test`."""
    return max(1, count * settings().max_examples // 100)


few_examples = settings(
    max_examples=drawn_examples(8),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
"""Tracing takes tens of milliseconds per rank, so property tests draw few examples."""


def before_and_after(world_size, params, *passes, interleaved=False):
    """Returns the graphs of all ranks before and after passes, each rewritten as its rank."""
    before, after = [], []
    for rank in range(world_size):
        with fake_world(world_size, rank):
            before.append(joint(params, rank, world_size, interleaved=interleaved))
            after.append(rewritten(before[-1], *passes))
    return before, after


def declared_and_encoded(world_size, params, texts, *, interleaved=False):
    """Returns the graphs of all ranks with the values that pipelines declare to change, and those
    after each of the pipelines, which encode alike.
    """
    before, after = [], [[] for _ in texts]
    for rank in range(world_size):
        with fake_world(world_size, rank):
            before.append(joint(params, rank, world_size, interleaved=interleaved))
    for text, graphs in zip(texts, after, strict=True):
        with simulated_answers():
            for rank in range(world_size):
                with fake_world(world_size, rank):
                    graphs.append(rewritten(before[rank], *Pipeline.parse(text)))
    for rank, gm in enumerate(before):
        with fake_world(world_size, rank):
            Pipeline.parse(texts[0]).changes_values(gm.graph)
            gm.recompile()
    return before, *after


def rewritten(gm, *passes):
    """Returns a copy of the graph that the passes rewrote."""
    copied = copy_graph(gm)
    for each in passes:
        each(copied.graph)
    copied.recompile()
    return copied


def steps(gm):
    """Returns what happens, in order: starts and waits of collectives by parameter, and kernels."""
    found = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or "getitem" in node.name:
            continue
        collective = collective_of(node)
        if is_wait(node):
            tag = tag_of(node.all_input_nodes[0])
            verb = "gather" if tag.role in ("gather", "gathered") else "reduce"
            found.append(f"await {verb} {','.join(tag.params)}")
        elif collective is not None:
            found.append(f"start {tag_of(node).role} {','.join(tag_of(node).params)}")
        else:
            found.append(node.name)
    return found


def expect_listing(actual, expected):
    """Compares with an inline listing. EXPECTTEST_ACCEPT=1 rewrites the listing."""
    expecttest.assert_expected_inline(actual + "\n", expected, skip=1)


def saved_for_backward(capture):
    """Returns the nodes of a forward graph that are saved for backward."""
    returned = capture.after.forward.graph.output_node().args[0]
    return list(returned[number_of_outputs(capture.before.joint) :])


def assert_predicted(us, predicted_us, params, mode):
    """Flat buckets are predicted with at least the copies that they make. Plans leave out what
    copies from the host cost kernels, and start them later than predicted.
    """
    exact = not any(param.on_host for param in params)
    assert us <= predicted_us * (1 if exact else 1.001) + 1e-3
    if exact and mode != "flat":
        assert us == pytest.approx(predicted_us)


def votes_of_the_first(monkeypatch, told=None):
    """Each vote also has what the first one said. Returns what was said."""
    told = [] if told is None else told

    def exchange(group, question, mine, *_, merge, **__):
        told.append(mine)
        return merge([told[0], mine])

    monkeypatch.setattr("zpasses.ranks.agree.exchange", exchange)
    return told
