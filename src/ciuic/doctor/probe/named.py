"""Names of what an optimizer trains, and which ranks must hold the same of it."""

import gc
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ciuic.doctor.probe.part import Model

STRANGER = "optimizer"
"""Parameters of an optimizer that no model has are called `optimizer.<number>`."""
LOCAL_HOOKS = ("post_localsgd_hook", "noop_hook")
"""Communication hooks of DDP that leave gradients different on purpose."""


def own_parameters(optimizer: Optimizer) -> list[Tensor]:
    """In the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def models_of(optimizer: Optimizer, models: Iterable[Model]) -> list[Model]:
    """Those of which it owns a parameter."""
    ids = {id(parameter) for parameter in own_parameters(optimizer)}
    return [model for model in models if any(id(parameter) in ids for _, parameter in model.parameters())]


def names_of(models: Iterable[Model]) -> dict[int, str]:
    """Name by id of each parameter. A name that two models have is told with the model's class and number."""
    models = list(models)
    names: dict[int, str] = {}
    taken: set[str] = set()
    for model in models:
        for name, parameter in model.parameters():
            if id(parameter) in names:
                continue
            full = name if name not in taken else f"{model.name}{model.index}.{name}"
            names[id(parameter)] = full
            taken.add(full)
    return names


def named_parameters(
    optimizer: Optimizer, models: Iterable[Model], others: Iterable[Optimizer] = ()
) -> dict[str, Tensor]:
    """All parameters of the models that an optimizer trains, but those that only others train; and strangers among its
    own."""
    mine = models_of(optimizer, models)
    own = {id(parameter) for parameter in own_parameters(optimizer)}
    theirs = {id(parameter) for other in others for parameter in own_parameters(other)} - own
    names = names_of(mine)
    found: dict[str, Tensor] = {}
    for model in mine:
        for _, parameter in model.parameters():
            if id(parameter) not in theirs:
                found.setdefault(names[id(parameter)], parameter)
    for at, parameter in enumerate(own_parameters(optimizer)):
        if id(parameter) not in names:
            found[f"{STRANGER}.{at}"] = parameter
    return {name: tensor for name, tensor in found.items() if has_memory(tensor)}


def has_memory(tensor: Tensor) -> bool:
    """FSDP frees the memory of gathered parameters and leaves the tensors: to read them would end the process."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.layout is not torch.strided or local.device.type == "meta":
        return False
    needed = (local.storage_offset() + local.numel()) * local.element_size() if local.is_contiguous() else 1
    return local.numel() == 0 or local.untyped_storage().nbytes() >= needed


def mode_of(models: Iterable[Model]) -> str:
    """See facts_model.MODE."""
    models = list(models)
    for model in models:
        if model.wrapper is not None:
            hooks = getattr(model.wrapper, "_comm_hooks", ())
            if any(getattr(hook, "__name__", "").lower() in LOCAL_HOOKS for hook, _ in hooks):
                return "local"
            return "ddp"
    if any(model.kind == "sharded" for model in models):
        return "sharded"
    if any(model.kind == "ledger" for model in models) or _in_a_run():
        return "ledger"
    return "plain"


def _in_a_run() -> bool:
    session = sys.modules.get("ciuic.train.session")
    return session is not None and any(type(item) is session.Run for item in gc.get_objects())


def replica_ranks(tensor: Tensor) -> tuple[int, ...] | None:
    """The ranks that must have the same bytes of a tensor as this one; None: no DTensor, all of them."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else at for placement, at in zip(tensor.placements, place, strict=True)
    )
    return tuple(sorted(int(rank) for rank in mesh.mesh[index].reshape(-1).tolist()))


def comparable(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[int, ...] | None]:
    """Those that other ranks must have as well, and these ranks (None: all)."""
    groups: dict[tuple[int, ...] | None, dict[str, Tensor]] = {}
    for name, tensor in named.items():
        groups.setdefault(replica_ranks(tensor), {})[name] = tensor
    groups = {ranks: tensors for ranks, tensors in groups.items() if ranks is None or len(ranks) > 1}
    if not groups:
        return {}, ()
    chosen = max(groups, key=lambda ranks: sum(tensor.numel() for tensor in groups[ranks].values()))
    return groups[chosen], chosen


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the state, by name."""
    found: dict[str, Tensor] = {}
    for path, child in module.named_modules():
        left_out = getattr(child, "_non_persistent_buffers_set", set())
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in left_out:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def is_distributed() -> bool:
    """Whether torch.distributed is in use with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
