"""Runs the bodies of tests on real gloo ranks."""

import contextlib
import functools
import importlib.util

import pytest
import torch.distributed as dist

import tests.dynamo  # noqa: F401  # on the ranks, too
from zpasses import compat
from zpasses.testing import run_on_ranks


def on_ranks(ranks, **options):
    """Run the body of a test function on `ranks` ranks: `@on_ranks(2)`, or with other options of
    `run_on_ranks`, `@on_ranks(2, timeout_s=600)`.

    The test gets the mark `processes`. pytest's process makes the parameters and fixtures, and
    pickles them. What belongs to one process, such as `monkeypatch`, a body makes for itself.
    """

    def decorate(body):
        @functools.wraps(body)
        def test(**values):
            run_on_ranks(_body, test, values, ranks=ranks, **options)

        return pytest.mark.processes(test)

    return decorate


@contextlib.contextmanager
def rank_0_before_rank_1():
    """Inside, rank 1 begins once rank 0 has left."""
    store, key = compat.default_store(), "rank 0 has left"
    if dist.get_rank() == 1:
        store.wait([key])
        store.delete_key(key)
    try:
        yield
    finally:
        if dist.get_rank() == 0:
            store.set(key, "")


def needs(package):
    """A mark that skips a test if a package is missing. On a rank, `pytest.skip` is a failure."""
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"needs {package}")


def _body(test, values):
    test.__wrapped__(**values)  # functions are pickled by name, which finds the wrapper
