"""Source locations of nodes: the innermost line of user code, outside torch and zpasses, and the
path of the module.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in [^\n]*(?:\n[ \t]+([^\n]*))?')
_PART = re.compile(
    r"\._(?:modules|parameters|buffers)\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]|\.(\w+)"
)
_TORCH, _ZPASSES = str(Path(torch.__file__).parent) + "/", str(Path(__file__).parents[1]) + "/"


def user_frame(node: fx.Node) -> tuple[str, int, str] | None:
    """File, line number and text of the innermost line of the user's code that made a node.

    A line of torch where no line of the user's code is known; None where no line is.
    """
    trace = node.meta.get("stack_trace")
    if not isinstance(trace, str):
        return None
    frames = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(_ZPASSES)]
    own = [frame for frame in frames if not is_torch_file(frame[0])] or frames
    if not own:
        return None
    file, line, text = own[-1]
    return file, int(line), text.strip()


def module_path(node: fx.Node) -> str:
    """The module that made a node, below the compiled module: "layers.0"; "" if none is known."""
    paths = list(module_paths(node).values())
    return paths[-1] if paths else ""


def module_paths(node: fx.Node) -> dict[str, str]:
    """The modules whose calls made a node, outermost first: a key of the call -> the path of the
    module below the compiled module.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not isinstance(stack, dict):
        return {}
    return {
        key: _clean_path(str(entry[0]) if isinstance(entry, (tuple, list)) and entry else "")
        for key, entry in stack.items()
    }


def describe_source(node: fx.Node) -> str:
    """For messages: "model.py:12 (layers.0): return self.linear(x)"; "" where nothing is known."""
    frame, module = user_frame(node), module_path(node)
    where = f" ({module})" if module else ""
    if frame is None:
        return f"module {module}" if module else ""
    file, line, text = frame
    return f"{short_file(file)}:{line}{where}: {text}"


def is_torch_file(path: str) -> bool:
    """Whether a source file is part of torch."""
    return path.startswith(_TORCH)


def _clean_path(path: str) -> str:
    start = path.find("]") + 1 if path.startswith(("L[", "G[")) else 0
    parts = ["".join(groups) for groups in _PART.findall(path[start:])]
    return ".".join(parts) or ("" if start else path)


def short_file(file: str) -> str:
    """A path below the place that it was imported from, so that a dump names no folders of the
    machine where it can.
    """
    entries = sorted(
        (entry for entry in sys.path if entry and file.startswith(entry.rstrip("/") + "/")), key=len
    )
    return file[len(entries[-1].rstrip("/")) + 1 :] if entries else file
