"""`compile_blocks`: blocks are compiled one by one, and each distinct one only once."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from zpasses import compat
from zpasses.errors import OptionError, some_of
from zpasses.host.saved_values import end_copies_out
from zpasses.pipeline.options import Options
from zpasses.runtime.block_schedule import begin_model_call, end_model_call
from zpasses.runtime.param_value import is_sharded_parameter

log = logging.getLogger("zpasses")


def compile_blocks(model: nn.Module, blocks: str = "auto", **options: Any) -> list[str]:
    """Compile blocks of a sharded model one by one, in place.

    Blocks of one class whose tensors have equal shapes share one compile. A schedule of the whole
    model starts the gathers of a block while the block before it computes, in forward and in
    backward, and lets reductions end while the next backward computes.

    Args:
        model: the model, after `zpasses.shard`. Call it as before.
        blocks: names of modules with wildcards, separated by commas, such as "layers.*"; "auto"
            takes all modules in lists (`nn.ModuleList`, `nn.Sequential`). Where modules that
            match are nested, the outermost one that has a forward is the block.
        options: options of the backend, as in `torch.compile(..., options={...})`. `prefetch` is
            "auto" if it is not given.

    Returns:
        The names of the blocks.

    Raises:
        OptionError: if no module matches, or an option is wrong.
    """
    if "options" in options:
        raise OptionError(
            "compile_blocks: got options=...; expected the options of the backend as arguments, "
            "such as compile_blocks(model, zero_stage=3)."
        )
    options = {"prefetch": "auto", **options}
    parsed = Options.parse(options)
    if not isinstance(blocks, str):
        raise OptionError(
            f"compile_blocks: got blocks={blocks!r}; expected names of modules such as 'layers.*', "
            "or 'auto'."
        )
    if not isinstance(model, nn.Module):
        raise OptionError(f"compile_blocks: got {model!r}; expected a module.")
    found = find_blocks(model, blocks)
    _warn_of_exact_values(model, found, parsed)
    limits = compat.recompile_limit(_VARIANTS * _most_kinds(found.values()))
    for module in found.values():
        compat.compile_module(module, backend="zpasses", options=options, **limits)
    if not getattr(model, _REPORTS_CALLS, False):
        setattr(model, _REPORTS_CALLS, True)
        model.register_forward_pre_hook(_begin, prepend=True)
        model.register_forward_hook(_end, always_call=True)
    return list(found)


def _warn_of_exact_values(
    model: nn.Module, blocks: Mapping[str, nn.Module], options: Options
) -> None:
    if not any(each.facts.changes_values for each in options.passes()):
        return
    inside = {param for block in blocks.values() for param in block.parameters()}
    outside = [
        name
        for name, param in model.named_parameters()
        if param.dim() > 1 and param not in inside and is_sharded_parameter(param)
    ]
    if outside:
        log.warning(
            "compile_blocks: %s move exact values, although the pipeline encodes: they lie outside "
            "of the blocks, in code that is not compiled. Name their modules, too.",
            some_of(outside, 5),
        )


_REPORTS_CALLS = "_zpasses_reports_calls"
"""Attribute of a model with the hooks below. A copy of the model has both."""


_VARIANTS = 4
"""Dynamo's limit is made for one graph per function, and for its shapes. A block may also run with
and without gradients, and with and without a gradient of its input. A rank that reaches the limit
runs the block uncompiled, while others may not."""


def _most_kinds(modules: Iterable[nn.Module]) -> int:
    """The largest number of different modules whose compiles Dynamo counts together.

    Modules differ by their class, by the shapes and dtypes of their tensors, and by numbers and
    texts among their attributes, such as the number of a layer.
    """
    kinds: dict[object, set[object]] = {}
    for module in modules:
        tensors = (*module.named_parameters(), *module.named_buffers())
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)
        constants = tuple(
            (name, key, value)
            for name, part in module.named_modules()
            for key, value in vars(part).items()
            if isinstance(value, (bool, int, float, str))
        )
        kind = type(module), shapes, constants
        kinds.setdefault(compat.starts_alike(module), set()).add(kind)
    return max(map(len, kinds.values()), default=1)


def find_blocks(model: nn.Module, patterns: str) -> dict[str, nn.Module]:
    """The blocks by name.

    Args:
        patterns: as the argument `blocks` of `compile_blocks`.

    Raises:
        OptionError: if a pattern matches no module that has a forward.
    """
    wanted = [each.strip() for each in patterns.strip(" ,").split(",")]
    named = {name: module for name, module in model.named_modules() if name}
    modules = {name: module for name, module in named.items() if _is_called(module)}
    for pattern in wanted:
        if not any(_matches(name, pattern) for name in modules):
            if lists := [name for name in named if _matches(name, pattern)]:
                raise OptionError(
                    f"compile_blocks: {pattern!r} matches {lists[0]!r}, a "
                    f"{type(named[lists[0]]).__name__}, which is never called. Name the modules in "
                    f"it: '{lists[0]}.*'."
                )
            names = list(modules)
            raise OptionError(
                f"compile_blocks: no module matches {pattern!r}. Modules of the model: "
                f"{', '.join(names[:20])}{', ...' if len(names) > 20 else ''}."
            )
    found: dict[str, nn.Module] = {}
    for name, module in modules.items():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and any(_matches(name, pattern) for pattern in wanted):
            found[name] = module
    return found


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward, which a list of modules has not."""
    return type(module).forward is not nn.Module.forward


def _matches(name: str, pattern: str) -> bool:
    if pattern == "auto":
        return name.rpartition(".")[2].isdecimal()
    return fnmatch.fnmatchcase(name, pattern)


def _begin(model: nn.Module, args: object) -> None:
    begin_model_call()


def _end(model: nn.Module, args: object, output: object) -> None:
    end_copies_out(observed=output is not None)
    end_model_call()
