"""The failure of a test on ranks, which pytest shows without a traceback of its own."""

from __future__ import annotations

from typing import Any

import pytest

from zpasses.testing.ranks.outcome import RanksError, describe_failure

__all__ = ["RanksFailed", "describe_failure"]


_Failed: Any = pytest.fail.Exception


class RanksFailed(_Failed, RanksError):  # type: ignore[misc]  # noqa: N818 - as pytest names them
    """A test failed on at least one rank. The message holds the ranks' own tracebacks."""

    def __init__(self, message: str) -> None:
        _Failed.__init__(self, message, pytrace=False)


RanksFailed.__module__ = "builtins"  # as pytest's outcomes, so that summaries show a short name
