"""Draws models, their graphs and pipelines from random numbers, to test passes on.

`zpasses.testing.strategies` has the same for hypothesis.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zpasses.testing.capture import TracedJoint, trace_partitionable
from zpasses.testing.graphs import ParamSpec

__all__ = ["PASS_OPTIONS", "DrawnModel", "draw_model", "draw_pipeline"]


@dataclass(frozen=True)
class DrawnModel:
    """Parameters that are each multiplied with an input of their own shape. Any shape works, and
    all values stay small integers.
    """

    params: tuple[ParamSpec, ...]
    interleaved: bool = False
    """Whether the reads of one parameter lie between those of others."""
    chained: bool = False
    """Whether each output also depends on the one before it."""

    def inputs(self, rank: int, world_size: int) -> list[Tensor]:
        """For each parameter the shard of one rank, and an input of the full shape."""
        found = []
        for param in self.params:
            dtype = param.param_dtype or param.dtype
            found.append(param.shard(rank, world_size))
            found.append(torch.zeros(param.shape, dtype=dtype, requires_grad=param.frozen))
        return found

    @property
    def shards(self) -> dict[int, str]:
        """Position of each shard among the inputs -> name of the parameter."""
        return {2 * i: f"p{i}" for i in range(len(self.params))}

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        order = [(i, turn) for i, param in enumerate(self.params) for turn in range(param.reads)]
        if self.interleaved:
            order.sort(key=lambda pair: pair[1])
        outputs: list[Tensor] = []
        for i, turn in order:
            output = self.params[i].read(values[2 * i]) * values[2 * i + 1]
            output = output * (turn + 1) if turn else output
            if self.chained and outputs:
                output = output + outputs[-1].sum().to(output.dtype)
            outputs.append(output)
        return tuple(outputs)

    def traced(self, rank: int, world_size: int) -> TracedJoint:
        """The joint graph of one rank, which can be partitioned. Call it inside `fake_world`."""
        return trace_partitionable(self, self.inputs(rank, world_size), self.shards)


def draw_model(draw: random.Random) -> DrawnModel:
    """A model of one to four parameters, some of unusual shapes: scalars, no rows, fewer rows than
    ranks, three dimensions. At least one parameter is trained or its input is.
    """
    low = draw.random() < 0.4  # 8 bits of precision: sums must stay small
    params = tuple(_draw_param(draw, low) for _ in range(draw.randint(1, 4)))
    return DrawnModel(params, draw.random() < 0.5, not low and draw.random() < 0.4)


def _draw_param(draw: random.Random, low: bool) -> ParamSpec:
    shape: tuple[int, ...] = draw.choice(
        [
            (),
            (draw.randint(0, 9),),
            (draw.randint(0, 9), draw.randint(0, 3)),
            (draw.randint(1, 9), draw.randint(1, 3)),
            (draw.randint(1, 5), 2, 2),
        ]
    )
    dtypes = [None, torch.bfloat16, torch.float64] if low else [None, torch.float64]
    return ParamSpec(
        shape,
        param_dtype=draw.choice(dtypes),
        reduce_dtype=draw.choice([None, torch.float32, torch.float64]),
        frozen=draw.random() < 0.2,
        reads=draw.randint(1, 2 if low else 3),
    )


# --- pipelines ------------------------------------------------------------------------------------
PASS_OPTIONS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "merge-reads": {"max_hold_mb": ("0", "0.0001", "1")},
    "reduce-grads": {"form": ("auto", "reduce_scatter", "all_reduce")},
    "bucket": {
        "cap_mb": ("0", "0.0001", "0.0003", "25"),
        "mode": ("auto", "coalesced", "flat"),
        "memory_budget": ("0%", "5%", "1000%", "1MiB"),
        "plan_for_overlap": ("true", "false"),
    },
    "schedule": {
        "memory_budget": ("0%", "10%", "1000%", "1MiB"),
        "mode": ("auto", "coalesced", "flat"),
    },
    "sdma": {"min_mb": ("0", "0.0001", "16"), "min_hidden": ("0", "0.5")},
    "flatten-on-device": {"tier": ("auto", "plain", "host"), "device": ("cpu",)},
}
"""Pass -> option -> values to draw from, in addition to leaving it out."""

_ORDER = (
    "merge-reads",
    "gather-params",
    "reduce-grads",
    "reshard-after-forward",
    "cache-params",
    "flatten-on-device",
    "schedule",
    "bucket",
    "overlap",
    "defer-reduction",
    "sdma",
)
"""A sensible order of the passes of zpasses."""


def draw_pipeline(draw: random.Random, known: Sequence[str]) -> str:
    """The text of a pipeline: some passes with some options. Most are in a sensible order, and some
    are not, or repeat a pass.

    Args:
        known: names of the passes and named pipelines to draw from, such as `catalogue()`.
    """
    kept = [name for name in known if draw.random() < 0.6]
    rank = {name: at for at, name in enumerate(_ORDER)}
    kept.sort(key=lambda name: rank.get(name, len(rank) * draw.random()))
    if draw.random() < 0.2:
        draw.shuffle(kept)
    if kept and draw.random() < 0.2:
        kept.insert(draw.randrange(len(kept) + 1), draw.choice(kept))
    return ",".join(name + _draw_options(draw, PASS_OPTIONS.get(name, {})) for name in kept)


def _draw_options(draw: random.Random, options: Mapping[str, Sequence[str]]) -> str:
    given = [
        f"{key}={draw.choice(values)}" for key, values in options.items() if draw.random() < 0.5
    ]
    return f"{{{','.join(given)}}}" if given else ""
