"""Tests of the examples with several backwards per step, through their own functions."""

import runpy
from pathlib import Path

import pytest

from zpasses.testing import run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.processes


def _accumulate():
    example = runpy.run_path(str(EXAMPLES / "accumulate.py"))
    return [
        example["train"](way, 8, 3, 8, "cpu", codegen="eager", zero_stage=2)
        for way in example["WAYS"]
    ]


@pytest.mark.slow(quick="tests/zpasses/test_accumulation.py")
def test_every_way_to_accumulate_trains_identically():
    for losses in run_on_ranks(_accumulate):
        assert all(each == pytest.approx(losses[0], rel=1e-5) for each in losses)
        assert losses[0][-1] < losses[0][0]


def _grad_cache():
    example = runpy.run_path(str(EXAMPLES / "grad_cache.py"))
    return example["compare"](
        steps=2, batch=4, mini_batch=2, width=16, layers=1, device="cpu", codegen="eager"
    )


@pytest.mark.slow(quick="tests/zpasses/test_accumulation.py")
def test_cached_loss_of_sentence_transformers_trains_like_the_unsharded_model():
    pytest.importorskip("sentence_transformers")
    for ours, plain in run_on_ranks(_grad_cache, timeout_s=240):
        assert ours == pytest.approx(plain, rel=1e-4)
