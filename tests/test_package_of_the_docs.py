"""The package that docs/writing-passes.md shows is built, installed and tested."""

import re
from pathlib import Path

import pytest

from tests.programs import run_program, start_python

PAGE = (Path(__file__).parents[1] / "docs" / "writing-passes.md").read_text()
REDUCTION = "            if reduce_dtype != torch.float32"


def files_of_the_page():
    """Path -> text of each file."""
    shown = re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL)
    (first, *_) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return {**dict(shown), "src/precise_grads/__init__.py": first}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The folder of the package, and the folder that it is installed in."""
    folder = tmp_path_factory.mktemp("precise-grads")
    for path, text in files_of_the_page().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    installed = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", installed]
    done = start_python("-m", "pip", "install", *options, folder)
    assert done.returncode == 0, done.stderr
    return folder, installed


def run_tests(package):
    """Runs pytest in the package. Returns the outcomes of its tests and what it printed."""
    folder, installed = package
    words = ["-m", "pytest", "-p", "no:cacheprovider", "-v", "--color=no"]
    (done,) = run_program(
        *words, cwd=folder, variables={"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    )
    found = re.findall(r"^tests/test_passes\.py::(\S+) (PASSED|FAILED|ERROR)", done.stdout, re.M)
    return dict(found), done.stdout


TESTS = (
    "test_listing",
    "test_step_keeps_its_bits[1]",
    "test_step_keeps_its_bits[3]",
    "test_drawn_graphs_keep_their_bits",
    "test_gradients_on_real_ranks",
)
slow = pytest.mark.slow(quick="test_the_worked_pass_runs_and_prints_what_the_page_shows")


def test_the_page_shows_all_files():
    tree = re.search(r"^    precise-grads/\n((?:        .*\n)+)", PAGE, re.MULTILINE)
    assert {line.split()[0] for line in tree[1].splitlines()} == set(files_of_the_page())


@slow
@pytest.mark.processes
def test_the_tests_of_the_package_pass(package):
    outcomes, shown = run_tests(package)
    assert outcomes == dict.fromkeys(TESTS, "PASSED"), shown


@slow
@pytest.mark.processes
def test_the_tests_of_a_broken_pass_fail(package):
    """The pass doubles gradients, which no static check finds."""
    _, installed = package
    path = installed / "precise_grads" / "__init__.py"
    right = path.read_text()
    wrong = (
        "            grad = Editor(graph, before=node).call(torch.ops.aten.mul.Tensor, grad, 2)\n"
        "            node.args = (grad, *node.args[1:])\n"
        "            changed += 1\n"
    )
    broken = right.replace(REDUCTION, wrong + REDUCTION).replace(
        "graph import ", "graph import Editor, "
    )
    assert broken.count("Editor") == 2
    path.write_text(broken)
    try:
        outcomes, shown = run_tests(package)
    finally:
        path.write_text(right)
    assert outcomes == dict.fromkeys(TESTS, "FAILED"), shown
    assert "pytest tests/test_passes.py::test_listing --update-listings" in shown
