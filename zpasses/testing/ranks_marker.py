"""The marker `ranks`: runs the body of a test on real gloo ranks.

This module loads no torch before a marked test runs.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import unittest
from dataclasses import dataclass
from typing import Any

import pytest

__all__ = ["DESCRIPTION", "RanksMark", "marked", "refusal", "run_marked"]

DESCRIPTION = (
    "ranks(count, timeout_s=60): run the body of the test on `count` real gloo ranks. Fixtures and "
    "parameters are made in pytest's process and pickled. After `timeout_s` seconds the ranks are "
    "killed and the test fails with every rank's stack and output."
)

_OF_THIS_PROCESS = (
    *("cache", "capfd", "capfdbinary", "caplog", "capsys", "capsysbinary", "doctest_namespace"),
    *("fake_world", "listing_snapshot", "pytestconfig", "pytester", "record_property"),
    *("record_testsuite_property", "record_xml_attribute", "recwarn", "request", "subtests"),
    *("testdir", "tmp_path_factory", "tmpdir_factory"),
)
"""Fixtures that work only in the process that made them."""

_CLASS_SETUP = ("setup_class", "setup_method", "teardown_class", "teardown_method")


@dataclass(frozen=True)
class RanksMark:
    """The arguments of the marker."""

    count: int
    timeout_s: float = 60.0

    @classmethod
    def of(cls, mark: pytest.Mark) -> RanksMark:
        """Raises TypeError for arguments that the marker does not take."""
        given = ", ".join(
            [*map(repr, mark.args), *(f"{key}={value!r}" for key, value in mark.kwargs.items())]
        )
        try:
            parsed = cls(*mark.args, **mark.kwargs)
        except TypeError:
            parsed = cls(0)
        numbers = isinstance(parsed.timeout_s, (int, float)) and parsed.timeout_s > 0
        if type(parsed.count) is not int or parsed.count < 1 or not numbers:
            raise TypeError(
                f"got @pytest.mark.ranks({given}); expected a number of ranks of at least 1, and "
                "optionally timeout_s=SECONDS, as in @pytest.mark.ranks(2, timeout_s=30)."
            )
        return parsed


def marked(item: pytest.Item) -> bool:
    """Whether a test has the marker."""
    return item.get_closest_marker("ranks") is not None


def refusal(item: pytest.Item) -> str:
    """Why a marked test cannot run on ranks, and what to do; "" if it can."""
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    try:
        RanksMark.of(mark)
    except TypeError as error:
        return str(error)
    if not isinstance(item, pytest.Function):
        return f"the marker ranks is for test functions, not for a {type(item).__name__}."
    return _refused_kind(item) or _refused_fixtures(item)


def _refused_kind(item: pytest.Function) -> str:
    function = item.obj
    if item.cls is not None and issubclass(item.cls, unittest.TestCase):
        return "the marker ranks does not run methods of unittest.TestCase; write a function."
    if inspect.iscoroutinefunction(function):
        return "the marker ranks does not run coroutines; call asyncio.run in the test."
    if getattr(function, "is_hypothesis_test", False):
        return (
            "the marker ranks does not run a hypothesis test, because every rank would draw "
            "examples of its own. Remove the marker, and call zpasses.testing.run_on_ranks in the "
            "test for each example."
        )
    setup = [name for name in _CLASS_SETUP if item.cls is not None and hasattr(item.cls, name)]
    if setup:
        return (
            f"the ranks do not run {setup[0]} of {item.cls.__name__}; call what the test needs "
            "from the test."
        )
    for mark in item.iter_markers("xfail"):
        raises = mark.kwargs.get("raises")
        if raises is not None and not issubclass(AssertionError, raises):
            return (
                "an exception on a rank arrives as zpasses.testing.RanksError; write "
                "xfail(raises=RanksError)."
            )
    return ""


def _arguments(item: pytest.Function) -> list[str]:
    """The names of the fixtures and parameters that the test function takes."""
    return [
        name
        for name, parameter in inspect.signature(item.obj).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def _refused_fixtures(item: pytest.Function) -> str:
    for name in _arguments(item):
        if name in _OF_THIS_PROCESS:
            return (
                f"the fixture {name!r} works only in pytest's process, and the body of the test "
                "runs on the ranks. Leave it out, or remove the marker and call "
                "zpasses.testing.run_on_ranks in the test."
            )
    return ""


def run_marked(item: pytest.Function) -> None:
    """Run the body of a marked test on its ranks.

    Raises:
        RanksError: if it failed on a rank, or some ranks skipped it and others did not.
    """
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    wanted = RanksMark.of(mark)
    session = importlib.import_module("zpasses.testing.ranks.pytest_session")
    pool = importlib.import_module("zpasses.testing.ranks.pool")
    names = _arguments(item)
    test = session.RankTest(
        nodeid=item.nodeid,
        path=str(item.path),
        cls=item.cls.__qualname__ if item.cls is not None else "",
        function=item.originalname,
        values={name: _pickled(item, name) for name in names if name not in session.RANK_FIXTURES},
        made_here=tuple(name for name in names if name in session.RANK_FIXTURES),
    )
    outcomes = pool.call_on_ranks(
        session.run_test, (test,), {}, ranks=wanted.count, timeout_s=wanted.timeout_s
    )
    failure = importlib.import_module("zpasses.testing.ranks.failure")
    if not all(outcome.ok for outcome in outcomes):
        raise failure.RanksFailed(
            failure.describe_failure("", outcomes, pool.scaled(wanted.timeout_s))
        )
    for outcome in outcomes:
        if outcome.output:
            item.add_report_section("call", f"rank {outcome.rank}", outcome.output)
    results = [outcome.result for outcome in outcomes]
    if len({state for state, _ in results}) > 1:
        pool.close_pools()  # the ranks that went on may still wait for the others
        raise failure.RanksFailed(
            "all ranks must skip the test, or none: "
            + ", ".join(
                f"rank {rank} {state}{f' ({reason})' * bool(reason)}"
                for rank, (state, reason) in enumerate(results)
            )
        )
    state, reason = results[0]
    if state == "skipped":
        pytest.skip(reason)
    if state == "xfailed":
        pytest.xfail(reason)


def _pickled(item: pytest.Function, name: str) -> bytes:
    value: Any = item.funcargs[name]
    try:
        return pickle.dumps(value)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    callspec = getattr(item, "callspec", None)
    kind = "parameter" if callspec and name in callspec.params else "fixture"
    pytest.fail(
        f"the {kind} {name!r} is a {type(value).__name__} that cannot be pickled, so it cannot be "
        f"sent to the ranks ({reason}). Make it in the test, or pass something that can be "
        "pickled.",
        pytrace=False,
    )
