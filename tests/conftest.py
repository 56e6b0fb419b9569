"""Fixtures of all tests, and environment variables that must be set before torch is imported. The
processes that tests start inherit them.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Limits end hangs. They must not decide on a busy machine.
os.environ.setdefault("ZPASSES_TEST_PATIENCE", "5")
# No pool of compile workers, each of which would import torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Scalar kernels: Inductor compiles C++ in every process to find out which vector instructions work.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# No collection of garbage after each compile.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import gc
import itertools
import logging
import zlib
from collections import Counter
from unittest import mock

import hypothesis
import pytest
import torch
import torch.distributed as dist

import tests.dynamo  # noqa: F401
from tests.roundtrip import round_trip_of
from zpasses.host import host_pool
from zpasses.pipeline.events import observe_graphs

# torch's structured trace would hide the messages of a failed test.
logging.getLogger("torch.__trace").propagate = False


# `make test` draws a fifth of the examples, and shows the one that fails as it was drawn: shrinking
# it takes minutes. See `drawn_examples` in tests/graphs.py.
# An example may take long on a busy machine, so none has a deadline.
hypothesis.settings.register_profile("all", deadline=None)
DRAWN = (hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate)
hypothesis.settings.register_profile("quick", max_examples=20, deadline=None, phases=DRAWN)
hypothesis.settings.load_profile("all")


class Failures:
    """Names each failed test at once: pytest shows failures at the end of a session, which one that
    is stopped does not reach.
    """

    def __init__(self, terminal):
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message.partition("\n")[0] if crash else report.longreprtext[-200:]
            self.terminal.write_line(f"\nFAILED in {report.when}: {report.nodeid} - {message}")


def pytest_sessionstart(session):
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Failures(terminal))


def pytest_terminal_summary(terminalreporter):
    """Counts skipped tests by reason: what a machine lacks would otherwise go unnoticed."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(str(each.longrepr[2]).removeprefix("Skipped: ") for each in skipped)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"skipped {number}: {reason}")


def pytest_collection_finish():
    """What is loaded stays, so collections of garbage look at the objects of tests only. Tracing
    makes so many of them that the default threshold takes a fifth of the processor time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A slow test names the quick test that comes closest."""
    for item in items:
        for mark in item.iter_markers("slow"):
            quick = mark.kwargs.get("quick")
            if not quick:
                raise pytest.UsageError(f'{item.nodeid}: expected @pytest.mark.slow(quick="...")')


@pytest.fixture(autouse=True)
def destroy_fake_world():
    """A test that fails inside a fake world must not break the next tests, nor leave compiled code
    for them.
    """
    yield
    if dist.is_initialized() and dist.get_backend() == "fake":
        dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_host_memory_of_other_tests():
    """What graphs of earlier tests may still take of the host counts in no other test."""
    with mock.patch.object(host_pool, "_pools", []):
        yield


@pytest.fixture(autouse=True)
def round_trip_of_graphs(request, tmp_path_factory):
    """Graphs that this process compiles are written in the dump format, read and compared:
    every one, and in `make test` one of five.
    """
    folder, numbers = None, itertools.count(zlib.crc32(request.node.nodeid.encode()))
    step = max(1, 100 // hypothesis.settings().max_examples)

    def observe(log):
        nonlocal folder
        if next(numbers) % step:
            return
        folder = folder or tmp_path_factory.mktemp("dump")
        round_trip_of(log, folder)

    with observe_graphs(observe):
        yield
