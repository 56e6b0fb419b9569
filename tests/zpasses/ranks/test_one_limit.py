"""Every wait for other ranks is bounded by a limit that the user sets. No wait has a constant of
its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
THE_DEFAULT = "zpasses/ranks/vote.py: DEFAULT_TIMEOUT_S = 300.0"
WAITS = (
    "wait",
    "join",
    "result",
    "timedelta",
    "vote",
    "exchange",
    "store_barrier",
    "monitored_barrier",
)
"""Calls that take a time limit, perhaps by position."""


def is_number(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def has_number(node: ast.AST | None) -> bool:
    return node is not None and any(is_number(each) for each in ast.walk(node))


def constants(source: str) -> Iterator[str]:
    """Time limits in a source that are numbers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args]
            defaults = dict(zip(reversed(named), reversed(node.defaults), strict=False))
            defaults.update(zip(node.kwonlyargs, node.kw_defaults, strict=True))
            for argument, default in defaults.items():
                if "timeout" in argument.arg and has_number(default):
                    yield f"{argument.arg} = {ast.unparse(default)}"
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if "timeout" in (keyword.arg or "") and has_number(keyword.value):
                    yield ast.unparse(keyword)
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in WAITS and any(is_number(each) for each in node.args):
                yield ast.unparse(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if "timeout" in ast.unparse(targets[0]).lower() and is_number(node.value):
                yield ast.unparse(node)


def test_no_wait_has_a_constant_of_its_own():
    found = {
        f"{path.relative_to(ROOT)}: {each}"
        for folder in ("zpasses", "passes")
        for path in (ROOT / folder).rglob("*.py")
        if "testing" not in path.parts
        for each in constants(path.read_text())
    }
    assert found == {THE_DEFAULT}


@pytest.mark.parametrize(
    "source",
    [
        "def f(timeout_s=30.0): ...",
        "def f(*, timeout=30): ...",
        "vote(group, timeout_s=300)",
        "thread.join(5)",
        "store.wait(keys, timedelta(seconds=3), timeout=3)",
        "TIMEOUT_S = 300.0",
        "class A:\n    timeout_s: float = 300.0",
    ],
)
def test_a_constant_is_found(source):
    assert list(constants(source))
