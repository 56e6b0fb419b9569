"""Training steps that the suite "schedule" captures: models of real width with few layers, on fake
tensors and a fake process group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

import zpasses
from zpasses import compat
from zpasses.backend.partition_plan import StepPlan
from zpasses.backend.step_trials import StepTrials
from zpasses.cost.time.route_figures import planned_routes
from zpasses.cost.time.target import Target, use_target
from zpasses.pipeline.events import ObservedGraph, listen, observe_graphs
from zpasses.testing import copy_graph, fake_world
from zpasses.testing.step_graphs import capture_step


@dataclass(frozen=True)
class ModelShape:
    """A decoder of Hugging Face's transformers, by its config."""

    kind: str
    """"llama" or "mixtral"."""
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    layers: int
    experts: int = 0


MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        "llama-8b": ModelShape("llama", 4096, 14336, 32, 8, 128256, 8),
        "llama-70b": ModelShape("llama", 8192, 28672, 64, 8, 128256, 4),
        "mixture": ModelShape("mixtral", 2048, 512, 16, 2, 151936, 4, 512),
    }
)
"""Widths of Llama 3 8B and 70B, and of Qwen3-Next 80B-A3B with plain attention. Its experts are
stacked, and as many as the ranks of the largest world, so none is padded."""


@dataclass
class Step:
    """Forward and backward of one training step, as partitioned, before any schedule."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    memory_budget: str | None = None
    """Memory budget of the passes that plan a schedule; None leaves them their own."""

    def copied(self) -> Step:
        """Returns a copy to rewrite. Fake values are shared."""
        return replace(self, forward=copy_graph(self.forward), backward=copy_graph(self.backward))

    @property
    def graphs(self) -> tuple[fx.Graph, fx.Graph]:
        return self.forward.graph, self.backward.graph


@dataclass
class CapturedStep:
    """One training step as the backend partitions it."""

    lean: Step
    """Backward finds the parameters that do not raise the peak."""
    planned: dict[str, dict[str, Step]]
    """Name of the target -> name of the plan -> step."""


@contextlib.contextmanager
def captured_step(
    shape: ModelShape,
    ranks: int,
    tokens: int,
    pipeline: str,
    targets: Sequence[Target],
    plans: Mapping[str, Callable[[StepTrials], StepPlan]],
) -> Iterator[CapturedStep]:
    """Captures a step of one sequence per rank in bfloat16. The fake world lasts for the block.

    Args:
        shape: of the model.
        ranks: size of the world.
        tokens: length of the sequence.
        pipeline: passes at the joint level, such as those of stage 3.
        targets: hardware to plan for.
        plans: name -> what the step saves and keeps.
    """
    seen: dict[str, fx.GraphModule] = {}
    planned: dict[str, dict[str, Step]] = {}

    def partition(trials: StepTrials) -> None:
        for target in targets:
            with use_target(target):
                ours = trials.again(bool(planned_routes(target)))
                steps = planned.setdefault(target.name, {})
                for name, make in plans.items():
                    plan = make(ours)
                    steps[name] = Step(*ours.graphs(plan.choice), plan.memory_budget)

    def observe(log: ObservedGraph) -> None:
        seen[log.kind] = copy_graph(log.graph)

    with fake_world(ranks) as mesh:
        with (
            compat.FakeTensorMode(allow_non_fake_inputs=True),
            observe_graphs(observe),
            listen(StepTrials, partition),
        ):
            model = _model(shape, tokens)
            zpasses.shard(model, mesh=mesh)
            options = {"pipeline": pipeline, "recompute_elementwise": True}
            words = torch.zeros(1, tokens, dtype=torch.long)
            given = {"input_ids": words, "labels": words}
            capture_step(
                model, given, options=options, loss=lambda result: result.loss, fullgraph=True
            )
        yield CapturedStep(Step(seen["forward"], seen["backward"]), planned)


def _model(shape: ModelShape, tokens: int) -> torch.nn.Module:
    import transformers

    common: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "num_hidden_layers": shape.layers,
        "max_position_embeddings": max(tokens, 8192),
        "use_cache": False,
    }
    experts: dict[str, Any] = {
        "num_local_experts": shape.experts,
        "experts_implementation": "grouped_mm",
    }
    config: Any = (
        transformers.LlamaConfig(**common)
        if shape.kind == "llama"
        else transformers.MixtralConfig(**common, **experts)
    )
    build: Any = transformers.AutoModelForCausalLM.from_config
    model: torch.nn.Module = build(config, dtype=torch.bfloat16)
    return model
