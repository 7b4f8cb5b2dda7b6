"""Serving the live page: its own files from this folder, the chart library from the installed plotly package.

The files are few and small, so they are read once; each has an ETag and is asked for again with it. The page runs under
a content security policy without inline scripts or styles, and reaches nothing but the hub.
"""

import gzip
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from starlette.responses import Response
from starlette.routing import Route

from ciuic.errors import NotFoundError
from ciuic.hub.access.auth import VIEWERS
from ciuic.hub.api.endpoints import Call, Desk
from ciuic.hub.api.view import StateSource

FOLDER = Path(__file__).parent
PAGE = "index.html"
CHARTS = "plotly.min.js"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
WORTH_PACKING_BYTES = 1024
CHARTS_MAX_AGE_S = 86400

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One file as it is sent."""

    body: bytes
    packed: bytes
    """gzip of `body`; empty when that is not worth it."""
    etag: str
    media_type: str
    max_age_s: int

    def answer(self, *, etags: str = "", encodings: str = "") -> Response:
        """The whole file, or 304 when the asker's If-None-Match says that it has it."""
        caching = f"private, max-age={self.max_age_s}" if self.max_age_s else "no-cache"
        headers = {**SECURITY_HEADERS, "etag": self.etag, "cache-control": caching, "vary": "accept-encoding"}
        if self.etag in [etag.strip().removeprefix("W/") for etag in etags.split(",")]:
            return Response(status_code=304, headers=headers)
        if self.packed and "gzip" in encodings:
            return Response(self.packed, media_type=self.media_type, headers={**headers, "content-encoding": "gzip"})
        return Response(self.body, media_type=self.media_type, headers=headers)


class PageFiles:
    """The files that exist when the hub starts; nothing else can be asked for, whatever its name."""

    def __init__(self, folder: Path = FOLDER, charts: Path | None = None) -> None:
        """`charts`: the chart library; None finds it in the installed plotly package."""
        charts = charts or find_charts()
        self._paths = {path.name: path for path in sorted(folder.iterdir()) if path.suffix in MEDIA_TYPES}
        if charts is not None:
            self._paths[CHARTS] = charts
        self._assets: dict[str, Asset] = {}

    @property
    def names(self) -> list[str]:
        """What there is."""
        return list(self._paths)

    def get(self, name: str) -> Asset:
        """Read once, kept in memory. Raises NotFoundError."""
        path = self._paths.get(name)
        if path is None:
            raise NotFoundError(
                f"the live page has no file {name[:80]!r}",
                cause="the plotly package is not installed beside the hub" if name == CHARTS else "",
                next="reload the page; if the hub was upgraded, `ciuic dash` too",
            )
        if name not in self._assets:
            self._assets[name] = _read(path)
        return self._assets[name]


def find_charts() -> Path | None:
    """plotly's JavaScript in the installed package, without importing it; None when it is not there."""
    found = importlib.util.find_spec("plotly")
    folders = [] if found is None else found.submodule_search_locations or []
    files = (Path(folder) / "package_data" / CHARTS for folder in folders)
    return next((file for file in files if file.is_file()), None)


def _read(path: Path) -> Asset:
    body = path.read_bytes()
    packed = gzip.compress(body, 6, mtime=0) if len(body) >= WORTH_PACKING_BYTES else b""
    return Asset(
        body=body,
        packed=packed,
        etag=f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        media_type=MEDIA_TYPES[path.suffix],
        max_age_s=CHARTS_MAX_AGE_S if path.name == CHARTS else 0,
    )


def page_routes(desk: Desk, _source: StateSource) -> list[Route]:
    """GET / and GET /assets/...; the page reads everything else from the endpoints of api_view."""
    files = PageFiles()

    async def answer(call: Call, name: str) -> Response:
        asset = await desk.long(files.get, name)
        asked = call.request.headers
        return asset.answer(etags=asked.get("if-none-match", ""), encodings=asked.get("accept-encoding", ""))

    async def page(call: Call) -> Response:
        return await answer(call, PAGE)

    async def asset(call: Call) -> Response:
        return await answer(call, call.path("name"))

    return [
        desk.route("GET", "/", page, roles=VIEWERS),
        desk.route("GET", "/assets/{name}", asset, roles=VIEWERS),
    ]
