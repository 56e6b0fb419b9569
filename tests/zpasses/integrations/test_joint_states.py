"""How long ranks wait for one that writes a checkpoint."""

from types import SimpleNamespace

import pytest
from torch import nn

from zpasses.integrations import joint_states
from zpasses.ranks.vote import DEFAULT_TIMEOUT_S


@pytest.mark.parametrize(
    ("options", "expected"),
    [(None, DEFAULT_TIMEOUT_S), ({"agreement_timeout_s": 1234.0}, 1234.0)],
    ids=["default", "given"],
)
def test_ranks_wait_as_long_as_the_options_say(monkeypatch, options, expected):
    prepared = SimpleNamespace(options=options)
    monkeypatch.setattr(joint_states, "preparation_of", lambda module: prepared)
    assert joint_states.limit_s(nn.Linear(1, 1)) == expected
