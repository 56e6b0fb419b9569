"""Sentences about graphs that figures alone do not tell: which never run, what a variant is, and
which need more memory than the device has.
"""

from __future__ import annotations

from zpasses.dumps.format import Compile, Graph
from zpasses.inspect.find import is_executed
from zpasses.inspect.units import bytes_text, count

NEVER_RUNS = (
    "This graph never runs: it is split into forward and backward, so this peak never occurs."
)


def variant_text(graph: Graph) -> str:
    """What a variant carries from call to call; empty for other graphs."""
    if not graph.of:
        return ""
    what = "gathered parameters" if graph.of.startswith("forward") else "pending gradients"
    carried = [
        f"{verb} those of {count(len(names), 'parameter')}"
        for verb, names in (("takes", graph.given), ("leaves", graph.kept))
        if names
    ]
    how = f"carries {what} from call to call: it {' and '.join(carried)}" if carried else ""
    steps = count(len(graph.stepped), "parameter")
    stepped = f", and in which the optimizer steps {steps}" if graph.stepped else ""
    return (
        f"{graph.name} is the form of {graph.of} that {how or f'carries no {what} between calls'}"
        f"{stepped}. It runs in place of {graph.of}."
    )


def capacity_warning(compiled: Compile, name: str, peak_bytes: int) -> str:
    """A warning if a graph that runs does not fit into the memory of the target; else empty."""
    memory = compiled.info.target.get("memory_bytes")
    if not isinstance(memory, int) or memory <= 0 or not is_executed(name):
        return ""
    shards = sum(param.shard_bytes for param in compiled.info.parameters.values())
    if peak_bytes + shards <= memory:
        return ""
    return (
        f"WARNING: {name} does not fit into the memory of {compiled.info.target.get('name', '?')}, "
        f"{bytes_text(memory)}: its peak is {bytes_text(peak_bytes)}, and the shards of the "
        f"parameters take {bytes_text(shards)}. Inputs and the optimizer's state come on top."
    )
