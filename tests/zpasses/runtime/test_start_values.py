"""When start values count as compared."""

from unittest import mock

import pytest
from torch import nn

import zpasses
from zpasses.errors import AgreementError
from zpasses.runtime import start_values
from zpasses.runtime.layout import layout_of


def test_values_that_were_found_to_differ_are_compared_again(one_rank):
    model = zpasses.shard(nn.Linear(4, 3), mesh=one_rank)
    params = list(model._parameters.values())
    holders = mock.patch.object(
        start_values, "_holders", lambda param: layout_of(param).sharding_groups
    )
    differ = mock.patch.object(start_values, "_compare", side_effect=AgreementError("differ"))
    with holders:
        for _ in range(2):
            with differ, pytest.raises(AgreementError, match="differ"):
                start_values.compare_start_values(params, ["weight", "bias"], 1.0)
        with mock.patch.object(start_values, "_compare") as compared:
            for _ in range(2):
                start_values.compare_start_values(params, ["weight", "bias"], 1.0)
    assert compared.call_count == 1
