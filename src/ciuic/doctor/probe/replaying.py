"""`ciuic.doctor.replay`: one batch through the model of every rank, and where they part."""

import hashlib
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from ciuic.doctor.loss.judge import judge
from ciuic.doctor.loss.records import Held, Replayed, ReplaySettings, Verdict
from ciuic.doctor.probe.digests import digest
from ciuic.doctor.probe.parcel import pack, unpack
from ciuic.doctor.probe.postbox import Postbox
from ciuic.doctor.probe.recorder import Recorder
from ciuic.doctor.probe.undisturbed import random_states, undisturbed
from ciuic.errors import FrameError, UsageError

Loss = Callable[[nn.Module, Any], Tensor]
MARGIN_S = 10.0
"""Ranks wait so much longer for rank 0 than it waits for them."""
READ_S = 5.0
_DECODE = msgspec.msgpack.Decoder(Replayed)


def replay(
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    seed: int = 0,
    settings: ReplaySettings | None = None,
) -> Verdict:
    """Replay one batch on all ranks with the same random numbers; the same verdict on all of them. Call it on each.

    `batch`: that of rank 0 is sent to all, so the others may give None. `loss(model, batch)` gives the loss, a scalar;
    `model` is then the one without wrapper. Without it the model is called with the batch (a tuple: its arguments, a
    dictionary: its keywords), and the output's own loss, or the mean square of the output, is followed back.

    Nothing changes: gradients, buffers, modes and random states are as they were. No collective is called, each wait
    ends: a rank that does not come within `settings.timeout_s` is named in the verdict.

    Raises UsageError when the model is no module or is sharded, or the batch cannot be sent (on rank 0; the others
    learn from the verdict that it did not come).
    """
    settings = settings or ReplaySettings()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{type(model).__name__} is not a torch module", next="replay(model, batch)")
    module = inner(model)
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise UsageError(
            f"{type(module).__name__} is sharded and cannot be replayed",
            cause="its forward pass gathers parameters from the other ranks",
            next="replay the model before fully_shard",
        )
    box = Postbox(settings)
    until_s = time.monotonic() + settings.timeout_s
    body = _batch_for_all(box, batch, settings, until_s)
    if settings.share and body is None:
        return Verdict(result="unknown", cause="rank 0 did not come", missing=(0,), world=box.world)
    record = _replayed(module, batch if body is None else body, loss, seed, box.rank)
    if box.rank != 0:
        box.put(f"seen/{box.rank}", msgspec.msgpack.encode(record))
        said = box.take("verdict", until_s + MARGIN_S)
        if said is None:
            return Verdict(result="unknown", cause="rank 0 gave no verdict", missing=(0,), world=box.world)
        box.put(f"read/{box.rank}", b"")
        return msgspec.msgpack.decode(said, type=Verdict)
    records = _gathered(box, record, until_s)
    verdict = judge(records, box.world, settings.tolerances)
    box.put("verdict", msgspec.msgpack.encode(verdict))
    for rank in records:  # rank 0 may hold the store: it does not leave before the others have read
        if rank and box.take(f"read/{rank}", time.monotonic() + READ_S) is None:
            break
    return verdict


def inner(model: nn.Module) -> nn.Module:
    """Without DistributedDataParallel and torch.compile."""
    wrapped: Any = model
    while wrapped is not None:
        model = wrapped
        is_ddp = isinstance(model, DistributedDataParallel)
        wrapped = model.module if is_ddp else getattr(model, "_orig_mod", None)
    return model


def _batch_for_all(box: Postbox, batch: Any, settings: ReplaySettings, until_s: float) -> bytes | None:
    if not settings.share:
        return None
    if box.rank == 0:
        body = pack(batch)
        box.put("batch", body)
        return body
    return box.take("batch", until_s)


def _gathered(box: Postbox, own: Replayed, until_s: float) -> dict[int, Replayed]:
    records = {0: own}
    for rank in range(1, box.world):
        try:
            body = box.take(f"seen/{rank}", until_s)
            if body is not None:
                records[rank] = _DECODE.decode(body)
        except (FrameError, msgspec.DecodeError):
            continue  # as if it had not come
        box.forget(f"seen/{rank}")
    if len(records) == box.world:
        box.forget("batch")
    return records


# ---- one rank ------------------------------------------------------------------------------------------------------


def _replayed(module: nn.Module, batch: Any, loss: Loss | None, seed: int, rank: int) -> Replayed:
    named = list(module.named_parameters())
    first = named[0][1].device if named else torch.device("cpu")
    given = unpack(batch, first) if isinstance(batch, bytes) else batch
    before = _digest_of(*random_states())
    with undisturbed(module, seed), torch.enable_grad(), Recorder(module) as recorder:
        value, error, unseen = _run(module, given, loss, recorder)
        after = _digest_of(*random_states())
    if recorder.left_out:
        unseen += (f"{recorder.left_out} tensors after the first {len(recorder.seen)}",)
    return Replayed(
        rank=rank,
        model=type(module).__name__,
        settings=settings_here(first),
        parameters={name: _held(parameter) for name, parameter in named},
        buffers={name: _held(buffer) for name, buffer in module.named_buffers()},
        evaluating=tuple(path or type(module).__name__ for path, each in module.named_modules() if not each.training),
        code=_code(module),
        batch=_digest_of(batch) if isinstance(batch, bytes) else _digest_of(_packed(batch)),
        random_before=before,
        random_after=after,
        seen=tuple(recorder.seen),
        loss=value,
        error=error,
        unseen=unseen,
    )


def _run(
    module: nn.Module, batch: Any, loss: Loss | None, recorder: Recorder
) -> tuple[float | None, str, tuple[str, ...]]:
    """(loss, error, what could not be looked at)."""
    try:
        value, is_own = (loss(module, batch), True) if loss is not None else _called(module, batch)
    except Exception as error:  # noqa: BLE001 - the program's own code; the verdict tells it
        return None, _line(error), ()
    recorder.is_forward = False
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None, "", ("backward: there is no loss and no floating output",)
    if is_own:
        recorder.loss(value)
    number = float(value.detach().double().mean()) if is_own else None
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not value.requires_grad or not trained:
        return number, "", ("backward: nothing that is trained is connected with the loss",)
    try:  # not .backward(): gradients, DDP's reductions and optimizers that step in backward are left alone
        found = torch.autograd.grad(value.sum(), [parameter for _, parameter in trained], allow_unused=True)
    except Exception as error:  # noqa: BLE001 - as above; reentrant checkpointing refuses
        return number, "", (f"backward: {_line(error)}",)
    recorder.parameter_gradients((name, gradient) for (name, _), gradient in zip(trained, found, strict=True))
    return number, "", ()


def _called(module: nn.Module, batch: Any) -> tuple[Tensor | None, bool]:
    """(loss, whether it is the model's own)."""
    if isinstance(batch, dict):
        output = module(**batch)
    elif isinstance(batch, tuple | list):
        keywords = batch[-1] if len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], dict) else None
        output = module(*batch) if keywords is None else module(*batch[0], **keywords)
    else:
        output = module(batch)
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own, True
    if isinstance(output, Tensor) and output.dim() == 0:
        return output, True
    leaves = [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    squares = [leaf.float().square().mean() for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad]
    return (torch.stack(squares).sum(), False) if squares else (None, False)


def settings_here(device: torch.device) -> dict[str, str]:
    """What decides with which kernels and in which order numbers are added."""
    found = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda or "none"),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "default type": str(torch.get_default_dtype()),
        "autocast": _autocast(device.type),
    }
    if device.type == "cuda":
        found["cudnn"] = f"{torch.backends.cudnn.version()}, benchmark {torch.backends.cudnn.benchmark}"
        found["tf32"] = str(torch.backends.cudnn.allow_tf32)
        found["cublas workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    return found


def _autocast(device: str) -> str:
    enabled = torch.is_autocast_enabled(device)
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if enabled else "off"


def _held(tensor: Tensor) -> Held:
    return Held(digest=digest(tensor), dtype=str(tensor.dtype).removeprefix("torch."))


def _code(module: nn.Module) -> dict[str, bytes]:
    """Of each class's forward, as it is compiled; constants inside count, names of files do not."""
    found: dict[str, bytes] = {}
    for kind in {type(each) for each in module.modules()}:
        code = getattr(getattr(kind, "forward", None), "__code__", None)
        if code is not None:
            plain = [const for const in code.co_consts if const is None or isinstance(const, int | float | str | bytes)]
            found[kind.__qualname__] = hashlib.sha256(code.co_code + repr((plain, code.co_names)).encode()).digest()[:8]
    return found


def _packed(batch: Any) -> bytes:
    try:
        return pack(batch)
    except UsageError:
        return repr(type(batch)).encode()


def _digest_of(*bodies: bytes) -> bytes:
    state = xxhash.xxh3_64()
    for body in bodies:
        state.update(body)
    return state.digest()


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
