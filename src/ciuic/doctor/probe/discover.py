"""Which modules an optimizer trains: known ones first, then those that the interpreter holds."""

import gc
from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ciuic.doctor.probe.part import Model


def find_models(optimizer: Optimizer, known: Iterable[Model], *, trained: bool = True) -> list[Model]:
    """The outermost modules that own parameters of this optimizer and are not known yet.

    An optimizer none of whose parameters has a gradient gives the outermost modules that were trained (have gradients)
    as well; with `trained` False it does not: its closure has yet to make them.
    """
    known = list(known)
    owned = {id(parameter) for model in known for _, parameter in model.parameters()}
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = wanted - owned
    if not missing:
        return []
    modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if trained and all(parameter.grad is None for parameter in own):
        missing |= _trained(modules) - owned
    roots = outermost([m for m in modules if any(id(p) in missing for p in _parameters(m))])
    return [model_of(root, len(known) + at) for at, root in enumerate(roots)]


def _trained(modules: list[nn.Module]) -> set[int]:
    """Parameters that have a gradient."""
    return {id(p) for module in modules for p in _parameters(module) if p.grad is not None}


def outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Those that are in none of the others; wrappers are looked through."""
    inner: set[int] = set()
    for module in modules:
        inner.update(id(child) for child in module.modules() if child is not module)
    return [module for module in modules if id(module) not in inner]


def model_of(root: nn.Module, index: int) -> Model:
    """What is known about a module from the outside."""
    wrapper = root if isinstance(root, DistributedDataParallel) else None
    module = root.module if isinstance(root, DistributedDataParallel) else root
    if wrapper is not None:
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(wrapper.process_group))
        return Model(index=index, module=module, wrapper=wrapper, kind="ddp", ranks=ranks)
    sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    return Model(index=index, module=module, kind="sharded" if sharded else "plain")


def wrapper_of(module: nn.Module) -> nn.Module:
    """The DistributedDataParallel around a module that is in use somewhere, else the module itself."""
    wrappers = (item for item in gc.get_objects() if issubclass(type(item), DistributedDataParallel))
    return next((wrapper for wrapper in wrappers if getattr(wrapper, "module", None) is module), module)


def _parameters(module: nn.Module) -> Iterable[nn.Parameter]:
    try:
        return list(module.parameters())
    except Exception:  # noqa: BLE001 - one that is being built or torn down, or whose own method wants something else
        return []
