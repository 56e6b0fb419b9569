"""A pytest session inside a rank process. It rewrites assertions, imports test modules as the
session's pytest does, and reports a test's outcome and traceback in pytest's form.

Only the body of a test runs here. Fixtures, marks and hooks of the project belong to the session
that sends the test.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from zpasses.testing.rank_host import PytestHost
from zpasses.testing.ranks.outcome import ReportedFailureError

__all__ = ["RANK_FIXTURES", "RankTest", "run_below_pytest", "run_test"]

RANK_FIXTURES = ("monkeypatch",)
"""Fixtures that every rank makes for itself."""


@dataclass(frozen=True)
class RankTest:
    """A test function as the ranks find and call it."""

    nodeid: str
    path: str
    """The test's file."""
    cls: str
    """The qualified name of its class; "" for a function of the module."""
    function: str
    values: dict[str, bytes]
    """The pickled values of its fixtures and parameters, by name."""
    made_here: tuple[str, ...]
    """Its fixtures out of `RANK_FIXTURES`."""


def run_below_pytest(host: PytestHost, calls: Callable[[], None]) -> None:
    """Start a pytest session that collects nothing, and run `calls` in it."""
    arguments = [
        *("-c", os.devnull, f"--rootdir={host.root}", "--noconftest", "-s"),
        *(f"--import-mode={host.import_mode}", "-o", f"python_files={' '.join(host.python_files)}"),
        *(word for plugin in _UNUSED_PLUGINS for word in ("-p", f"no:{plugin}")),
    ]
    # Options and plugins of the session that started the rank do not hold here.
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # Markers are registered in the project's session, which warns about unknown ones.
    warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)
    session = _Session(host, calls)
    code = pytest.main(arguments, plugins=[session])
    if not session.ran:
        raise RuntimeError(f"pytest did not start in a rank: {code!r}")


_UNUSED_PLUGINS = ("cacheprovider", "terminal", "faulthandler", "junitxml", "unraisableexception")


@dataclass
class _Session:
    """The plugin that takes the place of collection and of the loop over tests."""

    host: PytestHost
    calls: Callable[[], None]
    ran: bool = False
    session: Any = None
    modules: dict[str, Any] = field(default_factory=dict)
    """Test modules by path."""
    reports: list[pytest.TestReport] = field(default_factory=list)

    def pytest_configure(self, config: pytest.Config) -> None:
        # Options of the terminal reporter, which does not run here.
        config.option.tbstyle, config.option.verbose = self.host.traceback, self.host.verbosity

    def pytest_collection(self) -> bool:
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.ran, self.session = True, session
        _current.append(self)
        self.calls()
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def module(self, path: str) -> Any:
        if path not in self.modules:
            (collector,) = self.session.perform_collect([path], genitems=False)
            self.modules[path] = collector.obj
        return self.modules[path]

    def run(self, call: Callable[[], None], name: str, path: str) -> list[pytest.TestReport]:
        """Run a call as a test, and return what pytest reports about it."""
        self.reports.clear()
        item = _Body.from_parent(self.session, name=name, call=call, path_of_test=path)
        self.session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return list(self.reports)


_current: list[_Session] = []


class _Body(pytest.Item):
    """The body of a test function."""

    def __init__(self, *, call: Callable[[], None], path_of_test: str, **options: Any) -> None:
        super().__init__(**options)
        self._call, self._path = call, path_of_test

    def runtest(self) -> None:
        self._call()

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Leave out the frames of pytest and of this file, and shorten those below the test."""
        excinfo.traceback = excinfo.traceback.cut(path=self._path)
        if self.config.option.tbstyle == "auto" and len(excinfo.traceback) > 1:
            style = "short"
        return super().repr_failure(excinfo, style)


def run_test(test: RankTest) -> tuple[str, str]:
    """Run a test function on this rank.

    Returns:
        "passed", "skipped" or "xfailed", and the reason.

    Raises:
        ReportedFailureError: if it failed, with pytest's report.
    """
    session = _current[-1]

    def call() -> None:
        holder = session.module(test.path)
        for name in test.cls.split(".") if test.cls else ():
            holder = getattr(holder, name)
        values = {name: _unpickled(name, value) for name, value in test.values.items()}
        with contextlib.ExitStack() as stack:
            if "monkeypatch" in test.made_here:
                values["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
            getattr(holder() if test.cls else holder, test.function)(**values)

    reports = session.run(call, test.nodeid.rpartition("::")[2], test.path)
    failed = "\n".join(each.longreprtext for each in reports if each.failed)
    if failed:
        raise ReportedFailureError(failed)
    (body,) = (each for each in reports if each.when == "call")
    if hasattr(body, "wasxfail"):
        return "xfailed", str(body.wasxfail).removeprefix("reason: ")
    if body.skipped:
        reason = body.longrepr[2] if isinstance(body.longrepr, tuple) else body.longreprtext
        return "skipped", reason.removeprefix("Skipped: ")
    return "passed", ""


def _unpickled(name: str, value: bytes) -> Any:
    try:
        return pickle.loads(value)
    except Exception as error:
        raise RuntimeError(
            f"the value of {name!r} does not arrive on a rank: {type(error).__name__}: {error}. "
            "Its class must be importable by name on a rank."
        ) from error
