"""Suite `caches`: runs with drawn options share one compile cache on disk.

Every run must train as the same options do with an empty cache: the same losses to the last bit,
and the same collectives. The caches of some ranks are emptied between runs.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zpasses
from zpasses.testing import world_mesh
from zpasses.testing.ranks import run_in_fresh_ranks
from zpasses.tools.stress.cases import CaseResult, Outcome, StressConfig

OPTIONS: tuple[dict[str, Any], ...] = (
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"pipeline": "gather-params,reduce-grads"},
    {"pipeline": "gather-params,reduce-grads{form=reduce_scatter},reshard-after-forward"},
    {"pipeline": "merge-reads,gather-params,reduce-grads,schedule{plan=one-ahead,mode=flat}"},
    {"zero_stage": 3, "target": "h100"},
    {"zero_stage": 3, "recompute_elementwise": False},
)
"""What is drawn."""

_RUNS = 3
"""Runs per case."""
_RANKS = 2
_START_S = 180.0
"""Seconds for a run beside the limit of its votes."""


def run(seeds: Iterable[int], config: StressConfig) -> Iterator[CaseResult]:
    """Run one case per seed: some runs over one cache."""
    cold: dict[int, list[CacheResult]] = {}
    for seed in seeds:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="zpasses-caches-", dir=config.scratch) as folder:
            kind, outcome, detail = _case(
                random.Random(seed), Path(folder), cold, config.case_limit_s
            )
        yield CaseResult("caches", kind, seed, outcome, detail, time.monotonic() - started)


def _case(
    chance: random.Random, folder: Path, cold: dict[int, list[CacheResult]], limit_s: float
) -> tuple[str, Outcome, str]:
    one_empty = chance.random() < 0.4
    kind = "one rank's cache is empty" if one_empty else "a warm cache"
    history = []
    pair = chance.sample(range(len(OPTIONS)), 2)  # few, so that they come again
    for number in range(_RUNS):
        choice = chance.choice(pair)
        if choice not in cold:
            empty = _train(choice, folder / f"cold-{choice}", limit_s)
            if isinstance(empty, str):
                return kind, "crash", f"{OPTIONS[choice]} with an empty cache: {empty}"
            cold[choice] = empty
        if one_empty and number:
            shutil.rmtree(folder / "warm" / str(chance.randrange(_RANKS)), ignore_errors=True)
        history.append(str(OPTIONS[choice]))
        warm = _train(choice, folder / "warm", limit_s)
        if isinstance(warm, str):
            return kind, "crash", f"{', then '.join(history)}: {warm}"
        if warm != cold[choice]:
            return kind, "wrong", f"{', then '.join(history)}: {warm}, but {cold[choice]} when cold"
    return kind, "equal", ", then ".join(history)


def _train(choice: int, caches: Path, limit_s: float) -> list[CacheResult] | str:
    """The results of all ranks, each with a cache of its own, or what went wrong."""
    options = {**OPTIONS[choice], "agreement_timeout_s": _START_S}
    most_s, folder = _START_S + limit_s, str(caches)
    outcomes = run_in_fresh_ranks(train, options, folder, ranks=_RANKS, timeout_s=most_s)
    if not all(outcome.ok for outcome in outcomes):
        return "\n".join(map(str, outcomes))
    results: list[CacheResult] = [outcome.result for outcome in outcomes]
    for each in results:
        pairs = zip(each.losses, each.unsharded, strict=True)
        if not all(math.isclose(ours, theirs, rel_tol=1e-5) for ours, theirs in pairs):
            return f"losses {each.losses}, but {each.unsharded} unsharded"
    return results


# --- on a rank ------------------------------------------------------------------------------------
_STEPS = 3


@dataclass(frozen=True)
class CacheResult:
    """What one rank saw."""

    losses: tuple[float, ...]
    unsharded: tuple[float, ...]
    """Losses of an unsharded run."""
    ran: Mapping[str, int]
    """Collectives that ran in the last step, by operator."""


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x))) * self.scale
        return F.mse_loss(y, x)


def train(options: Mapping[str, Any], caches: str) -> CacheResult:
    """Train for three steps through Inductor, and count what communicates.

    Args:
        options: of the compile.
        caches: folder with a compile cache per rank.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(caches, str(dist.get_rank())))
    torch.manual_seed(0)
    model, reference = _Model(), _Model()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    unsharded = tuple(_step(reference, optimizer, number) for number in range(_STEPS))
    zpasses.shard(model, mesh=world_mesh())
    compiled = torch.compile(model, backend="zpasses", options=dict(options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = [_step(compiled, optimizer, number) for number in range(_STEPS - 1)]
    with profile(activities=[ProfilerActivity.CPU]) as profiled:  # nothing is compiled any more
        losses.append(_step(compiled, optimizer, _STEPS - 1))
    names = [event.name.partition("::") for event in profiled.events()]
    ran = Counter(name for space, _, name in names if space in ("_c10d_functional", "zpasses"))
    return CacheResult(tuple(losses), unsharded, dict(ran))


def _step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    loss = model(torch.linspace(-1, 1, 24).reshape(4, 6) * (number + 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)
