"""Trained parameters whose shards rest on the host, on real gloo ranks: the bits stay the same."""

import pytest

from tests.on_ranks import on_ranks
from tests.zpasses.optim.test_offload_params_on_ranks import CASES, Net, compare


def net(**options):
    """A model with trained and frozen layers, one trained matrix of which is read twice."""
    made = Net(**options)
    made.head.requires_grad_(True)
    made.layers[-1].requires_grad_(True)
    made.layers[-1].scale.requires_grad_(True)
    return made


TRAINED = {"trained": True}


@pytest.mark.inductor
@on_ranks(2, timeout_s=400)
def test_generated_code_has_the_same_bits():
    reloads = compare(TRAINED, steps=2, net=net, codegen="inductor", cache=False)
    assert reloads["forward"] >= 2


@pytest.mark.slow(quick="test_generated_code_has_the_same_bits")
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout_s=400)
def test_runs_have_the_bits_of_those_without(name):
    options = {"net": net, **CASES[name]}
    compare({**TRAINED, **options.pop("offload", {})}, **options)
