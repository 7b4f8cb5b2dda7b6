"""Ranks exchange bytes over a store, each wait with an end; no collective."""

import time
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ciuic.doctor.loss.records import ReplaySettings
from ciuic.errors import FrameError

PLACE = "ciuic/doctor/replay"
CHUNK_BYTES = 4 << 20
PARCEL_BYTES_MAX = 512 << 20
_SHORTEST_S, _LONGEST_S = 0.001, 0.05


class Postbox:
    """One meeting of ranks; all make it, in the same order."""

    def __init__(self, settings: ReplaySettings) -> None:
        self.rank, self.world = settings.rank, settings.world
        store = settings.store
        if store is None and dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            store = distributed_c10d._get_default_store()
        self._store: Any = None
        if store is not None and self.world > 1:
            number = store.add(f"{PLACE}/made/{self.rank}", 1)
            self._store = dist.PrefixStore(f"{PLACE}/{number}", store)
        else:
            self.rank, self.world = 0, 1

    def put(self, name: str, body: bytes) -> None:
        """For others to take."""
        if self._store is None:
            return
        chunks = range(0, len(body), CHUNK_BYTES)
        for number, at in enumerate(chunks):
            self._store.set(f"{name}/{number}", body[at : at + CHUNK_BYTES])
        self._store.set(name, f"{len(chunks)} {len(body)}")

    def take(self, name: str, until_s: float) -> bytes | None:
        """What somebody put there by then (monotonic seconds); None: nobody. Raises FrameError when it is too long."""
        if self._store is None or not self._appears(name, until_s):
            return None
        count, size = (int(word) for word in bytes(self._store.get(name)).split())
        if not 0 <= size <= PARCEL_BYTES_MAX or count != -(-size // CHUNK_BYTES):
            raise FrameError(f"{name} claims {size} bytes", cause=f"limit {PARCEL_BYTES_MAX}")
        body = b"".join(bytes(self._store.get(f"{name}/{number}")) for number in range(count))
        if len(body) != size:
            raise FrameError(f"{name} has {len(body)} bytes, not {size}")
        return body

    def forget(self, name: str) -> None:
        """All have taken it."""
        if self._store is None or not self._store.check([name]):
            return
        count = int(bytes(self._store.get(name)).split()[0])
        for number in range(count):
            self._store.delete_key(f"{name}/{number}")
        self._store.delete_key(name)

    def _appears(self, name: str, until_s: float) -> bool:
        pause_s = _SHORTEST_S
        while self._store is not None and not self._store.check([name]):  # `wait` would hold the store's lock
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(_LONGEST_S, 1.5 * pause_s)
        return True
