"""Tests of differences: they name exactly the changes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zpasses.inspect.graphs import (
    chain,
    gradients,
    node,
    replace,
    retagged,
    snapshot,
    two_gathers,
)
from zpasses.dumps.nodes import RecomputeMark, Ref, Tag
from zpasses.inspect import compare, pair_nodes


def changes(difference):
    return {(change.kind, change.node.name) for change in difference.changes}


def test_moved_collective_is_named_and_not_the_compute_it_passed():
    difference = compare(two_gathers(), two_gathers(early=True))
    assert [(change.kind, change.node.name, change.detail) for change in difference.changes] == [
        ("moved", "gather_v", "after w (-1)")
    ]


def test_details_name_the_old_and_the_new_state():
    before = two_gathers()
    nodes = list(before.nodes)
    nodes[5] = replace(nodes[5], args=(Ref(4), Ref(4)), tag=Tag("full", ("w", "v"), bucket=3))
    nodes[8] = replace(
        nodes[8], vals=(replace(nodes[8].vals[0], dtype="bfloat16"),), name="product"
    )
    nodes.insert(6, node(20, "extra", args=(Ref(5),)))
    difference = compare(before, snapshot(*nodes))
    assert [(change.kind, change.detail) for change in difference.changes] == [
        ("inserted", "after mm"),
        ("rewired", "args[0]: x -> w"),
        ("retagged", "no tag -> full"),
        ("retyped", "f32[4, 4] -> bf16[4, 4]"),
        ("renamed", "mm_1 -> product"),
    ]
    kinds = "1 inserted, 1 rewired, 1 retagged, 1 retyped, 1 renamed"
    assert difference.summary == f"{kinds} (~2 nodes)"
    backward = compare(snapshot(*nodes), before)
    assert (backward.changes[0].kind, backward.changes[0].detail) == ("removed", "had no users")


@pytest.mark.parametrize(
    ("was", "now", "detail"),
    [
        (None, RecomputeMark("must_recompute", 7), "no mark -> recomputed"),
        (RecomputeMark("prefer_save", 1), None, "prefer save -> no mark"),
        (
            RecomputeMark("must_recompute", 1),
            RecomputeMark("must_recompute", 7),
            "recomputed, in region 1 -> 7",
        ),
    ],
)
def test_marks_for_the_partitioner_are_named(was, now, detail):
    first, *rest = chain(3).nodes
    before, after = (snapshot(replace(first, mark=mark), *rest) for mark in (was, now))
    (change,) = compare(before, after).changes
    assert (change.kind, change.node.name, change.detail) == ("recompute-changed", "x", detail)


NAMES = tuple(f"layers.{at}.weight" for at in range(12))


@pytest.mark.parametrize(
    ("was", "now", "detail"),
    [
        (("a", "b"), ("a", "c"), "a, b -> a, c"),
        (NAMES, (*NAMES[:-1], "last"), "12 -> 12: with last, without layers.11.weight"),
        (NAMES, (*NAMES, "x", "y", "z"), "12 -> 15: with x and 2 more"),
        (
            NAMES,
            (*NAMES[:10], *NAMES[:9:-1]),
            "12 in another order, from the 11. on: layers.10.weight -> layers.11.weight",
        ),
    ],
)
def test_lists_that_differ_late_are_shown_by_the_items_that_differ(was, now, detail):
    before, after = retagged(was, now)
    (change,) = compare(before, after).changes
    assert (change.kind, change.detail) == ("retagged", f"params: {detail}")


def test_texts_that_differ_late_are_shown_by_the_part_that_differs():
    graphs = []
    for end in ("yes", "no"):
        nodes = list(two_gathers().nodes)
        note = "a decision, and many reasons for it, " * 3 + end
        nodes[3] = replace(nodes[3], tag=replace(nodes[3].tag, note=note))
        graphs.append(snapshot(*nodes))
    (change,) = compare(*graphs).changes
    assert change.detail == "note: ...reasons for it, yes -> ...reasons for it, no"


# --- planted changes ------------------------------------------------------------------------------
def insert(nodes, at, draw):
    fresh = node(1000, "fresh", args=(Ref(nodes[at - 1].id),))
    nodes.insert(at, fresh)
    return {("inserted", "fresh")}


def remove(nodes, at, draw):
    gone = nodes.pop(at)
    expected = {("removed", gone.name)}
    for index, each in enumerate(nodes):
        if gone.id in each.inputs:
            rewired = replace(each, args=rewire(each.args, gone.id, 0))
            nodes[index] = rewired
            expected.add(("rewired", each.name))
    return expected


def rewire(args, old, new):
    return tuple(
        Ref(new) if arg == Ref(old) else rewire(arg, old, new) if isinstance(arg, tuple) else arg
        for arg in args
    )


def move(nodes, at, draw):
    moved = nodes.pop(at)
    others = [
        place for place in range(1, len(nodes)) if abs(place - at) > 1
    ]  # between neighbours, either may be reported as moved
    nodes.insert(draw(st.sampled_from(others)), moved)
    return {("moved", moved.name)}


def retarget(nodes, at, draw):
    nodes[at] = replace(nodes[at], target="aten.other.default")
    return {("rewired", nodes[at].name)}


def retag(nodes, at, draw):
    nodes[at] = replace(nodes[at], tag=Tag("full", ("w",)))
    return {("retagged", nodes[at].name)}


def remark(nodes, at, draw):
    nodes[at] = replace(nodes[at], mark=RecomputeMark("must_recompute", 7))
    return {("recompute-changed", nodes[at].name)}


def retype(nodes, at, draw):
    nodes[at] = replace(nodes[at], vals=(replace(nodes[at].vals[0], shape=(16,)),))
    return {("retyped", nodes[at].name)}


def rename(nodes, at, draw):
    nodes[at] = replace(nodes[at], name="other")
    return {("renamed", "other")}


EDITS = (insert, remove, move, retarget, retag, remark, retype, rename)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 50), edit=st.sampled_from(EDITS))
def test_difference_names_exactly_the_planted_change(data, seed, edit):
    before = chain(16, seed)
    nodes = list(before.nodes)
    expected = edit(nodes, data.draw(st.integers(1, 15)), data.draw)
    difference = compare(before, snapshot(*nodes))
    assert changes(difference) == expected
    assert sum(difference.counts.values()) == len(expected)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_as_few_nodes_as_possible_are_reported_as_moved(data):
    before = chain(9)
    order = data.draw(st.permutations(before.nodes))
    moved = {change.node.id for change in compare(before, snapshot(*order)).of_kind("moved")}
    stayed = [each.id for each in order if each.id not in moved]
    assert stayed == sorted(stayed)
    rising = [1] * len(
        order
    )  # length of the longest increasing subsequence that ends at each place
    for at, each in enumerate(order):
        rising[at] = 1 + max((rising[i] for i in range(at) if order[i].id < each.id), default=0)
    assert len(stayed) == max(rising)


# --- between compiles -----------------------------------------------------------------------------
def renumbered(graph, offset=100, names=None):
    """The same graph with the ids and names of another compile."""

    def shifted(argument):
        if isinstance(argument, Ref):
            return Ref(argument.node + offset)
        return tuple(map(shifted, argument)) if isinstance(argument, tuple) else argument

    nodes = []
    for each in graph.nodes:
        name = (names or {}).get(each.name, each.name)
        nodes.append(replace(each, id=each.id + offset, name=name, args=shifted(each.args)))
    return snapshot(*nodes)


def changes_of(before, after):
    """Kind and name of each change between two graphs whose nodes are paired."""
    return changes(compare(before, after, pair_nodes(before, after)))


def test_graphs_of_two_compiles_are_paired_by_what_they_compute():
    after = renumbered(two_gathers(), names={"mm": "product", "mm_1": "mm_7"})
    assert changes_of(two_gathers(), after) == {("renamed", "product")}


@pytest.mark.parametrize("seed", range(5))
def test_every_node_of_an_equal_graph_is_paired(seed):
    before, after = chain(40, seed), renumbered(chain(40, seed))
    assert pair_nodes(before, after) == {each.id: each.id + 100 for each in before.nodes}


@pytest.mark.parametrize("lines", [True, False])
def test_nodes_are_paired_by_their_parameters_before_their_shapes(lines):
    before, after = gradients("b", lines=lines), gradients("b", "c", lines=lines)
    pairs = pair_nodes(before, after)
    for old, new in pairs.items():
        assert before.by_id[old].params == after.by_id[new].params
    names = {before.by_id[old].name: after.by_id[new].name for old, new in pairs.items()}
    assert (names["reduce"], names["wait"]) == ("reduce_1", "wait_1")  # of b: those of c are first


def test_a_layer_that_only_one_rank_has_is_inserted_and_the_others_are_not_retagged():
    assert changes_of(gradients("b"), gradients("b", "c")) == {
        *(("inserted", name) for name in ("sum", "reduce", "wait", "mm")),
        *(("rewired", name) for name in ("sum_1", "mm_1", "output")),
    }


def test_parameters_of_other_names_are_paired():
    before, nodes = two_gathers(), []
    for each in before.nodes:
        params = tuple(f"module.{name}" for name in each.params)
        tag = each.tag and replace(each.tag, params=params)
        nodes.append(replace(each, params=params, tag=tag))
    assert len(pair_nodes(before, renumbered(snapshot(*nodes)))) == len(nodes)


def test_a_node_with_several_kinds_of_changes_counts_once():
    before = two_gathers()
    nodes = {each.name: each for each in two_gathers(early=True).nodes}
    nodes["gather_v"] = replace(nodes["gather_v"], tag=Tag("gather", ("v", "u"), 32))
    after = snapshot(*nodes.values())
    found = compare(before, after)
    assert found.counts == {"moved": 1, "retagged": 1}
    assert found.changed_nodes == 1
    assert found.summary == "1 moved, 1 retagged (~1 node)"
    plain = compare(before, two_gathers(early=True))
    assert (plain.changed_nodes, plain.summary) == (1, "1 moved")
