"""The suite "scaling": capture, trace, passes and partition of a model with the width of Llama 3
70B, over its number of layers.

The suite uses fake tensors and a fake process group. Nothing is allocated, computed or
communicated.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

import zpasses
from zpasses import compat
from zpasses.pipeline.events import observe_graphs
from zpasses.tools.bench.launch import RankError, run_ranks

__all__ = ["ScalingConfig", "ScalingPoint", "ScalingReport", "run_scaling"]

_WORKER = "zpasses.tools.bench.scaling"


@dataclass(frozen=True)
class ScalingConfig:
    """The model. Its default width is that of Llama 3 70B."""

    layers: tuple[int, ...] = (2, 8, 32, 80)
    stage: int = 3
    ranks: int = 512
    """Size of the fake process group."""
    hidden: int = 8192
    intermediate: int = 28672
    heads: int = 64
    kv_heads: int = 8
    vocab: int = 128256
    seq: int = 128
    timeout_s: float = 600.0
    """Time limit per number of layers."""


@dataclass(frozen=True)
class ScalingPoint:
    """Results for one number of layers, in seconds and bytes."""

    layers: int
    build_s: float
    shard_s: float
    dynamo_s: float
    """Dynamo, and zpasses' capture of its graph."""
    trace_s: float
    """AOTAutograd's trace of forward and backward."""
    partition_s: float
    passes_s: float
    """zpasses' own passes, at all levels."""
    checks_s: float
    """The checks after passes."""
    total_s: float
    """Sum of Dynamo, trace, partition, passes and checks."""
    share: float
    """Share of passes and checks in the total, 0 to 1."""
    joint_nodes: int
    peak_rss_bytes: int


@dataclass
class ScalingReport:
    config: ScalingConfig
    points: list[ScalingPoint] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    """Number of layers -> the end of the log."""


def run_scaling(config: ScalingConfig) -> ScalingReport:
    """Measure each number of layers in a new process."""
    report = ScalingReport(config)
    for layers in tqdm(config.layers):
        job = {**asdict(config), "layers": layers}
        try:
            (result,) = run_ranks(_WORKER, job, ranks=1, timeout_s=config.timeout_s)
            report.points.append(ScalingPoint(**result))
        except RankError as error:
            report.failed[layers] = str(error)
    return report


# --- in the measured process ----------------------------------------------------------------------
def measure(job: dict[str, Any]) -> ScalingPoint:
    """Measure one number of layers in this process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group("fake", store=compat.fake_store(), rank=0, world_size=job["ranks"])
    mesh = init_device_mesh("cpu", (job["ranks"],))
    config = LlamaConfig(
        hidden_size=job["hidden"],
        intermediate_size=job["intermediate"],
        num_attention_heads=job["heads"],
        num_key_value_heads=job["kv_heads"],
        vocab_size=job["vocab"],
        num_hidden_layers=job["layers"],
        use_cache=False,
    )
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        started = time.perf_counter()
        model = LlamaForCausalLM(config)
        built = time.perf_counter()
        zpasses.shard(model, mesh=mesh)
        sharded = time.perf_counter()
        compiled: Any = torch.compile(
            model,
            backend="zpasses",
            options={"zero_stage": job["stage"], "codegen": "eager"},
            fullgraph=True,
        )
        tokens = torch.zeros(1, job["seq"], dtype=torch.long)
        clock = _Clock()
        with clock.running():
            loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()  # compiles the backward graph
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours_s = clock.passes_s + clock.checks_s
    total_s = sum(clock.spent_s.values()) + ours_s
    return ScalingPoint(
        layers=job["layers"],
        build_s=built - started,
        shard_s=sharded - built,
        dynamo_s=clock.spent_s["captured"],
        trace_s=clock.spent_s["joint"],
        partition_s=clock.spent_s["forward"],
        passes_s=clock.passes_s,
        checks_s=clock.checks_s,
        total_s=total_s,
        share=ours_s / total_s,
        joint_nodes=clock.joint_nodes,
        peak_rss_bytes=usage * (1 if sys.platform == "darwin" else 1024),
    )


class _Clock:
    """Time between the graphs that the backend reports, without the time of its passes."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}
        self.passes_s = self.checks_s = 0.0
        self.joint_nodes = 0

    def running(self) -> Any:
        self._last = time.perf_counter()
        return observe_graphs(self._see)

    def _see(self, graph: Any) -> None:
        passes = sum(record.time_us for record in graph.records) / 1e6
        checks = sum(record.check_us for record in graph.records) / 1e6
        if graph.kind != "backward":  # it is compiled after the forward ran on fake tensors
            self.spent_s[graph.kind] = time.perf_counter() - self._last - passes - checks
        self.passes_s, self.checks_s = self.passes_s + passes, self.checks_s + checks
        if graph.kind == "joint":
            self.joint_nodes = len(graph.graph.nodes)
        self._last = time.perf_counter()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        json.dumps(asdict(measure(json.loads(Path(sys.argv[1]).read_text()))))
    )
