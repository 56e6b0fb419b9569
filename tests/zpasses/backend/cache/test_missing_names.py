"""A torch that lacks what the compile cache needs."""

import logging

import torch
from torch import fx
from torch.fx import _graph_pickler

from zpasses.backend.cache import entry
from zpasses.backend.cache.entry import GraphArtifacts


def test_a_cache_that_cannot_store_says_so_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("ZPASSES_CACHE_DIR", str(tmp_path))
    monkeypatch.delattr(_graph_pickler, "patch_pytree_map_over_slice")
    entry._warn_of_missing.cache_clear()
    with caplog.at_level(logging.INFO, logger="zpasses"):
        for name in ("0/0", "1/0"):
            stored = GraphArtifacts.new(f"key of {name}", name)
            stored._add_graph("forward", fx.symbolic_trace(lambda x: x.relu()), [torch.ones(2)])
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        f"The compile cache stores nothing with torch {torch.__version__}: cannot import name "
        "'patch_pytree_map_over_slice'"
    )
    notes = [each.getMessage() for each in caplog.records if each.levelname == "INFO"]
    assert [each.partition(":")[0] for each in notes] == ["graph 0/0", "graph 1/0"]
