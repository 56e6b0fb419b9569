"""Starts new processes for a measurement, and collects their results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from tqdm import tqdm

_TAIL_LINES = 25


class RankError(RuntimeError):
    """A measurement failed or exceeded its time limit. The message ends with the last output of the
    rank.
    """


def run_ranks(
    module: str,
    task: Mapping[str, Any],
    *,
    ranks: int,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `python -m module TASK RESULT` in `ranks` new processes. Returns their results, by rank.

    A rank reads its task from the JSON file TASK and writes its result as JSON to RESULT. It finds
    the other ranks as under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and computes on
    one thread.

    Args:
        timeout_s: seconds until all processes are killed.
        env: additional environment variables.

    Raises:
        RankError: if a rank fails or the time limit is exceeded.
    """
    with (
        tempfile.TemporaryDirectory(prefix="zpasses-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        task_file = Path(folder, "task.json")
        task_file.write_text(json.dumps(dict(task)))
        # This process hosts the store, as torchrun does, so that no port has to be guessed.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes, logs, results = [], [], []
        for rank in range(ranks):
            results.append(Path(folder, f"result-{rank}.json"))
            logs.append(stack.enter_context(Path(folder, f"log-{rank}.txt").open("w+")))
            command = [sys.executable, "-m", module, str(task_file), str(results[-1])]
            rank_env = {**os.environ, **_environment(rank, ranks, store.port), **(env or {})}
            processes.append(
                subprocess.Popen(
                    command, env=rank_env, stdout=logs[-1], stderr=subprocess.STDOUT, cwd=folder
                )
            )
        try:
            failed = _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed is not None:
            logs[failed].seek(0)
            tail = "".join(logs[failed].readlines()[-_TAIL_LINES:])
            code = processes[failed].returncode
            reason = (
                f"ended with code {code}"
                if code not in (-9, None)
                else f"was killed (time limit {timeout_s:g} s, or out of memory)"
            )
            raise RankError(f"rank {failed} {reason}. Its last output:\n{tail}")
        return [json.loads(path.read_text()) for path in results]


def interleaved(
    peers: Collection[str], rounds: int, run: Callable[[str, int, dict[str, str]], object]
) -> dict[str, str]:
    """Run every peer in each round, so that all of a round run close together in time. A peer that
    fails runs no more, and does not stop the others.

    Args:
        run: measures a peer, given the number of the round, and environment variables with which
            it has caches of its own.

    Returns:
        Peer that failed -> the end of its log.
    """
    failed: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="zpasses-bench-caches-") as caches,
        tqdm(total=len(peers) * rounds) as bar,
    ):
        for number in range(rounds):
            for name in peers:
                bar.set_description(name)
                if name not in failed:
                    try:
                        run(name, number, {"TORCHINDUCTOR_CACHE_DIR": str(Path(caches, name))})
                    except RankError as error:
                        failed[name] = str(error)
                bar.update()
    return failed


def rank_main(measure: Callable[[Any], Any]) -> None:
    """One rank: `python -m module TASK RESULT`. What `measure` returns of the task is written.

    Args:
        measure: may make the default process group, which is destroyed when all ranks are done.
    """
    task_file, result_file = sys.argv[1:]
    task = json.loads(Path(task_file).read_text())
    result = json.dumps(measure(task), default=dataclasses.asdict)
    if dist.is_initialized():
        dist.barrier()
    Path(result_file).write_text(result)
    if dist.is_initialized():
        dist.destroy_process_group()


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",  # torch takes the larger of both
        "TORCH_FR_BUFFER_SIZE": "100000",
    }


def _wait(processes: Sequence[subprocess.Popen[Any]], timeout_s: float) -> int | None:
    """Wait for all processes. Returns the first rank that failed, a rank that still runs at the
    time limit, or None.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return codes.index(None)
        time.sleep(0.05)
