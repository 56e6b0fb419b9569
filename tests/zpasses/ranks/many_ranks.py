"""What 1,024 ranks ask of the store: programs for `simulated_world`, and a table of their figures.

python -m tests.zpasses.ranks.many_ranks
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Sequence
from types import SimpleNamespace

from tests.zpasses.ranks.simulated_world import GROUP, SimulatedWorld, Traffic
from zpasses import compat
from zpasses.ranks.agree import adopt, exchange
from zpasses.ranks.compared_collectives import CallSequence, compare_sequences
from zpasses.ranks.current_compile import compiling
from zpasses.ranks.edit_log import EditLog
from zpasses.ranks.failures import report_failure
from zpasses.ranks.mesh_comparison import compare_shard_calls
from zpasses.ranks.run_order import RunEvent, check_run_event
from zpasses.ranks.vote import store_barrier
from zpasses.runtime.run_checks import check_conflicts

FEW, MANY = 8, 1024
LIMIT_S = 10.0

PARAMS = [f"layers.{layer}.{part}.weight" for layer in range(80) for part in ("q", "k", "v", "o")]
PLAN = [[4 * at, 4 * at + 1, 4 * at + 2, 4 * at + 3] for at in range(80)]


@functools.cache
def lines_of(collectives):
    return CallSequence(
        [f"all_gather(bfloat16[8192, 8]) of {param}" for param in PARAMS[:collectives]],
        [f"model.py:{at}: self.linear(x)" for at in range(collectives)],
        [param.rpartition(".")[0] for param in PARAMS[:collectives]],
        [[f"bfloat16[8192, 8] of {param}"] for param in PARAMS[:collectives]],
    )


# --- what ranks do --------------------------------------------------------------------------------
def barrier(rank):
    store_barrier(GROUP, "a barrier", LIMIT_S)


def adopts_one_plan(rank):
    with compiling("0/0", PARAMS):
        return adopt([GROUP], "the schedule", PARAMS, PLAN)


def adopts_plans_of_two_kinds(rank):
    plan = PLAN if rank % 2 else PLAN[1:]
    with compiling("0/0", PARAMS):
        return adopt([GROUP], "the schedule", PARAMS, plan)


def merges_numbers(rank):
    with compiling("0/0", PARAMS):
        return exchange(GROUP, "free memory", 10**10 - rank, LIMIT_S, merge=min)


def compares_collectives(rank):
    with compiling("0/0", PARAMS):
        compare_sequences({GROUP: lines_of(80)}, "0/0")


def compares_collectives_of_two_kinds(rank):
    with compiling("0/0", PARAMS):
        collectives = 79 if rank >= 5 and rank % 2 else 80
        compare_sequences({GROUP: lines_of(collectives)}, "0/0")


def checks_a_run(rank):
    edits = EditLog()
    edits.count, edits.digest = 64, 1
    edits.last.extend((f":{param}", "add_", 1) for param in PARAMS[:64])
    check_run_event(GROUP, RunEvent.of("graph 0/0 forward"), LIMIT_S, edits=edits)


def checks_an_optimizer_step(rank):
    edits = EditLog()
    check_conflicts()
    check_run_event(GROUP, RunEvent.of("AdamW.step()"), LIMIT_S, edits=edits)


def mesh(ranks):
    return SimpleNamespace(
        ndim=1,
        size=lambda dim: ranks,
        mesh_dim_names=("shard",),
        get_group=lambda dim: compat.process_group(GROUP),
    )


def writes_notes(rank):
    compare_shard_calls(mesh(8), {"param_dtype": "bfloat16", "reduce_dtype": "float32"})
    check_conflicts()


def rank_3_fails(rank):
    if rank != 3:
        barrier(rank)
        return
    try:
        raise ValueError("told to fail")
    except ValueError as error:
        report_failure([GROUP], error, "compiling graph 0/0")
        raise


@functools.cache
def measured_once(program, ranks):
    """A measurement that tests share."""
    return measured(program, ranks)


def measured(program, ranks, **kwargs):
    world = SimulatedWorld(ranks)
    world.run(barrier)  # the first vote of a group also counts its ranks
    return world.run(program, **kwargs)


ALL = [
    barrier,
    adopts_one_plan,
    adopts_plans_of_two_kinds,
    merges_numbers,
    compares_collectives,
    compares_collectives_of_two_kinds,
    checks_a_run,
    checks_an_optimizer_step,
    writes_notes,
    rank_3_fails,
]


def main() -> None:
    """Print a row for each program, in Markdown. Times are processor time."""
    print("| what | first of 8 | first of 1,024 | its time | others of 8 | of 1,024 | all 1,024 |")
    print(f"| {' | '.join(7 * ['---'])} |")
    for program in ALL:
        few, many = measured(program, FEW), measured(program, MANY)
        cells = [
            program.__name__.replace("_", " "),
            _text(few.traffic[:1]),
            _text(many.traffic[:1]),
            f"{many.traffic[0].seconds * 1e3:.1f} ms",
            _text(few.traffic[1:]),
            _text(many.traffic[1:]),
            f"{many.total_round_trips:,}, {many.total_bytes / 2**20:.2f} MiB",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def _text(traffic: Sequence[Traffic]) -> str:
    """Median round trips and KiB of some ranks."""
    trips = statistics.median(each.round_trips for each in traffic)
    return f"{trips:g}, {statistics.median(each.total_bytes for each in traffic) / 1024:.1f} KiB"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
