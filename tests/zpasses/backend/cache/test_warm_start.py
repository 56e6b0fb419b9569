"""Warm starts: a program that starts again takes its graphs from the compile cache, with the same
results; a rank whose cache is cold, stale or damaged makes no other rank wait or compute something
else.
"""

import os
import random
import shutil

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.fake_mori import Settings, installed
from tests.zpasses.backend.cache.starts import COLD, Net, on_fresh_ranks, start, starts, words
from zpasses.backend.cache.entry import Entry

pytestmark = [pytest.mark.processes, pytest.mark.inductor]


def test_the_second_start_takes_the_graph_from_the_cache(tmp_path):
    cold, said = starts(tmp_path)
    assert [words(each) for each in said] == [COLD, COLD]
    warm, said = starts(tmp_path)
    assert said == [["hit"], ["hit"]]
    assert warm == cold


def _by_copy_engines(folder):
    fake = Settings()
    target = "mi300x,launch_us=0.01,hop_us=0.01,link_gb_s=0.001"
    with installed(fake):
        return (*start(folder, {"target": target}), len(fake.calls))


@pytest.mark.slow(quick="test_the_second_start_takes_the_graph_from_the_cache")
def test_warm_starts_gather_by_copy_engines_as_cold_ones_do(tmp_path):
    cold, warm = (on_fresh_ranks(_by_copy_engines, tmp_path) for _ in range(2))
    assert [words(each[2]) for each in (*cold, *warm)] == [COLD, COLD, ["hit"], ["hit"]]
    assert [each[:2] for each in warm] == [each[:2] for each in cold]
    assert all(each[3] > 2 for each in (*cold, *warm))  # besides those of the trial


def _without_a_cache_on_the_second_rank(folder):
    return start(folder, {"cache": not dist.get_rank()})


@pytest.mark.slow(quick="test_the_second_start_takes_the_graph_from_the_cache")
def test_a_rank_that_dumps_makes_no_other_rank_wait(tmp_path):
    trained = []
    for number in (1, 2):
        options = {"dump": str(tmp_path / f"dump{number}")}  # of rank 0, which is the default
        ranks = on_fresh_ranks(start, tmp_path / "cache", options)
        assert [words(each[2]) for each in ranks] == [["off"], COLD]
        trained += [each[:2] for each in ranks]
    ranks = on_fresh_ranks(_without_a_cache_on_the_second_rank, tmp_path / "cache")
    assert [words(each[2]) for each in ranks] == [COLD, ["off"]]
    assert len({str(weights) for _, weights in trained + [each[:2] for each in ranks]}) == 1


def like_a_head():
    """The last product makes rows wider, and each is reduced, so they are computed in chunks."""
    Net.width = 3
    Net.forward = lambda self, x: self.down(self.activation(self.up(x))).logsumexp(1).mean()


_ENCODED = {"encode": "int8", "block": "8", "exact_below_kib": "0", "feedback": "on"}
FEEDBACK = f"zero3{{{','.join(f'reduce-grads.{key}={to}' for key, to in _ENCODED.items())}}}"
CONFIGURATIONS = {
    "chunks": ({"pipeline": "chunk-loss{chunks=2},zero3"}, {"patch": like_a_head}),
    "stage 1": ({"zero_stage": 1}, {}),
    "stage 2": ({"zero_stage": 2}, {}),
    "stage 3, regathered": (
        {"pipeline": "gather-params,reduce-grads,reshard-after-forward{keep=nothing}"},
        {},
    ),
    "windows": ({"zero_stage": 2, "backwards_per_step": 2}, {"lengths": (4,) * 6}),
    "evaluation": ({"zero_stage": 2}, {"evaluate": True}),
    "no votes": ({"agreement": False}, {}),
    "first run only": ({"agreement": "first"}, {}),
    "memory budget": ({"memory_budget": "1MiB"}, {}),
    "prefetch": ({"prefetch": 1}, {}),
    "prefetch, windows": ({"prefetch": "auto", "backwards_per_step": 2}, {"lengths": (4,) * 6}),
    "error feedback": ({"pipeline": FEEDBACK}, {}),
    "error feedback, prefetch": ({"pipeline": FEEDBACK, "prefetch": "auto"}, {}),
    "shapes": ({}, {"lengths": (4, 5, 6, 4)}),
    "dynamic": ({}, {"lengths": (4, 5, 6, 4), "dynamic": True}),
}


@pytest.mark.slow(quick="test_the_ranks_to_gather_again_from_are_part_of_the_key")
def test_groups_to_gather_again_from_have_the_names_of_the_first_start(tmp_path):
    how = {"options": {"zero_stage": 3}, "reshard": 2, "ranks": 4}
    cold, said = starts(tmp_path, **how)
    assert [words(each) for each in said] == [COLD] * 4
    warm, said = starts(tmp_path, **how)
    assert said == [["hit"]] * 4
    assert warm == cold


@pytest.mark.slow(quick="test_the_second_start_takes_the_graph_from_the_cache")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_warm_starts_equal_cold_starts(tmp_path, name):
    options, how = CONFIGURATIONS[name]
    cold, _ = starts(tmp_path, options, **how)
    warm, said = starts(tmp_path, options, **how)
    assert {*said[0], *said[1]} == {"hit"}, said
    assert warm == cold
    without, said = starts(tmp_path, {**options, "cache": False}, **how)
    assert {*words(said[0]), *words(said[1])} == {"off"}, said
    assert without == cold
    # Variants are compiled from the stored graphs where their code is missing.
    for path in tmp_path.rglob("entry"):
        for variant in path.parent.rglob("*-*"):
            if variant.is_file():
                variant.unlink()
    again, said = starts(tmp_path, options, **how)
    assert {*said[0], *said[1]} == {"hit"}, said
    assert again == cold


def without_own_entry():
    """On rank 1, the cache is empty."""
    if dist.get_rank() == 1:
        os.environ["ZPASSES_CACHE_DIR"] += "-empty"


@pytest.mark.slow(quick="test_the_second_start_takes_the_graph_from_the_cache")
def test_a_rank_with_a_cold_cache_makes_all_compile(tmp_path):
    cold, _ = starts(tmp_path / "cache")
    other, said = starts(tmp_path / "cache", patch=without_own_entry)
    assert other == cold
    assert said[0][0] == "miss: graph 0/0: not in the compile cache: rank 1 has no entry"
    assert words(said[0]) == words(said[1]) == COLD
    both, said = starts(tmp_path / "cache", patch=without_own_entry)
    assert (both, said) == (cold, [["hit"], ["hit"]])


def hybrid_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@pytest.mark.slow(quick="test_the_second_start_takes_the_graph_from_the_cache")
def test_replicas_take_graphs_from_the_cache_together(tmp_path):
    """A rank without an entry makes the other replica compile, too."""
    kinds = {"mesh": hybrid_mesh, "ranks": 4}
    cold, said = starts(tmp_path / "cache", **kinds)
    assert [words(each) for each in said] == [COLD] * 4
    warm, said = starts(tmp_path / "cache", **kinds)
    assert (warm, said) == (cold, [["hit"]] * 4)
    other, said = starts(tmp_path / "cache", patch=without_own_entry, **kinds)
    assert other == cold
    assert [words(each) for each in said] == [COLD] * 4
    assert "rank 1 has no entry" in said[0][0]


def other_answers():
    """On rank 1, the entry is of a compile in which the ranks agreed on another schedule."""
    original = Entry.fingerprint
    rank = dist.get_rank()
    Entry.fingerprint = lambda self, group: f"{original(self, group)} {rank}"


@pytest.mark.slow(quick="test_the_second_start_takes_the_graph_from_the_cache")
def test_entries_of_different_compiles_are_not_mixed(tmp_path):
    cold, _ = starts(tmp_path)
    other, said = starts(tmp_path, patch=other_answers)
    assert other == cold
    assert "rank 1 has another entry" in said[0][0]
    assert "rank 0 has another entry" in said[1][0]


@pytest.mark.slow(quick="test_the_second_start_takes_the_graph_from_the_cache")
def test_shapes_that_are_compiled_later_need_no_second_question(tmp_path):
    """Ranks may compile for another shape alone: the cache asks nothing then."""
    lengths = {0: (4, 4, 5), 1: (4, 4, 4)}

    cold = on_fresh_ranks(start_with_lengths, tmp_path, lengths)
    warm = on_fresh_ranks(start_with_lengths, tmp_path, lengths)
    assert [each[:2] for each in warm] == [each[:2] for each in cold]
    assert [each[2] for each in warm] == [["hit", "hit"], ["hit"]]


def start_with_lengths(folder, lengths):
    return start(folder, lengths=lengths[dist.get_rank()], dynamic=False)


# --- damage ---------------------------------------------------------------------------------------
def damage(path, draw):
    data, kind = path.read_bytes(), draw.randrange(4)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(data[: draw.randrange(len(data))])
    elif kind == 2:
        at = draw.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
    else:
        path.write_bytes(bytes(draw.randrange(256) for _ in range(100)))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache") / "whole"
    options, how = CONFIGURATIONS["windows"]
    cold, _ = starts(folder, options, **how)
    return folder, cold


@pytest.mark.slow(quick="test_the_second_start_takes_the_graph_from_the_cache")
@pytest.mark.parametrize("seed", range(60))
def test_damaged_files_are_not_used(stored, seed, tmp_path):
    (folder, cold), draw, damaged = stored, random.Random(seed), tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    files = sorted(path for path in damaged.rglob("*") if path.is_file())
    for path in draw.sample(files, draw.choice([1, 1, 2, len(files)])):
        damage(path, draw)
    options, how = CONFIGURATIONS["windows"]
    assert starts(damaged, options, **how)[0] == cold


def another_user():
    os.getuid = lambda: -1


@pytest.mark.slow(quick="test_the_second_start_takes_the_graph_from_the_cache")
def test_files_of_another_user_are_not_read(tmp_path):
    cold, _ = starts(tmp_path)
    other, said = starts(tmp_path, patch=another_user)
    assert other == cold
    assert [words(each)[0] for each in said] == ["miss", "miss"]
