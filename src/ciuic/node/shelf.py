"""The snapshots in this node's copies of ledgers, by what is in them; the two ends of each file are read once."""

import threading
from contextlib import suppress
from pathlib import Path

from ciuic.errors import FrameError, StorageError
from ciuic.ledger.content import SnapshotFacts, snapshot_facts
from ciuic.net.chunks import LARGE_BYTES
from ciuic.net.peer_messages import MAX_HELD, HeldSnapshot

PATTERN = "*/ledger/[0-9]*/fragment-*/[0-9]*.base"
Stamp = tuple[int, int]


class SnapshotShelf:
    """For several threads."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where the node keeps its runs."""
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[tuple[Path, Stamp], SnapshotFacts | None] = {}
        self._paths: dict[str, Path] = {}

    def held(self) -> list[HeldSnapshot]:
        """What is there now, the newest files first; small ones are not worth a connection and left out."""
        with self._lock:
            found, paths = {}, {}
            for key in self._newest():
                facts = self._known[key] if key in self._known else _read(key[0])
                found[key] = facts
                if facts is not None and facts.size_bytes >= LARGE_BYTES:
                    paths.setdefault(facts.content, (key[0], facts.header))
            self._known, self._paths = found, {content: path for content, (path, _) in paths.items()}
        return [
            HeldSnapshot(run_id=header.run, fragment=header.fragment, version=header.version, content=content)
            for content, (_, header) in paths.items()
        ]

    def path_of(self, content: str) -> Path | None:
        """The file that holds it; None when there is none (any more)."""
        with self._lock:
            return self._paths.get(content)

    def _newest(self) -> list[tuple[Path, Stamp]]:
        stamps = []
        for path in self._folder.glob(PATTERN):
            with suppress(OSError):  # it has just been replaced
                status = path.stat()
                stamps.append((path, (status.st_mtime_ns, status.st_size)))
        return sorted(stamps, key=lambda one: one[1], reverse=True)[:MAX_HELD]


def _read(path: Path) -> SnapshotFacts | None:
    try:
        return snapshot_facts(path)
    except (FrameError, StorageError):
        return None
