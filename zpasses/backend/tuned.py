"""The option `tuned`: options that `zpasses tune` found to be the fastest for a graph.

A file of tuned options has one entry for each graph, world size, stage, target, and versions of
torch and zpasses. All ranks follow the first rank's reading of the file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from zpasses.backend.capture import Capture
from zpasses.cost.target import Target, current_target
from zpasses.errors import OptionError
from zpasses.pipeline.options import Options
from zpasses.ranks.vote import exchange
from zpasses.version import __version__

__all__ = [
    "CHOSEN",
    "FORMAT",
    "graph_key",
    "place_key",
    "remember",
    "with_chosen",
    "with_tuned_options",
]

FORMAT = 1
"""Version of the file."""

CHOSEN = ("pipeline", "memory_budget")
"""The options that an entry of the file sets."""

log = logging.getLogger("zpasses")


def with_tuned_options(options: Options, captured: Capture) -> Options:
    """Returns the options with those that the file named by `options.tuned` has for this graph.

    If the file has none, the options stay as they are, and a warning says why. The ranks vote: all
    follow the first rank of each process group of the graph.

    Raises:
        AgreementError: if another rank does not take part in the vote.
    """
    if options.tuned is None or captured.share == 0:
        return options
    found = _look_up(Path(options.tuned), options, captured)
    for group in captured.groups:
        # Recompiles for other shapes do not vote, since other ranks may not compile then.
        asked = f"{options.tuned} {sorted(captured.shards.values())}"
        found = exchange(group, "which tuned options to use", found, remember=asked)[0]
    if isinstance(found, str):
        log.warning("tuned=%r is ignored on all ranks: %s", str(options.tuned), found)
        return options
    log.info("tuned=%r: %s", str(options.tuned), found)
    return with_chosen(options, found)


def with_chosen(options: Options, chosen: Mapping[str, str]) -> Options:
    """Returns the options with others in the place of those that choose passes and memory.

    Raises:
        OptionError: if the chosen options do not work.
    """
    given = {each.name: getattr(options, each.name) for each in dataclasses.fields(options)}
    replaced = [*CHOSEN, "tuned", *(["zero_stage"] if "pipeline" in chosen else [])]
    return Options.parse({**given, **dict.fromkeys(replaced), **chosen})


def _look_up(path: Path, options: Options, captured: Capture) -> dict[str, str] | str:
    """Returns the options of the entry for this graph, or why there is none."""
    try:
        entries = _read(path)
    except FileNotFoundError:
        return "there is no such file. `zpasses tune --output FILE -- COMMAND` writes it."
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"it is no file of tuned options ({error}). `zpasses tune` writes one."
    place = place_key(options)
    mine = [each for each in entries if each["graph"] == graph_key(captured)]
    for entry in mine:
        if entry["place"] == place:
            found = {name: str(value) for name, value in entry["options"].items()}
            if not set(found) <= set(CHOSEN):
                return f"its entry sets {', '.join(found)}; expected {' or '.join(CHOSEN)}."
            try:
                with_chosen(options, found)
            except OptionError as error:
                return f"its entry has options that do not work: {error}"
            return found
    if not mine:
        return "it was tuned for other graphs. Run `zpasses tune` again."
    return _difference(mine[-1]["place"], place)


def _difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    parts = [
        f"{key} was {then.get(key)} and is {value}"
        for key, value in now.items()
        if then.get(key) != value
    ]
    return f"it was tuned elsewhere: {'; '.join(parts)}. Run `zpasses tune` again."


# --- the file -------------------------------------------------------------------------------------
def _read(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    if content["format"] != FORMAT:
        raise ValueError(f"got format {content['format']}; this release reads {FORMAT}")
    entries: list[dict[str, Any]] = content["entries"]
    for each in entries:
        if not isinstance(each["graph"], str) or not isinstance(each["options"], dict):
            raise ValueError("an entry needs a graph and options")
        dict(each["place"])
    return entries


def remember(
    path: Path, graphs: list[str], place: Mapping[str, Any], options: Mapping[str, str]
) -> None:
    """Write the options of some graphs into a file, which is replaced atomically.

    Args:
        path: the file. Entries for other graphs and places stay; a file that cannot be read is
            replaced.
        graphs: results of `graph_key`.
        place: result of `place_key`.
        options: texts of the options that `CHOSEN` names.
    """
    try:
        entries = _read(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        entries = []
    entries = [each for each in entries if each["graph"] not in graphs or each["place"] != place]
    entries += [
        {"graph": graph, "place": dict(place), "options": dict(options)} for graph in graphs
    ]
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(json.dumps({"format": FORMAT, "entries": entries}, indent=1) + "\n")
    temporary.replace(path)


# --- keys -----------------------------------------------------------------------------------------
def place_key(options: Options) -> dict[str, Any]:
    """Returns what tuned options depend on besides the graph."""
    target = Target.parse(options.target) if options.target else current_target()
    return {
        "world": dist.get_world_size() if dist.is_initialized() else 1,
        "target": str(target),
        "stage": options.zero_stage or 3,
        "codegen": options.codegen,
        "torch": torch.__version__,
        "zpasses": __version__,
    }


def graph_key(captured: Capture) -> str:
    """Returns a hash of a captured graph: its operations, names of parameters and shapes."""
    lines = [*captured.shards.values()]
    for node in captured.gm.graph.nodes:
        value = node.meta.get("example_value")
        shape = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else ""
        lines.append(f"{node.op} {_name(node)} {len(node.all_input_nodes)} {shape}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', type(target))}"
