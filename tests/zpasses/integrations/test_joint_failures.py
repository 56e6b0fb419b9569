"""How long ranks wait for one that writes a checkpoint."""

import pytest
from torch import nn

from zpasses.integrations import joint_failures
from zpasses.ranks.vote import DEFAULT_TIMEOUT_S


class Prepared:
    def __init__(self, options):
        self.options = options


@pytest.mark.parametrize(
    ("options", "expected"),
    [(None, DEFAULT_TIMEOUT_S), ({"agreement_timeout_s": 1234.0}, 1234.0)],
    ids=["default", "given"],
)
def test_ranks_wait_as_long_as_the_options_say(monkeypatch, options, expected):
    inner = nn.Linear(1, 1)
    monkeypatch.setattr(
        joint_failures,
        "preparation_of",
        lambda module: Prepared(options) if module is inner else None,
    )
    assert joint_failures.limit_s(nn.Sequential(inner)) == expected
