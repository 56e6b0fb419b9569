"""Which ranks of a dump agree, and where the first difference is."""

import json
import re

import pytest
from click.testing import CliRunner

from tests.zpasses.inspect.browsing import needs_browser, one
from tests.zpasses.inspect.graphs import (
    chain,
    dump_of,
    graph_of,
    output,
    replace,
    snapshot,
    two_gathers,
)
from tests.zpasses.inspect.real import ExtraParameter, dump_training_step
from zpasses.dumps.format import Agreement, Dump
from zpasses.dumps.nodes import Value
from zpasses.inspect import Inspection
from zpasses.inspect import open as open_dump
from zpasses.inspect.rank_agreement import rank_agreements, ranks_text, ranks_that_differ
from zpasses.tools.cli.main import cli


def ranks_of(*graphs):
    """A dump of one graph on each rank. None is a rank without it."""
    held = [() if graph is None else (graph,) for graph in graphs]
    dumps = [dump_of(*each, rank=rank) for rank, each in enumerate(held)]
    ranks = {rank: each.ranks[rank] for rank, each in enumerate(dumps)}
    return Dump(dumps[0].path, 3, dumps[0].meta, ranks)


def forward(snapshot, digest=None):
    graph = graph_of("forward", (None, snapshot))
    if digest is None:
        return graph
    return replace(graph, agreements=(Agreement("forward", "0", digest, 2, "agreed"),))


def test_ranks_that_agree_are_one_line():
    dump = ranks_of(*[forward(two_gathers())] * 4)
    (found,) = rank_agreements(dump)
    assert (found.agree, found.alike, found.difference) == (True, ((0, 1, 2, 3),), "")
    assert "All ranks run the same collectives: forward." in str(Inspection(dump).overview())


def test_the_rank_that_differs_is_named_with_its_first_collective():
    same, early = forward(two_gathers()), forward(two_gathers(early=True))
    dump = ranks_of(same, same, early, forward(chain(3)))
    (found,) = rank_agreements(dump)
    assert found.alike == ((0, 1, 2), (3,))  # the order of starts is equal on ranks 0 to 2
    assert "collective 1 is all_gather_into_tensor -> f32[4, 4] of w " in found.difference
    assert "nothing more on rank 3 (graph forward, 0 collectives)" in found.difference
    assert found.difference.endswith("zpasses diff dump forward --ranks 0 3")
    text = str(Inspection(dump).overview())
    assert "0/0 forward DIFFERS: ranks 0 to 2; 3" in text


def test_the_first_tensor_of_a_bucket_that_differs_is_named():
    def bucket(rows):
        found = two_gathers()
        values = tuple(Value((each, 4), "float32", "cpu", each * 16) for each in (4, rows))
        nodes = [
            replace(node, params=("a.w", "b.w"), vals=values) if node.collective else node
            for node in found.nodes
        ]
        return replace(found, nodes=tuple(nodes))

    (found,) = rank_agreements(ranks_of(forward(bucket(6)), forward(bucket(8))))
    assert (
        "collective 1 is all_gather_into_tensor of 2 tensors, of which tensor 2 is f32[6, 4] of "
        "b.w (module b) on rank 0" in found.difference
    )
    assert "tensor 2 is f32[8, 4] of b.w (module b) on rank 1" in found.difference


def test_a_rank_without_the_graph_is_named():
    (found,) = rank_agreements(ranks_of(forward(two_gathers()), None, forward(two_gathers())))
    assert (found.alike, found.missing, found.agree) == (((0, 2),), (1,), False)


def test_digests_that_ranks_exchanged_are_enough():
    def unreadable(number):
        raise AssertionError(f"graph {number} was read")

    graph = forward(two_gathers(), "abc")
    graph = replace(graph, steps=tuple(replace(each, load=unreadable) for each in graph.steps))
    (found,) = rank_agreements(ranks_of(graph, graph))
    assert found.agree


def test_a_dump_of_one_rank_says_nothing():
    assert rank_agreements(ranks_of(forward(two_gathers()))) == []


RANGES = {
    "0": (0,),
    "0, 1": (0, 1),
    "0 to 511": range(512),
    "0, 2 to 4": (0, 2, 3, 4),
    "0, 2, 4, 6, 8, 10 and 4 more": range(0, 20, 2),
}


def test_ranks_are_ranges():
    assert [ranks_text(tuple(ranks)) for ranks in RANGES.values()] == list(RANGES)


@pytest.fixture(scope="module")
def disagreeing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disagreeing")
    dump_training_step(folder, rank=0)
    dump_training_step(folder, rank=1, model=ExtraParameter)
    return open_dump(folder)


def test_the_parameter_that_only_one_rank_gathers_is_named(disagreeing):
    text = str(disagreeing.overview())
    assert "0/0 forward DIFFERS: ranks 0; 1" in text
    assert "Only on rank 1: f32[64] of scale." in text
    assert f"zpasses diff {disagreeing.dump.path} forward --ranks 0 1" in text


@pytest.mark.slow(quick="the tests of rank_agreements without a browser")
@needs_browser
def test_the_page_says_which_ranks_differ_and_compares_them(page, disagreeing):
    assert ranks_that_differ(disagreeing.dump) == (0, 1)
    shown = page(disagreeing, "", Inspection(disagreeing.dump, 1))
    text = one(shown, ".failure").text
    assert "Ranks run different collectives" in text
    assert "Only on rank 1: f32[64] of scale." in text
    one(shown, ".failure button", "Compare these ranks").click()
    assert "scale" in one(shown, ".cell.after.inserted").text


def test_ranks_that_agree_are_not_compared():
    assert ranks_that_differ(ranks_of(*[forward(two_gathers())] * 3)) is None
    assert ranks_that_differ(ranks_of(forward(two_gathers()), None)) is None
    same, other = forward(two_gathers()), forward(snapshot(output(0)))
    assert ranks_that_differ(ranks_of(same, same, other)) == (0, 2)


def test_the_page_of_ranks_that_differ_has_both(disagreeing, tmp_path):
    written = tmp_path / "page.html"
    done = CliRunner().invoke(cli, ["html", str(disagreeing.dump.path), "-o", str(written)])
    assert done.exit_code == 0, done.output
    data = re.search(r'id="data"[^>]*>(.*?)</script>', written.read_text(), re.DOTALL)
    compiles = json.loads(data[1])["compiles"]
    assert [each["rank"] for each in compiles] == [0, 1]
    assert len({each["dump"] for each in compiles}) == 1


def test_a_compile_that_failed_on_all_ranks_is_compared_on_all_of_them():
    joint = graph_of("joint", (None, two_gathers()))
    (found,) = rank_agreements(ranks_of(joint, joint))
    assert (found.graph, found.agree, found.missing) == ("joint", True, ())


def test_ranks_that_stopped_at_different_places_are_compared_before_they_part():
    first = dump_of(graph_of("joint", (None, two_gathers())))
    graphs = [graph_of(name, (None, chain(3))) for name in ("joint", "forward")]
    second = dump_of(*graphs, rank=1)
    dump = Dump(first.path, 3, first.meta, {**first.ranks, **second.ranks})
    joint, forward = rank_agreements(dump)
    assert (joint.graph, joint.alike) == ("joint", ((0,), (1,)))
    assert "collective 1 is all_gather_into_tensor" in joint.difference
    assert joint.difference.endswith("zpasses diff dump joint --ranks 0 1")
    assert (forward.graph, forward.missing) == ("forward", (0,))
    text = str(Inspection(dump).overview())
    assert text.index("0/0 joint DIFFERS") < text.index("0/0 forward DIFFERS")
    assert "\n    Shown by: zpasses diff dump joint --ranks 0 1" in text
