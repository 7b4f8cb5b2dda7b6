"""The shards of a network: their names and addresses (durable), and who spoke lately."""

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from ciuic.errors import StorageError
from ciuic.hub.run.checks import free_name
from ciuic.ledger.files import write_durable

PRESENT_S = 30.0
"""A shard that has not spoken for so long gets no more fragments, and moves to or from it are given up."""


class ShardBook:
    """Thread-safe."""

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        """Raises StorageError when the file is damaged."""
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._heard_s: dict[str, float] = {}
        try:
            self._urls = msgspec.json.decode(path.read_bytes(), type=dict[str, str]) if path.exists() else {}
        except (OSError, msgspec.DecodeError) as error:
            raise StorageError(
                f"{path} cannot be read", cause=str(error), next="remove it: shards tell their addresses again"
            ) from error

    def take_name(self, stem: str) -> str:
        """A name that no shard has, from now on taken. Raises StorageError."""
        with self._lock:
            name = free_name(stem, self._urls)
            self._note(name, "")
            return name

    def heard(self, name: str, url: str = "") -> None:
        """A shard spoke; `url` when it said where nodes reach it. Raises StorageError."""
        with self._lock:
            self._heard_s[name] = self._clock()
            if url and self._urls.get(name) != url:
                self._note(name, url)

    def _note(self, name: str, url: str) -> None:
        urls = self._urls | {name: url}
        write_durable(self._path, msgspec.json.encode(urls))
        self._urls = urls

    def present(self) -> list[str]:
        """Names of those that spoke lately and said where they are."""
        with self._lock:
            now_s = self._clock()
            return sorted(n for n, at_s in self._heard_s.items() if now_s - at_s <= PRESENT_S and self._urls.get(n))

    def url(self, shard: str) -> str:
        """Where nodes reach it; empty when it never said."""
        return self._urls.get(shard, "")
