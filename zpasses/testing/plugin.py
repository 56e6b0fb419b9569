"""The pytest plugin for tests of passes: fixtures and listings.

pytest loads it in every project that has zpasses installed; `-p no:zpasses.testing.plugin` leaves
it out. It imports torch only when a test uses it, and changes nothing for tests that do not.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zpasses.testing.listings import (
    FOLDER,
    Snapshots,
    file_stem,
    remove,
    stale_files,
    unused_message,
)

_SNAPSHOTS = pytest.StashKey[Snapshots]()
_WRITTEN = "listing written"


# --- options --------------------------------------------------------------------------------------
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("zpasses").addoption(
        "--update-listings",
        action="store_true",
        help="write the listings that the fixture listing_snapshot compares with, and remove those "
        "that no test uses",
    )


# --- graphs ---------------------------------------------------------------------------------------
@pytest.fixture
def fake_world() -> Iterator[Callable[..., Any]]:
    """Be one rank of a world that does not exist: `mesh = fake_world(4, rank=1)`.

    Returns the one-dimensional CPU mesh of all ranks. The world ends with the test, or when the
    test calls `fake_world` again. Collectives do nothing: use it to shard, capture and rewrite.
    """
    worlds = importlib.import_module("zpasses.testing.worlds")
    with contextlib.ExitStack() as stack:

        def enter(world_size: int, rank: int = 0) -> Any:
            stack.close()
            return stack.enter_context(worlds.fake_world(world_size, rank))

        yield enter


@pytest.fixture
def capture_step() -> Iterator[Callable[..., Any]]:
    """Capture the graphs of a training step as one rank of a fake world:
    `step = capture_step(model, (x,), world_size=4, rank=1, pipeline="zero3")`.

    The arguments are those of `zpasses.testing.capture_graphs`. `step.before` and `step.after` hold
    the captured, joint, forward and backward graphs before and after the passes.
    """
    testing = importlib.import_module("zpasses.testing")
    with _compiler():
        yield testing.capture_graphs


@pytest.fixture
def run_pipeline() -> Callable[..., Any]:
    """Run passes on a copy of a graph, verified after each:
    `run = run_pipeline(graph, "merge-reads,gather-params")`.

    The arguments are those of `zpasses.testing.run_pipeline`: a pipeline as text or object, or one
    pass; `verify="simulate"` also compares on simulated ranks. `run.graph` is the rewritten graph,
    and `run.records` says what each pass changed.
    """
    run: Callable[..., Any] = importlib.import_module("zpasses.testing").run_pipeline
    return run


@pytest.fixture
def simulate_ranks() -> Iterator[Callable[..., Any]]:
    """Capture a training step on all ranks, and check on simulated ranks that the pipeline keeps
    its results bit for bit: `ranks = simulate_ranks(model, (x,), world_size=4, pipeline="zero3")`.

    The arguments are those of `zpasses.testing.capture_ranks`, and `seed`, the seed of the inputs.
    Returns the captures of the ranks. Fails if an output or a gradient of a rank differs from the
    graph before all passes, and if real ranks would hang, race or disagree.
    """
    testing = importlib.import_module("zpasses.testing")

    def simulate(model: Any, inputs: Any, *, world_size: int, seed: int = 0, **options: Any) -> Any:
        captures = testing.capture_ranks(model, inputs, world_size=world_size, **options)
        testing.assert_step_equals_reference(captures, seed=seed)
        return captures

    with _compiler():
        yield simulate


@contextlib.contextmanager
def _compiler() -> Iterator[None]:
    """Keep torch's structured trace, which has thousands of lines, out of the logs that pytest
    shows for a failed test. Afterwards forget what was compiled.
    """
    trace = logging.getLogger("torch.__trace")
    propagated, trace.propagate = trace.propagate, False
    try:
        yield
    finally:
        trace.propagate = propagated
        importlib.import_module("torch").compiler.reset()


# --- listings -------------------------------------------------------------------------------------
@pytest.fixture
def listing_snapshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare a graph's listing with a text file next to the test: `listing_snapshot(graph)`.

    The file is `listings/MODULE/TEST.txt`. A test with several listings gives each a label:
    `listing_snapshot(graph, "after")`. Text is compared as it is. A missing or different file is an
    error, and so is a file that no test uses. `pytest --update-listings` writes and removes files.
    """
    item = request.node
    snapshots = item.stash[_SNAPSHOTS] = Snapshots(
        _folder(item.path), _stem(item), item.config.getoption("update_listings"), _command(item)
    )

    def compare(graph: Any, label: str = "") -> None:
        if not isinstance(graph, str):
            graph = importlib.import_module("zpasses.testing").listing(graph)
        try:
            snapshots.compare(graph, label)
        except AssertionError as error:
            pytest.fail(str(error), pytrace=False)

    return compare


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    __tracebackhide__ = True
    result = yield
    snapshots = item.stash.get(_SNAPSHOTS, None)
    if snapshots is not None:
        try:
            snapshots.finish()
        except AssertionError as error:
            pytest.fail(str(error), pytrace=False)
        item.user_properties += [(_WRITTEN, os.path.relpath(path)) for path in snapshots.written]
    return result


class UnusedListings(pytest.Item):
    """Fails, because listings of a module belong to none of its tests."""

    def __init__(self, *, files: list[Path], **options: Any) -> None:
        super().__init__(**options)
        self._files = files

    def runtest(self) -> None:
        if self.config.getoption("update_listings"):
            remove(self._files)
        else:
            command = f"pytest {shlex.quote(os.path.relpath(self.path))} --update-listings"
            pytest.fail(unused_message(self._files, command), pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, "unused listings"


@pytest.hookimpl(tryfirst=True)  # before tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("::" in arg for arg in config.args) or config.getoption("lf", False):
        return  # not all tests of a module are here
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    for path, tests in modules.items():
        module = tests[0].getparent(pytest.Module)
        if module is None or not _folder(path).is_dir():
            continue
        stems = [_stem(test) for test in tests if "listing_snapshot" in _fixtures(test)]
        files = stale_files(_folder(path), set(stems))
        if files:
            unused = UnusedListings.from_parent(module, name="unused listings", files=files)
            items.insert(items.index(tests[-1]) + 1, unused)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    written = [
        value
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for name, value in report.user_properties
        if name == _WRITTEN
    ]
    if written:
        terminalreporter.section("listings written")
        for path in written:
            terminalreporter.line(path)


def _fixtures(item: pytest.Item) -> list[str]:
    return list(getattr(item, "fixturenames", ()))


def _folder(path: Path) -> Path:
    return path.parent / FOLDER / path.stem


def _stem(item: pytest.Item) -> str:
    function = getattr(item, "originalname", item.name)
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    return file_stem([*classes, function], item.name.removeprefix(function)[1:-1])


def _command(item: pytest.Item) -> str:
    _, _, rest = item.nodeid.partition("::")
    return f"pytest {shlex.quote(f'{os.path.relpath(item.path)}::{rest}')} --update-listings"
