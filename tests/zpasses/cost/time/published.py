"""Published step times with and without copy engines, and what the timing model says of them.

    python -m tests.zpasses.cost.time.published

fits the priors of `zpasses/cost/time/route_figures.py` to micro-benchmarks (half of the published
figures whose configuration is known), predicts the other half with the priors as they are, and
prints both. Nothing is run: models are captured on fake ranks.

Each model is captured with a few layers, and its step time is extended to all of them: every
further layer adds the same time. The peak operations per second of the target are lowered until the
predicted step without copy engines takes as long as the published one. So only the relative change
is predicted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx

import zpasses
from zpasses import compat
from zpasses.cost.time.clock import Clock, CollectiveTiming
from zpasses.cost.time.fused_kernels import use_fusion
from zpasses.cost.time.roofline import collective_on_route_us
from zpasses.cost.time.route_figures import RouteFigures, route_figures
from zpasses.cost.time.step_time import Timeline
from zpasses.cost.time.target import TARGETS, Target, use_target
from zpasses.pipeline.base_pass import Level
from zpasses.pipeline.events import ObservedGraph, observe_graphs
from zpasses.pipeline.pipeline import Pipeline
from zpasses.testing import copy_graph, fake_world
from zpasses.testing.step_graphs import capture_step

STAGE_3 = "merge-reads{{max_hold_mb=1}},gather-params,reduce-grads,reshard-after-forward,schedule{}"
WITHOUT, WITH = (STAGE_3.format(f"{{copy_engines={each}}}") for each in ("off", "on"))
"""The pipelines without and with copy engines."""
QUICK = STAGE_3.format("{plan=one-ahead,cap_mb=512,memory_budget=5%}")
"""The pipeline by which the speed of the target is found: it needs no search."""
LAYERS = 8, 16
"""Numbers of layers to capture. A plan differs a little between them, which counts once for each
further layer."""


# --- training steps -------------------------------------------------------------------------------
LLAMA_8B = {
    "kind": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "num_hidden_layers": 32,
}
LLAMA_7B = LLAMA_8B | {
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
QWEN3_32B = {
    "kind": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_hidden_layers": 64,
}


@dataclass(frozen=True)
class Pair:
    """One training step, published with and without copy engines."""

    name: str
    model: Mapping[str, Any]
    """Type and arguments of a config of transformers."""
    batch: int
    """Sequences per rank."""
    tokens: int
    """Length of a sequence."""
    target: str
    ranks: int
    without_ms: float
    with_ms: float
    known: bool
    """Whether the source states all of the above."""
    mixed: bool = False
    """Whether the shards are fp32, gathered in bf16 and reduced in fp32. Else all is bf16."""
    eager: bool = False
    """Whether the source says that the model is not compiled."""

    @property
    def published(self) -> float:
        """Change of the step time, in percent; negative is faster."""
        return 100 * (self.with_ms / self.without_ms - 1)


def _ms(tokens: int, *tokens_per_s: float) -> tuple[float, ...]:
    return tuple(1e3 * tokens / each for each in tokens_per_s)


PAIRS = (
    Pair(
        "DeepSpeed#7999 Qwen3-32B",
        QWEN3_32B,
        1,
        1024,
        "mi300x",
        8,
        1402.5,
        1263.2,
        True,
        eager=True,
    ),
    Pair(
        "pytorch#179937 Llama-3-8B",
        LLAMA_8B,
        2,
        4096,
        "h100",
        8,
        *_ms(8192, 9369, 9593),
        known=True,
        mixed=True,
    ),
    # The widths of the model are not published.
    Pair(
        "DeepSpeed#7999 GPT-7B-ish", LLAMA_7B, 1, 2048, "mi300x", 8, 697.7, 622.0, False, eager=True
    ),
    # Batch and length are the defaults of torchtitan. Nothing says that copy engines did the work.
    Pair(
        "torchtitan#3105 Llama-3-8B",
        LLAMA_8B,
        1,
        8192,
        "b200,ranks_per_node=4",
        4,
        *_ms(8192, 17158, 17551),
        known=False,
        mixed=True,
    ),
    Pair(
        "torchtitan#3105 Qwen3-32B",
        QWEN3_32B,
        2,
        4096,
        "b200,ranks_per_node=4",
        4,
        *_ms(8192, 4312, 4414),
        known=False,
        mixed=True,
    ),
)


@dataclass
class _Captured:
    """A training step with the joint passes, at two numbers of layers."""

    layers: int
    """Of the whole model."""
    graphs: dict[int, list[fx.GraphModule]]
    """Layers captured -> forward and backward."""

    def ms(self, pipeline: str, target: Target) -> float:
        """Returns the predicted time of the whole model's step, in milliseconds."""
        passes = Pipeline(Pipeline.parse(pipeline).at(Level.FORWARD))
        few, more = (self._ms(layers, passes, target) for layers in LAYERS)
        return few + (self.layers - LAYERS[0]) * (more - few) / (LAYERS[1] - LAYERS[0])

    def _ms(self, layers: int, passes: Pipeline, target: Target) -> float:
        found = 0.0
        for gm in self.graphs[layers]:
            graph = copy_graph(gm).graph
            with use_target(target):
                passes(graph)
            found += Timeline(graph, target).run().total_us / 1e3
        return found


@contextlib.contextmanager
def captured(pair: Pair, pipeline: str = WITH) -> Iterator[_Captured]:
    """Captures a step on fake ranks. The fake world lasts for the block."""
    joint = str(Pipeline(Pipeline.parse(pipeline).at(Level.JOINT)))
    codegen = "eager" if pair.eager else "inductor"
    graphs: dict[int, list[fx.GraphModule]] = {}
    with fake_world(pair.ranks) as mesh, use_fusion(not pair.eager):
        for layers in LAYERS:
            seen: dict[str, fx.GraphModule] = {}

            def observe(log: ObservedGraph, seen: dict[str, fx.GraphModule] = seen) -> None:
                seen[log.kind] = copy_graph(log.graph)

            with compat.FakeTensorMode(allow_non_fake_inputs=True), observe_graphs(observe):
                model = _model(pair, layers)
                halves = (torch.bfloat16, torch.float32) if pair.mixed else (None, None)
                zpasses.shard(model, mesh=mesh, param_dtype=halves[0], reduce_dtype=halves[1])
                words = torch.zeros(pair.batch, pair.tokens, dtype=torch.long)
                capture_step(
                    model,
                    {"input_ids": words, "labels": words},
                    options={"pipeline": joint, "target": pair.target, "codegen": codegen},
                    loss=lambda result: result.loss,
                    fullgraph=True,
                )
            graphs[layers] = [seen["forward"], seen["backward"]]
        yield _Captured(pair.model["num_hidden_layers"], graphs)


def _model(pair: Pair, layers: int) -> torch.nn.Module:
    import transformers

    arguments = {**pair.model, "num_hidden_layers": layers, "use_cache": False}
    kinds = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    config = kinds[arguments.pop("kind")](**arguments)
    build: Any = transformers.AutoModelForCausalLM.from_config
    model: torch.nn.Module = build(config, dtype=torch.float32 if pair.mixed else torch.bfloat16)
    return model


@dataclass(frozen=True)
class Prediction:
    change: float
    """Predicted change of the step time, in percent; negative is faster."""
    tflops: float
    """Peak at which the predicted step without copy engines takes as long as the published one."""


def predicted(pair: Pair) -> Prediction:
    """Predicts the change of a step's time, with the published time without copy engines given."""
    with captured(pair) as step:
        engines = Target.parse(pair.target)

        def without(tflops: float) -> float:
            return step.ms(QUICK, replace(engines, tflops=tflops))

        slow, fast = 1.0, engines.tflops
        assert without(fast) < pair.without_ms < without(slow), "no speed fits the published step"
        while fast / slow > 1.002:
            middle = (slow * fast) ** 0.5
            slow, fast = (middle, fast) if without(middle) > pair.without_ms else (slow, middle)
        target = replace(engines, tflops=slow)
        by_engines = step.ms(WITH, target)
        return Prediction(100 * (by_engines / step.ms(WITHOUT, target) - 1), slow)


# --- micro-benchmarks -----------------------------------------------------------------------------
def together(product: float, collective: float, timing: CollectiveTiming) -> float:
    """Returns how long a product and a collective take that start together."""
    clock = Clock()
    clock.enqueue(0, collective, timing)
    clock.work(product)
    clock.wait(0)
    return clock.now_us


def _beside(compute: float, collective: float) -> CollectiveTiming:
    return CollectiveTiming(0.0, max(compute, 1.0), max(collective, 1.0))


def realised(timing: CollectiveTiming) -> float:
    """Returns the share of the ideal gain of overlap, of a product and a collective of equal
    length."""
    return 2 * 1000 / together(1000, 1000, timing) - 1


GIB = 1 << 30
PLAIN_OVERLAP, DMA_OVERLAP = 0.21, 0.72
"""arXiv:2412.14335, MI300X: share of the ideal gain, on average."""
MORI_AG_MS = 1e3 / 333, 1e3 / 361
"""ROCm/mori#200, 8 x MI355X: gathers of 1 GiB at 333 GiB/s by RCCL and 361 by SDMA engines."""
MORI_AG_SPEEDUP = 1.23, 1.41
"""The same beside an int8 product of 16384^3: both one after another / both together."""
MORI_RS_MS = 1e3 / 326, 1e3 / 381
MORI_RS_SPEEDUP = 1.25, 1.34
"""The same for reduce-scatters. Held out."""
H100_SEQUENTIAL, H100_NCCL, H100_ENGINES = 2.96, 2.02, 1.77
"""pytorch#172714, 8 x H100: milliseconds of a product of 8192^3 and a gather of 64 MiB per rank."""
H100_SLOWDOWN = 1.35
"""pytorch#179937: products take 30 to 40 % longer beside NCCL."""


@dataclass(frozen=True)
class AmdFit:
    compute_slowdown: float
    collective_slowdown: float
    engine_slowdown: float
    """Of a gather by SDMA engines beside products. These do not slow: no compute unit is used."""
    product_ms: float
    """Of mori#200's product, which is not published."""
    link_efficiency: float
    """Of RCCL on MI355X."""
    engines_by_rccl: float
    """Ratio of bandwidths without copies."""


@dataclass(frozen=True)
class NvidiaFit:
    compute_slowdown: float
    engine_compute_slowdown: float
    link_efficiency: float


@functools.cache
def fit_amd() -> AmdFit:
    """Fits the priors of AMD's devices to arXiv:2412.14335 and the gathers of mori#200."""
    by_rccl, by_engines = MORI_AG_MS

    def misses(x: np.ndarray) -> list[float]:
        compute, collective, engine, product = x
        kernels, engines = _beside(compute, collective), _beside(1.0, engine)
        return [
            realised(kernels) - PLAIN_OVERLAP,
            realised(engines) - DMA_OVERLAP,
            (product + by_rccl) / together(product, by_rccl, kernels) - MORI_AG_SPEEDUP[0],
            (product + by_engines) / together(product, by_engines, engines) - MORI_AG_SPEEDUP[1],
        ]

    # A product of 1.1 ms would fit, too: nearly 8 POPS, and the device's peak is 5.
    compute, collective, engine, product = least_squares(misses, [1.3, 1.5, 1.3, 8.0])

    # Of both, 7 / 8 GiB are sent. `dist.all_gather` of a list and mori copy out what has arrived.
    target = TARGETS["mi355x"]
    figures = route_figures(target)

    def ms(route: str, gb_s: float, copied: float) -> float:
        known = replace(figures[route], gb_s=gb_s, copied_full=copied)
        return collective_on_route_us(known, "all_gather", GIB, 8, target) / 1e3

    (rccl,) = least_squares(lambda x: [ms("c10d", x[0], 1.0) - by_rccl], [300.0])
    (mori,) = least_squares(lambda x: [ms("mori", x[0], 1.0) - by_engines], [300.0])
    return AmdFit(compute, collective, engine, product, rccl / target.link_gb_s, mori / rccl)


@functools.cache
def fit_nvidia() -> NvidiaFit:
    """Fits the priors of NVIDIA's devices to pytorch#172714."""

    def misses(x: np.ndarray) -> list[float]:
        gather, engine = x
        product = H100_SEQUENTIAL - gather
        return [
            together(product, gather, _beside(H100_SLOWDOWN, 1.0)) - H100_NCCL,
            together(product, gather, _beside(engine, 1.0)) - H100_ENGINES,
        ]

    gather, engine = least_squares(misses, [1.2, 1.1])
    target = TARGETS["h100"]
    known = route_figures(target)["c10d"]

    def ms(gb_s: float) -> float:
        figures = replace(known, gb_s=gb_s)
        return collective_on_route_us(figures, "all_gather", 512 << 20, 8, target) / 1e3

    (gb_s,) = least_squares(lambda x: [ms(x[0]) - gather], [300.0])
    return NvidiaFit(H100_SLOWDOWN, engine, gb_s / target.link_gb_s)


def least_squares(
    misses: Callable[[np.ndarray], Sequence[float]], start: Sequence[float]
) -> list[float]:
    """Returns where the sum of the squared misses is least, by damped Gauss-Newton steps."""
    x = np.array(start, dtype=float)
    for _ in range(200):
        here = np.array(misses(x))
        steps = 1e-6 * np.maximum(np.abs(x), 1e-3)
        slopes = [
            (np.array(misses(x + step * unit)) - here) / step
            for step, unit in zip(steps, np.eye(len(x)), strict=True)
        ]
        move = np.linalg.lstsq(np.array(slopes).T, -here, rcond=None)[0]
        damping = 1.0
        while damping > 1e-6 and np.sum(np.square(misses(x + damping * move))) > here @ here:
            damping /= 2
        x = x + damping * move
        if np.max(np.abs(damping * move)) < 1e-9:
            break
    return [float(each) for each in x]


def reduce_scatter_speedups(figures: Mapping[str, RouteFigures]) -> tuple[float, float]:
    """Predicts mori#200's speedups of reduce-scatters beside the product, by RCCL and by engines,
    with figures of gathers."""
    product = fit_amd().product_ms
    found = []
    for route, ms in zip(("c10d", "mori"), MORI_RS_MS, strict=True):
        known = figures[route]
        timing = _beside(known.compute_slowdown, known.collective_slowdown)
        found.append((product + ms) / together(product, ms, timing))
    return found[0], found[1]


def main() -> None:
    print(fit_amd(), fit_nvidia(), sep="\n")
    speedups = reduce_scatter_speedups(route_figures(TARGETS["mi355x"]))
    print(f"mori#200 reduce-scatter, speedup by RCCL and by engines: {speedups}")
    print(f"  published {MORI_RS_SPEEDUP}")
    for pair in PAIRS:
        found = predicted(pair)
        print(
            f"{pair.name}: published {pair.published:.1f} %, predicted {found.change:.1f} %, "
            f"{abs(found.change - pair.published):.1f} points off at {found.tflops:.0f} TFLOPS"
            f"{'' if pair.known else ' (assumed configuration)'}"
        )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
