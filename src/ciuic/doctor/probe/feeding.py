"""Which data training gets: digests of batches, the order of epochs, the loaders and their lengths."""

import os
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from ciuic.doctor.facts_data import (
    EPOCH,
    FEED,
    FEED_HELD,
    FEED_SOURCES,
    LOADER,
    LOADER_ENDS,
    PEERS,
    RESUMED_AT,
    SAME_ORDER,
    SHARED_MEMORY,
)
from ciuic.doctor.probe.batches import batch_bytes, batch_digest
from ciuic.doctor.probe.loaders import describe, is_shuffled, length_of, sharing
from ciuic.doctor.probe.part import Model, Part, Step
from ciuic.doctor.probe.progress import Progress

LOADERS_MAX = 4
FIRST_BATCHES = 3
"""Of a pass: equal ones in two passes are the same order."""
PASSES_MAX = 64
ENDS_TOLD_MAX = 16


class _Pass:
    """One iteration over a loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = weakref.ref(loader)
        shares = sharing(loader)
        self.sampler = type(shares).__name__ if shares is not None else "the sampler"
        self.distributed = weakref.ref(shares) if type(shares) is DistributedSampler else None
        """With it the epoch's number makes the order."""
        self.epoch = getattr(shares, "epoch", None)
        self.length = length_of(loader)
        self.is_shuffled = is_shuffled(loader)
        self.key = id(getattr(loader, "dataset", loader)), self.length
        self.first: list[bytes | None] = []
        self.fresh: list[bytes | None] = []
        """Digests of batches since the last backward pass."""
        self.batches = 0
        self.is_trained = self.is_judged = False
        self.bytes = 0

    def is_same_sampler(self, before: "_Pass") -> bool:
        """The very DistributedSampler of that pass."""
        mine = self.distributed() if self.distributed is not None else None
        return mine is not None and before.distributed is not None and before.distributed() is mine


class _Source:
    """Digests of one source."""

    def __init__(self) -> None:
        self.count = 0
        self.newest: deque[bytes] = deque(maxlen=FEED_HELD)
        self.unsent = 0

    def add(self, digest: bytes) -> None:
        self.count += 1
        self.unsent += 1
        self.newest.append(digest)


class Feeding(Part):
    """FEED, PEERS and EPOCH of sampled steps; notices about loaders and passes."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._passes: dict[int, _Pass] = {}
        """The newest of each loader."""
        self._last: _Pass | None = None
        self._before: dict[tuple[int, int], _Pass] = {}
        """The last pass that training used, by data set."""
        self._sources: dict[int, _Source] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._progress = Progress()
        self._ends_told = 0
        self._peers: list[int] | None = None
        self._peers_known = False

    # ---- loaders -----------------------------------------------------------------------------------------------------

    def loader_begins(self, loader: Any) -> None:
        """A pass."""
        self._passes[id(loader)] = _Pass(loader)
        while len(self._passes) > PASSES_MAX:
            self._passes.pop(next(iter(self._passes)))

    def batch(self, loader: Any, batch: Any, wait_s: float) -> None:
        """It may be for training or not: the next backward pass says."""
        current = self._passes.get(id(loader))
        if current is None:
            return
        current.batches += 1
        digest = batch_digest(batch)
        if len(current.first) < FIRST_BATCHES:
            current.first.append(digest)
            current.bytes = max(current.bytes, batch_bytes(batch))
        current.fresh.append(digest)
        del current.fresh[: -2 * FEED_HELD]
        self._last = current

    def loader_ends(self, loader: Any, batches: int) -> None:
        """How many there were."""
        current = self._passes.pop(id(loader), None)
        if current is not None and current.is_trained and self._ends_told < ENDS_TOLD_MAX:
            self._ends_told += 1
            self.probe.note(
                LOADER_ENDS, number=self._numbers.get(current.key, -1), batches=batches, **{"pass": self._ends_told}
            )

    def backward_begin(self, roots: tuple[Tensor, ...]) -> None:
        """The newest batches were for training."""
        current = self._last
        if current is None or not current.fresh:
            return
        source = self._sources.setdefault(0, _Source())
        for digest in current.fresh:
            if digest is not None:
                source.add(digest)
        current.fresh.clear()
        if not current.is_trained:
            current.is_trained = True
            self._new_loader(current)
            self._resumed(current)
        if not current.is_judged:
            self._same_order(current)

    def _new_loader(self, current: _Pass) -> None:
        loader = current.loader()
        if loader is None or current.key in self._numbers or len(self._numbers) >= LOADERS_MAX:
            return
        number = self._numbers[current.key] = len(self._numbers)
        facts = describe(loader)
        self.probe.note(LOADER, number=number, **facts)
        workers = facts["workers"]
        if workers and hasattr(os, "statvfs"):
            prefetch = getattr(loader, "prefetch_factor", None) or 2
            self._shared_memory(current.bytes * workers * prefetch, workers)

    def _shared_memory(self, wanted: int, workers: int) -> None:
        try:
            state = os.statvfs("/dev/shm")
        except OSError:
            return
        free = state.f_bavail * state.f_frsize
        if wanted > free:
            self.probe.note(SHARED_MEMORY, free=free, wanted=wanted, workers=workers)

    # ---- the order of epochs -----------------------------------------------------------------------------------------

    def _same_order(self, current: _Pass) -> None:
        before = self._before.get(current.key)
        if before is None or before is current:
            self._before[current.key] = current
            current.is_judged = True
            return
        if not current.is_shuffled or before.batches < 2:
            how = ""
        elif current.is_same_sampler(before):
            how = "epoch" if before.epoch == current.epoch else ""
        elif len(current.first) < FIRST_BATCHES <= len(before.first):
            return  # more batches will tell
        else:
            varied = None not in current.first and len(set(current.first)) == len(current.first)
            how = "digests" if varied and current.first == before.first else ""
        current.is_judged = True
        if how:
            epoch = current.epoch if isinstance(current.epoch, int) else -1
            self.probe.note(SAME_ORDER, sampler=current.sampler, epoch=epoch, batches=before.batches, how=how)
        self._before[current.key] = current

    # ---- after a checkpoint ------------------------------------------------------------------------------------------

    def read(self, where: str, what: Any) -> None:
        """torch.load has returned."""
        self._progress.read(what)

    def loaded(self, target: Any, state: Any, result: Any) -> None:
        """How many steps were made before."""
        if self.probe.step == 0:
            self._progress.loaded(target)

    def _resumed(self, current: _Pass) -> None:
        steps = self._progress.steps
        if self.probe.step or len(self._before) or steps < 1 or not isinstance(current.epoch, int):
            return
        if current.length > 1:
            facts = {"steps": steps, "epoch": current.epoch, "position": current.batches - 1, "length": current.length}
            self.probe.note(RESUMED_AT, saved_epoch=self._progress.epoch, shuffle=current.is_shuffled, **facts)

    # ---- what models are given --------------------------------------------------------------------------------

    def forward_begin(self, model: Model, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """In training only."""
        at = 1 + model.index
        if at >= FEED_SOURCES or not torch.is_grad_enabled() or not model.module.training:
            return
        if torch.compiler.is_compiling():
            return
        digest = batch_digest((inputs, keywords), close=self.probe.sampler.due(self.probe.step + 1))
        if digest is not None:
            self._sources.setdefault(at, _Source()).add(digest)

    def before_step(self, step: Step) -> None:
        """Digests since the last sample."""
        if step.index or not step.due:
            return
        found = []
        for at, source in sorted(self._sources.items()):
            newest = list(source.newest)[-source.unsent :] if source.unsent else []
            source.unsent = 0
            if newest:
                found.append([at, source.count, b"".join(newest)])
        if found:
            step.facts[FEED] = found
        if not self._peers_known:
            self._peers, self._peers_known = self._who_reads_other_data(), True
        if self._peers is not None:
            step.facts[PEERS] = self._peers
        current = self._last
        if current is not None and current.is_shuffled and isinstance(current.epoch, int):
            step.facts[EPOCH] = current.epoch

    def _who_reads_other_data(self) -> list[int] | None:
        """None: all ranks."""
        for model in self.probe.models:
            if model.kind == "ddp":
                return list(model.ranks) if len(model.ranks) < self.probe.world else None
            if model.kind == "sharded":
                return None if self._is_only_sharded(model) else []
        return None

    def _is_only_sharded(self, model: Model) -> bool:
        from torch.distributed.fsdp import FSDPModule

        meshes = {
            id(mesh): mesh for _, p in model.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None
        }
        flat = all(mesh.ndim == 1 and mesh.size() == self.probe.world for mesh in meshes.values())
        return flat and any(isinstance(module, FSDPModule) for module in model.module.modules())
