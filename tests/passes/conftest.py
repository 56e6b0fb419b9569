"""Fixtures of tests of passes."""

import pytest


@pytest.fixture
def mi300x(monkeypatch):
    """Plans are made for this target."""
    monkeypatch.setenv("ZPASSES_TARGET", "mi300x")
