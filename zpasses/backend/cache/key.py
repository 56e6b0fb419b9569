"""Keys of the compile cache: everything that decides what code a captured graph becomes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.backend.cache.graph_text import NotCacheableError, graph_text, input_text, state_text
from zpasses.backend.captured import Capture, local_shard
from zpasses.cost.time.route_figures import route_figures
from zpasses.cost.time.target import current_target
from zpasses.pipeline.base_pass import package_digest
from zpasses.pipeline.events import has_listeners
from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Pipeline
from zpasses.probe import is_probed
from zpasses.ranks.vote import has_other_ranks
from zpasses.runtime.layout import layout_of

_NOT_IN_KEY = (
    "agreement",  # read when the code runs, not when it is made
    "agreement_timeout_s",
    "cache",
    "dump",
    "dump_ranks",
    "pipeline",  # in the key as the passes that run
)
"""Options that do not change the code of a graph."""


@dataclass(frozen=True)
class GraphKey:
    """The key of a captured graph on this rank."""

    digest: str
    question: str
    """What the ranks ask each other before they take the graph from the cache. It is equal for all
    graphs of the same parameters: a rank may compile for another shape of its inputs when no other
    rank does. Blocks whose parameters have other shapes are asked about by themselves."""


def refusal_here(options: Options, *, recorded: bool) -> str | None:
    """Returns why this rank takes no graph from the cache and stores none; None if it may.

    Other ranks may take graphs, as long as they are told.

    Args:
        recorded: whether the compile is dumped or traced.
    """
    if not options.cache:
        return "cache=False"
    if recorded or has_listeners() or is_probed():
        return (
            "a dump, a trace, an observer, `zpasses bisect` or `zpasses tune` reads the graphs of "
            "this compile"
        )
    return None


def refusal(captured: Capture, options: Options, pipeline: Pipeline) -> str | None:
    """Returns why a graph is neither taken from the cache nor stored in it; None if it may be.

    All ranks find the same reason.
    """
    if options.codegen != "inductor":
        return f"codegen={options.codegen!r} is not cached"
    if captured.is_fake:
        return "no code is generated for fake tensors"
    if options.verify == "simulate":
        return "verify='simulate' checks the graphs of this compile"
    for each in pipeline:
        if type(each).__module__.partition(".")[0] != "zpasses":
            return f"pass {each.name!r} is not one of zpasses; nothing tells when it changes"
        if not each.facts.cacheable:
            return f"pass {str(each)!r} sets up collectives when it runs"
    if not captured.has_one_mesh and sum(map(has_other_ranks, captured.groups)) > 1:
        groups = ", ".join(captured.groups)
        return f"the graph communicates over groups of several meshes ({groups})"
    return compat.artifacts_refusal(captured.gm, [local_shard], options.inductor)


def graph_key(
    captured: Capture, example_inputs: Sequence[Any], options: Options, pipeline: Pipeline
) -> GraphKey:
    """Returns the key of a captured graph, under the target of its compile.

    Args:
        example_inputs: the inputs that Dynamo gave, with DTensors in place of shards.
        options: the options of the compile.
        pipeline: the passes that will run, with their memory budget.

    Raises:
        NotCacheableError: if the graph has no text that determines it.
    """
    shards = [_shard_text(captured, at, example_inputs[at]) for at in captured.shards]
    groups = [_group_text(group) for group in captured.groups]
    chosen = [
        f"{each.name}={getattr(options, each.name)!r}"
        for each in fields(options)
        if each.name not in _NOT_IN_KEY
    ]
    parts = [
        package_digest(),
        pipeline.digest(),
        repr(current_target()),
        repr(dict(route_figures(current_target()))),
        *chosen,
        *groups,
        *shards,
        f"share {captured.share!r}",
        f"frozen {captured.frozen}",
        *compat.code_environment(options.inductor),
        state_text(),
        input_text(captured.inputs),
        graph_text(captured.gm),
    ]
    params = [f"{name} {tuple(example_inputs[at].shape)}" for at, name in captured.shards.items()]
    names = "\n".join([*captured.groups, *params])
    grad = state_text().partition("\n")[0]
    return GraphKey(_digest("\x00".join(parts)), f"{_digest(names)[:16]} {grad}")


def _shard_text(captured: Capture, at: int, param: Any) -> str:
    if not isinstance(param, DTensor):
        raise NotCacheableError(f"input {at} is a {type(param).__name__}, not a DTensor")
    mesh, placements = param.device_mesh, param.placements
    layout = layout_of(param)
    cut = (layout.dim, layout.cuts)
    described = (captured.shards[at], tuple(param.shape), param.stride(), placements, *cut)
    return f"shard {at} {described} mesh {mesh.mesh.tolist()} {mesh.mesh_dim_names}"


def _group_text(group: str) -> str:
    process_group = compat.process_group(group)
    backend = compat.group_backend(group)
    return f"group {group} {backend} {compat.group_ranks(group)} rank {process_group.rank()}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
