"""The hook's messages: one buffer per peer, counted, over a process group of their own.

A group of its own keeps these collectives in one order on all ranks, whatever else the program sends meanwhile.
Bytes of a message of the first phase: 8 (7 of a tag that all ranks must share, 1 flag), one bit per parameter of the
bucket, then the codec's payload (bits and scales). The second phase sends payloads only.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ciuic.errors import ProtocolError

TAG_BYTES = 7
HEAD_BYTES = TAG_BYTES + 1
_PROBE_BYTES = 1 << 18
_PROBES = 5


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """What a message between two ranks costs."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Head:
    """What every first message begins with."""

    finite: bool
    used: NDArray[np.bool_]
    """[parameters of the bucket] whether this rank has a gradient for it."""


class Wire:
    """Collectives of one group of ranks, with a count of the bytes handed to other ranks."""

    def __init__(self, group: Any) -> None:
        ranks = dist.get_process_group_ranks(group)
        backend = dist.get_backend(group)
        self._is_world = len(ranks) == dist.get_world_size()
        self._group = dist.new_group(
            ranks, backend=backend, timeout=_timeout_of(group), use_local_synchronization=not self._is_world
        )
        self.rank, self.size = dist.get_rank(self._group), len(ranks)
        self.bytes_sent = 0
        self._device = torch.device("cuda") if backend == "nccl" else torch.device("cpu")

    def exchange(self, messages: Sequence[Tensor], receive_bytes: Sequence[int]) -> list[Tensor]:
        """messages[r] goes to rank r; returns what each rank sent here. One all-to-all of one buffer."""
        sizes = [len(message) for message in messages]
        received = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=self._device)
        if sum(sizes) + sum(receive_bytes):
            sent = torch.cat(list(messages)).to(self._device)
            dist.all_to_all_single(received, sent, list(receive_bytes), sizes, group=self._group)
        self.bytes_sent += sum(sizes) - sizes[self.rank]
        return list(received.cpu().split(list(receive_bytes)))

    def gather(self, message: Tensor) -> list[Tensor]:
        """Everybody's message, in rank order; all have the same size. One all-gather."""
        received = torch.empty(self.size * len(message), dtype=torch.uint8, device=self._device)
        dist.all_gather_single(received, message.to(self._device), group=self._group)
        self.bytes_sent += (self.size - 1) * len(message)
        return list(received.cpu().split(len(message)))

    def agree(self, text: str, what: str) -> None:
        """All ranks must give the same text. Raises ProtocolError naming the first rank that differs."""
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        for rank, theirs in enumerate(self.gather(mine)):
            if not torch.equal(theirs, mine):
                raise ProtocolError(
                    f"rank {rank} has another {what} than rank {self.rank}",
                    cause="the ranks did not call compress_ddp with the same model, codec and form",
                    next="run the same program, model and versions on all ranks",
                )

    def measure(self) -> LinkSpeed:
        """Latency and rate of this group as rank 0 sees them, on all ranks."""
        tiny, large = torch.zeros(1, dtype=torch.uint8), torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
        self.gather(tiny)
        latency_s = sorted(self._timed(tiny) for _ in range(_PROBES))[_PROBES // 2]
        rate = (self.size - 1) * _PROBE_BYTES / max(self._timed(large) - latency_s, 1e-9)
        numbers = torch.tensor([latency_s, rate], dtype=torch.float64, device=self._device)
        dist.broadcast(numbers, src=dist.get_global_rank(self._group, 0), group=self._group)
        latency_s, rate = numbers.tolist()
        return LinkSpeed(latency_s=latency_s, bytes_per_s=rate)

    def close(self) -> None:
        """Give the group back. One of some ranks only stays: torch would give its name, and old addresses, again."""
        if dist.is_initialized() and self._is_world:
            dist.destroy_process_group(self._group)

    def _timed(self, message: Tensor) -> float:
        began = time.perf_counter()
        self.gather(message)
        return time.perf_counter() - began


def choose_form(message_bytes: int, ranks: int, link: LinkSpeed) -> str:
    """`all-gather` where its extra bytes cost less than the second round's latency, else `two-phase`.

    All-gather sends (N-1)·m bytes per rank in one round, two-phase 2(N-1)/N·m in two; m: bytes of one message.
    With two ranks the bytes are the same, and one rounding is saved.
    """
    extra_bytes = message_bytes * (ranks - 1) * (1 - 2 / ranks)
    return "all-gather" if ranks <= 2 or link.latency_s * link.bytes_per_s > extra_bytes else "two-phase"


def head_bytes(parameter_count: int) -> int:
    """Bytes before the payload of a first message."""
    return HEAD_BYTES + (parameter_count + 7) // 8


def pack_head(tag: bytes, head: Head) -> Tensor:
    """Head -> uint8 [head_bytes]."""
    raw = tag + bytes([head.finite]) + np.packbits(head.used, bitorder="little").tobytes()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def read_head(message: Tensor, tag: bytes, parameter_count: int, sender: int) -> Head:
    """The head of what rank `sender` sent. Raises ProtocolError when it speaks of another bucket or step."""
    raw = message[: head_bytes(parameter_count)].numpy().tobytes()
    if raw[:TAG_BYTES] != tag or raw[TAG_BYTES] > 1:
        raise ProtocolError(
            f"rank {sender} sent another bucket or step",
            cause="the ranks are not at the same step, or were resumed from different checkpoints",
            next="resume all ranks from the same step, and give every rank the same number of batches",
        )
    bits = np.frombuffer(raw, np.uint8, offset=HEAD_BYTES)
    used = np.unpackbits(bits, count=parameter_count, bitorder="little").astype(bool)
    return Head(finite=bool(raw[TAG_BYTES]), used=used)


def _timeout_of(group: Any) -> timedelta | None:
    """The time-out of an existing group, so that ours is as patient."""
    for kind in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(kind)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None
