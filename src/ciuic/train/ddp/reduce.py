"""The arithmetic of one bucket: encode with feedback, exchange, mean, encode again, decode what everybody decodes.

two-phase    x = g + e_w;  q = decode(encode(x)), e_w' = x - q;  the owner of a part decodes all ranks' messages for it,
             y = mean + e_s;  q' = decode(encode(y)), e_s' = y - q';  q' goes to all.
all-gather   the same first half over the whole bucket; every rank takes the mean of all messages itself.

All ranks decode all parts from the wire, their own too, and add in rank order: results are equal bit for bit. So
    sum over steps of (mean g - out) = mean of e_w + e_s.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ciuic.codec import FragmentCodec
from ciuic.codec.vectors import LARGEST
from ciuic.train.ddp.plan import Chunk, Parameter, chunk_of, cut
from ciuic.train.ddp.residuals import Residuals
from ciuic.train.ddp.wire import TAG_BYTES, Head, Wire, head_bytes, pack_head, read_head
from ciuic.train.torch_codec import TorchFragmentCodec


class ChunkCodec:
    """One chunk's codec: fp32 on the gradient's device to host bytes and back."""

    def __init__(self, name: str, chunk: Chunk, device: torch.device) -> None:
        self.chunk = chunk
        self._codec: FragmentCodec | TorchFragmentCodec
        if device.type == "cpu":
            self._codec = FragmentCodec(name, chunk.shape, threads=torch.get_num_threads())
        else:
            self._codec = TorchFragmentCodec(name, chunk.shape, device)
        self.payload_bytes = self._codec.payload_bytes

    def encode(self, values: Tensor) -> Tensor:
        """Finite fp32 [n] -> uint8 [payload_bytes] on the host."""
        if isinstance(self._codec, FragmentCodec):
            return torch.from_numpy(self._codec.encode(values.numpy()))
        return torch.from_numpy(self._codec.encode(values))

    def decode(self, payload: Tensor, out: Tensor) -> Tensor:
        """uint8 [payload_bytes] on the host -> fp32 [n], in the first elements of `out`."""
        own = out[: self.chunk.element_count]
        if isinstance(self._codec, FragmentCodec):
            self._codec.decode(payload.numpy(), own.numpy())
        else:
            self._codec.decode(payload.numpy(), own)
        return own

    def accumulate(self, payload: Tensor, total: Tensor, room: Tensor) -> None:
        """total [n] += decoded; `room` is for values in between."""
        if isinstance(self._codec, FragmentCodec):
            self._codec.accumulate(payload.numpy(), np.float32(1), total.numpy())
        else:
            total += self.decode(payload, room)


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """What one bucket of DDP needs; made once per bucket."""

    bucket: tuple[int, ...]
    """Parameter numbers in the order of the buffer."""
    chunks: tuple[ChunkCodec, ...]
    """One per rank (two-phase) or one for all (all-gather)."""
    identity: bytes

    @cached_property
    def place(self) -> dict[int, int]:
        """Parameter number -> place in the bucket."""
        return {number: place for place, number in enumerate(self.bucket)}


class BucketReducer:
    """Reduces buckets in the order in which they are given; keeps the residuals."""

    def __init__(
        self, parameters: Sequence[Parameter], codec: str, form: str, wire: Wire, device: torch.device
    ) -> None:
        self.codec = codec
        self.form = form
        """two-phase or all-gather; may change between steps."""
        self.parameters = tuple(parameters)
        self.wire = wire
        self.device = device
        self._parts = cut(self.parameters, wire.size)
        self.residuals = Residuals(self.parameters, [ranges[wire.rank] for ranges in self._parts], device)
        self._room = torch.empty(0, device=device)
        self._plans: dict[tuple[str, tuple[int, ...]], BucketPlan] = {}

    @torch.no_grad()
    def reduce(self, buffer: Tensor, bucket: tuple[int, ...], step: int, scale: float, may_be_unused: bool) -> bool:
        """Mean over the ranks, in place in `buffer`. False: some rank's gradient is not finite; buffer is all NaN then.

        scale: the gradients are that many times too large (loss scaling); residuals are in unscaled units.
        """
        plan = self._plan(bucket)
        tag = hashlib.blake2b(plan.identity + step.to_bytes(8, "little"), digest_size=TAG_BYTES).digest()
        used = self._used(buffer, bucket) if may_be_unused else np.ones(len(bucket), bool)
        inputs = [self._input(codec.chunk, buffer, scale) for codec in plan.chunks]
        head = Head(finite=all(is_finite(x) for x in inputs), used=used)
        first = pack_head(tag, head)
        payloads = [self._payload(codec, x, head.finite) for codec, x in zip(plan.chunks, inputs, strict=True)]
        messages = [torch.cat([first, payload]) for payload in payloads]
        received = self._first_round(messages)
        heads = [read_head(message, tag, len(bucket), sender) for sender, message in enumerate(received)]
        if not all(head.finite for head in heads):
            buffer.fill_(torch.nan)
            return False
        used = np.logical_or.reduce([head.used for head in heads])
        for codec, x, payload in zip(plan.chunks, inputs, payloads, strict=True):
            self._keep_worker(plan, codec.chunk, x, codec.decode(payload, self._room), used)
        bodies = [message[head_bytes(len(bucket)) :] for message in received]
        if self.form == "two-phase":
            return self._second_phase(plan, bodies, buffer, used, scale)
        return self._gathered(plan, bodies, buffer, used, scale)

    # ---- first half: every rank's own message

    def _plan(self, bucket: tuple[int, ...]) -> BucketPlan:
        key = (self.form, bucket)
        if key not in self._plans:
            ranks = range(self.wire.size) if self.form == "two-phase" else (None,)
            chunks = [
                chunk_of(bucket, self.parameters, None if r is None else [ranges[r] for ranges in self._parts])
                for r in ranks
            ]
            identity = "|".join([self.codec, self.form, *(self.parameters[number].name for number in bucket)])
            self._plans[key] = BucketPlan(
                bucket=bucket,
                chunks=tuple(ChunkCodec(self.codec, chunk, self.device) for chunk in chunks),
                identity=identity.encode(),
            )
            largest = max(chunk.element_count for chunk in chunks)
            if len(self._room) < largest:
                self._room = torch.empty(largest, device=self.device)
        return self._plans[key]

    def _used(self, buffer: Tensor, bucket: tuple[int, ...]) -> np.ndarray:
        """Which parameters have a gradient here that is not all zeros."""
        parts = buffer.split([self.parameters[number].element_count for number in bucket])
        return np.array([bool(part.any()) for part in parts], bool)

    def _input(self, chunk: Chunk, buffer: Tensor, scale: float) -> Tensor:
        """g / scale + e_w (and, in the all-gather form, N e_s of what this rank owned) of one chunk, fp32."""
        x = torch.empty(chunk.element_count, device=self.device)
        at = 0
        for span in chunk.spans:
            end = at + span.stop - span.start
            gradient = buffer[span.at : span.at + end - at]
            residual = self.residuals.worker[span.parameter][span.start : span.stop]
            torch.add(residual, gradient, alpha=1 / scale, out=x[at:end])
            if self.form == "all-gather" and not self.residuals.owner_is_zero:
                start, stop = self.residuals.owned[span.parameter]
                x[at + start : at + stop].add_(self.residuals.owner[span.parameter], alpha=self.wire.size)
            at = end
        return x

    def _payload(self, codec: ChunkCodec, values: Tensor, finite: bool) -> Tensor:
        if not finite:  # somebody's flag stops this step before a byte of it is read
            return torch.zeros(codec.payload_bytes, dtype=torch.uint8)
        return codec.encode(values)

    def _first_round(self, messages: list[Tensor]) -> list[Tensor]:
        if self.form == "two-phase":
            return self.wire.exchange(messages, [len(messages[self.wire.rank])] * self.wire.size)
        return self.wire.gather(messages[0])

    def _keep_worker(self, plan: BucketPlan, chunk: Chunk, x: Tensor, q: Tensor, used: np.ndarray) -> None:
        at = 0
        for span in chunk.spans:
            end = at + span.stop - span.start
            if used[plan.place[span.parameter]]:
                kept = self.residuals.next_worker(span.parameter)[span.start : span.stop]
                torch.sub(x[at:end], q[at:end], out=kept)
            at = end

    # ---- second half: what everybody gets

    def _second_phase(
        self, plan: BucketPlan, bodies: list[Tensor], buffer: Tensor, used: np.ndarray, scale: float
    ) -> bool:
        mine = plan.chunks[self.wire.rank]
        y = self._mean(mine, bodies)
        at = 0
        for span in mine.chunk.spans:
            end = at + span.stop - span.start
            y[at:end] += self.residuals.owner[span.parameter]
            at = end
        payload = mine.encode(y)
        received = self.wire.exchange([payload] * self.wire.size, [codec.payload_bytes for codec in plan.chunks])
        finite = True
        for rank, (codec, body) in enumerate(zip(plan.chunks, received, strict=True)):
            given = self._put(plan, codec, codec.decode(body, self._room), (buffer, used, scale))
            finite = finite and is_finite(given)
            if rank == self.wire.rank:
                self._keep_owner(plan, codec.chunk, y.sub_(given), used)
        return finite or self._void(buffer)

    def _keep_owner(self, plan: BucketPlan, chunk: Chunk, dropped: Tensor, used: np.ndarray) -> None:
        at = 0
        for span in chunk.spans:
            end = at + span.stop - span.start
            if used[plan.place[span.parameter]]:
                self.residuals.next_owner(span.parameter).copy_(dropped[at:end])
            at = end
        self.residuals.owner_is_zero = False

    def _gathered(self, plan: BucketPlan, bodies: list[Tensor], buffer: Tensor, used: np.ndarray, scale: float) -> bool:
        (codec,) = plan.chunks
        y = self._mean(codec, bodies)
        given = self._put(plan, codec, y, (buffer, used, scale))
        if not is_finite(given):
            return self._void(buffer)
        rounding = y - given if given is not y else None
        at = 0
        for span in codec.chunk.spans:
            end = at + span.stop - span.start
            if used[plan.place[span.parameter]]:
                if rounding is not None:  # the same on all ranks, so its mean is itself
                    self.residuals.next_worker(span.parameter)[span.start : span.stop] += rounding[at:end]
                if not self.residuals.owner_is_zero:
                    self.residuals.next_owner(span.parameter).zero_()
            at = end
        return True

    def _mean(self, codec: ChunkCodec, bodies: list[Tensor]) -> Tensor:
        """Mean of the ranks' decoded messages, added in rank order."""
        total = torch.empty(codec.chunk.element_count, device=self.device)
        codec.decode(bodies[0], total)
        for body in bodies[1:]:
            codec.accumulate(body, total, self._room)
        return total.div_(self.wire.size)

    def _put(
        self, plan: BucketPlan, codec: ChunkCodec, values: Tensor, into: tuple[Tensor, np.ndarray, float]
    ) -> Tensor:
        """Write values x scale into the buffer; returns what the buffer's type made of them, in unscaled fp32."""
        buffer, used, scale = into
        exact = buffer.dtype == torch.float32 and scale == 1.0
        given = values if exact else (values * scale).to(buffer.dtype).float() / scale
        at = 0
        for span in codec.chunk.spans:
            end = at + span.stop - span.start
            place = slice(span.at, span.at + end - at)
            if used[plan.place[span.parameter]]:
                buffer[place] = given[at:end] if scale == 1.0 else given[at:end] * scale
            else:
                buffer[place] = 0
            at = end
        return given

    def _void(self, buffer: Tensor) -> bool:
        buffer.fill_(torch.nan)
        return False


def is_finite(values: Tensor) -> bool:
    """Whether all of fp32 [n] are finite and below LARGEST; the common case costs one dot product."""
    if bool(torch.isfinite(torch.dot(values, values))):
        return True
    return bool((values.abs() <= LARGEST).all())
