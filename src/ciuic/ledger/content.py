"""A short name for what is in a snapshot's file, found by reading its two ends only.

It is the blake2b (128 bit, hex) of everything but the vectors: sizes, header (run, fragment, version, digest of the
base, parts) and the frame's checksum over all of it. Two files with the same name hold the same, unless somebody made
one to deceive: so what comes from another node is checked by the hub's list of chunks all the same.
"""

import hashlib
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ciuic.errors import FrameError
from ciuic.ledger.entry import SnapshotHeader
from ciuic.ledger.files import storage_error
from ciuic.ledger.frame import CHECKSUM_BYTES, MAX_HEADER_BYTES, PREFIX_BYTES, frame_bytes

CONTENT = re.compile(r"[0-9a-f]{32}")
_HEADER_BYTES = struct.Struct("<8xI")


@dataclass(frozen=True, kw_only=True)
class SnapshotFacts:
    """What a snapshot's file says about itself."""

    content: str
    header: SnapshotHeader
    size_bytes: int


def snapshot_facts(path: Path) -> SnapshotFacts:
    """Raises FrameError when it is no whole snapshot, StorageError when it cannot be read."""
    try:
        with path.open("rb") as file:
            prefix = file.read(PREFIX_BYTES)
            size = frame_bytes(prefix, "snapshot")
            header = file.read(min(MAX_HEADER_BYTES, _HEADER_BYTES.unpack_from(prefix)[0]))
            if file.seek(0, 2) != size:
                raise FrameError(f"{path.name} is cut or too long: it should have {size} bytes")
            file.seek(-CHECKSUM_BYTES, 2)
            ends = prefix + header + file.read()
        known = msgspec.msgpack.decode(header, type=SnapshotHeader)
    except OSError as error:
        raise storage_error(f"cannot read {path}", error) from error
    except msgspec.DecodeError as error:
        raise FrameError(f"the header of {path.name} is not valid", cause=str(error)) from error
    content = hashlib.blake2b(ends, digest_size=16).hexdigest()
    return SnapshotFacts(content=content, header=known, size_bytes=size)
