"""The suite "dumps": a real dump, damaged, and dumps that cost as much as possible. Every command
that reads dumps must show each, or refuse it with an error, within its bounds of time and memory.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from zpasses.tools.stress.cases import CaseResult, StressConfig
from zpasses.tools.stress.damage import damage
from zpasses.tools.stress.heavy import HEAVY, write_heavy
from zpasses.tools.stress.read_dump import Readers

__all__ = ["run", "start_readers"]

_HEAVY_SHARE = 0.05
_SCALES = (0.1, 0.5, 1.0, 1.0, 3.0)


def start_readers() -> Readers:
    """The process that reads the dumps."""
    return Readers()


def run(seeds: Iterable[int], config: StressConfig) -> Iterator[CaseResult]:
    """One dump per seed."""
    original = config.scratch / "original"
    made = False
    with start_readers() as readers:
        for seed in seeds:
            if not made:
                _make_dump(original)
                made = True
            started = time.perf_counter()
            folder = config.scratch / f"dumps-{seed}"
            (folder / "output").mkdir(parents=True)
            kind, what = _write(folder / "dump", original, random.Random(f"dump {seed}"))
            found = readers.read(folder / "dump", folder / "output", config.limit_s)
            shutil.rmtree(folder)
            detail = f"{what}: {found.detail}"
            seconds = time.perf_counter() - started
            yield CaseResult("dumps", kind, seed, found.outcome, detail, seconds)


def _write(folder: Path, original: Path, draw: random.Random) -> tuple[str, str]:
    """Write the dump of a case. Returns its kind, and its description."""
    if draw.random() < _HEAVY_SHARE:
        name, scale = draw.choice(list(HEAVY)), draw.choice(_SCALES)
        write_heavy(folder, name, scale)
        return "work", f"{name}, scale {scale}"
    shutil.copytree(original, folder)
    return damage(folder, draw)


def _make_dump(folder: Path) -> None:
    # In a process of its own, because the readers' process must not be a fork of one with torch,
    # and this one may have a process group.
    command = [sys.executable, "-m", "zpasses.tools.stress.real_dump", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
