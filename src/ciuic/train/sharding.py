"""Models that FSDP2 (`fully_shard`) has spread over the ranks of a node: which can be synchronised, and sharding them.

torch keeps a parameter of such a model as a DTensor: every rank has a part. What is refused here would train wrongly.
"""

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from ciuic.errors import ModelError, TrainingLoopError


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 or another user of DTensor has spread the model over ranks."""
    spread = (isinstance(parameter, DTensor) for parameter in model.parameters())
    return any(isinstance(part, FSDPModule) for part in model.modules()) or any(spread)


def reshard(model: nn.Module) -> None:
    """Parameters that a forward pass left whole on this rank are let go; the parts are what counts."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def check_sharding(model: nn.Module, ranks: int) -> None:
    """Raises ModelError for a sharded model that cannot be synchronised, naming what is wrong with it."""
    for name, part in model.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise ModelError(
                f"{name or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1)",
                cause="it hides the parameters in flat ones, so nodes could not agree on names and shapes",
                next='use torch.distributed.fsdp.fully_shard (FSDP2), or nodes.sharding = "fsdp2" in the job',
            )
    if not is_sharded(model):
        return
    if ranks == 1:
        raise ModelError(
            "the model is sharded, but this node trains with one rank",
            cause="its parts are on ranks that the run does not know",
            next="set nodes.ranks to the number of ranks, or give run.prepare the model before fully_shard",
        )
    if not isinstance(model, FSDPModule):
        raise ModelError(
            "only parts of the model are sharded, or not by FSDP2",
            cause="fully_shard was not called for the model itself; with tensor parallelism alone all ranks would "
            "need the same samples, and here each rank has its own",
            next="call fully_shard on the blocks and then on the whole model",
        )
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter, ranks)


def _check_parameter(name: str, parameter: nn.Parameter, ranks: int) -> None:
    if not isinstance(parameter, DTensor):
        if parameter.requires_grad:
            raise ModelError(
                f"{name} is trained but not sharded",
                cause="fully_shard ignored it, so each rank would move its own copy apart from the others",
                next="leave it out of ignored_params, or freeze it",
            )
        return
    mesh, placements = parameter.device_mesh, parameter.placements
    shards = sum(type(placement) is Shard for placement in placements)
    known = all(type(placement) in (Shard, Replicate) for placement in placements)
    if shards > 1 or not known or mesh.mesh.flatten().tolist() != list(range(ranks)):
        raise ModelError(
            f"{name} is spread in a way that cannot be synchronised: {_describe(mesh, placements)}",
            cause="FSDP2 over all ranks of the node is supported, also with replicas (HSDP); tensor, context and "
            "expert parallelism are not: their ranks need the same samples, and here each rank has its own",
            next=f"use one mesh over the {ranks} ranks of the node: fully_shard(model)",
        )


def _describe(mesh: DeviceMesh, placements: tuple[object, ...]) -> str:
    return f"{', '.join(map(repr, placements))} on ranks {mesh.mesh.tolist()}"


def shard_model(model: nn.Module, optimizer: Optimizer, device_type: str) -> None:
    """FSDP2 in place: each block, then the rest with the model itself. The optimizer gets the new parameters.

    A block is an element of a ModuleList (a transformer's layers). Raises TrainingLoopError when the optimizer has
    made a step: its state is of whole parameters.
    """
    if optimizer.state:
        raise TrainingLoopError(
            "this optimizer has already made steps",
            cause="nodes.sharding shards the model in run.prepare, and the optimizer's state is of whole parameters",
            next="call run.prepare before the first step",
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    for block in _blocks(model):
        _shard_by_type(block, mesh)
    _shard_by_type(model, mesh)
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"][:] = [sharded[names[id(p)]] if id(p) in names else p for p in group["params"]]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from _blocks(child)


def _shard_by_type(module: nn.Module, mesh: DeviceMesh) -> None:
    """What has parameters of another type than the module's own becomes a group of its own: FSDP2 wants one in each."""
    usual = _usual_type(module)
    for part in module.modules():
        own = {p.dtype for p in part.parameters(recurse=False) if _is_whole(p)}
        if part is not module and own and usual not in own:
            _shard_by_type(part, mesh)
    fully_shard(module, mesh=mesh)


def _usual_type(module: nn.Module) -> torch.dtype | None:
    """Of the module's own trained parameters; where it has none, of most elements below it."""
    own = [p for p in module.parameters(recurse=False) if _is_whole(p)]
    counts: Counter[torch.dtype] = Counter()
    for parameter in own or filter(_is_whole, module.parameters()):
        counts[parameter.dtype] += parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else None


def _is_whole(parameter: nn.Parameter) -> bool:
    """Trained, and not sharded yet."""
    return parameter.requires_grad and not isinstance(parameter, DTensor)
