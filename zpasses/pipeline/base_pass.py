"""Passes: the base class, and what identifies a pass in cache keys."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import os
from abc import abstractmethod
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import fx

from zpasses import compat
from zpasses.cost.time.route_figures import route_figures
from zpasses.cost.time.target import current_target
from zpasses.option_values import format_value
from zpasses.pipeline.facts import Facts
from zpasses.pipeline.runner import run_passes
from zpasses.ranks.vote import has_other_ranks


class Level(enum.Enum):
    """The graph that a pass rewrites."""

    CAPTURED = "captured"
    """The graph that Dynamo captured, with local shards in place of sharded parameters."""
    JOINT = "joint"
    """Forward and backward together, before partitioning; also the graph of a model that runs
    without gradients.
    """
    FORWARD = "forward"
    BACKWARD = "backward"
    PARTITIONED = "partitioned"
    """The forward and the backward graph, one after the other."""


class Pass(compat.CustomGraphPass):
    """A rewrite of one graph. Derive a frozen dataclass from it: its fields are the pass's options.

    An instance can also be handed to Inductor's hooks
    (`torch._inductor.config.joint_custom_pre_pass`, `post_grad_custom_post_pass`, ...) to rewrite
    graphs that zpasses did not capture.
    """

    name: ClassVar[str]
    """Name of the pass in pipelines, in kebab-case."""
    level: ClassVar[Level]
    """The graph that it rewrites."""

    @property
    def facts(self) -> Facts:
        """What else the runner and the backend know of the pass. Subclasses whose facts do not
        depend on options set a class attribute: `facts: ClassVar[Facts] = Facts(votes=True)`.
        """
        return Facts()

    @abstractmethod
    def rewrite(self, graph: fx.Graph) -> int:
        """Rewrite `graph` in place and return the number of changes.

        The runner lints, verifies, times and records.
        """

    def __call__(self, graph: fx.Graph) -> None:
        run_passes(graph, [self])

    def uuid(self) -> str:
        """Return the pass's part of the key of Inductor's compile caches.

        If the pass votes, the part is unique to this process. Otherwise a rank with a cache hit
        would skip the pass, and the other ranks would wait for its vote.
        """
        return self.digest() + vote_key_suffix([self])

    def digest(self) -> str:
        """Return a hash of everything that determines the pass: the sources of zpasses and of the
        pass, its options, the backends of the process groups, and the target.
        """
        module = inspect.getsourcefile(type(self))
        parts = (
            package_digest(),
            _file_digest(module),
            str(self),
            repr(sorted(_environment().items())),
        )
        return hashlib.sha256("|".join(parts).encode()).hexdigest()

    def __str__(self) -> str:
        """Format the pass as pipeline text, with the options that differ from their defaults."""
        options = [
            f"{field.name}={format_value(getattr(self, field.name))}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if field.init and getattr(self, field.name) != field.default
        ]
        return self.name + (f"{{{','.join(options)}}}" if options else "")


# --- cache keys -----------------------------------------------------------------------------------
_TOKEN = uuid4().hex


def process_token() -> str:
    """Part of cache keys that must not match in another process, nor in a fork of this one."""
    return f"{_TOKEN}{os.getpid():x}"


def vote_key_suffix(passes: Iterable[Pass]) -> str:
    """Part of cache keys that is unique to this process if the ranks vote on one of the passes."""
    voting = any(each.facts.votes for each in passes) and dist.is_initialized()
    return (
        f"-{process_token()}" if voting and any(map(has_other_ranks, compat.group_names())) else ""
    )


@functools.cache
def package_digest() -> str:
    """Return a hash of torch's version and of the sources of zpasses: a change anywhere in them may
    change what a pass does.
    """
    digest = hashlib.sha256(torch.__version__.encode())
    folders = [Path(__file__).parents[1]]
    passes = find_spec("zpasses.passes")  # in a checkout, not below the folder of zpasses
    if passes is not None and passes.origin is not None:
        folders.append(Path(passes.origin).parent)
    for path in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _file_digest(path: str | None) -> str:
    return hashlib.sha256(
        Path(path).read_bytes() if path and Path(path).exists() else b""
    ).hexdigest()


def _environment() -> dict[str, str]:
    """Return what passes read besides the graph: the backend of each process group, the target, and
    the known figures of its routes.

    Second groups are left out: passes make them, and their backend is that of another group.
    """
    known = compat.group_backends() if torch.distributed.is_initialized() else {}
    groups = {name: each for name, each in known.items() if compat.parent_group(name) == name}
    target = current_target()
    return {**groups, "target": repr(target), "routes": repr(route_figures(target))}
