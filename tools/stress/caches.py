"""Suite `caches`: runs with drawn options share one compile cache on disk.

Every run must train as the same options do with an empty cache: the same losses to the last bit,
and the same collectives. The caches of some ranks are emptied between runs.
"""

from __future__ import annotations

import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zpasses.testing.ranks import Outcome as RankOutcome
from zpasses.testing.ranks import run_in_fresh_ranks
from zpasses.tools.stress.cache_program import CacheResult, train
from zpasses.tools.stress.cases import CaseResult, Outcome, StressConfig

__all__ = ["OPTIONS", "run"]

OPTIONS: tuple[dict[str, Any], ...] = (
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"pipeline": "gather-params,reduce-grads"},
    {"pipeline": "gather-params,reduce-grads{form=reduce_scatter},reshard-after-forward"},
    {"pipeline": "merge-reads,gather-params,reduce-grads,bucket{form=flat},overlap"},
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
            kind, outcome, detail = _case(random.Random(seed), Path(folder), cold, config.limit_s)
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
    outcomes: list[RankOutcome] = run_in_fresh_ranks(
        train,
        options,
        str(caches),
        ranks=_RANKS,
        timeout_s=_START_S + limit_s,
    )
    if not all(outcome.ok for outcome in outcomes):
        return "\n".join(map(str, outcomes))
    results: list[CacheResult] = [outcome.result for outcome in outcomes]
    for each in results:
        pairs = zip(each.losses, each.unsharded, strict=True)
        if not all(math.isclose(ours, theirs, rel_tol=1e-5) for ours, theirs in pairs):
            return f"losses {each.losses}, but {each.unsharded} unsharded"
    return results
