"""The command `zpasses capture`. It imports torch when it runs, so that `zpasses --help` stays
quick.
"""

from __future__ import annotations

import ast
import functools
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from zpasses.errors import OptionError
from zpasses.inspect.view import Text, View
from zpasses.tools.capture.mesh_shapes import AutoMesh, MeshShape
from zpasses.tools.cli.common import CommandError, as_json, errors_as_messages, print_view
from zpasses.tools.new_folder import check_new

Command = TypeVar("Command", bound=Callable[..., Any])


def _arguments(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, Any]:
    found = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"got {value!r}; expected NAME=VALUE.")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def _ranks(context: click.Context, option: click.Parameter, value: str) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"got {value!r}; expected rank numbers such as 0,3.")
    return tuple(map(int, parts))


def _mesh(context: click.Context, option: click.Parameter, value: str | None) -> Any:
    if value is None:
        return None
    # Only `zpasses plan` tries all shapes.
    auto = context.command.name == "plan" and value.strip().startswith("auto")
    try:
        return AutoMesh.parse(value) if auto else MeshShape.parse(value)
    except OptionError as error:
        raise click.BadParameter(str(error)) from error


@dataclass(frozen=True)
class StepOptions:
    """What the commands that capture a step are given about it."""

    function: str
    """`MODULE:FUNCTION` or `FILE.py:FUNCTION`."""
    world: int = 8
    """Number of ranks."""
    target: str | None = None
    """The hardware; None is this machine."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    shard: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `zpasses.shard`: param_dtype, reduce_dtype, reshard_after_forward."""
    mesh: MeshShape | None = None
    """Device mesh of the ranks. None is one dimension, over which the model is sharded."""


_STEP_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--mesh",
        metavar="NAME=SIZE,...",
        callback=_mesh,
        help="Device mesh of the ranks: dp=64,tp=8 or replicate=8,shard=64. The model is "
        "sharded over dp or shard. The function gets the mesh as argument `mesh`. In `zpasses "
        "plan`, auto or auto,tp=8 tries all shapes of hybrid sharding.",
    ),
    click.option(
        "--reduce-dtype", metavar="DTYPE", help="Reduce gradients in this dtype: float32."
    ),
    click.option(
        "--param-dtype", metavar="DTYPE", help="Gather parameters in this dtype: bfloat16."
    ),
    click.option(
        "--reshard-after-forward",
        "reshard_size",
        metavar="RANKS",
        type=click.IntRange(min=2),
        help="In stage 3, gather again in backward from this many consecutive ranks.",
    ),
    click.option(
        "--arg",
        "arguments",
        metavar="NAME=VALUE",
        multiple=True,
        callback=_arguments,
        help="Keyword argument of the function. Can be repeated.",
    ),
    click.option(
        "--target",
        help='Hardware to plan for: "mi300x", "h100,ranks_per_node=4". Default: this machine.',
    ),
    click.option(
        "--world",
        type=click.IntRange(min=1),
        help="Ranks of the fake process group. Default: those of --mesh, or 8.",
    ),
    click.argument("function", metavar="MODULE:FUNCTION"),
)


def step_options(command: Command) -> Command:
    """Decorator: add MODULE:FUNCTION, and the options that say how to capture its step. The command
    gets them as the argument `step`.
    """

    @functools.wraps(command)
    def run(
        function: str,
        world: int | None,
        mesh: MeshShape | AutoMesh | None,
        target: str | None,
        arguments: dict[str, Any],
        reshard_size: int | None,
        param_dtype: str | None,
        reduce_dtype: str | None,
        **given: Any,
    ) -> Any:
        import torch

        from zpasses.option_values import parse_value

        if isinstance(mesh, MeshShape) and world not in (None, mesh.ranks):
            raise CommandError(
                f"--world {world} does not go together with --mesh {mesh}, which has {mesh.ranks} "
                "ranks; leave --world out."
            )
        ranks = mesh.ranks if isinstance(mesh, MeshShape) else world or 8
        dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
        shard: dict[str, Any] = {
            key: parse_value(text, torch.dtype, f"--{key.replace('_', '-')}")
            for key, text in dtypes.items()
            if text is not None
        }
        if reshard_size is not None:
            shard["reshard_after_forward"] = reshard_size
        own = None if isinstance(mesh, AutoMesh) else mesh
        step = StepOptions(function, ranks, target, arguments, shard, own)
        if isinstance(mesh, AutoMesh):
            given["auto"] = mesh  # of `zpasses plan`
        return command(step, **given)

    for option in _STEP_OPTIONS:
        run = option(run)
    return run  # type: ignore[return-value]


_UNTRUSTED_BYTES = 12 << 20
"""Graphs of a dump in bytes, above which some command may need more than `Limits` allow. Those of
Llama with 24 layers have 8 MB, and all commands read them; those with 80 have 27 MB."""


def _how_to_inspect(out: Path) -> str:
    large = sum(each.stat().st_size for each in out.rglob("*.jsonl")) > _UNTRUSTED_BYTES
    read = shlex.quote(str(out)) + (" --trusted" if large else "")
    return (
        f"Inspect it with: zpasses list {read}; zpasses memory {read}; zpasses html {read} -o "
        "report.html"
    )


@click.command()
@errors_as_messages
@step_options
@click.option(
    "-o",
    "--output",
    "out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder of the dump.",
)
@click.option(
    "--ranks",
    metavar="N,N",
    default="0",
    show_default=True,
    callback=_ranks,
    help="Ranks to capture, one after another.",
)
@click.option(
    "--zero-stage",
    type=click.IntRange(1, 3),
    help="Named pipeline to run. Default: 3, unless --pipeline is given.",
)
@click.option(
    "--pipeline",
    help='Passes to run instead, as text: "gather-params,reduce-grads,reshard-after-forward".',
)
@click.option(
    "--compile-blocks",
    metavar="NAMES",
    help="Modules to compile one by one, as zpasses.compile_blocks does.",
)
@click.option(
    "--train/--no-train",
    default=True,
    help="Capture forward and backward, or a call without gradients.",
)
@as_json
def capture(
    step: StepOptions,
    out: Path,
    ranks: tuple[int, ...],
    zero_stage: int | None,
    pipeline: str | None,
    compile_blocks: str | None,
    train: bool,
    as_json: bool,
) -> None:
    """Capture a training step for any number of ranks, without running it.

    MODULE:FUNCTION (or FILE.py:FUNCTION) returns (model, inputs) or (model, inputs, loss). It is
    called on fake tensors, so a model of any size can be built on this machine. The model is
    sharded, captured and rewritten by the passes. The dump contains every graph.
    """
    from zpasses.tools.capture.captured_step import CaptureRequest, run_capture

    if zero_stage is not None and pipeline is not None:
        raise CommandError("--zero-stage and --pipeline exclude each other; give only one of them.")
    check_new(out)
    given = {"zero_stage": zero_stage, "pipeline": pipeline, "target": step.target}
    options = {key: value for key, value in given.items() if value is not None}
    about = (step.function, out, step.world, ranks, step.arguments, train, step.shard, options)
    report = run_capture(CaptureRequest(*about, compile_blocks=compile_blocks, mesh=step.mesh))
    values = {
        "dump": str(out),
        "seconds": report.seconds,
        "peak_rss_bytes": report.peak_rss_bytes,
    }
    mesh = "" if step.mesh is None else f" (mesh {step.mesh})"
    took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items())
    lines = (
        f"{step.function} as rank {', '.join(map(str, ranks))} of {step.world}{mesh}: {took}; "
        f"{report.peak_rss_bytes / 2**30:.1f} GiB",
        _how_to_inspect(out),
    )
    print_view(View("", (Text(lines),), values), as_json)
