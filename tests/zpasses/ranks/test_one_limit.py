"""Every wait for other ranks is bounded by a limit that the user sets. No wait has a constant of
its own.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]

THE_DEFAULT = "zpasses/ranks/vote.py: DEFAULT_TIMEOUT_S"

ALLOWED = {
    THE_DEFAULT: "the default of the user's limit",
    "zpasses/ranks/vote.py: _RESULT_SLACK_S": (
        "on top of the limit, for the first rank to combine the ballots"
    ),
    "zpasses/ranks/vote.py: _RECOVERY_S": "ends the wait for a rank that has reported a failure",
    "zpasses/ranks/vote.py: _LATE_RECOVERY_S": "the same, for a rank that comes to the vote later",
    "zpasses/ranks/vote.py: _FIRST_POLL_S": "a poll interval",
    "zpasses/ranks/vote.py: _LAST_POLL_S": "a poll interval",
    "zpasses/ranks/vote.py: _POLL_PER_RANK_S": "a poll interval",
    "zpasses/ranks/notes.py: _RECOVERY_S": "ends the wait for a rank that has left a conflict",
    "zpasses/ranks/heartbeat.py: INTERVAL_S": (
        "an interval; errors wait up to three for a heartbeat, on top of the limit"
    ),
}
"""Constants in seconds, and why they are not limits of their own."""

LONGEST_S = 5.0
"""Of the allowed constants but the default. An error comes at most 10 s after the limit."""

WAITS = (
    "wait",
    "join",
    "result",
    "timedelta",
    "sleep",
    "vote",
    "exchange",
    "store_barrier",
    "monitored_barrier",
)
"""Calls that take a time limit, perhaps by position."""

CLOCKS = ("monotonic", "perf_counter", "time")


def is_number(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def has_number(node: ast.AST | None) -> bool:
    return node is not None and any(is_number(each) for each in ast.walk(node))


def reads_a_clock(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Call) and ast.unparse(each.func).rpartition(".")[2] in CLOCKS
        for each in ast.walk(node)
    )


def constants(source: str) -> Iterator[str]:
    """Time limits in a source that are numbers. A named constant is given by its name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arguments):
            yield from _defaults(node)
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if "timeout" in (keyword.arg or "") and has_number(keyword.value):
                    yield ast.unparse(keyword)
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in WAITS and any(is_number(each) for each in node.args):
                yield ast.unparse(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name for each in targets for name in _named_limits(each, node.value))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            if reads_a_clock(node) and (is_number(node.left) or is_number(node.right)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(reads_a_clock, sides)) and any(map(is_number, sides)):
                yield ast.unparse(node)


def _defaults(node: ast.arguments) -> Iterator[str]:
    named = [*node.posonlyargs, *node.args]
    defaults = dict(zip(reversed(named), reversed(node.defaults), strict=False))
    defaults.update(zip(node.kwonlyargs, node.kw_defaults, strict=True))
    for argument, default in defaults.items():
        if "timeout" in argument.arg and has_number(default):
            yield f"{argument.arg} = {ast.unparse(default)}"


def _named_limits(target: ast.expr, value: ast.expr | None) -> Iterator[str]:
    """Constants in seconds; time limits and deadlines of any name that contain a number."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        # One with a star stands for several values.
        for pair in zip(target.elts, value.elts, strict=False):
            yield from _named_limits(*pair)
        return
    name = ast.unparse(target)
    in_seconds = name.endswith("_S") or "timeout" in name.lower()
    if (in_seconds and _is_constant(value)) or ("deadline" in name and has_number(value)):
        yield name


def _is_constant(value: ast.expr | None) -> bool:
    """Whether a value is made of numbers only."""
    return has_number(value) and not any(
        isinstance(each, (ast.Name, ast.Attribute, ast.Call)) for each in ast.walk(value)
    )


def test_waits_have_only_the_allowed_constants_and_these_are_short():
    found = {
        f"{path.relative_to(ROOT)}: {each}"
        for folder in ("zpasses", "passes")
        for path in (ROOT / folder).rglob("*.py")
        if "testing" not in path.parts
        for each in constants(path.read_text())
    }
    assert found == set(ALLOWED)
    for place in ALLOWED:
        path, _, name = place.partition(".py: ")
        seconds = getattr(importlib.import_module(path.replace("/", ".")), name)
        assert 0 < seconds <= LONGEST_S or place == THE_DEFAULT, place


LIMITS = """
def f(timeout_s=30.0): ...
def f(*, timeout=30): ...
vote(group, timeout_s=300)
thread.join(5)
time.sleep(5)
store.wait(keys, timedelta(seconds=3), timeout=3)
TIMEOUT_S = 300.0
class A: timeout_s: float = 300.0
_GRACE_S = 30.0
_GRACE_S: float = 60 * 5
_FIRST_S, _LAST_S = 0.1, 30
deadline = time.monotonic() + 30
until = 30 + monotonic()
deadline = started + self.timeout_s + 30
while time.monotonic() - started < 30: ...
if 30 < time.perf_counter() - started: ...
"""

NO_LIMITS = """
deadline = time.monotonic() + timeout_s
deadline = started + self.timeout_s + _RESULT_SLACK_S
while time.monotonic() < deadline: ...
time_us = (time.perf_counter() - started) * 1e6
time.sleep(_LAST_POLL_S)
first = elapsed_us + 1
"""


def test_constants_are_found_and_the_limit_of_the_user_is_none():
    assert [line for line in LIMITS.strip().split("\n") if not list(constants(line))] == []
    assert [line for line in NO_LIMITS.strip().split("\n") if list(constants(line))] == []
