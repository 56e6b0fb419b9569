"""Tests of dumps by several processes: a shared folder, and a rank that cannot write its dump."""

import pytest
import torch
from torch import nn

import zpasses
from zpasses.dumps import read
from zpasses.testing import run_on_ranks, world_mesh

pytestmark = pytest.mark.processes


def _train(options, width=5):
    torch._dynamo.reset()
    model = zpasses.shard(nn.Linear(width, 3), mesh=world_mesh())
    options = {"codegen": "eager", "agreement_timeout_s": 20.0, **options}
    step = torch.compile(model, backend="zpasses", options=options)
    step(torch.ones(2, width)).sum().backward()


def _dump_on_all_ranks_then_fail_on_rank_0(folder, blocked):
    _train({"dump": folder, "dump_ranks": "all"})
    try:
        _train({"dump": blocked}, width=6)  # ranks do not vote again on what they agreed on
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.slow(quick="the dumps of test_training_equals_the_unsharded_model")
def test_ranks_share_a_folder_and_one_failing_dump_is_an_error_on_all(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    errors = run_on_ranks(
        _dump_on_all_ranks_then_fail_on_rank_0, str(tmp_path / "dump"), str(blocked)
    )
    dump = read(tmp_path / "dump")
    assert list(dump.ranks) == [0, 1]
    digests = []
    for rank in (0, 1):
        (compiled,) = dump.ranks[rank].compiles
        assert (compiled.info.rank, compiled.info.world) == (rank, 2)
        agreements = [each for graph in compiled.graphs.values() for each in graph.agreements]
        assert {each.result for each in agreements} == {"agreed"}
        digests.append([each.digest for each in agreements])
        assert compiled.info.parameters["weight"].shard_bytes == (2, 1)[rank] * 5 * 4
    assert digests[0] == digests[1]
    assert f"{blocked} is a file" in errors[0]
    assert "DumpPathError" in errors[1]
    assert str(blocked) in errors[1]
