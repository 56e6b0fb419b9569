"""Marks of tests say what is true, and tests share helpers by modules that hold no tests."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
NAMED = re.compile(r"\btest_\w+\b(?!\.py)")


def _quick_of(mark):
    """Returns what a mark names, "" if it is no mark of a slow test."""
    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.slow":
        return ast.unparse(mark.keywords[0].value)
    return ""


def test_slow_tests_name_tests_that_are_quick():
    quick, named = set(), {}
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            is_function = isinstance(node, ast.FunctionDef)
            if is_function and not any(_quick_of(each) for each in node.decorator_list):
                quick.add(node.name)
            for name in NAMED.findall(_quick_of(node)):
                named.setdefault(name, set()).add(str(file.relative_to(TESTS)))
    assert len(named) > 20
    assert not {name: files for name, files in named.items() if name not in quick}


def test_no_test_imports_a_module_of_tests():
    imports = re.compile(r"^from tests\.[\w.]*\btest_\w+ import", re.MULTILINE)
    assert [str(file) for file in TESTS.rglob("*.py") if imports.search(file.read_text())] == []
