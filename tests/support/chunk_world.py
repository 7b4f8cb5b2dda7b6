"""A real TLS port that takes bodies in chunks and gives files in ranges, in this process; a test may cut and damage."""

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from ciuic.errors import CiuicError
from ciuic.hub.access.auth import NODES
from ciuic.hub.api.chunks import ChunkApi
from ciuic.hub.api.endpoints import Call, Front
from ciuic.hub.api.events import Board
from ciuic.hub.api.spool import Spool, Upload
from ciuic.hub.port import PortServer, ServerFiles, listening
from ciuic.hub.run.courtesy import Courtesy, SnapshotResponse
from ciuic.ledger.files import Spooled
from ciuic.net.chunks import Buffer, Manifest
from ciuic.net.exchange import Exchange
from ciuic.net.messages import PushReply
from ciuic.net.tls import Authority, client_context, write_private_file
from ciuic.net.transfer import Fan
from ciuic.net.transfer_up import Uploader
from ciuic.net.url import parse_hub_url

PATH = "/v1/runs/r1/chunks"
LIMIT_BYTES = 64 * 1024 * 1024


class CountedSpool(Spool):
    """Tells after every chunk that came, also one that was there."""

    stored: Callable[[int], None] = staticmethod(lambda count: None)
    count = 0

    def open(self, key: tuple[str, str], manifest: Manifest, limit_bytes: int) -> Upload:
        upload = super().open(key, manifest, limit_bytes)
        if not hasattr(upload, "is_counted"):
            store = upload.store

            def counted(index: int, chunk: Buffer) -> None:
                store(index, chunk)
                self.count += 1
                self.stored(self.count)

            vars(upload).update(store=counted, is_counted=True)
        return upload


class ChunkWorld:
    """The port, with what it has taken; `client` connects to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority.create(folder)
        cert, key = self.authority.issue_server([])
        write_private_file(folder / "hub.pem", cert)
        write_private_file(folder / "hub.key", key)
        cert, key = self.authority.issue_client(None, common_name="us", role="node")
        write_private_file(folder / "us.pem", cert)
        write_private_file(folder / "us.key", key)
        self.spool = CountedSpool(folder / "spool")
        self.taken: list[bytes] = []
        self.refusals: list[CiuicError] = []
        """Raised, one each, instead of taking a body."""
        self.files: dict[str, Path] = {}
        self.ranges: list[str] = []
        self._fans: list[Fan] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "ChunkWorld":
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        for fan in self._fans:
            fan.close()
        self.server.should_exit = True
        self._thread.join(30)
        self.spool.close()

    async def _serve(self) -> None:
        front = Front()
        file = Route("/file/{name}", self._file)
        app = Starlette(routes=[*ChunkApi(front, self.spool, self).routes(), file])
        files = ServerFiles(
            cert=self.folder / "hub.pem", key=self.folder / "hub.key", authority_pem=self.authority.certificate_pem
        )
        board = Board()
        board.attach(asyncio.get_running_loop())
        with listening("127.0.0.1", 0, "hub") as listener:
            self.port = listener.getsockname()[1]
            self.server = PortServer(app, board, files)

            async def ready() -> None:
                self._ready.set()

            self.server.when_started = ready
            await self.server.serve(sockets=[listener])
        front.close()

    async def _file(self, request) -> Response:  # type: ignore[no-untyped-def]
        self.ranges.append(request.headers.get("range", ""))
        return SnapshotResponse(self.files[request.path_params["name"]], Courtesy())

    # ---- the taker

    async def most_bytes(self, call: Call) -> int:
        assert call.caller is not None
        assert call.caller.role in NODES
        return LIMIT_BYTES

    async def expect(self, call: Call, manifest: Manifest) -> None:
        """Everything is wanted."""

    async def take(self, call: Call, manifest: Manifest, frame: bytes, spooled: Spooled) -> PushReply | None:
        if self.refusals:
            raise self.refusals.pop()
        self.taken.append(frame)
        return PushReply(status="accepted")

    # ---- the other end

    def fan(self, *, port: int = 0, timeout_s: float = 20.0) -> Fan:
        context = client_context(
            self.authority.certificate_pem, self.folder / "us.pem", self.folder / "us.key", "updates"
        )
        address = parse_hub_url(f"https://127.0.0.1:{port or self.port}")
        made = Fan(make=lambda: Exchange(address, context, timeout_s))
        self._fans.append(made)
        return made

    def uploader(self, **where: float) -> Uploader:
        return Uploader(self.fan(**where))  # type: ignore[arg-type]

    def address(self) -> tuple[str, int]:
        return socket.gethostbyname("127.0.0.1"), self.port
