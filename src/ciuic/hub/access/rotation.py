"""The hub's own certificate while it runs: replaced by a new one of the same authority, without a restart.

Nodes pin the authority, so they accept the new one; connections that are open keep the old one until they end.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from ciuic.errors import CiuicError, StorageError
from ciuic.hub.access.auth import HubFiles, issue_server
from ciuic.hub.api.events import Board
from ciuic.net.tls import certificate_ends_at, certificate_serial

RENEW_BEFORE_S = 30 * 86400.0
LOOK_EVERY_S = 3600.0
_log = structlog.get_logger("ciuic.hub")


@dataclass(frozen=True, kw_only=True)
class ServerCertificate:
    """What a hub shows now."""

    serial: str
    ends_at: float


class Rotation:
    """`install(cert, key)` makes the port use new files; it is called in the loop's thread."""

    def __init__(self, files: HubFiles, names: Sequence[str], install: Callable[[Path, Path], None]) -> None:
        self._files, self._names, self._install = files, list(names), install

    @property
    def present(self) -> ServerCertificate:
        """The one in use."""
        body = self._files.cert.read_bytes()
        return ServerCertificate(serial=certificate_serial(body), ends_at=certificate_ends_at(body))

    async def rotate(self) -> ServerCertificate:
        """Issue and use a new one. Raises StorageError, and then the old one stays in use."""
        files = await asyncio.to_thread(issue_server, self._files.cert.parent, self._files.authority, self._names)
        try:
            self._install(files.cert, files.key)
        except OSError as error:
            raise StorageError("the new certificate cannot be used", cause=str(error)) from error
        return self.present

    async def keep_fresh(self, board: Board) -> None:
        """Rotate in the last month, until the hub stops."""
        while not board.is_closed:
            try:
                if self.present.ends_at - time.time() < RENEW_BEFORE_S:
                    await self.rotate()
            except (CiuicError, OSError) as error:
                _log.error("the hub's certificate cannot be renewed; trying again", error=str(error))
            await board.pause(LOOK_EVERY_S)
