import pytest
import torch
from torch import fx, nn

from zpasses.graph.dialect import REDUCE_GRAD, UNSHARD
from zpasses.graph.queries import calls
from zpasses.graph.tags import Tag, add_tag, drop_tag, retag, tag_of, tagged
from zpasses.testing import capture_graphs

X = torch.zeros(2, 6)


def one_node():
    graph = fx.Graph()
    return graph.placeholder("x")


def test_added_tag_is_found_even_if_only_the_mirror_survived():
    node = one_node()
    assert tag_of(node) is None
    node.meta["custom"] = {"theirs": 1}
    add_tag(node, Tag("shard", ("w",)))
    assert tag_of(node) == Tag("shard", ("w",))
    del node.meta["zpasses"]
    assert tag_of(node) == Tag("shard", ("w",))
    assert node.meta["custom"]["theirs"] == 1


def test_mirror_is_not_shared_between_nodes_that_share_metadata():
    first, second = one_node(), one_node()
    first.meta["custom"] = second.meta["custom"] = {}
    add_tag(first, Tag("shard", ("w",)))
    assert tag_of(second) is None


def test_other_metadata_is_not_a_tag():
    node = one_node()
    node.meta["zpasses"] = "something else"
    node.meta["custom"] = "nor this"
    assert tag_of(node) is None


def test_retag_changes_both_copies():
    node = one_node()
    add_tag(node, Tag("gather", ("w",), 8))
    retag(node, bucket=3, cached=True)
    expected = Tag("gather", ("w",), 8, bucket=3, cached=True)
    assert tag_of(node) == node.meta["custom"]["zpasses"] == expected
    with pytest.raises(ValueError, match="node x has no tag to change"):
        retag(one_node(), bucket=3)


def test_drop_tag_removes_both_copies():
    node = one_node()
    node.meta["custom"] = {"theirs": 1}
    add_tag(node, Tag("gather", ("w",)))
    drop_tag(node)
    assert tag_of(node) is None
    assert node.meta["custom"] == {"theirs": 1}


def test_nodes_are_found_by_role_in_graph_order():
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in "abc"]
    for node, role in zip(nodes, ("full", "shard", "full"), strict=True):
        add_tag(node, Tag(role, (node.name,)))
    assert [node.name for node, _ in tagged(graph, "full")] == ["a", "c"]
    assert [node.name for node, _ in tagged(graph)] == ["a", "b", "c"]
    assert [node.name for node, _ in tagged(graph, "shard", "gather")] == ["b"]


def test_only_custom_survives_retracing(monkeypatch):
    """The reason for the mirror: it is all that retracing keeps of the captured tag."""
    monkeypatch.setattr("zpasses.backend.captured.tag_joint", lambda *_: None)
    monkeypatch.setattr("zpasses.backend.levels.tag_joint", lambda *_: None)
    captured = capture_graphs(nn.Linear(6, 4, bias=False), (X,), world_size=2)
    (traced,) = calls(captured.before.joint.graph, UNSHARD)
    assert "zpasses" not in traced.meta
    assert tag_of(traced) == Tag("gather", ("weight",), origin="capture")


def test_nodes_of_all_graphs_of_a_compile_are_tagged():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6, bias=False))
    captured = capture_graphs(model, (X,), world_size=2, pipeline="zero3")
    joint, expected = captured.before.joint.graph, ["0.bias", "0.weight", "1.weight"]
    reads = [each for each in captured.before.captured.graph.nodes if "unshard" in str(each.target)]
    assert sorted(tag_of(node).params[0] for node in reads) == expected
    traced = [node.meta["custom"]["zpasses"].params[0] for node in calls(joint, UNSHARD)]
    assert sorted(traced) == expected
    for role in ("shard", "gather", "reduce"):
        assert sorted(tag.params[0] for _, tag in tagged(joint, role)) == expected
    assert all(tag_of(node) for node in calls(joint, UNSHARD, REDUCE_GRAD))
    (nbytes,) = [t.nbytes for _, t in tagged(joint, "reduce") if t.params == ("1.weight",)]
    assert nbytes == 6 * 4 * 4
    roles = [tag.role for _, tag in tagged(captured.after.forward.graph)]
    assert {"shard", "gather", "full"} <= set(roles)
    assert "shard_grad" in [tag.role for _, tag in tagged(captured.after.backward.graph)]


def test_reads_inside_a_checkpoint_are_tagged_with_their_parameter():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6, bias=False)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(
                lambda y: self.inner(y).sin(), x, use_reentrant=False
            )

    joint = capture_graphs(Checkpointed(), (X,), world_size=2).before.joint
    assert {tag_of(node).params for node in calls(joint.graph, UNSHARD)} == {("inner.weight",)}
