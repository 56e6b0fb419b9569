"""The command `zpasses plan`. It imports torch when it runs: `zpasses --help` stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from zpasses.tools.capture.capture_command import StepOptions, step_options
from zpasses.tools.capture.mesh_shapes import AutoMesh
from zpasses.tools.cli.common import (
    CommandError,
    as_json,
    errors_as_messages,
    print_view,
    write_output,
)
from zpasses.tools.plan.plan_picture import check_matplotlib, plan_page
from zpasses.tools.plan.plan_view import plan_view
from zpasses.tools.plan.shape_table import shape_view


@click.command()
@errors_as_messages
@step_options
@click.option(
    "--memory",
    metavar="SIZE",
    help='Budget whose plan is chosen: "70GiB", "10%". Default: the fastest plan.',
)
@click.option(
    "--host-memory",
    metavar="SIZE",
    help='What a plan may take of the host on each rank, such as "40GiB", as in the option.',
)
@click.option(
    "--offload-parameters",
    metavar="WHICH",
    help="Shards of these parameters rest on the host: frozen, or all with the gradients of "
    "trained ones, as with zpasses.offload_parameters.",
)
@click.option(
    "--optimizer",
    metavar="NAME",
    help='Also plan the states of this optimizer of torch or zpasses: adamw, "sgd,momentum=0.9".',
)
@click.option(
    "--device-memory",
    metavar="SIZE",
    help="What the whole device may hold. With --optimizer: states that do not fit rest on the "
    "host, and the fastest plan that fits is chosen.",
)
@click.option(
    "--step-in-backward",
    is_flag=True,
    help="Parameters of blocks step in backward, which frees their gradients, as with "
    "zpasses.step_in_backward. With --compile-blocks and --optimizer.",
)
@click.option(
    "--pipeline",
    metavar="PASSES",
    help='Passes of the step, as in the option: "zero3{gather-params.encode=int8}", '
    '"chunk-loss,zero3". Default: zero3.',
)
@click.option(
    "--points",
    type=click.IntRange(2, 50),
    default=8,
    show_default=True,
    help="About how many plans to make.",
)
@click.option(
    "--backwards-per-step",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Micro-batches from one optimizer step to the next, as in the option of the backend.",
)
@click.option(
    "--compile-blocks",
    metavar="NAMES",
    help="Plan a step whose modules of these names are compiled one by one, as "
    "zpasses.compile_blocks does.",
)
@click.option(
    "--repeat-layers",
    "repeat",
    metavar="NAME",
    help="Argument of the function that is the number of layers. A few are captured, and the "
    "others are copies of one of them.",
)
@click.option(
    "--html",
    "picture",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also write a page with time over memory. Needs matplotlib.",
)
@as_json
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    step: StepOptions,
    picture: Path | None,
    as_json: bool,
    auto: AutoMesh | None = None,
    **given: Any,
) -> None:
    """Show what a training step costs under every memory budget, without running it.

    MODULE:FUNCTION (or FILE.py:FUNCTION) is as for `zpasses capture`. The table has the plans from
    the leanest to the fastest, and stages 2 and 3 without a budget. Times and memory are those of
    the cost model. The last line but the legend has the options that reproduce the chosen plan.

    With --mesh auto, the table has one line for each shape of hybrid sharding, with its plan for
    --memory, or its fastest that fits in a device together with the state of AdamW, or of the
    --optimizer. The chosen shape is the fastest that fits.

    With --compile-blocks, the table has one plan for each number of graphs ahead for which gathers
    start, and the last line is the call that compiles the blocks.

    With --optimizer and --device-memory, states of the optimizer rest on the host where a plan does
    not fit otherwise, and the chosen plan is the fastest together with their copies.

    With --repeat-layers, a plan of a large model takes as long as that of a small one.

    The exit status is 0, 1 if no plan fits, and 2 for an error.
    """
    from zpasses.tools.plan.plan_request import PlanRequest
    from zpasses.tools.plan.step_plans import plan_shapes, plan_step

    if given["compile_blocks"] is not None:
        _check_blocks(ctx, given["backwards_per_step"])
    if given["repeat"] is not None:
        _check_repeat(given["backwards_per_step"], given["compile_blocks"])

    if picture is not None:
        check_matplotlib()
        if not picture.parent.is_dir():
            raise CommandError(
                f"cannot write {picture}: there is no folder {picture.parent}; name a file in a "
                "folder that exists with --html."
            )
    if auto is not None and _is_given(ctx, "points"):
        raise CommandError("--points counts the plans of one mesh; give one instead of auto.")
    if auto is not None and "reshard_after_forward" in step.shard:
        raise CommandError(
            "--reshard-after-forward divides the ranks of one mesh; give one instead of auto."
        )
    request = PlanRequest(**vars(step), **given)
    if auto is not None:
        if picture is not None:
            raise CommandError("--html shows the plans of one mesh; give one instead of auto.")
        with tqdm(desc="meshes", unit="mesh", disable=None, leave=False) as bar:
            shapes = plan_shapes(request, auto, lambda point: bar.update())
        print_view(shape_view(shapes), as_json)
        ctx.exit(0 if shapes.chosen is not None else 1)
    with tqdm(desc="plans", unit="plan", disable=None, leave=False) as bar:
        found = plan_step(request, lambda point: bar.update())
    if picture is not None:
        write_output(picture, plan_page(found))
    print_view(plan_view(found), as_json)
    if found.chosen is None:
        ctx.exit(1)


def _is_given(ctx: click.Context, option: str) -> bool:
    return ctx.get_parameter_source(option) is not click.core.ParameterSource.DEFAULT


def _check_blocks(ctx: click.Context, backwards_per_step: int) -> None:
    """Refuses options that change nothing in a step of blocks."""
    if _is_given(ctx, "points"):
        raise CommandError(
            "--points does not go together with --compile-blocks, which makes one plan for each "
            "number of graphs ahead; leave it out."
        )
    if backwards_per_step > 1:
        raise CommandError(
            f"--backwards-per-step {backwards_per_step} does not go together with "
            "--compile-blocks, which plans each backward by itself when it ends; leave it out to "
            "plan one that reduces its gradients."
        )


def _check_repeat(backwards_per_step: int, compile_blocks: str | None) -> None:
    """Refuses options that a plan of repeated layers does not know."""
    given = {
        "--compile-blocks": compile_blocks is not None,
        "--backwards-per-step": backwards_per_step > 1,
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise CommandError(
            f"{name} does not go together with --repeat-layers, which plans one graph of one "
            "micro-batch; leave out one of the two."
        )
