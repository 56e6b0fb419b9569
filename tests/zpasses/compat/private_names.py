"""The private names of torch that `zpasses/compat` uses, and the versions that have them.

    python -m tests.zpasses.compat.private_names

brings `private_names.txt` up to date for the torch that runs it. Run it with each version.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import torch

COMPAT = Path(__file__).parents[3] / "zpasses" / "compat"
TABLE = Path(__file__).with_suffix(".txt")
VERSION = ".".join(torch.__version__.split(".")[:2])

_OWNERS = {
    "_adjust_lr": "torch.optim._muon",
    "_allgather_base": "torch.distributed.ProcessGroup",
    "_backend_fns": "torch._library.custom_ops.CustomOpDef",
    "_backward_hooks": "torch.Tensor",
    "_call_impl": "torch.nn.Module",
    "_cdata": "torch.UntypedStorage",
    "_compiled_call_impl": "torch.nn.Module",
    "_device_types": "torch.distributed.ProcessGroup",
    "_erased": "torch.fx.Node",
    "_get_backend": "torch.distributed.ProcessGroup",
    "_get_backend_stream": "torch.distributed._symmetric_memory",
    "_get_root_mesh": "torch.distributed.device_mesh.DeviceMesh",
    "_has_symbolic_sizes_strides": "torch.Tensor",
    "_i_will_not_complain_if_bc_breaks_InstructionTranslator": (
        "torch._dynamo.comptime.ComptimeContext"
    ),
    "_is_view": "torch.Tensor",
    "_local_tensor": "torch.distributed.tensor.DTensor",
    "_metrics": "torch._dynamo.metrics_context.MetricsContext",
    "_opname": "torch._ops.OpOverload",
    "_PipelineStageBase": "torch.distributed.pipelining.stage",
    "_post_accumulate_grad_hooks": "torch.Tensor",
    "_qualified_op_name": "torch._ops.OpOverloadPacket",
    "_schema": "torch._ops.OpOverload",
    "_sequence_nr": "torch._C._FunctionBase",
    "_set_default_timeout": "torch._C._distributed_c10d.ProcessGroupGloo",
    "_spec": "torch.distributed.tensor.DTensor",
    "_stable_hash": "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "_timeout": "torch._C._distributed_c10d.Backend.Options",
    "_triton_bundle": "torch._inductor.output_code.CompiledFxGraph",
    "_version": "torch.Tensor",
    "_zeropower_via_newtonschulz": "torch.optim._muon",
}
"""Private attributes of values, whose class the code does not name."""

_NOT_OF_TORCH = {"_getframe", "_patches", "_zpasses_has_empty_part", "_zpasses_scales"}
_OF_BACKENDS = {"_dynamo_source"}
"""Set on single nodes, so no class has them."""

_STRINGS = {
    ("aot.py", "_SCRIPT_OBJECT_SIZE"): "torch._functorch.config",
    ("artifacts.py", "_HOOKS"): "torch._inductor.config",
    ("artifacts.py", "_SETTINGS"): "torch._functorch.config",
    ("inductor.py", "_CONFIG_PATCHES"): "torch._inductor.config",
    ("inductor_overlap.py", "bandwidth"): "torch.utils._runtime_estimation",
    ("inductor_peaks.py", "_AFTER_FUSION"): "torch._inductor.config",
    ("inductor_peaks.py", "_BEFORE_FUSION"): "torch._inductor.config",
}
"""Constants that hold names of options, and where these options are."""


def used_names() -> dict[str, str]:
    """Returns the names and where each is used first, such as "aot.py:12"."""
    found: dict[str, str] = {}
    for path in sorted(COMPAT.glob("*.py")):
        for name, line in _names_in(path):
            if re.search(r"\._(?!_)", name):
                found.setdefault(name, f"{path.name}:{line}")
    found = {_of_class(name): place for name, place in found.items()}
    ends = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    return {name: found[name] for name in sorted(ends)}


def _of_class(name: str) -> str:
    """The name without what every container has, and with a class in place of a value that exists
    only in a compile.
    """
    name = re.sub(r"\.(add|clear|get|items)$", "", name)
    return name.replace("._inductor.virtualized.V.graph.", "._inductor.graph.GraphLowering.")


def _names_in(path: Path) -> Iterator[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    imported = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = f"{module}{alias.name}"
                if name.startswith("torch."):
                    yield name, node.lineno
                    if module or alias.asname:
                        imported[alias.asname or alias.name] = name

    def resolved(node: ast.expr) -> str | None:
        """What an expression is called in torch."""
        if isinstance(node, ast.Name):
            return imported.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = resolved(node.value)
            return owner and f"{owner}.{node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cast":
            return resolved(node.args[1])
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from _attribute(path, node, resolved(node), node.attr)
        elif isinstance(node, ast.Call):
            yield from _in_call(path, node, resolved)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            owner = _STRINGS.get((path.name, ast.unparse(target)))
            value = ast.literal_eval(node.value) if owner and node.value else ()
            for option in (value,) if isinstance(value, str) else value:
                yield f"{owner}.{option}", node.lineno


def _attribute(
    path: Path, node: ast.expr, name: str | None, attribute: str
) -> Iterator[tuple[str, int]]:
    if name is None and re.match(r"_(?!_)", attribute):
        own = _own_attributes(path) - _OWNERS.keys()
        if attribute in _NOT_OF_TORCH | _OF_BACKENDS | own:
            return
        assert attribute in _OWNERS, (
            f"{path.name}:{node.lineno}: {ast.unparse(node)} is private; name its class in _OWNERS"
        )
        name = f"{_OWNERS[attribute]}.{attribute}"
    if name is not None:
        yield name, node.lineno


@functools.cache
def _own_attributes(path: Path) -> set[str]:
    """Private attributes and methods of the classes of a module."""
    found = re.findall(r"\bself\.(_\w+)(?:: .*)? = |\bdef (_\w+)\(\s*self\b", path.read_text())
    return {name for pair in found for name in pair if name}


def _in_call(path: Path, node: ast.Call, resolved) -> Iterator[tuple[str, int]]:
    """Names in `getattr(owner, "name")`, `patch.object(owner, "name")`, `config.patch(name=...)`
    and `config.patch({"name": ...})`.
    """
    function = ast.unparse(node.func)
    if re.fullmatch(r"getattr|hasattr|(mock\.)?patch\.object", function):
        owner, name = resolved(node.args[0]), node.args[1]
        if isinstance(name, ast.Constant):
            yield from _attribute(path, node, owner and f"{owner}.{name.value}", name.value)
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "patch":
        owner = resolved(node.func.value)
        options = [each.arg for each in node.keywords if each.arg]
        tables = [each for each in node.args if isinstance(each, ast.Dict)]
        keys = [key for table in tables for key in table.keys]
        options += [str(key.value) for key in keys if isinstance(key, ast.Constant)]
        yield from ((f"{owner}.{each}", node.lineno) for each in options if owner)


def exists(name: str) -> bool:
    """Whether the running torch has a name."""
    parts = name.split(".")
    value: object = torch
    for at, part in enumerate(parts[1:], 2):
        owner = value
        try:
            value = importlib.import_module(".".join(parts[:at]))
        except ImportError:
            value = getattr(owner, part, None)
        if value is None and not hasattr(owner, part):
            return at == len(parts) and _is_set_by(owner, part)
    return True


def _is_set_by(kind: object, attribute: str) -> bool:
    """Whether the methods of a class set an attribute of its instances."""
    if not isinstance(kind, type):
        return False
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return re.search(rf"self\.{attribute}\b.*=|^    {attribute}:", source, re.MULTILINE) is not None


def read_table() -> dict[str, list[str]]:
    """Returns name -> the versions that have it."""
    rows = [line.split() for line in TABLE.read_text().splitlines() if line[:1] != "#"]
    return {name: versions for name, *versions in rows}


def _write_table() -> None:
    known = read_table() if TABLE.exists() else {}
    lines = [
        "# The private names of torch that zpasses/compat uses, and the versions that have them."
    ]
    for name in used_names():
        versions = {*known.get(name, ()), VERSION} - ({VERSION} if not exists(name) else set())
        lines.append(" ".join([name, *sorted(versions)]))
    TABLE.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    _write_table()
