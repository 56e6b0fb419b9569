"""Imports point one way, and private torch APIs stay in `zpasses/compat`: every import is
read from its source.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    (
        "zpasses.compat",
        "zpasses.errors",
        "zpasses.garbage",
        "zpasses.option_values",
        "zpasses.short_names",
        "zpasses.version",
    ),
    ("zpasses.graph",),
    ("zpasses.cost", "zpasses.probe", "zpasses.ranks", "zpasses.simulate"),
    ("zpasses.pipeline",),
    ("zpasses.dumps",),
    ("zpasses.runtime",),
    ("zpasses.host", "zpasses.sharding", "zpasses.sdma"),
    (
        "zpasses.backend",
        "zpasses.accumulation",
        "zpasses.checkpoint",
        "zpasses.passes",
        "zpasses.inspect",
        "zpasses.optim",
    ),
    ("zpasses.testing", "zpasses.integrations"),
    ("zpasses.tools",),
)
"""Rooms from the bottom up. A room imports rooms of lower layers, and its own files."""

ABOVE_ALL = ("zpasses", "zpasses.__main__")
"""The package's public names, and `python -m zpasses`."""


@dataclass(frozen=True)
class Import:
    path: str
    line: int
    importer: str
    imported: str
    text: str
    lazy: bool
    """Inside a function."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def sources() -> dict[str, Path]:
    """Module name -> file, of all that is installed."""
    found = {}
    for folder in ("zpasses", "passes", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if folder == "zpasses" else ("zpasses", *parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = sources()


COMPUTED = {
    ("zpasses", "f'zpasses.{name}'"): "the submodules in _MODULES, which are attributes of zpasses",
    (
        "zpasses.tools.capture.captured_step",
        "place",
    ): "the user's module, named on the command line",
}
"""Calls of `import_module` whose argument is computed, by module and text, and what they import."""

computed: set[tuple[str, str]] = set()
"""Those that were found."""


def imported_by_name(module: str, tree: ast.Module, call: ast.Call) -> list[str]:
    """What a call of `import_module` imports: a constant, or the values of a table of constants."""
    (argument,) = call.args
    if isinstance(argument, ast.Constant):
        return [argument.value]
    text = ast.unparse(argument)
    tables = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    table = tables.get(text.partition("[")[0])
    if isinstance(argument, ast.Subscript) and isinstance(table, ast.Dict):
        return list(dict.fromkeys(ast.literal_eval(table).values()))
    assert (module, text) in COMPUTED, (
        f"{MODULES[module]}:{call.lineno}: import_module({text}) hides an import; name a constant, "
        "a table of constants, or add it to COMPUTED with a reason."
    )
    computed.add((module, text))
    return []


def imports_of(module: str) -> Iterator[Import]:
    path = MODULES[module]
    text = path.read_text()
    lines = text.split("\n")
    tree = ast.parse(text)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    inside = {id(child) for function in functions for child in ast.walk(function)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _chain(node.func).endswith("import_module"):
            names = imported_by_name(module, tree, node)
        for name in names:
            place = path.relative_to(ROOT).as_posix()
            yield Import(
                place, node.lineno, module, name, lines[node.lineno - 1].strip(), id(node) in inside
            )


def resolved(name: str) -> str | None:
    """The module that an imported name is, or is in; None for other packages."""
    return next((each for each in (name, name.rpartition(".")[0]) if each in MODULES), None)


@functools.cache
def imports() -> list[Import]:
    return [each for module in MODULES for each in imports_of(module)]


def ours() -> list[tuple[Import, str]]:
    """The imports of our own modules, and which module each imports."""
    return [(each, target) for each in imports() if (target := resolved(each.imported)) is not None]


def layer(module: str) -> int:
    for number, rooms in enumerate(LAYERS):
        if any(module == room or module.startswith(f"{room}.") for room in rooms):
            return number
    raise AssertionError(
        f"{module} is in no room of LAYERS in {Path(__file__).name}: add its room, or move it into "
        "one."
    )


def test_tables_of_public_names_are_read():
    by_table = [each for each in imports() if "import_module(_HOMES[name])" in each.text]
    assert {each.importer for each in by_table} == {"zpasses", "zpasses.testing"}
    unknown = [str(each) for each in by_table if each.imported not in MODULES]
    assert not unknown, "\n".join(["tables name modules that do not exist:", *unknown])


def test_computed_imports_are_used():
    imports()
    assert computed == set(COMPUTED)


def room(module: str) -> str:
    return next(
        each
        for rooms in LAYERS
        for each in rooms
        if module == each or module.startswith(f"{each}.")
    )


def test_imports_point_down():
    wrong = [
        f"{each} ({room(each.importer)} is in layer {layer(each.importer)}, {room(target)} in "
        f"layer {layer(target)})"
        for each, target in ours()
        if each.importer not in ABOVE_ALL and target != "zpasses"
        if layer(target) > layer(each.importer)
        or (layer(target) == layer(each.importer) and room(target) != room(each.importer))
        if not _is_errors_for_option_values(each.importer, target)
    ]
    assert not wrong, "\n".join(["imports against the order of the rooms:", *wrong])


def _is_errors_for_option_values(importer: str, target: str) -> bool:
    return (importer, target) == ("zpasses.option_values", "zpasses.errors")


def test_rooms_name_modules_and_not_the_package():
    wrong = [
        str(each)
        for each, target in ours()
        if target == "zpasses"
        and each.importer != "zpasses"
        and not each.importer.startswith("zpasses.tools")
    ]
    assert not wrong, "\n".join(["import from a module instead of the package `zpasses`:", *wrong])


def test_files_import_each_other_without_a_circle():
    """Imports inside functions count."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    found = ours()
    for each, target in found:
        if target != each.importer and each.importer not in ABOVE_ALL:
            graph[each.importer].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        steps = error.args[1]
        pairs = itertools.pairwise(steps)
        lines = [
            str(each)
            for a, b in pairs
            for each, target in found
            if (each.importer, target) in ((a, b), (b, a))
        ]
        pytest.fail("\n".join(["imports form a circle:", *lines]))


def test_no_two_modules_have_the_same_base_name():
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        if path.stem not in ("__init__", "__main__"):
            places.setdefault(path.stem, []).append(module)
    assert not [modules for modules in places.values() if len(modules) > 1]


def test_there_are_at_most_ten_layers():
    assert len(LAYERS) <= 10
    assert {layer(module) for module in MODULES if module not in ABOVE_ALL} == set(
        range(len(LAYERS))
    )


LAZY = {
    "zpasses.compat.artifacts": "the class of stored code derives from Inductor's, which is slow",
    "zpasses.compat.inductor": "Inductor's scheduler, which is slow to import",
    "zpasses.compat.inductor_peaks": "the same",
    "zpasses.pipeline.runner": "a pipeline loads the simulator only if it is asked to simulate",
    "zpasses.dumps.listeners": "a compile without a dump does not load the writer",
    "zpasses.inspect.inspection": "the page's template engine, which listing a dump does not need",
    "zpasses.testing": "public names; pytest loads the package with the plugin",
    "zpasses.testing.plugin": "pytest loads it in every project, and most of them need no torch",
    "zpasses.tools.capture.capture_command": "`zpasses --help` imports it, but not torch",
    "zpasses.tools.measure.measure_command": "the same",
    "zpasses.tools.plan.plan_command": "`zpasses --help` imports it, and planning imports torch",
    "zpasses.tools.tune.tune_command": "`zpasses --help` imports it, and tuning imports torch",
    "zpasses.tools.cli.main": "`zpasses passes` imports the catalogue, which imports torch",
}
"""Modules that may import others inside functions, and why."""


def test_imports_stand_at_the_top_unless_they_must_be_lazy():
    wrong = [
        str(each)
        for each, _ in ours()
        if each.lazy and each.importer not in ABOVE_ALL and each.importer not in LAZY
    ]
    assert not wrong, "\n".join(
        ["imports inside functions; move them up, or give the reason in LAZY:", *wrong]
    )


def test_no_import_is_only_for_type_checkers():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for module, path in MODULES.items()
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if "TYPE_CHECKING" in line and module not in ("zpasses", "zpasses.testing")
    ]
    assert not wrong, "\n".join(["imports under TYPE_CHECKING hide circles:", *wrong])


# --- private torch APIs ---------------------------------------------------------------------------
PRIVATE_OF_MODULES = {"_parameters", "_modules", "_buffers", "_replace", "_Unpickler"}
"""Tables of nn.Module that have no public form which replaces an entry; methods of named tuples;
Python's unpickler in Python.
"""


def _chain(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _own_names() -> set[str]:
    """Private names that zpasses itself defines: attributes, functions, classes and slots."""
    found: set[str] = set()
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)  # __slots__, setattr
    return found


def test_private_torch_apis_are_used_in_compat_only():
    own = _own_names()
    wrong = []
    for module, path in MODULES.items():
        if module.startswith("zpasses.compat"):
            continue
        place = path.relative_to(ROOT).as_posix()
        own_imports = (each for each in imports() if each.importer == module)
        wrong += [str(each) for each in own_imports if re.match(r"torch\b.*\._", each.imported)]
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                not isinstance(node, ast.Attribute)
                or not node.attr.startswith("_")
                or node.attr.startswith("__")
            ):
                continue
            chain = _chain(node)
            if chain.startswith(("torch.ops.", "aten.", "os.")):
                continue  # operators are public, whatever their names
            if place.startswith("tools/stress/") and re.match(
                r"torch\._(foreach_\w+|dynamo(\.graph_break)?)$", chain
            ):
                continue  # what the programs of users call
            if chain.startswith("torch.") or (
                node.attr not in own and node.attr not in PRIVATE_OF_MODULES
            ):
                wrong.append(f"{place}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(["private APIs outside zpasses/compat:", *sorted(set(wrong))])


def test_every_package_is_installed():
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^packages = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    folders = {
        ".".join((package, *init.parent.relative_to(root).parts))
        for root, package in (
            (ROOT / "zpasses", "zpasses"),
            (ROOT / "passes", "zpasses.passes"),
            (ROOT / "tools", "zpasses.tools"),
        )
        for init in root.rglob("__init__.py")
    }
    assert set(re.findall(r'"(.+)"', listed)) == folders
