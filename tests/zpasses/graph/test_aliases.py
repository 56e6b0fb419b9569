import torch
from torch import fx

from zpasses.graph.aliases import (
    CLONES,
    UNSAFE_VIEWS,
    elements_of,
    is_view,
    memory_base,
    shared_arguments,
    view_base,
)
from zpasses.graph.queries import WAIT

aten = torch.ops.aten


def chain(*targets):
    """A graph's input, and calls of which each takes the one before."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for target in targets:
        nodes.append(graph.call_function(target, (nodes[-1],)))
    return nodes


def test_bases_follow_the_views_that_are_asked_for():
    x, _, cloned, _, last = chain(
        aten.t.default, aten.clone.default, aten._unsafe_view.default, aten.alias.default
    )
    assert view_base(last) is last.all_input_nodes[0]
    assert view_base(last, UNSAFE_VIEWS) is cloned
    assert view_base(last, UNSAFE_VIEWS | CLONES) is x
    assert memory_base(last) is cloned
    assert elements_of(last) is last.all_input_nodes[0]


def test_calls_that_may_return_views_count_as_views():
    for target in (aten.reshape.default, aten.contiguous.default):
        assert is_view(chain(target)[-1])
    assert not is_view(chain(aten.clone.default)[-1])


def test_a_transposed_value_does_not_keep_the_order_of_elements():
    x, viewed, transposed, last = chain(aten.view.default, aten.t.default, aten.detach.default)
    assert elements_of(viewed) is x
    assert elements_of(last) is transposed
    assert view_base(last) is x


def test_waits_and_calls_in_place_return_memory_of_their_first_input():
    x, _, last = chain(WAIT, aten.relu_.default)
    assert memory_base(last) is x
    assert view_base(last) is last
    assert shared_arguments(WAIT) == ("tensor",)
    assert shared_arguments(aten.relu.default) == ()
