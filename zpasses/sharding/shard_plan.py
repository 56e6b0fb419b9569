"""What a call of `zpasses.shard` does: a plan, which raises before anything is changed, and its
application to the model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.ranks.mesh_comparison import compare_shard_calls, register_mesh
from zpasses.ranks.new_groups import consecutive_ranks
from zpasses.runtime.layout import ParamLayout, layout_of
from zpasses.runtime.param_value import as_sharded_parameter
from zpasses.runtime.step_windows import register_step_window
from zpasses.sharding.flat_buffers import check_pack_mb, next_batch, pack_local_rows
from zpasses.sharding.foreign_weights import ForeignWeight, foreign_weight, take_over
from zpasses.sharding.hooks import install_hooks
from zpasses.sharding.layouts import (
    PlacementFn,
    check_divide_factor,
    check_reshard_size,
    cut_dims,
    layouts_of,
)
from zpasses.sharding.module import ShardedModule, add_reads, mark_ignored, put_in_place
from zpasses.sharding.param_spec import ParamShardSpec, own_part
from zpasses.sharding.replaced_params import mark_replaced, sharded_form
from zpasses.sharding.rnn import LIST_OF_WEIGHTS, drop_weights, rnns_with
from zpasses.sharding.scalars import refuse_parts_as_numbers
from zpasses.sharding.wrappers import check_no_ddp_inside, prepare_for_wrappers
from zpasses.short_names import REPLICATE_DIMENSIONS

_Places = dict[int, list[tuple[str, nn.Module, str]]]
"""Identity of a parameter -> path, module and name of each place that holds it."""


@dataclass(frozen=True)
class ShardPlan:
    """What a call of `zpasses.shard` does to a model."""

    model: nn.Module
    mesh: DeviceMesh
    places: _Places
    params: deque[nn.Parameter]
    """Each parameter to shard, once. No other part of the plan holds them, so that they can be
    freed one by one."""
    layouts: Mapping[int, ParamLayout]
    """How each is cut, by its identity."""
    foreign: dict[int, ForeignWeight]
    """Those that hold codes of another library, by their identity."""
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    ignored_params: Collection[nn.Parameter]
    pack_mb: float | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        ignored_params: Collection[nn.Parameter],
        pack_mb: float | None,
        shard_placement_fn: PlacementFn | None,
        grad_divide_factor: float | None,
        reshard_after_forward: int | None,
    ) -> ShardPlan:
        """Check the arguments, which are those of `zpasses.shard`, and compare them with those of
        the other ranks. The model stays as it is.

        Raises:
            ShardingError, AgreementError: as `zpasses.shard` says.
        """
        _check_arguments(mesh, param_dtype, reduce_dtype)
        check_divide_factor(grad_divide_factor)
        check_pack_mb(pack_mb)
        check_reshard_size(reshard_after_forward, mesh.size(mesh.ndim - 1))
        ignored = {id(param) for param in ignored_params}
        places, params = _find(model, ignored)
        if not params:
            raise ShardingError(_nothing_to_do(model))
        register_mesh(mesh)
        _check_order(mesh)  # after the comparison, which tells the other ranks
        check_no_ddp_inside(model)
        for path, module in model.named_modules():
            _check_module(path, module, ignored)
        _check_parameters(places, params, mesh, pack_mb)
        _check_shared_memory(model, places)
        foreign = _foreign_weights(places, params, param_dtype)
        names = {key: found[0][0] for key, found in places.items()}
        hybrid_mesh = mesh if mesh.ndim == 2 else None
        shard_mesh = mesh if hybrid_mesh is None else compat.submesh_of_dimension(mesh, 1)
        plain = [param for param in params if id(param) not in foreign]
        dims = cut_dims(plain, names, shard_placement_fn) | dict.fromkeys(foreign, 0)
        del plain
        divide_factor = mesh.size() if grad_divide_factor is None else grad_divide_factor
        asked = {
            "param_dtype": str(param_dtype),
            "reduce_dtype": str(reduce_dtype),
            "grad_divide_factor": divide_factor,
            "reshard_after_forward": reshard_after_forward,
            "pack_mb": pack_mb,
            "shard_placement_fn": {names[key]: f"Shard({dim})" for key, dim in dims.items() if dim},
        }
        compare_shard_calls(mesh, asked)
        reshard_group = None
        if reshard_after_forward is not None:
            reshard_group = consecutive_ranks(shard_mesh, reshard_after_forward)
        layouts = layouts_of(
            params, names, shard_mesh, hybrid_mesh, dims, grad_divide_factor, reshard_group
        )
        _check_tied(places, params, layouts)
        found = (model, mesh, places, params, layouts, foreign)
        return cls(*found, param_dtype, reduce_dtype, ignored_params, pack_mb)

    def apply(self) -> None:
        """Shard the parameters. Empties `places`, `params` and `foreign`."""
        install_hooks()
        mark_ignored(self.ignored_params)
        specs: dict[nn.Module, list[ParamShardSpec]] = {}
        for rnn in rnns_with(self.places, self.model):
            drop_weights(rnn)
            specs[rnn] = []  # also where all its weights are parametrized
        while self.params:
            batch = next_batch(self.params, self.layouts, self.pack_mb)
            sharded = _shard_parameters(batch, self.layouts, self.foreign, self.pack_mb)
            for key, made in sharded.items():
                foreign = self.foreign.pop(key, None)
                for _, module, name in self.places.pop(key):
                    spec = self._spec(name, made, self.layouts[key])
                    if foreign is not None:
                        take_over(module)
                        spec = replace(spec, name=foreign.codes.name, codes=foreign.codes)
                    put_in_place(module, name, spec.name, made)
                    specs.setdefault(module, []).append(spec)
            batch.clear()  # frees the full parameters
        for module, own in specs.items():
            add_reads(module, own)
        prepare_for_wrappers(self.model)
        register_step_window(
            [(module, spec.name) for module, own in specs.items() for spec in own],
            {module: path for path, module in self.model.named_modules()},
        )
        refuse_parts_as_numbers(self.mesh)

    def _spec(self, name: str, param: nn.Parameter, layout: ParamLayout) -> ParamShardSpec:
        floating = param.is_floating_point()
        return ParamShardSpec(
            name,
            param.shape,
            layout,
            self.param_dtype if floating else None,
            self.reduce_dtype if floating else None,
        )


def _unsharded(
    model: nn.Module, ignored: Collection[int]
) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    for prefix, module in model.named_modules():
        taken = module._zpasses_specs if isinstance(module, ShardedModule) else {}
        for name, param in module._parameters.items():
            if param is not None and name not in taken and id(param) not in ignored:
                yield f"{prefix}.{name}" if prefix else name, module, param


def _find(model: nn.Module, ignored: Collection[int]) -> tuple[_Places, deque[nn.Parameter]]:
    """Return the places of unsharded parameters, and each such parameter once.

    The queue holds the only further reference to the parameters, so that they can be freed one by
    one.
    """
    places: _Places = {}
    params: deque[nn.Parameter] = deque()
    for path, module, param in _unsharded(model, ignored):
        if id(param) not in places:
            params.append(param)
        places.setdefault(id(param), []).append((path, module, path.rpartition(".")[2]))
    return places, params


def _check_parameters(
    places: _Places, params: Iterable[nn.Parameter], mesh: DeviceMesh, pack_mb: float | None
) -> None:
    for param in params:
        for path, _, _ in places[id(param)]:
            _check_parameter(path, param, mesh, pack_mb is not None)


def _check_shared_memory(model: nn.Module, places: _Places) -> None:
    """Refuses trained parameters that share memory with another parameter or a buffer: each would
    get memory of its own.
    """
    found: list[tuple[str, int, int, str, Tensor]] = []
    for path, value in (*model.named_parameters(), *model.named_buffers()):
        plain = type(value) in (nn.Parameter, Tensor) and value.layout == torch.strided
        if plain and not value.is_meta and value.numel() and compat.is_dense(value):
            found.append((str(value.device), value.data_ptr(), value.nbytes, path, value))
    found.sort(key=lambda each: each[:3])
    for (device, first, size, one, a), (device_of_b, second, _, other, b) in itertools.pairwise(
        found
    ):
        pair = a, b
        if (
            device == device_of_b
            and second < first + size
            and any(id(each) in places for each in pair)
            and any(each.requires_grad for each in pair)
        ):
            raise ShardingError(
                f"{one} and {other} are two tensors that share memory. Sharding would give each "
                "its own, so a change of one would not be seen in the other. To tie two "
                "parameters, assign one to both modules (b.weight = a.weight); else give one of "
                "them a copy (tensor.detach().clone())."
            )


def _foreign_weights(
    places: _Places, params: Iterable[nn.Parameter], param_dtype: torch.dtype | None
) -> dict[int, ForeignWeight]:
    found = {}
    for param in params:
        for path, module, _ in places[id(param)]:
            if (foreign := foreign_weight(path, module, param, param_dtype)) is not None:
                found[id(param)] = foreign
    return found


def _check_tied(
    places: _Places, params: Iterable[nn.Parameter], layouts: Mapping[int, ParamLayout]
) -> None:
    for param in params:
        known = sharded_form(param)
        if isinstance(known, DTensor) and layout_of(known) != layouts[id(param)]:
            raise ShardingError(
                f"parameter {places[id(param)][0][0]} is tied to one that an earlier call sharded "
                f"over another mesh, along another dimension or with another grad_divide_factor "
                f"({known.placements} on {known.device_mesh}). Shard both the same way, or untie "
                "them by giving one module a copy."
            )


def _shard_parameters(
    batch: Sequence[nn.Parameter],
    layouts: Mapping[int, ParamLayout],
    foreign: Mapping[int, ForeignWeight],
    pack_mb: float | None,
) -> dict[int, nn.Parameter]:
    """Shard a batch of parameters. Returns identity of the full parameter -> sharded parameter."""
    made = {id(param): sharded_form(param) for param in batch}
    todo = [param for param in batch if made[id(param)] is None]
    owns = [layouts[id(param)] for param in todo]
    full = [foreign[id(each)].records() if id(each) in foreign else each for each in todo]
    parts = [own_part(value, layout) for value, layout in zip(full, owns, strict=True)]
    if pack_mb is None:
        parts = [layout.owned(part) for part, layout in zip(parts, owns, strict=True)]
    else:
        parts = pack_local_rows(parts, [value.shape for value in full], owns)
    for param, value, part, layout in zip(todo, full, parts, owns, strict=True):
        made[id(param)] = _as_parameter(part, param, value, layout)
    return {key: param for key, param in made.items() if param is not None}


def _as_parameter(
    part: Tensor, param: nn.Parameter, full: Tensor, layout: ParamLayout
) -> nn.Parameter:
    sharded = layout.wrap(part, full.shape)
    made = nn.Parameter(sharded, requires_grad=param.requires_grad)
    compat.set_spec(made, compat.spec_of(sharded))
    if full is param:  # other classes keep their own state there
        made.__dict__.update(param.__dict__)
    as_sharded_parameter(made, layout)
    mark_replaced(param, made)
    return made


def _check_arguments(mesh: Any, param_dtype: Any, reduce_dtype: Any) -> None:
    if not dist.is_initialized():
        raise ShardingError(
            "no process group: call torch.distributed.init_process_group() and make a mesh with "
            "init_device_mesh() first."
        )
    if not isinstance(mesh, DeviceMesh):
        raise ShardingError(
            f"mesh is a {type(mesh).__name__}; expected a DeviceMesh, e.g. "
            "init_device_mesh('cuda', (world_size,))."
        )
    if mesh.ndim > 2:
        raise ShardingError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}; expected one, or two "
            "for hybrid sharding (replicate, shard). Pass the submesh to shard over, e.g. "
            "mesh['shard'] or mesh['replicate', 'shard']."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ShardingError(
            f"mesh has two dimensions of sizes {tuple(mesh.shape)} without names; hybrid sharding "
            "needs names, e.g. init_device_mesh('cuda', (2, 4), mesh_dim_names=('replicate', "
            "'shard'))."
        )
    kind = mesh.device_type
    backend = dist.get_default_backend_for_device(kind)
    groups = [compat.group_name(group) for group in mesh.get_all_groups()]
    if backend != "gloo" and any(compat.is_gloo(name, torch.device(kind)) for name in groups):
        raise ShardingError(
            f"mesh is on {kind} and communicates through gloo, which cannot gather tensors of that "
            f"device. Call init_process_group({backend!r}), or init_process_group() for a backend "
            "per device, before the mesh is made."
        )
    for label, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ShardingError(
                f"{label} is {dtype!r}; expected a floating-point torch.dtype such as "
                "torch.bfloat16, or None."
            )


def _check_order(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 2 and names[1] in REPLICATE_DIMENSIONS:
        raise ShardingError(
            f"mesh has the dimensions {names}; expected replicas first and shards "
            "second, since neighbouring ranks, which share a node, should gather parameters from "
            "each other. Make it with init_device_mesh('cuda', (2, 4), mesh_dim_names=('replicate',"
            " 'shard'))."
        )


def _nothing_to_do(model: nn.Module) -> str:
    kind = type(model).__name__
    if any(isinstance(module, ShardedModule) for module in model.modules()):
        return (
            f"{kind} is sharded already. Shard a model once; to shard it differently, build a new "
            "one."
        )
    return f"{kind} has no parameter to shard."


def _check_module(path: str, module: nn.Module, ignored: Collection[int]) -> None:
    where = f"module {path or '(root)'} ({type(module).__name__})"
    if isinstance(module, torch.jit.ScriptModule):
        raise ShardingError(
            f"{where} is a TorchScript module, whose class cannot change. Shard the Python module "
            "instead."
        )
    is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    if is_embedding and id(module._parameters["weight"]) not in ignored:
        if module.max_norm is not None:
            raise ShardingError(
                f"{where} has max_norm: its forward writes to its weight, and reading a sharded "
                "weight returns a gathered copy. Set max_norm=None and renormalise the shards "
                "after each optimizer step, or pass its weight as ignored_params."
            )
        if module.sparse:
            raise ShardingError(
                f"{where} has sparse gradients, which cannot be reduced to shards. Set "
                "sparse=False, or pass its weight as ignored_params."
            )
    for name, value in vars(module).items():
        if name in ("_parameters", "_modules", "_buffers"):
            continue
        if name == LIST_OF_WEIGHTS and isinstance(module, nn.RNNBase):
            continue
        if any(id(param) not in ignored for param in _parameters_in(value)):
            raise ShardingError(
                f"{where} holds parameters outside its parameter table, in attribute {name!r}. "
                "Sharding would leave the full, stale weights there. Read them from the parameter "
                "table (`self.weight`) instead, or leave these parameters unsharded: pass "
                "them as ignored_params, such as set(module.parameters()), and average their "
                "gradients over the ranks yourself."
            )


def _parameters_in(value: object, depth: int = 3) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif depth and isinstance(value, (list, tuple, set, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _parameters_in(item, depth - 1)
    elif depth and isinstance(value, functools.partial):
        yield from _parameters_in((value.func, value.args, value.keywords), depth)
    elif depth and isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield from _parameters_in(cell.cell_contents, depth - 1)
    elif depth and isinstance(value, types.MethodType):
        yield from _parameters_in(value.__self__, depth)
    elif depth and not isinstance(value, (nn.Module, Tensor, type, types.ModuleType)):
        yield from _parameters_in(getattr(value, "__dict__", None), depth - 1)


def _check_parameter(path: str, param: nn.Parameter, mesh: DeviceMesh, packs: bool) -> None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ShardingError(
            f"parameter {path} has no shape yet (lazy module). Run one forward on a small input "
            "first."
        )
    if param.is_complex():
        raise ShardingError(
            f"parameter {path} is complex; keep its real view (torch.view_as_real) as the "
            "parameter instead, or pass it as ignored_params and average its gradient yourself."
        )
    if packs and param.is_meta:
        raise ShardingError(
            f"parameter {path} is on meta and has no memory to pack. Leave pack_mb out, and call "
            "zpasses.pack_shards after to_empty."
        )
    if param.device.type not in (mesh.device_type, "meta", *(("cpu",) if packs else ())):
        raise ShardingError(
            f"parameter {path} is on {param.device.type}, the mesh on {mesh.device_type}. Move the "
            "model first "
            f"(model.to({mesh.device_type!r})), give pack_mb=... so that each rank moves its own "
            "shards from the host, or build it on "
            "meta and call to_empty after sharding."
        )
    if compat.has_hooks(param):
        raise ShardingError(
            f"parameter {path} has hooks (register_hook or register_post_accumulate_grad_hook). "
            "Sharding replaces it by a DTensor, and they would not be called. Register them after "
            f"zpasses.shard, on model.get_parameter({path!r}): they get DTensors, and "
            "the average of the gradient over the ranks. Or pass the parameter as ignored_params."
        )
