"""Fixtures of tests of graphs."""

import pytest

from zpasses.testing import fake_world


@pytest.fixture
def two_ranks():
    """A fake world of two ranks."""
    with fake_world(2):
        yield
