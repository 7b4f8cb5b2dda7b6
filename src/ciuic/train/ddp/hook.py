"""`handle = compress_ddp(model, codec="1-bit")`: DDP's gradients in few bits.

What a step means: DDP hands out its buckets in one order on all ranks; the last one ends the step. When any rank's
gradient is not finite in any bucket, that bucket is all NaN on all ranks (so a GradScaler skips the step, and a loop
without one sees it), and the residuals of the whole step are as before it.
"""

import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ciuic.errors import TrainingLoopError
from ciuic.ledger.layout import Tensor as Spec
from ciuic.train.ddp.checks import check_choice, check_gradient, check_model, check_optimizer, holds_any
from ciuic.train.ddp.lane import Lane
from ciuic.train.ddp.plan import Parameter, chunk_of
from ciuic.train.ddp.reduce import BucketReducer, ChunkCodec
from ciuic.train.ddp.state import State, read_state, write_state
from ciuic.train.ddp.wire import LinkSpeed, Wire, choose_form
from ciuic.train.tensors import model_layout
from ciuic.train.two_syncs import watch_double_sync


def compress_ddp(
    model: nn.Module,
    codec: str = "1-bit",
    *,
    form: str = "auto",
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    link: LinkSpeed | None = None,
) -> "DdpCompression":
    """Compress what DistributedDataParallel sends, with error feedback. Call it on every rank, once, after DDP.

    codec: 1-bit, int4, int8, bf16 or none. form: two-phase, all-gather, or auto (by latency and rate of `link`, which
    is measured when it is not given). optimizer: checked now; without it at its first step. scaler: the GradScaler of
    fp16 training, so that residuals do not depend on the loss scale.
    Raises TrainingLoopError or CodecUnavailableError for what cannot work, ProtocolError when the ranks differ.
    """
    check_choice(codec, form)
    wrapped = check_model(model)
    if optimizer is not None:
        check_optimizer(optimizer, codec)
    handle = DdpCompression(wrapped, codec, form=form, scaler=scaler, link=link)
    try:
        wrapped.register_comm_hook(handle, _hook)
    except RuntimeError as error:  # a built-in hook leaves no other trace
        handle.close()
        raise TrainingLoopError(
            "this DDP has a communication hook already", cause=str(error).splitlines()[0], next="make the DDP anew"
        ) from error
    return handle


class DdpCompression:
    """The hook at work: counters, state, the end."""

    def __init__(
        self,
        model: DistributedDataParallel,
        codec: str,
        *,
        form: str,
        scaler: GradScaler | None,
        link: LinkSpeed | None,
    ) -> None:
        tensors, specs = _trainable(model.module)
        self._numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self._model = model
        self._scaler = scaler
        parameters = [_parameter(spec) for spec in specs]
        self._group: Any = model.process_group
        self._wire = Wire(self._group)
        self._wire.agree(repr((codec, form, parameters)), "model, codec or form")
        self._asked_form = form
        if form == "auto":
            form = self._choose(codec, parameters, link)
        self._reducer = BucketReducer(parameters, codec, form, self._wire, tensors[0].device)
        self._lane = Lane(threaded=tensors[0].device.type == "cpu")
        self._wire.bytes_sent = 0
        self._good = True
        self._is_closed = False
        self.steps = 0
        """Synchronised backward passes so far."""
        self.skipped_steps = 0
        """Of these, how many had a gradient that was not finite."""
        self._watch = watch_double_sync(model)
        self._seen_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._optimizer_hook = register_optimizer_step_pre_hook(self._check_stepping)

    @property
    def codec(self) -> str:
        """Its name."""
        return self._reducer.codec

    @property
    def form(self) -> str:
        """two-phase or all-gather."""
        return self._reducer.form

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has handed to other ranks since compress_ddp, without the transport's own headers."""
        return self._wire.bytes_sent

    def state_dict(self) -> State:
        """This rank's residuals and counters, copied to the host; between steps. Save one per rank."""
        return read_state(self._reducer, self.steps)

    def load_state_dict(self, state: State) -> None:
        """Go on where this rank was. For another number of ranks see merge_ddp_states.

        Raises LayoutMismatchError when it is of another model or rank, StorageError when it is damaged.
        """
        self.steps = write_state(self._reducer, state)
        if self._asked_form == "auto":
            self._reducer.form = state["form"] if self._wire.size > 2 else "all-gather"

    def close(self) -> None:
        """Stop compressing: DDP goes on with torch's own mean in full precision. What was not sent yet is dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._optimizer_hook.remove()
        self._watch.close()
        self._lane.close()
        self._wire.close()

    def __enter__(self) -> "DdpCompression":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def on_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP has a bucket's gradients ready. The last bucket waits for all and ends the step."""
        buffer = bucket.buffer()
        check_gradient(buffer)
        if self._is_closed:
            return allreduce_hook(self._group, bucket)
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type == "cuda" else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        if bucket.index() == 0:
            self._begin()
        numbers = tuple(self._numbers[id(parameter)] for parameter in bucket.parameters())
        may_be_unused = bool(self._model.find_unused_parameters or self._model.static_graph)
        scale = float(self._scaler.get_scale()) if self._scaler is not None and self._scaler.is_enabled() else 1.0
        step = self.steps

        def work() -> None:
            good = self._reducer.reduce(buffer, numbers, step, scale, may_be_unused)
            self._good = self._good and good

        self._lane.submit(work, lambda: future.set_result(buffer))
        if bucket.is_last():
            self._end()
        return future

    def _begin(self) -> None:
        self._reducer.residuals.discard()  # a backward pass that failed half-way
        self._good = True

    def _end(self) -> None:
        self._lane.wait()
        if self._good:
            self._reducer.residuals.commit()
        else:
            self._reducer.residuals.discard()
            self.skipped_steps += 1
        self.steps += 1

    def _choose(self, codec: str, parameters: list[Parameter], link: LinkSpeed | None) -> str:
        whole = ChunkCodec(codec, chunk_of(range(len(parameters)), parameters), torch.device("cpu"))
        if self._wire.size <= 2:
            return "all-gather"
        return choose_form(whole.payload_bytes, self._wire.size, link or self._wire.measure())

    def _check_stepping(self, optimizer: Optimizer, *_: Any) -> None:
        """Before each optimizer's first step: whether it holds the model's parameters, and may."""
        if optimizer not in self._seen_optimizers and holds_any(optimizer, self._numbers):
            check_optimizer(optimizer, self.codec)
        self._seen_optimizers.add(optimizer)


def _hook(state: DdpCompression, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return state.on_bucket(bucket)


def _trainable(module: nn.Module) -> tuple[list[Tensor], list[Spec]]:
    """Trainable parameters in the model's order, and what the ledger's layout knows of them."""
    layout, by_name = model_layout(module)
    known = {id(by_name[spec.name]): spec for spec in layout.tensors if spec.trainable}
    tensors: list[Tensor] = [p for p in module.parameters() if id(p) in known]
    return tensors, [known[id(tensor)] for tensor in tensors]


def _parameter(spec: Spec) -> Parameter:
    rows = spec.row_aligned and len(spec.shape) > 1
    count = math.prod(spec.shape)
    return Parameter(
        name=spec.name,
        element_count=count,
        row_length=spec.shape[-1] if rows else count,
        is_coded=spec.section == "coded",
    )
