"""Builds, shards, compiles and "runs" a model on fake tensors in a fake process group. Nothing is
allocated, computed or communicated.

A capture names a function, `MODULE:FUNCTION` or `FILE.py:FUNCTION`. It is called on fake tensors,
as one rank of the fake process group, and returns `(model, inputs)` or `(model, inputs, loss)`:

    model    an nn.Module. Without a mesh, it is sharded over all ranks unless it has DTensor
             parameters. With a mesh, it is sharded over the dimensions of data parallelism, unless
             the function has called `zpasses.shard`.
    inputs   a tensor, a tuple of positional arguments, or a dict of keyword arguments
    loss     maps the model's result to the scalar to differentiate. Without it, the result's
             attribute `loss` is used, or else the sum of all differentiable tensors of the result.

A function with a parameter `mesh` gets the device mesh of the request, and applies tensor or expert
parallelism over its other dimensions.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import zpasses
from zpasses import compat
from zpasses.backend.per_block import find_blocks
from zpasses.errors import OptionError, ShardingError, ZpassesError, suggestion
from zpasses.garbage import no_garbage_collection
from zpasses.graph.queries import nbytes
from zpasses.sharding.module import ShardedModule
from zpasses.testing.step_graphs import capture_step
from zpasses.testing.worlds import fake_world
from zpasses.tools.capture.mesh_shapes import MeshShape


class CaptureError(ZpassesError):
    """The function cannot be found or returns something unexpected, or the model cannot be
    captured.
    """


@dataclass(frozen=True)
class CaptureRequest:
    """What to capture, and for which ranks and hardware."""

    function: str
    """`MODULE:FUNCTION` or `FILE.py:FUNCTION`."""
    out: Path | None
    """Folder of the dump; None writes none."""
    world: int = 8
    """Number of ranks of the fake process group."""
    ranks: tuple[int, ...] = (0,)
    """Ranks to capture, one after another."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    train: bool = True
    """Capture forward and backward; False captures a call without gradients."""
    shard: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `zpasses.shard`: param_dtype, reduce_dtype, reshard_after_forward."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the backend: zero_stage, pipeline, target, ..."""
    more_options: Sequence[Mapping[str, Any]] = ()
    """The model is compiled again with each of these in addition, which costs less than a capture.
    """
    compile_blocks: str | None = None
    """Compile these modules one by one, as `zpasses.compile_blocks` does; None compiles the model.
    """
    mesh: MeshShape | None = None
    """Device mesh of the `world` ranks. None is one dimension, over which the model is sharded."""
    steps: int = 1
    """How often the step runs."""
    on_sharded: Callable[[nn.Module], object] = lambda model: None
    """Called with the sharded model of each rank, before its step."""


@dataclass(frozen=True)
class CaptureReport:
    """The cost of a capture, and the size of the model."""

    seconds: Mapping[str, float]
    """Seconds of "build", "shard" and "step" (Dynamo, tracing, passes, checks, dump), summed over
    ranks.
    """
    peak_rss_bytes: int
    """Peak resident memory of this process since its start."""
    shard_bytes: int
    """Bytes of the last rank's shards of all parameters."""
    uncompiled: Mapping[str, int]
    """With `compile_blocks`: name of a module that has parameters outside of the blocks -> their
    bytes, as in the unsharded model."""


def run_capture(request: CaptureRequest) -> CaptureReport:
    """Capture, run the passes, and write the dump, if there is a folder for it.

    Raises:
        CaptureError: if the function or the model fails, of which the original exception is the
            cause; or if a file of the dump could not be written, as on a full disk.
        ShardingError: if `zpasses.shard` refuses the model or the mesh.
        OptionError: for options that the backend does not know, or a mesh of other ranks.
        PassError: if a pass fails. The dump has the graph before it.
        DumpError: if the dump cannot be written to the folder.
    """
    if not all(0 <= rank < request.world for rank in request.ranks):
        raise OptionError(
            f"capture: got ranks {request.ranks}; expected numbers from 0 to "
            f"{request.world - 1} in a world of {request.world}."
        )
    if request.mesh is not None and request.mesh.ranks != request.world:
        raise OptionError(
            f"capture: mesh {request.mesh} has {request.mesh.ranks} ranks; expected those of the "
            f"world, {request.world}."
        )
    function = load(request.function)
    _check_arguments(request, function)
    options = dict(request.options)
    if request.out is not None:
        options |= {"dump": request.out, "dump_ranks": "all"}
    every = [options, *({**options, **more} for more in request.more_options)]
    for each in every:
        zpasses.Options.parse(each)
    seconds = dict.fromkeys(("build", "shard", "step"), 0.0)
    sizes: tuple[int, dict[str, int]] = 0, {}
    for number, rank in enumerate(request.ranks):
        if number:
            gc.collect()
        with no_garbage_collection():
            sizes = compat.call_with_stack_room(
                functools.partial(_capture_rank, request, function, rank, every, seconds)
            )
    if request.out is not None:
        _check_complete(Path(request.out))
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return CaptureReport(seconds, usage * (1 if sys.platform == "darwin" else 1024), *sizes)


def _check_complete(out: Path) -> None:
    """An error ends the dump and not the compile, but a capture is for its dump."""
    for path in sorted(out.glob("rank*/*/compile.json")):
        if json.loads(path.read_bytes())["state"] == "compiling":
            raise CaptureError(
                f"the dump in {path.parent} is incomplete, because a file of it could not be "
                f"written; {shutil.disk_usage(out).free >> 20:,} MiB are free there. Free some "
                "space, or name another folder with -o."
            )


def load(name: str) -> Callable[..., Any]:
    """The function that `MODULE:FUNCTION` or `FILE.py:FUNCTION` names.

    Raises:
        CaptureError: if it does not exist or cannot be imported.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute.isidentifier():
        raise CaptureError(
            f"{name!r} does not name a function; expected MODULE:FUNCTION or FILE.py:FUNCTION, as "
            "in "
            "train.model:build."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = (
            _module_of_file(Path(place))
            if place.endswith(".py")
            else importlib.import_module(place)
        )
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{place} cannot be imported: {type(error).__name__}: {error}. Run the command "
            "where the import works."
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise CaptureError(
            f"{place} has no function {attribute!r}.{suggestion(attribute, functions)}"
        )
    return found  # type: ignore[no-any-return]


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise CaptureError(
            f"there is no file {path}; expected MODULE:FUNCTION or FILE.py:FUNCTION."
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and torch look up modules by name
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _takes_mesh(function: Callable[..., Any]) -> bool:
    return "mesh" in inspect.signature(function).parameters


def _check_arguments(request: CaptureRequest, function: Callable[..., Any]) -> None:
    name, signature, arguments = request.function, inspect.signature(function), request.arguments
    if request.mesh is not None and _takes_mesh(function):
        if "mesh" in arguments:
            raise CaptureError(
                f"{name}: argument mesh is given twice; give the device mesh as --mesh only."
            )
        arguments = {**arguments, "mesh": request.mesh}
    elif request.mesh is not None and request.mesh.model_names:
        raise CaptureError(
            f"{name}{signature} has no parameter named mesh, so nothing would use dimension "
            f"{', '.join(request.mesh.model_names)} of --mesh {request.mesh}. Add the parameter, "
            "and apply the model's own parallelism in the function, e.g. "
            f"parallelize_module(model, mesh[{request.mesh.model_names[0]!r}], ...)."
        )
    try:
        signature.bind(**arguments)
    except TypeError as error:
        hint = "" if request.mesh is not None else " and a device mesh as --mesh dp=4,tp=2"
        raise CaptureError(
            f"{name}{signature}: {error}. Give arguments as --arg NAME=VALUE{hint}."
        ) from error


def _capture_rank(
    request: CaptureRequest,
    function: Callable[..., Any],
    rank: int,
    every: Sequence[Mapping[str, Any]],
    seconds: dict[str, float],
) -> tuple[int, dict[str, int]]:
    """Returns the sizes of a `CaptureReport`."""
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(fake_world(request.world, rank))
        if request.mesh is not None:  # a mesh holds real tensors of ranks
            names = request.mesh.names
            mesh = init_device_mesh("cpu", request.mesh.sizes, mesh_dim_names=names)
        stack.enter_context(compat.FakeTensorMode(allow_non_fake_inputs=True))
        with _timed(seconds, "build"):
            given = dict(request.arguments)
            if request.mesh is not None and _takes_mesh(function):
                given["mesh"] = mesh
            try:
                made = function(**given)
            except ShardingError:
                raise
            except Exception as error:
                raise CaptureError(
                    f"{request.function} raised {type(error).__name__}: {error}{_hint(error)}"
                ) from error
            model, inputs, loss = _unpacked(request.function, made)
        with _timed(seconds, "shard"):
            _shard(request, model, mesh)
        request.on_sharded(model)
        for options in every:
            with _timed(seconds, "step"):
                try:
                    ends = capture_step(
                        model,
                        inputs,
                        options=options,
                        loss=loss or _own_loss,
                        train=request.train,
                        blocks=request.compile_blocks,
                        steps=request.steps,
                    )
                except Exception as error:
                    raise _unwrapped_error(error) from error
            if request.train and not ends:
                raise CaptureError(
                    "no result of the model requires a gradient; return a loss function as third "
                    "value, or use --no-train."
                )
        return _sizes(model, request.compile_blocks)


def _sizes(model: nn.Module, blocks: str | None) -> tuple[int, dict[str, int]]:
    inside = () if blocks is None else tuple(f"{name}." for name in find_blocks(model, blocks))
    shards, outside = 0, dict[str, int]()
    for name, param in model.named_parameters():
        shards += nbytes(compat.local_part(param))
        if blocks is not None and not name.startswith(inside):
            module = name.rpartition(".")[0]
            outside[module] = outside.get(module, 0) + param.numel() * param.element_size()
    return shards, outside


def _own_loss(result: Any) -> Any:
    own = getattr(result, "loss", None)
    return result if own is None else own


def _shard(request: CaptureRequest, model: nn.Module, mesh: DeviceMesh) -> None:
    """Shards the model, unless its function has done so."""
    sharded = any(isinstance(module, ShardedModule) for module in model.modules())
    if request.mesh is None:
        sharded = sharded or any(isinstance(param, DTensor) for param in model.parameters())
    if sharded:
        if request.shard:
            raise CaptureError(
                f"{request.function} returned a model that is sharded already, so "
                f"{', '.join(request.shard)} would change nothing; give it to the function's own "
                "call of zpasses.shard, or return a model that is not sharded."
            )
        return
    if request.mesh is not None:
        names = request.mesh.data_names
        part = mesh if names == request.mesh.names else mesh[names if len(names) > 1 else names[0]]
        zpasses.shard(model, mesh=part, **request.shard)
    else:
        zpasses.shard(model, mesh=mesh, **request.shard)


def _unpacked(name: str, made: Any) -> tuple[nn.Module, Any, Callable[[Any], Any] | None]:
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise CaptureError(
            f"{name} returned {what}; expected (model, inputs) or (model, inputs, loss), where "
            "model is an nn.Module."
        )
    model, inputs, *loss = made
    if not isinstance(inputs, (Tensor, tuple, list, dict)):
        raise CaptureError(
            f"{name} returned inputs of type {type(inputs).__name__}; expected a tensor, a tuple, "
            "or a dict of keywords."
        )
    if loss and loss[0] is not None and not callable(loss[0]):
        raise CaptureError(
            f"{name} returned a {type(loss[0]).__name__} as third value; expected a function that "
            "maps the model's result to the loss. Arguments by keyword are a dict in place of the "
            "inputs."
        )
    return model, inputs, loss[0] if loss else None


def _hint(error: Exception) -> str:
    if str(error).startswith("_apply(): Couldn't swap"):
        return (
            ". torch converts no modules of fake tensors, as by .to(...) or .bfloat16(): make the "
            "model in its dtype, as by nn.Linear(..., dtype=...) or torch.set_default_dtype."
        )
    return ""


def _unwrapped_error(error: Exception) -> Exception:
    inner = compat.inner_exception(error) or error
    if isinstance(inner, (ZpassesError, OptionError)):
        return inner if isinstance(inner, Exception) else error
    return CaptureError(f"the step failed on fake tensors: {type(inner).__name__}: {inner}")


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Any:
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - started
