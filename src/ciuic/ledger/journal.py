"""The journal of a run: what must outlive a crash of the hub besides entries and pushes.

Attachments (incarnations only grow), leases (each sample once) and held-out losses, as one durable record each.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

from ciuic.errors import LedgerDamagedError
from ciuic.ledger.files import AppendLog
from ciuic.ledger.frame import build_frame, read_frame
from ciuic.ledger.intervals import Range
from ciuic.ledger.settings import Settings


class Attached(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A new incarnation of a node; its unpushed leases went back."""

    node: str
    incarnation: int
    returned: tuple[Range, ...] = ()
    totals: dict[str, float] = {}
    """Steps, tokens, times of the node's earlier incarnations, added up."""


class Leased(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    node: str
    incarnation: int
    request_id: int
    ranges: tuple[Range, ...]


class Returned(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Leases of a worker that is still in the run went back unstarted."""

    node: str
    ranges: tuple[Range, ...]
    is_lost: bool = False
    """It did not give them: it has been silent, and others had nothing to train."""


class Recovered(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A worker that was thought lost speaks again: what nobody else has taken meanwhile is its lease again."""

    node: str
    ranges: tuple[Range, ...]


class Departed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A node left or is gone; its leases went back."""

    node: str
    state: Literal["done", "gone"]
    returned: tuple[Range, ...] = ()


class Revived(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A node that was gone spoke again."""

    node: str


class Evaluated(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    node: str
    version: int
    loss: float
    samples: int
    time: float
    samples_committed: int
    final: bool


class Started(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Enough nodes attached for the first time; how many samples the run has."""

    total_samples: int


class Switched(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Other settings hold from here on."""

    settings: Settings


class Placed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """From here on this shard serves the fragment. This record decides who its one owner is, whatever crashed."""

    fragment: int
    shard: str
    generation: int


class Rebuilt(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The ledger was rebuilt from a node's copy: what was committed before its first entry."""

    committed: tuple[Range, ...]
    duplicated: int = 0
    node: str = ""
    """Whose copy."""


Record = (
    Attached | Leased | Returned | Recovered | Departed | Revived | Evaluated | Started | Switched | Placed | Rebuilt
)


class Journal:
    """Append records, read them all back."""

    def __init__(self, path: Path) -> None:
        self._log = AppendLog(path, "record")

    @property
    def torn_bytes(self) -> int:
        """How many bytes of an unfinished record were cut off when it was opened."""
        return self._log.torn_bytes

    def append(self, record: Record) -> None:
        """Durable when it returns."""
        self._log.append(build_frame("record", msgspec.msgpack.encode(record)))

    def records(self) -> list[Record]:
        """All records, oldest first. Raises LedgerDamagedError."""
        found: list[Any] = []
        for data in self._log:
            try:
                found.append(msgspec.msgpack.decode(read_frame(data, "record").header, type=Record))
            except msgspec.DecodeError as error:
                raise LedgerDamagedError("the journal holds a record of another version", cause=str(error)) from error
        return found

    def close(self) -> None:
        self._log.close()
