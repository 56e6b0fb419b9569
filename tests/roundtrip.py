"""Writes graphs in the dump format and reads them back: the result must be equal."""

from zpasses.cost.memory.liveness import liveness
from zpasses.cost.time.target import TARGETS
from zpasses.dumps.describe import Describer
from zpasses.dumps.format import StepEvent
from zpasses.dumps.json_lines import snapshot_lines
from zpasses.dumps.limits import Limits
from zpasses.dumps.snapshots import SnapshotFiles


def write_snapshot(folder, snapshot, base=None):
    path = folder / f"{snapshot.number:03d}-graph.jsonl"
    path.write_bytes(
        b"".join(
            line + b"\n" for line in snapshot_lines(snapshot, StepEvent("graph", "joint"), base)
        )
    )
    return path


def round_trip(graph, folder, *, modelled=True):
    """Returns the snapshot that was read."""
    snapshot = Describer(TARGETS["mi300x"]).graph("graph", modelled=modelled).snapshot(graph, 0)
    read = SnapshotFiles({0: write_snapshot(folder, snapshot)}, Limits()).load(0)
    assert read == snapshot
    assert [node.name for node in read.nodes] == [node.name for node in graph.nodes]
    if modelled:
        memory = liveness(graph)
        assert read.live_bytes == memory.live_bytes
        for node in read.nodes[:: max(len(read.nodes) // 20, 1)]:
            live = read.live_bytes[read.position[node.id]]
            assert sum(buffer.nbytes for _, buffer in read.alive_at(node)) == live
    return read


def round_trip_of(log, folder):
    """Observes compiled graphs and takes each through the dump format."""
    round_trip(log.graph, folder, modelled=log.kind != "captured")
