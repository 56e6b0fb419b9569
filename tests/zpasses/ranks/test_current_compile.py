"""What an error says about the graphs that ranks compile."""

import pytest

from zpasses.pipeline.options import Options
from zpasses.ranks.current_compile import (
    compared_differ,
    compiled_graph,
    compiling,
    graphs_differ,
    options_differ,
)

SHOW = (
    "To see the graphs, run with options={'dump': DIR, 'dump_ranks': 'all'}, and then: zpasses "
    "diff DIR --ranks 0 1"
)


def _graph(*params, name="0/0"):
    with compiling(name, params):
        return compiled_graph()


def test_parameters_that_one_rank_reads_are_named_with_their_modules():
    text = graphs_differ(0, _graph("a.w", "b.w", "scale"), 1, _graph("a.w"))
    assert text == f" Only rank 0 reads b.w (module b), scale in graph 0/0. {SHOW}"
    text = graphs_differ(1, _graph("a.w"), 0, _graph("a.w", *(f"l{i}.w" for i in range(6))))
    assert "Only rank 0 reads l0.w (module l0), " in text
    assert "l3.w (module l3) and 2 more in graph 0/0." in text


def test_equal_parameters_and_other_graphs_are_said():
    same = graphs_differ(0, _graph("w"), 1, _graph("w"))
    assert same == f" Both compile graph 0/0, and read the same parameters in it. {SHOW}"
    other = graphs_differ(0, _graph("w"), 1, _graph("w", name="1/0"))
    assert "Rank 0 compiles graph 0/0, and rank 1 1/0." in other


def test_outside_of_compiles_nothing_is_said():
    assert compiled_graph() is None
    assert graphs_differ(0, None, 1, _graph("w")) == ""


def test_a_dump_of_both_ranks_is_named():
    def graph(*params, dump):
        with compiling("0/0", params, dump):
            return compiled_graph()

    text = graphs_differ(1, graph("a.w", dump="my dump"), 0, graph("b.w", dump="my dump"))
    assert text.endswith(" To see the graphs: zpasses diff 'my dump' --ranks 0 1")
    text = graphs_differ(1, graph("a.w", dump=None), 0, graph("b.w", dump="my dump"))
    assert text.endswith(SHOW)


def test_options_that_differ_are_named():
    given = {"zero_stage": 2, "codegen": "eager", "dump": "a"}
    assert options_differ(0, given, 1, {**given, "dump": "b"}) == ""
    text = options_differ(0, given, 3, {"codegen": "eager", "backwards_per_step": 4})
    assert text == (
        "The options differ: zero_stage is 2 on rank 0 and not given on rank 3, "
        "backwards_per_step is not given on rank 0 and 4 on rank 3. "
    )
    assert options_differ(0, None, 1, None) == ""


def _differ(*options):
    first, other = (Options.parse(each).compared() for each in options)
    return compared_differ(0, first, 3, other)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"memory_budget": "1GiB"}, {"memory_budget": "1024MiB"}),
        ({"memory_budget": "5%"}, {"memory_budget": "5.0 %"}),
        (
            {"memory_budget": "auto", "host_memory": "1GiB"},
            {"memory_budget": "auto", "host_memory": "1024 MiB"},
        ),
        ({}, {"zero_stage": 3}),
        ({"pipeline": "zero2"}, {"zero_stage": 2}),
        ({}, {"recompute_elementwise": True}),
        ({}, {"dump": "here", "agreement_timeout_s": 3.0, "cache": False, "verify": "off"}),
    ],
)
def test_options_that_mean_the_same_do_not_differ(first, other):
    assert _differ(first, other) is None


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        (
            {"memory_budget": "100MiB", "host_memory": "1GiB"},
            {"memory_budget": "5%"},
            "memory_budget is 100MiB on rank 0 and 5% on rank 3, "
            "host_memory is 1GiB on rank 0 and not given on rank 3",
        ),
        ({"zero_stage": 2}, {}, "zero_stage is 2 on rank 0 and not given on rank 3"),
        ({"prefetch": "auto"}, {}, "prefetch is auto on rank 0 and 0 on rank 3"),
        ({"grad_accum": "shards"}, {}, "grad_accum is shards on rank 0 and full on rank 3"),
    ],
)
def test_options_that_must_be_alike_are_named_with_their_values(first, other, said):
    expected = f"ranks compile with different options: {said}; give all ranks the same."
    assert _differ(first, other) == expected
