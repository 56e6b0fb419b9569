"""Train a byte-level GPT with ZeRO and torch.compile, and compare with one unsharded process.

Two ranks on this machine:
    python examples/train_gpt.py --ranks 2
One rank per GPU (NCCL or RCCL):
    torchrun --nproc-per-node 8 examples/train_gpt.py --device cuda
Two nodes:
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/train_gpt.py --device cuda

Three lines of `train_sharded` add ZeRO: init_device_mesh, zpasses.shard and
torch.compile(backend="zpasses"). The rest is a plain training program: a model without any sharding
code, batches, AdamW, and a report of speed, memory and communication.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import zpasses
import zpasses.inspect
from zpasses.graph.queries import collectives
from zpasses.pipeline.events import ObservedGraph, observe_graphs

BYTES = 256
"""The vocabulary: one token per byte."""

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest accepted difference between the two loss curves, in nats, by the dtype of compute.

The two runs compute the same sums in another order: gradients per rank that are then averaged,
instead of gradients over the whole batch. The difference is about one unit in the last place (1e-7
of a float32 gradient, 4e-3 of a bfloat16 one), and training amplifies it. Measured with the
defaults: 5e-7 nats over 120 steps in float32, 6e-3 over 60 steps in bfloat16. A learning rate at
the edge of stability amplifies far more (3e-3 instead of 1e-3: 1e-2 nats, whether sharding or a
perturbation of 1e-7 caused it). Compare at a learning rate that trains well.
"""

DIVERGED = 3
"""Exit status if the curves differ by more than the tolerance."""


# --- the model: plain PyTorch ---------------------------------------------------------------------
@dataclass(frozen=True)
class GPTConfig:
    layers: int
    width: int
    heads: int
    seq: int
    tied: bool
    """Whether the output head shares the weight of the embedding."""


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Pre-norm decoder over bytes. Takes inputs and targets, both (batch, seq), and returns the
    mean loss in nats per byte.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, config.width)
        self.positions = nn.Embedding(config.seq, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)
        self.apply(self._init)
        for block in self.blocks:  # the residual stream adds 2 x layers terms: keep its variance
            for last in (block.attention.out, block.mlp[2]):
                nn.init.normal_(last.weight, std=0.02 / (2 * config.layers) ** 0.5)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


def build_model(args: argparse.Namespace, seed: int, device: torch.device) -> GPT:
    """Build the model on the CPU from the seed, so every rank and every device has the same
    weights.
    """
    torch.manual_seed(seed)
    return GPT(GPTConfig(args.layers, args.width, args.heads, args.seq, args.tied)).to(device)


# --- the data -------------------------------------------------------------------------------------
def read_text(path: Path | None) -> bytes:
    """Returns the file, or the reference documentation that comes with Python: about 0.7 MB of
    English.
    """
    return path.read_bytes() if path else "\n\n".join(pydoc_data.topics.topics.values()).encode()


@dataclass(frozen=True)
class Batches:
    """Random windows of a text. A batch depends only on the step, so every rank knows the whole
    batch and takes its rows.
    """

    text: Tensor
    """uint8, (bytes,)"""
    batch: int
    """Windows per step, all ranks together."""
    seq: int
    seed: int

    def __call__(
        self, step: int, rank: int, ranks: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Returns the inputs and targets of one rank: int64, (batch / ranks, seq)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.seq, (self.batch,), generator=generator).chunk(
            ranks
        )[rank]
        windows = self.text[starts[:, None] + torch.arange(self.seq + 1)].long().to(device)
        return windows[:, :-1], windows[:, 1:]


# --- training -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Usage:
    """Memory and communication of one step on one rank."""

    resting_bytes: int
    """Bytes of parameters and optimizer state, which stay between steps."""
    peak_bytes: int
    """Peak bytes of a step above that: gathered parameters, activations, gradients."""
    counted: dict[str, int]
    """Calls of functional collectives that ran, by operator."""


@dataclass(frozen=True)
class Run:
    """One training run on one rank."""

    losses: list[float]
    """Mean over the whole batch per step, in nats per byte."""
    compile_s: float
    """Time of the first step, less that of an average step."""
    tokens_per_s: float | None
    """Tokens per second of all ranks together, without the first step (compile) and the last
    (measured); None if no step is left.
    """
    usage: Usage


def train(
    model: nn.Module,
    forward: Callable[[Tensor, Tensor], Tensor],
    batches: Batches,
    args: argparse.Namespace,
    *,
    rank: int,
    ranks: int,
    device: torch.device,
    label: str,
) -> Run:
    """Train `model` by calling `forward`. The loop is the same for the sharded and the unsharded
    model.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True)
    warmup = max(args.steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda number: min((number + 1) / warmup, 1.0)
    )
    losses: list[Tensor] = []

    def step(number: int) -> None:
        loss = forward(*batches(number, rank, ranks, device))
        loss.backward()
        # The norm is that of the whole gradient, also if the gradient is sharded.
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())

    clock = [time.perf_counter()]

    def tick() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        clock.append(time.perf_counter())
        return clock[-1] - clock[-2]

    with tqdm(total=args.steps, desc=label, unit="step", disable=rank != 0) as bar:

        def show() -> None:
            bar.set_postfix(loss=f"{losses[-1].item():.3f}", refresh=False)
            bar.update()

        first_s, plain_s, plain_steps = 0.0, 0.0, max(args.steps - 2, 0)
        if args.steps > 1:
            step(0)
            show()
            first_s = tick()
        for number in range(1, args.steps - 1):
            step(number)
            show()
        plain_s = tick()
        usage = measure(lambda: step(args.steps - 1), model, optimizer, device)
        show()
        last_s = tick()
    step_s = plain_s / plain_steps if plain_steps else last_s if args.steps > 1 else 0.0
    return Run(
        losses=mean_over_ranks(losses, ranks),
        compile_s=max((first_s or last_s) - step_s, 0.0),
        tokens_per_s=plain_steps * args.batch * args.seq / plain_s if plain_steps else None,
        usage=usage,
    )


def mean_over_ranks(losses: Sequence[Tensor], ranks: int) -> list[float]:
    total = torch.stack(list(losses)).double()
    if ranks > 1:
        dist.all_reduce(total)
    return (total / ranks).tolist()


def train_sharded(
    args: argparse.Namespace, batches: Batches, device: torch.device
) -> tuple[Run, list[Usage], Counter[tuple[str, int]]]:
    """Train with ZeRO. Returns this rank's run, the usage of every rank, and the planned
    collectives: (operator, bytes) -> calls.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    model = build_model(args, args.seed, device)
    reduce_dtype = None if args.param_dtype == torch.float32 else torch.float32
    zpasses.shard(model, mesh=mesh, param_dtype=args.param_dtype, reduce_dtype=reduce_dtype)
    options: dict[str, object] = {"codegen": args.codegen}
    options |= {"pipeline": args.pipeline} if args.pipeline else {"zero_stage": args.zero_stage}
    options |= {"dump": str(args.dump)} if args.dump else {}
    compiled = torch.compile(model, backend="zpasses", fullgraph=True, options=options)

    planned: Counter[tuple[str, int]] = Counter()

    def observe(log: ObservedGraph) -> None:
        # Forward and backward are the graphs that run; "joint" is both before partitioning.
        if log.kind in ("forward", "backward"):
            planned.update((each.op, each.nbytes) for _, each in collectives(log.graph))

    with observe_graphs(observe):
        run = train(
            model,
            compiled,
            batches,
            args,
            rank=rank,
            ranks=ranks,
            device=device,
            label=f"ZeRO-{args.zero_stage}, {ranks} ranks",
        )
    usages: list[Usage | None] = [None] * ranks
    dist.all_gather_object(usages, run.usage)
    return run, [usage for usage in usages if usage is not None], planned


def train_unsharded(args: argparse.Namespace, batches: Batches, device: torch.device) -> Run:
    """Run the same training in one process: same weights, same batches, plain PyTorch."""
    model = build_model(args, args.reference_seed, device)

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        if args.param_dtype == torch.float32:
            return model(inputs, targets)
        cast = {name: param.to(args.param_dtype) for name, param in model.named_parameters()}
        return torch.func.functional_call(model, cast, (inputs, targets))

    compiled = torch.compile(forward, fullgraph=True) if args.codegen == "inductor" else forward
    return train(
        model, compiled, batches, args, rank=0, ranks=1, device=device, label="unsharded, 1 process"
    )


# --- measuring ------------------------------------------------------------------------------------
def measure(
    step: Callable[[], None],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> Usage:
    """Run one step under the profiler. Memory comes from the recorded allocations, collectives from
    the recorded operators.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=device.type == "cpu"
    ) as profiled:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    namespaces = ("_c10d_functional", "zpasses")
    called = (event.get("name", "").partition("::") for event in events)
    names = (name for namespace, _, name in called if namespace in namespaces)
    return Usage(
        resting_bytes=resting_bytes(model, optimizer),
        peak_bytes=torch.cuda.max_memory_allocated(device) - before
        if device.type == "cuda"
        else peak_of_trace(events),
        counted=dict(
            Counter(name for name in names if name != "wait_tensor" and not name.startswith("_"))
        ),
    )


def peak_of_trace(events: Iterable[dict]) -> int:
    """Peak bytes that the traced code held above those at its start."""
    held = peak = 0
    for event in sorted(
        (event for event in events if event.get("name") == "[memory]"),
        key=lambda event: event["ts"],
    ):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def resting_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's parameters and optimizer state."""
    tensors = [
        *model.parameters(),
        *(
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ),
    ]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


# --- reporting ------------------------------------------------------------------------------------
def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


def show_run(run: Run, usages: Sequence[Usage], planned: Counter[tuple[str, int]]) -> None:
    speed = f"{run.tokens_per_s:,.0f} tokens/s" if run.tokens_per_s else "too few steps to tell"
    print(
        f"\nloss {run.losses[0]:.3f} -> {run.losses[-1]:.3f} · {speed} · compile "
        f"{run.compile_s:.1f} s"
    )
    rows = [
        (rank, mib(usage.resting_bytes), mib(usage.peak_bytes)) for rank, usage in enumerate(usages)
    ]
    print(
        "\n"
        + tabulate(
            rows,
            headers=["rank", "parameters + optimizer", "peak of a step above that"],
            stralign="right",
        )
    )
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for (op, nbytes), count in planned.items():
        calls[op] += count
        sent[op] += count * nbytes
    total = ("together", sum(calls.values()), mib(sum(sent.values())))
    print(
        "\n"
        + tabulate(
            [*((op, calls[op], mib(sent[op])) for op in calls), total],
            headers=["collective", "calls per step", "bytes per step"],
        )
    )
    counted, clipping = (
        sum(usages[0].counted.values()),
        sum(usages[0].counted.values()) - sum(calls.values()),
    )
    print(
        f"Bytes are those that one rank sends in. The last step made {counted} calls: these, and "
        f"{clipping} to clip the gradient."
    )


def show_comparison(run: Run, reference: Run, stage: int) -> None:
    steps = len(run.losses)
    shown = sorted({round(i * (steps - 1) / 10) for i in range(11)})
    rows = [
        (
            step,
            run.losses[step],
            reference.losses[step],
            abs(run.losses[step] - reference.losses[step]),
        )
        for step in shown
    ]
    headers = ["step", f"loss, ZeRO-{stage}", "loss, unsharded", "difference"]
    print("\n" + tabulate(rows, headers=headers, floatfmt=("d", ".6f", ".6f", ".1e")))


def largest_difference(run: Run, reference: Run) -> float:
    """Returns the largest difference; infinite if a loss is not a number, so that NaN never passes
    the comparison.
    """
    differences = [abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True)]
    return max(value if value == value else float("inf") for value in differences)


# --- the program ----------------------------------------------------------------------------------
def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the options. Errors are reported before any process starts."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="processes to start (default: 2); leave it out under torchrun",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cpu communicates through gloo, cuda through NCCL or RCCL",
    )
    parser.add_argument(
        "--zero-stage",
        type=int,
        choices=(1, 2, 3),
        default=3,
        help="ZeRO stage",
    )
    parser.add_argument(
        "--pipeline",
        help="passes to run instead of the stage's; 'zpasses passes' lists them",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--codegen",
        choices=("inductor", "eager"),
        help="code generator (default: inductor if it works here, else eager)",
        default=None,
    )
    parser.add_argument(
        "--param-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of compute and gathers",
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128, help="bytes per window")
    parser.add_argument(
        "--batch", type=int, default=16, help="windows per step, all ranks together"
    )
    parser.add_argument(
        "--tied",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="share the embedding with the output head",
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=1e-3,
        help="learning rate after a warm-up over the first tenth of the steps",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    parser.add_argument(
        "--text",
        type=Path,
        help="file to train on (default: Python's own documentation)",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train unsharded as well and compare",
    )
    parser.add_argument(
        "--reference-seed",
        type=int,
        help="seed of the unsharded run; if it differs from --seed, the comparison must fail",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        help="seconds to wait for another rank before giving up",
    )
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="also write the results to this file"
    )
    parser.add_argument(
        "--dump",
        type=Path,
        metavar="DIR",
        help="also dump what every pass did to this folder, with report.html",
    )
    parser.set_defaults(text=None, ranks=None, pipeline=None)
    args = parser.parse_args(argv)

    under_torchrun = "WORLD_SIZE" in os.environ
    ranks = (
        int(os.environ["WORLD_SIZE"]) if under_torchrun else 2 if args.ranks is None else args.ranks
    )
    if under_torchrun and args.ranks not in (None, ranks):
        parser.error(
            f"--ranks {args.ranks}, but torchrun started {ranks}; leave --ranks out under torchrun."
        )
    args.ranks = ranks
    args.param_dtype = getattr(torch, args.param_dtype)
    args.reference_seed = args.seed if args.reference_seed is None else args.reference_seed
    problem = problem_with(args, under_torchrun)
    if problem:
        parser.error(problem)
    if args.codegen is None:
        missing = missing_for_inductor() if args.device == "cpu" else None
        args.codegen = "eager" if missing else "inductor"
        if missing and not under_torchrun:
            print(
                f"Running with --codegen eager. {missing[0].upper()}{missing[1:]} to use Inductor.",
                file=sys.stderr,
            )
    return args


def problem_with(args: argparse.Namespace, under_torchrun: bool) -> str | None:
    """Returns what is wrong with the options and what to do about it, or None."""
    for name in ("ranks", "steps", "layers", "width", "heads", "seq", "batch"):
        if getattr(args, name) < 1:
            return f"--{name} {getattr(args, name)}; expected 1 or more."
    for name in ("lr", "timeout"):
        if not 0 < getattr(args, name) < float("inf"):
            return f"--{name} {getattr(args, name)}; expected a number above 0."
    if args.width % args.heads:
        near = [
            args.width // args.heads * args.heads or args.heads,
            (args.width // args.heads + 1) * args.heads,
        ]
        widths = " or ".join(map(str, dict.fromkeys(near)))
        return (
            f"--width {args.width} is not divisible by --heads {args.heads}; use --width {widths}."
        )
    if args.batch % args.ranks:
        near = -(-args.batch // args.ranks) * args.ranks
        return (
            f"--batch {args.batch} is not divisible by the number of ranks, {args.ranks}; "
            f"use --batch {near}."
        )
    if args.text is not None and not args.text.is_file():
        return f"--text {args.text}: there is no such file."
    length = len(read_text(args.text))
    if length <= args.seq:
        return (
            f"--text {args.text} has {length} bytes; --seq {args.seq} needs {args.seq + 1} or "
            "more. Use a longer text or a smaller --seq."
        )
    if args.json is not None and not args.json.parent.is_dir():
        return f"--json {args.json}: there is no folder {args.json.parent} to write it to."
    if args.device == "cuda":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks))
        if not torch.cuda.is_available():
            return (
                "--device cuda, but this PyTorch sees no GPU; use --device cpu, or install a CUDA "
                "or ROCm build."
            )
        if here > torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            return f"{here} ranks on this machine, which has {gpus} GPUs; start one rank per GPU."
    elif args.codegen == "inductor" and missing_for_inductor():
        return f"--codegen inductor: {missing_for_inductor()}, or use --codegen eager."
    return None


def missing_for_inductor() -> str | None:
    """Returns what keeps Inductor from generating CPU code, as what to do about it; None if it
    works.
    """
    if " " in torch.__file__:
        folder = Path(torch.__file__).parent
        return (
            f"Inductor cannot link against PyTorch in a folder with spaces ({folder}); install it "
            "elsewhere"
        )
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        return (
            "Inductor needs a C++ compiler for the CPU, and none was found; install g++ or set CXX"
        )
    return None


def launch(args: argparse.Namespace) -> int:
    """Start the ranks on this machine: torchrun runs this file again, once per rank. Returns the
    exit status.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler announces itself otherwise
    try:
        torchrun(["--standalone", f"--nproc-per-node={args.ranks}", __file__, *sys.argv[1:]])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != DIVERGED:  # which rank 0 has explained
            print(
                f"rank {rank} failed first, with exit status {failure.exitcode}; the others were "
                "stopped.",
                file=sys.stderr,
            )
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


@record
def run_rank(args: argparse.Namespace) -> int:
    """Run one rank. Rank 0 reports and, when all ranks are done, trains unsharded and compares.
    Returns the exit status.
    """
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    text = torch.frombuffer(bytearray(read_text(args.text)), dtype=torch.uint8)
    batches = Batches(text, args.batch, args.seq, args.seed)
    # With a time limit, a rank that stops makes the others fail instead of leaving them waiting.
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo",
        timeout=timedelta(seconds=args.timeout),
        device_id=device if args.device == "cuda" else None,
    )
    rank = dist.get_rank()
    if rank == 0:
        print(
            f"{len(text):,} bytes of text, {args.ranks} ranks on {args.device}, "
            f"ZeRO-{args.zero_stage}, codegen {args.codegen}",
            flush=True,
        )
    run, usages, planned = train_sharded(args, batches, device)
    dist.destroy_process_group()
    if rank != 0:
        return 0

    show_run(run, usages, planned)
    result = {
        "options": {
            name: str(value) if isinstance(value, (Path, torch.dtype)) else value
            for name, value in vars(args).items()
        },
        "torch": torch.__version__,
        **asdict(run),
        "usage": [asdict(usage) for usage in usages],
        "collectives": [
            {"op": op, "nbytes": nbytes, "calls": calls}
            for (op, nbytes), calls in sorted(planned.items())
        ],
    }
    status = 0
    if args.compare:
        torch.compiler.reset()
        torch.set_num_threads(
            int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * torch.get_num_threads()
        )  # the other ranks are done
        print("\nThe same training, unsharded:", flush=True)
        reference = train_unsharded(args, batches, device)
        show_comparison(run, reference, args.zero_stage)
        difference, tolerance = largest_difference(run, reference), TOLERANCES[args.param_dtype]
        result |= {
            "reference": asdict(reference),
            "largest_difference": difference,
            "tolerance": tolerance,
        }
        comparison = (
            f"The curves differ by at most {difference:.1e} nats; rounding explains up to "
            f"{tolerance:g} in {args.param_dtype}."
        )
        if difference <= tolerance:
            print(f"\n{comparison}")
        else:
            print(f"\n{comparison} They are not the same training.", file=sys.stderr)
            status = DIVERGED
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    if args.dump is not None:
        page = zpasses.inspect.open(args.dump).write_html(args.dump / "report.html")
        print(f"\nWhat every pass did to the graphs is in {page}; open it in a browser.")
        print(
            f"In the terminal: zpasses list {args.dump}; zpasses memory {args.dump}; "
            "docs/inspecting.md has more."
        )
    return status


def main() -> int:
    args = parse_args()
    return run_rank(args) if "RANK" in os.environ else launch(args)


if __name__ == "__main__":
    sys.exit(main())
