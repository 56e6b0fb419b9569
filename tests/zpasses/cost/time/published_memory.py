"""Published steps with recomputation, copies to the host or chunks of the loss, and what the cost
model says of them.

    python -m tests.zpasses.cost.time.published_memory

prints all predictions. Nothing is run: each step is captured on fake ranks and planned for its
target. A model is captured with a part of its layers and of its vocabulary, so that all its times
and bytes are that part of the whole model's, but for latencies.

The published step without is given, and only the change is predicted. For recomputation it is the
difference between the kernels of both forms. Where kernels hide copies, the peak operations per
second of the target are lowered until all kernels take as long as the published step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import zpasses
from examples.capture_llama import tensor_parallel
from tests.zpasses.cost.time.published import LLAMA_8B
from zpasses import compat
from zpasses.backend.step_trials import StepTrials
from zpasses.cost.plan.kept_params import StepProblem
from zpasses.cost.plan.offloaded_values import SavedValue, idle_at_peaks
from zpasses.cost.time.clock import Clock
from zpasses.cost.time.roofline import durations_us, ring_collective_us
from zpasses.cost.time.step_time import Timeline, host_copy_timing
from zpasses.cost.time.target import TARGETS, Target, use_target
from zpasses.graph.host_copies import HostCopy
from zpasses.graph.queries import nbytes, saved_inputs, value_of
from zpasses.pipeline.base_pass import Level
from zpasses.pipeline.events import listen
from zpasses.pipeline.pipeline import Pipeline
from zpasses.testing import fake_world
from zpasses.testing.step_graphs import capture_step

STAGE_3 = "merge-reads{max_hold_mb=1},gather-params,reduce-grads,reshard-after-forward,schedule"
GIB = 1 << 30
aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
COMPUTE = frozenset({aten.mm.default, ATTENTION})
"""What selective checkpointing saves: products and attention."""

T = TypeVar("T")


# --- capture --------------------------------------------------------------------------------------
def on_trials(
    build: Callable[[DeviceMesh], tuple[nn.Module, dict[str, Tensor]]],
    look: Callable[[StepTrials], T],
    target: Target,
    mesh: dict[str, int],
    *,
    mixed: bool = True,
    inductor: Mapping[str, object] = MappingProxyType({}),
) -> T:
    """Captures a training step on fake ranks, and returns what a function says of its trials.

    Args:
        build: returns a model that returns its loss, and its arguments.
        look: is called while the fake world lasts, with `target` as the current target.
        target: hardware.
        mesh: name and size of each dimension. Parameters are sharded over the first.
        mixed: whether the shards are fp32, gathered in bf16 and reduced in fp32. Else all is bf16.
        inductor: settings of Inductor.
    """
    found: list[T] = []

    def observe(trials: StepTrials) -> None:
        with use_target(target):
            found.append(look(trials))

    with fake_world(math.prod(mesh.values())):
        whole = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        with (
            compat.FakeTensorMode(allow_non_fake_inputs=True),
            listen(StepTrials, observe),
        ):
            with _default_dtype(torch.float32 if mixed else torch.bfloat16):
                model, inputs = build(whole)
            dtypes = (torch.bfloat16, torch.float32) if mixed else (None, None)
            zpasses.shard(
                model, mesh=whole[next(iter(mesh))], param_dtype=dtypes[0], reduce_dtype=dtypes[1]
            )
            capture_step(
                model,
                inputs,
                options={
                    "pipeline": STAGE_3,
                    "target": str(target),
                    "inductor": dict(inductor),
                },
                loss=lambda result: getattr(result, "loss", result),
                fullgraph=True,
            )
    return found[0]


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def checkpointed(
    layers: Collection[nn.Module], saved: Callable[[object, Any], bool] | None
) -> None:
    """Has layers recomputed in backward, but for the results of the calls that `saved` accepts: it
    is given an operator and its arguments. None recomputes nothing.
    """
    if saved is None:
        return

    def policy(context: object, op: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if saved(op, args):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for layer in layers:
        layer.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, layer.forward, use_reentrant=False, context_fn=contexts
        )


def selective(op: object, args: Any) -> bool:
    return op in COMPUTE or any(each in str(op) for each in ("all_reduce", "all_to_all"))


def attention(op: object, args: Any) -> bool:
    return op is ATTENTION


def nothing(op: object, args: Any) -> bool:
    return False


def llama(
    mesh: DeviceMesh,
    config: dict[str, Any],
    part: int,
    batch: int,
    tokens: int,
    saved: Callable[[object, Any], bool] | None,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Builds a part of a model, one `part`-th of its layers and of its vocabulary."""
    import transformers

    given = {**config, "use_cache": False, "max_position_embeddings": tokens}
    for name in ("num_hidden_layers", "vocab_size"):
        given[name] //= part
    kinds = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    build: Any = transformers.AutoModelForCausalLM.from_config
    model = build(kinds[given.pop("kind")](**given), dtype=torch.get_default_dtype())
    if "tp" in (mesh.mesh_dim_names or ()):
        tensor_parallel(model, mesh["tp"])
    checkpointed(model.model.layers, saved)
    words = torch.zeros(batch, tokens, dtype=torch.long)
    return model, {"input_ids": words, "labels": words}


def kernels_ms(graphs: Collection[fx.GraphModule], target: Target) -> float:
    return sum(sum(durations_us(each.graph.nodes, target)) for each in graphs) / 1e3


def slowed_to(graphs: Collection[fx.GraphModule], ms: float, target: Target) -> Target:
    """Lowers a target's peak until the kernels of a step take so many milliseconds."""
    slow, fast = 1.0, target.tflops
    assert kernels_ms(graphs, target) < ms, "no speed fits the published step"
    while fast / slow > 1.001:
        middle = (slow * fast) ** 0.5
        late = kernels_ms(graphs, replace(target, tflops=middle)) > ms
        slow, fast = (middle, fast) if late else (slow, middle)
    return replace(target, tflops=round(fast, 1))


def _untouched(trials: StepTrials) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns forward and backward, and leaves the trials as they are."""
    return trials.partition(compat.clone_graph_module(trials.gm), 1.0)


@dataclass(frozen=True)
class Step:
    """A predicted step of the whole model."""

    ms: float
    """Of its kernels, and of the exchanges between experts, which it awaits at once."""
    saved_gib: float
    """What forward saves for backward, without parameters."""


def _step(trials: StepTrials, part: float, target: Target) -> Step:
    graphs = _untouched(trials)
    saved = saved_inputs(graphs[1].graph.nodes)
    held = sum(nbytes(value_of(each)) for each in saved if each.name not in _shards(graphs[0]))
    exchanged = sum(
        ring_collective_us("all_to_all", nbytes(value_of(node)), 8, target)
        for each in graphs
        for node in each.graph.find_nodes(op="call_function", target=ALL_TO_ALL)
    )
    return Step(part * (kernels_ms(graphs, target) + exchanged / 1e3), part * held / GIB)


def _shards(forward: fx.GraphModule) -> set[str]:
    return {node.name for node in forward.graph.find_nodes(op="placeholder")}


# --- recomputation --------------------------------------------------------------------------------
@dataclass(frozen=True)
class Change:
    """Published and predicted changes, in percent of the published figure before."""

    published: float
    predicted: float

    @property
    def off(self) -> float:
        return abs(self.predicted - self.published)


def _percent(before: float, after: float) -> float:
    return 100 * (after / before - 1)


def recomputed(
    mesh: dict[str, int],
    tokens_per_s: tuple[float, float],
    gib: tuple[float, float],
    *,
    slowed: bool = False,
) -> tuple[Change, Change]:
    """torchtitan#3429, Llama 3 8B: from selective checkpointing to the recomputation of all, in
    time and in memory. Figures per device; ranks of one "tp" group share 8,192 tokens.

    Args:
        mesh: ranks per dimension.
        tokens_per_s, gib: published, before and after.
        slowed: whether products take all of the published time that the model does not have.
    """
    part, tokens, layers = 8, 8192, 32
    before_ms, after_ms = (1e3 * tokens / mesh.get("tp", 1) / each for each in tokens_per_s)
    build = functools.partial(llama, config=LLAMA_8B, part=part, batch=1, tokens=tokens)

    def first(trials: StepTrials) -> tuple[Target, Step]:
        target = TARGETS["h100"]
        if slowed:
            target = slowed_to(_untouched(trials), before_ms / part, target)
        return target, _step(trials, part, target)

    target, before = on_trials(
        functools.partial(build, saved=selective), first, TARGETS["h100"], mesh
    )
    after = on_trials(
        functools.partial(build, saved=nothing),
        lambda trials: _step(trials, part, target),
        target,
        mesh,
    )
    return _changes(before, after, layers, (before_ms, after_ms), gib)


def _changes(
    before: Step, after: Step, layers: int, ms: tuple[float, float], gib: tuple[float, float]
) -> tuple[Change, Change]:
    """Returns the changes of time and of memory, with the published `ms` and `gib` of both."""
    # What one layer computes again is in memory at the peak of either form.
    gained = (before.saved_gib - after.saved_gib) * (layers - 1) / layers
    return (
        Change(_percent(*ms), 100 * (after.ms - before.ms) / ms[0]),
        Change(_percent(*gib), -100 * gained / gib[0]),
    )


class LatentAttentionLayer(nn.Module):
    """A layer of DeepSeek V3 with its shared expert, and with routed experts if a group of ranks
    that divide them is given. torchtitan#4153 needs none, as all its forms compute them
    identically. Without `q_rank`, queries are one product, as in the model of 16B.
    """

    def __init__(
        self,
        width: int = 7168,
        heads: int = 128,
        q_rank: int = 1536,
        shared: int = 2048,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(size) for size in (width, 512, width))
        self.wq = _linear(width, heads * 192)
        if q_rank:
            self.wq = nn.Sequential(
                _linear(width, q_rank), nn.RMSNorm(q_rank), _linear(q_rank, heads * 192)
            )
        self.wkv_a, self.wkv_b = _linear(width, 576), _linear(512, heads * 256)
        self.wo = _linear(heads * 128, width)
        self.gate, self.up, self.down = (
            _linear(*sizes) for sizes in ((width, shared), (width, shared), (shared, width))
        )
        self.routed = RoutedExperts(width, group) if group else None

    def forward(self, x: Tensor) -> Tensor:
        before, of_kv, after = self.norms
        normed = before(x)
        q = self.wq(normed).unflatten(-1, (self.heads, 192)).transpose(1, 2)
        latent, rope = self.wkv_a(normed).split((512, 64), -1)
        kv = self.wkv_b(of_kv(latent)).unflatten(-1, (self.heads, 256)).transpose(1, 2)
        k, v = kv.split(128, -1)
        k = torch.cat((k, rope.unsqueeze(1).expand(-1, self.heads, -1, -1)), -1)
        mixed = F.scaled_dot_product_attention(q, k, F.pad(v, (0, 64)), is_causal=True)[..., :128]
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        normed = after(x)
        made = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + (made if self.routed is None else made + self.routed(normed))


class RoutedExperts(nn.Module):
    """64 experts, eight on each of eight ranks, which exchange tokens before and after. Each token
    goes to six, and all receive equally many.
    """

    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.gate = group, _linear(width, 64)
        self.up, self.down = (
            nn.Parameter(torch.empty(8, *sizes)) for sizes in ((width, 2 * 1408), (1408, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).float().softmax(-1).topk(6)
        order = chosen.flatten().argsort()
        sent = self._exchange(tokens[order // 6]).unflatten(0, (8, 8, -1)).transpose(0, 1)
        gate, up = torch.bmm(sent.flatten(1, 2), self.up).chunk(2, -1)
        done = torch.bmm(F.silu(gate) * up, self.down).unflatten(1, (8, -1)).transpose(0, 1)
        back = self._exchange(done.flatten(0, 2))[order.argsort()].unflatten(0, (-1, 6))
        return torch.bmm(weights.unsqueeze(1), back.float()).to(x.dtype).view_as(x)

    def _exchange(self, tokens: Tensor) -> Tensor:
        return all_to_all_single_autograd(tokens.contiguous(), None, None, self.group)


def _linear(inward: int, outward: int) -> nn.Module:
    return nn.Linear(inward, outward, bias=False)


class LatentAttentionModel(nn.Module):
    def __init__(self, layers: int, width: int = 7168, **layer: Any) -> None:
        super().__init__()
        self.first = _linear(width, width)
        self.layers = nn.ModuleList(LatentAttentionLayer(width, **layer) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


SELECTORS = {"none": (), "wo": ((16384, 7168),), "wkv_a": ((16384, 7168), (7168, 576))}
"""Shapes of the weights whose products the forms of torchtitan#4153 save."""


def selected(form: str, layers: int = 2) -> Step:
    """Predicts the step of torchtitan#4153 with a selector, without what all forms share."""

    def saved(op: object, args: Any) -> bool:
        return op is aten.mm.default and tuple(args[1].shape) in SELECTORS[form]

    def build(mesh: DeviceMesh) -> tuple[nn.Module, dict[str, Tensor]]:
        model = LatentAttentionModel(layers)
        checkpointed(model.layers, saved)
        return model, {"x": torch.zeros(8, 4096, 7168, dtype=torch.bfloat16)}

    return on_trials(
        build,
        lambda trials: _step(trials, 61 / layers, TARGETS["b200"]),
        TARGETS["b200"],
        {"dp": 256},
        mixed=False,
    )


def experts_recomputed(captured: int = 2) -> tuple[Step, tuple[Change, Change]]:
    """torchtitan#3429, DeepSeek V3 16B, 4 x 4,096 tokens per rank, as its configuration has them.
    Of its 27 layers, the first has no experts, and counts as the others. Both published forms keep
    the results of attention and compute the products of routed experts again.

    Returns:
        The step before, and the changes of time and of memory.
    """

    layers = 27

    def step(saved: Callable[[object, Any], bool]) -> Step:
        def build(mesh: DeviceMesh) -> tuple[nn.Module, dict[str, Tensor]]:
            model = LatentAttentionModel(
                captured, 2048, heads=16, q_rank=0, shared=2816, group=mesh.get_group()
            )
            checkpointed(model.layers, saved)
            return model, {"x": torch.zeros(4, 4096, 2048, dtype=torch.bfloat16)}

        return on_trials(
            build,
            lambda trials: _step(trials, layers / captured, TARGETS["h100"]),
            TARGETS["h100"],
            {"dp": 8},
            mixed=False,
        )

    before = step(selective)
    ms = (1e3 * 4 * 4096 / 8325, 1e3 * 4 * 4096 / 7444)
    return before, _changes(before, step(attention), layers, ms, (84.78, 52.02))


# --- copies to the host ---------------------------------------------------------------------------
SELECTIVE_GIB, SELECTIVE_MS = 52.44, 1e3 * 8192 / 7890
"""torchtitan#3429: Llama 3 8B on 8 x H100 with selective checkpointing."""
OFFLOADED = {5.0: (-9.9, 1.0), 8.0: (-16.6, 5.0), 10.0: (-20.4, 7.0), 17.5: (-33.4, 28.0)}
"""torchtitan#3522: GiB on the host -> change of memory and of time, in percent. Of the first three,
an upper bound of the loss of throughput is published. The text has "GB", and `cpu_offload.py` takes
1024**3 bytes for each. The last row has no such limit: 33.4 % of 52.44 GiB are 17.5 GiB."""
FITTED_GB_S = 31.5
"""Bandwidth of copies in each direction, with which the last of them takes as long as published."""


def on_host(
    step: StepProblem, values: Sequence[SavedValue], limit_bytes: int, host_bytes: int
) -> list[SavedValue]:
    """Returns the values that are idle at a peak above a limit, those first that are idle longest,
    as far as they fit the host.
    """
    chosen = list[SavedValue]()
    idle = idle_at_peaks(step, values, limit_bytes)
    for each in sorted(idle, key=lambda one: (-one.held_us, -one.nbytes, one.name)):
        if sum(one.nbytes for one in (*chosen, each)) <= host_bytes:
            chosen.append(each)
    return chosen


def offloaded(rows: Collection[tuple[float, float]]) -> list[tuple[float, float]]:
    """Predicts the changes of memory and of time, in percent.

    Args:
        rows: GB/s of copies in each direction, and GiB on the host: of those values that
            are idle longest.
    """
    part, h100 = 4, TARGETS["h100"]
    passes = Pipeline(Pipeline.parse("schedule").at(Level.FORWARD))

    def total_us(graphs: Collection[fx.GraphModule], target: Target) -> float:
        copies = [compat.clone_graph_module(each) for each in graphs]
        for each in copies:
            passes(each.graph)
        return sum(Timeline(each.graph, target).run().total_us for each in copies)

    def look(trials: StepTrials) -> list[tuple[float, float]]:
        slowed = slowed_to(_untouched(trials), SELECTIVE_MS / part, h100)
        trials.host_bytes = 1 << 60
        found = []
        for gb_s, gib in rows:
            target = replace(slowed, host_out_gb_s=gb_s, host_in_gb_s=gb_s)
            with use_target(target):
                full = trials.trial(1.0)
                leaving = on_host(full.step, trials.saved_values(1.0), 0, int(gib * GIB / part))
                less = trials.offloading(full, leaving)
                fallen = part * (less.step.peak_bytes() - full.step.peak_bytes()) / GIB
                change = _percent(total_us(full.graphs, target), total_us(less.graphs, target))
            found.append((100 * fallen / SELECTIVE_GIB, change))
        return found

    build = functools.partial(
        llama, config=LLAMA_8B, part=part, batch=1, tokens=8192, saved=selective
    )
    return on_trials(build, look, h100, {"dp": 8})


QWEN3_14B = {
    "kind": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_hidden_layers": 40,
}


def states_beside_the_step(
    gb: float, step_s: float, links: Collection[tuple[float, bool]]
) -> list[float]:
    """Predicts the seconds of DeepSpeed#8186: states leave from the start of forward, and come back
    from the start of backward.

    Args:
        gb: GB (10^9 bytes) of states.
        step_s: published step without copies.
        links: links to the host: GB/s in a direction, and whether both directions work at a time.
    """
    part = 8
    build = functools.partial(llama, config=QWEN3_14B, part=part, batch=4, tokens=2048, saved=None)

    def look(trials: StepTrials) -> list[float]:
        graphs = _untouched(trials)
        target = slowed_to(graphs, 1e3 * step_s / part, TARGETS["h200"])
        return [part * kernels_ms([each], target) * 1e3 for each in graphs]

    forward, backward = on_trials(build, look, TARGETS["h200"], {"dp": 8}, mixed=False)
    found = []
    for gb_s, both_ways in links:
        clock = Clock()
        link = replace(TARGETS["h200"], host_out_gb_s=gb_s, host_in_gb_s=gb_s)
        out, back = (host_copy_timing(HostCopy(way, int(gb * 1e9)), link) for way in ("out", "in"))
        clock.enqueue(0, out.duration_us, out)
        clock.work(forward)
        if not both_ways:
            back = replace(back, channel=out.channel)
        clock.enqueue(1, back.duration_us, back)
        clock.work(backward)
        clock.wait(1)
        found.append(clock.now_us / 1e6)
    return found


LENGTHS = {
    2048: ((1.85, 0.0), (2.50, None)),
    3072: ((5.41, 0.0), (7.81, None)),
    3328: ((7.38, 11.7), (8.67, 22.0)),
    3584: ((9.76, 20.5), (10.80, 23.7)),
    4096: ((11.65, 26.8), (11.17, 27.0)),
}
"""DeepSpeed#8255: tokens -> seconds and GB on the host, as planned by DeepSpeed and with all out.
None: not published."""


def kernels_of_lengths(lengths: Collection[int]) -> dict[int, float]:
    """Predicts the time of the kernels of DeepSpeed#8255 and #8186 with so many tokens, as a
    multiple of that with 2,048. A layer and a 40th of the vocabulary stand for the model.
    """

    def of(tokens: int) -> float:
        build = functools.partial(
            llama, config=QWEN3_14B, part=40, batch=4, tokens=tokens, saved=None
        )
        target = TARGETS["h200"]
        return on_trials(
            build,
            lambda trials: kernels_ms(_untouched(trials), target),
            target,
            {"dp": 8},
            mixed=False,
        )

    found = {tokens: of(tokens) for tokens in {2048, *lengths}}
    return {tokens: each / found[2048] for tokens, each in found.items()}


def left_unexplained(times: dict[int, float]) -> dict[int, tuple[float, float]]:
    """Returns the seconds of both steps of each length of `LENGTHS` that neither the kernels take,
    which `times` compares with those of 2,048 tokens, nor copies out and back.
    """
    target, found = TARGETS["h200"], {}
    for tokens, steps in LENGTHS.items():
        rest = []
        for seconds, gb in steps:
            # Bytes grow with the tokens in the three published figures.
            moved = 22.0 * tokens / 3328 if gb is None else gb
            copies = moved / target.host_out_gb_s + moved / target.host_in_gb_s
            rest.append(seconds - LENGTHS[2048][0][0] * times[tokens] - copies)
        found[tokens] = rest[0], rest[1]
    return found


class Block(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up, self.down = _linear(hidden, intermediate), _linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """24 layers with 1.61 GB of inputs, as in accelerate#4175, which are computed again. The first
    is wider, so that the peak is in its recomputation, where no other input is left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(1024, 49152 if at == 0 else 4096) for at in range(24))
        checkpointed(self.layers, nothing)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def refused() -> tuple[float, int, int]:
    """Returns GB of layer inputs that may leave, and bytes of them that leave with a budget of the
    peak, and with one that is a little less.
    """

    def look(trials: StepTrials) -> tuple[float, int, int]:
        trials.host_bytes = 1 << 60
        trial = trials.trial(1.0)
        values = trials.saved_values(1.0)
        peak = trial.step.peak_bytes()
        less = on_host(trial.step, values, peak - (1 << 20), trials.host_bytes)
        return (
            sum(each.nbytes for each in values) / 1e9,
            trials.fastest(peak).host_bytes,
            sum(each.nbytes for each in less),
        )

    def build(mesh: DeviceMesh) -> tuple[nn.Module, dict[str, Tensor]]:
        return Blocks(), {"x": torch.zeros(1, 32768, 1024, dtype=torch.bfloat16)}

    return on_trials(build, look, TARGETS["h100"], {"dp": 8}, mixed=False)


# --- chunks of the loss ---------------------------------------------------------------------------
CHUNKS = {
    1: (36.208, 9.186),
    4: (38.518, 5.219),
    8: (40.396, 3.124),
    16: (43.687, 2.077),
    32: (48.708, 1.553),
    64: (56.699, 1.356),
}
"""pytorch#124480: chunks -> ms, GB, on one device. Its kind is not stated."""


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = _linear(768, 128256)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels)


def chunked(chunks: int, *, by_torch: bool = True) -> tuple[float, float]:
    """Predicts milliseconds and GB with so many chunks: those that Inductor's `auto_chunker` makes,
    as in the published steps, or ours.
    """

    def build(mesh: DeviceMesh) -> tuple[nn.Module, dict[str, Tensor]]:
        x = torch.zeros(32768, 768, dtype=torch.bfloat16, requires_grad=True)
        return Head(), {"x": x, "labels": torch.zeros(32768, dtype=torch.long)}

    def look(trials: StepTrials) -> tuple[float, float]:
        trial = (trials if by_torch else trials.in_chunks(chunks)).trial(1.0)
        return kernels_ms(trial.graphs, TARGETS["h100"]), trial.step.peak_bytes() / 1e9

    settings = {
        "auto_chunker.enable": by_torch and chunks > 1,
        "auto_chunker.num_chunk": chunks,
    }
    return on_trials(build, look, TARGETS["h100"], {"dp": 2}, mixed=False, inductor=settings)


RECOMPUTED: tuple[tuple[str, dict[str, int], tuple[float, float], tuple[float, float]], ...] = (
    ("torchtitan#3429, FSDP8", {"dp": 8}, (7890, 7006), (52.44, 32.07)),
    ("torchtitan#3429, FSDP4 and TP2", {"dp": 4, "tp": 2}, (6607, 5933), (30.92, 20.70)),
)
SELECTED_S = {"none": 15.9674, "wo": 15.7065, "wkv_a": 15.6379}
SELECTED_GIB = {"none": 96.596, "wo": 126.115, "wkv_a": 128.189}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, mesh, rates, gib in RECOMPUTED:
        print(name, "time, memory:", *recomputed(mesh, rates, gib))
        print("  if products take all of the time:", recomputed(mesh, rates, gib, slowed=True)[0])
    print("torchtitan#3429, DeepSeek V3 16B, step before, time, memory:", *experts_recomputed())
    for form in SELECTORS:
        print("torchtitan#4153", form, selected(form))
    rows = [
        (speed, gib) for speed in (TARGETS["h100"].host_out_gb_s, FITTED_GB_S) for gib in OFFLOADED
    ]
    for row, changes in zip(rows, offloaded(rows), strict=True):
        print("torchtitan#3522, (GB/s, GiB), % of memory and of time:", row, changes)
    links = ((20.0, True), (20.0, False), (22.2, False))
    for link, took in zip(links, states_beside_the_step(22.2, 1.89, links), strict=True):
        print("DeepSpeed#8186, GB/s and both ways at a time, s:", link, took)
    times = kernels_of_lengths((*LENGTHS, 2400))
    print("DeepSpeed#8255 and #8186, tokens: kernels / those of 2,048:", times)
    print("DeepSpeed#8255, tokens: seconds left, planned, all out:", left_unexplained(times))
    print("accelerate#4175, GB that may leave, bytes that leave:", refused())
    for chunks in CHUNKS:
        print(
            "pytorch#124480, chunks, (ms, GB), of chunk-loss:",
            chunks,
            chunked(chunks),
            chunked(chunks, by_torch=False),
        )


if __name__ == "__main__":
    main()
