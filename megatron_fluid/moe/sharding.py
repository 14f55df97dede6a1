"""Experts as sharded parameters. On several ranks weight1 and weight2 are DTensors, Shard(0) over
the device mesh of the expert-parallel group; kernels read their local parts. On one rank they are
plain tensors.

So whatever in torch knows DTensor knows which experts a rank holds: checkpoints, FSDP2, optimizers,
copies.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from megatron_fluid.comm.groups import group_resource
from megatron_fluid.comm.waits import group_waits
from megatron_fluid.errors import ConfigError

__all__ = [
    "Group",
    "clip_grad_norm_",
    "expert_numbers",
    "fill",
    "group_of",
    "is_sharded",
    "load_experts",
    "local_part",
    "shard_experts",
]

_MESHES = itertools.count()
_expert_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()  # over which experts are sharded

type Group = dist.ProcessGroup | DeviceMesh | None


def group_of(group: Group) -> dist.ProcessGroup | None:
    """The process group of a DeviceMesh of one dimension; a process group or None as it is.

    Raises:
        ConfigError: a mesh of several dimensions, or in another order than its group, by which
            tokens find their experts: torch sorts the ranks of a group.
    """
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        allowed = 'one dimension, such as mesh["ep"]'
        raise ConfigError.of("ep_group", f"a mesh of {group.ndim} dimensions", allowed)
    ranks, inside = group.mesh.tolist(), group.get_group()
    if ranks != (ordered := dist.get_process_group_ranks(inside)):
        raise ConfigError.of("ep_group", f"a mesh of ranks {ranks}", f"a mesh of ranks {ordered}")
    return inside


def is_sharded(param: Tensor) -> bool:
    """Whether a parameter is a DTensor: an expert's on several ranks, or any under FSDP2."""
    return hasattr(param, "_local_tensor")


def local_part(param: Tensor) -> Tensor:
    """The rows of a parameter that this rank holds, without gradient. A plain tensor is whole."""
    return getattr(param, "_local_tensor", param).detach()


def shard_experts(local: Tensor, group: Group, device_type: str) -> nn.Parameter:
    """The parameter of all ranks' experts, of which `local` [El, ...] are this rank's.

    Args:
        group: of several ranks; a DeviceMesh is used as it is, so that FSDP2 can join it with
            another dimension of its parent. Else all layers of a group share one mesh.
        device_type: of the mesh that is made.
    """
    from torch.distributed.tensor import DTensor, Shard  # 0.7 s that one rank need not wait for

    _refuse_data_parallel()
    mesh = group
    if isinstance(group, dist.ProcessGroup):
        make = functools.partial(_mesh_of, group, device_type)
        mesh = group_resource(group, "device mesh", make)
    assert isinstance(mesh, DeviceMesh)
    _expert_meshes.add(mesh)
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


def _mesh_of(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """A new mesh of a group, equal to no other: DTensor caches the shardings of operations by mesh,
    in each thread, and two meshes of the same ranks and names are equal to it. One of a group that
    was destroyed would be taken for a living one."""
    name = f"experts_{next(_MESHES)}"
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(name,))


@functools.cache
def _refuse_data_parallel() -> None:
    """torch's DistributedDataParallel sends one rank's parameters to all, experts included: refuse
    models with sharded experts by name.

    `replicate` and DistributedDataParallel(device_mesh=...) first replace DTensors by their local
    parts, with the sharding as `_st_info`; the former then overwrites experts, the latter drops
    them from the model's parameters.
    """

    def look(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if not isinstance(parent, DistributedDataParallel) or child is None:
            return
        named = {n for n, p in child.named_parameters() if is_sharded(p)}
        if found := sorted(named - parent.parameters_to_ignore):
            remedy = "_set_params_and_buffers_to_ignore_for_model(model, names)"
            allowed = f"these left out by DistributedDataParallel.{remedy}, or FSDP2"
            raise ConfigError.of("DistributedDataParallel, sharded parameters", found, allowed)
        localised = {n: p for n, p in child.named_parameters() if hasattr(p, "_st_info")}
        shapes = {
            n: list(p.shape) for n, p in localised.items() if p._st_info.mesh in _expert_meshes
        }
        if shapes:
            allowed = "MoE layers left out by replicate(model, ignored_modules=layers), or FSDP2"
            setting = "replicate or DistributedDataParallel with device_mesh, sharded parameters"
            raise ConfigError.of(setting, shapes, allowed)

    register_module_module_registration_hook(look)


def _share(whole: Tensor, like: Any) -> Tensor:
    """This rank's part of `whole`, which every rank has, as a parameter `like` is sharded."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    # src_data_rank=None: every rank cuts its own part, nothing is sent.
    given = like.device_mesh, like.placements
    shared: DTensor = distribute_tensor(whole, *given, src_data_rank=None)
    return shared.to_local()


def expert_numbers(param: Tensor) -> list[int]:
    """The numbers of the experts whose matrices are the rows of `local_part(param)`."""
    return _share(torch.arange(param.shape[0], device=local_part(param).device), param).tolist()


def fill(param: Tensor, whole: Tensor) -> None:
    """Write this rank's part of `whole` [as param] into a parameter, however it is sharded."""
    local_part(param).copy_(_share(whole, param))


def load_experts(param: Tensor, value: Any) -> Any:
    """What a state dict holds for an expert parameter, as load_state_dict compares it with `param`:
    a plain tensor of this rank's experts [El, ...] or of all [E, ...] becomes a DTensor.

    Raises:
        ConfigError: a DTensor that another rank saved, with the experts of that rank.
    """
    if not is_sharded(param) or not isinstance(value, Tensor):
        return value
    if is_sharded(value):
        _check_saved_here(param, value)
        return value
    from torch.distributed.tensor import DTensor

    assert isinstance(param, DTensor)
    if value.shape == param.shape:
        value = _share(value, param)
    if value.shape != param.to_local().shape:
        return value  # load_state_dict names the sizes
    given = param.device_mesh, param.placements
    return DTensor.from_local(
        value, *given, run_check=False, shape=param.shape, stride=param.stride()
    )


def _check_saved_here(param: Any, value: Any) -> None:
    """torch.save keeps a DTensor's local part and the place in the mesh of the rank that saved it;
    torch.load on another rank takes both as they are."""
    mesh, saved = param.device_mesh, value.device_mesh
    here, there = mesh.get_coordinate(), saved.get_coordinate()
    if mesh.shape != saved.shape or here is None or there is None:
        return  # torch names what differs
    places = zip(here, there, value.placements, strict=True)
    if all(h == t for h, t, placement in places if not placement.is_replicate()):
        return
    found = f"those saved by the rank at {tuple(there)} of the mesh, on the rank at {tuple(here)}"
    allowed = "a rank's own, or all experts as plain tensors; use torch.distributed.checkpoint"
    raise ConfigError.of("experts in a state dict", found, allowed)


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for parameters of which some are DTensors, also on different
    meshes. Collective over the meshes: every rank has the same norm, that of the whole model.

    Gradients of plain parameters count as they are: add them up over ranks before. Arguments are
    torch's; a module stands for its parameters. Norms of half precision gradients are computed in
    fp32.

    Returns:
        The norm before clipping, a plain tensor of no dimension: fp32, or fp64 where a gradient is.

    Raises:
        ConfigError: norm_type 0, which is no norm.
    """
    norm_type = float(norm_type)
    if norm_type == 0:
        raise ConfigError.of("norm_type", norm_type, "any other number, inf or -inf")
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    kinds: dict[Any, list[Tensor]] = {}
    for param in parameters:
        where = getattr(param, "device_mesh", None), getattr(param, "placements", ())
        kinds.setdefault(where, []).append(param)
    norms: list[Tensor] = []
    for (mesh, placements), members in kinds.items():
        found = [_placed(param) for param in members if param.grad is not None]
        grads = _wide([grad for grad in found if grad.numel()], norm_type)
        if grads:
            norm = nn.utils.get_total_norm(grads, norm_type, False, foreach)
        elif mesh is None:
            continue
        else:  # the other ranks of the mesh may have some
            nothing = math.inf if norm_type < 0 else 0.0
            norm = torch.full((), nothing, device=local_part(members[0]).device)
        for dim, placement in enumerate(placements):
            if not placement.is_replicate():
                norm = _over(mesh.get_group(dim), norm, norm_type)
        norms.append(norm)
    if not norms:
        return torch.zeros(())
    stacked = torch.stack([norm.to(norms[-1].device) for norm in norms])  # of the widest dtype
    total = torch.linalg.vector_norm(stacked, norm_type)
    if error_if_nonfinite:
        nn.utils.get_total_norm([total], norm_type, True)
    for members in kinds.values():
        nn.utils.clip_grads_with_norm_(members, max_norm, total, foreach)
    return total


def _placed(param: Tensor) -> Tensor:
    """This rank's part of a gradient, divided as its parameter is."""
    grad: Any = param.grad
    if is_sharded(param) and any(placement.is_partial() for placement in grad.placements):
        grad = grad.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in grad.placements]
        )
    return local_part(grad)


def _over(group: dist.ProcessGroup, norm: Tensor, norm_type: float) -> Tensor:
    """The norm over all ranks of a group, from each rank's. Collective."""
    infinite = math.isinf(norm_type)
    among = norm if infinite else norm.double() ** norm_type
    operation = dist.ReduceOp.SUM
    if infinite:
        operation = dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN
    group_waits(group).collective(
        "clip_grad_norm_", lambda: dist.all_reduce(among, operation, group, async_op=True)
    )
    return among if infinite else (among ** (1.0 / norm_type)).to(norm.dtype)


def _wide(grads: list[Tensor], norm_type: float) -> list[Tensor]:
    """The gradients, or the norms in fp32 of those in half precision: their squares overflow, and a
    norm of norms is the norm."""
    half = [grad for grad in grads if grad.dtype.itemsize < 4]
    if not half:
        return grads
    norms = torch._foreach_norm(half, norm_type, dtype=torch.float32)
    return [*(grad for grad in grads if grad.dtype.itemsize >= 4), *norms]
