"""The heartbeat of a process ends with it."""

import pytest

from tests.programs import start_python
from zpasses.ranks import heartbeat

PROGRAM = """
import torch.distributed as dist
from zpasses.ranks import heartbeat

heartbeat.INTERVAL_S, heartbeat._MISSED = 1e-4, 1e5  # almost always inside the store
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
heartbeat.start()
heartbeat._hearts[0]._stopped.wait(0.05)
"""


@pytest.mark.slow(quick="tests/zpasses/ranks/test_heartbeat.py")
def test_process_that_exits_during_a_heartbeat_ends_normally():
    """An interpreter that exits kills its daemon threads, for which C++ would abort the process."""
    done = start_python("-c", PROGRAM)
    assert done.returncode == 0, done.stderr


def test_an_interrupted_wait_is_what_a_rank_did_last(monkeypatch):
    monkeypatch.setattr(heartbeat, "_activity", "running a graph")
    with heartbeat.activity("waiting for rank 1"):
        pass
    assert heartbeat._activity == "running a graph"
    with pytest.raises(KeyboardInterrupt), heartbeat.activity("waiting for rank 1"):
        raise KeyboardInterrupt
    assert heartbeat._activity == "waiting for rank 1"
