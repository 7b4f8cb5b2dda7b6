"""A headless Chromium, `ciuic dash` as a process, and a stand-in for both hub and proxy that serves canned states."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from ciuic.errors import CiuicError
from ciuic.hub.page.routes import SECURITY_HEADERS, PageFiles

T = TypeVar("T")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)
SOURCES = Path(__file__).parents[2] / "src"

needs_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="THE LIVE PAGE WAS NOT TESTED: no chromium or chromedriver (apt-get install chromium chromium-driver)",
    ),
]


class Browser:
    """One window and what a person does with it."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(service=Service(str(DRIVER)), options=options)
        self.resize(1280, 900)

    def open(self, url: str) -> None:
        self.driver.get("about:blank")  # else another #part of the same page is no new page
        self.driver.get(url)

    def resize(self, width: int, height: int, *, scheme: str = "light") -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def one(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        """What can be seen of it; empty when it is hidden or replaced meanwhile."""
        return str(self.js("return document.querySelector(arguments[0])?.innerText ?? ''", css))

    def click(self, css: str) -> None:
        self.one(css).click()

    def js(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def call(self, module: str, body: str, *arguments: object) -> Any:
        """What `body` makes of a module of the page (`m`) and the arguments (`a`)."""
        script = f"""const done = arguments[arguments.length - 1], a = [...arguments].slice(0, -1);
            const work = import("/assets/{module}").then(async (m) => {{ {body} }});
            work.then(done, (error) => done({{failed: String(error)}}));"""
        result = self.driver.execute_async_script(script, *arguments)
        if isinstance(result, dict) and "failed" in result:
            raise AssertionError(result["failed"])
        return result

    def wait(self, what: Callable[[], T], *, within_s: float = 30.0) -> T:
        """The first true value; what the page shows is in the failure."""
        until = time.monotonic() + within_s
        while not (value := what()):
            if time.monotonic() > until:
                raise AssertionError(f"still {value!r} after {within_s} s; the page:\n{self.text('body')[:3000]}")
            time.sleep(0.1)
        return value

    def wait_for(self, css: str, words: str, *, within_s: float = 30.0) -> None:
        self.wait(lambda: words in self.text(css), within_s=within_s)

    def complaints(self) -> list[str]:
        """Errors in the console since the last call: exceptions, refused styles and scripts, failed requests."""
        return [line["message"] for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]

    def strangers(self) -> list[str]:
        """What the page asked of anybody but its own server."""
        script = """return performance.getEntriesByType("resource").map((entry) => entry.name)
            .filter((name) => !name.startsWith(location.origin) && !name.startsWith("data:"))"""
        return list(self.js(script))

    def quit(self) -> None:
        self.driver.quit()


@contextmanager
def browser_at(folder: Path) -> Iterator[Browser]:
    browser = Browser(folder / "chromium")
    try:
        yield browser
    finally:
        browser.quit()


class Dash:
    """`ciuic dash` as a process of its own."""

    def __init__(self, home: Path, *arguments: str) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CIUIC_")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ciuic.cli.main", "dash", *(arguments or ("--port", "0"))],
            env={**kept, "CIUIC_HOME": str(home), "PYTHONPATH": str(SOURCES)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        if not self.line:
            raise AssertionError(f"no live page: {self.process.communicate(timeout=30)[1]}")

    @property
    def url(self) -> str:
        return self.line.split()[3]

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.communicate(timeout=30)
        return self.process.returncode


class CannedHub:
    """Serves the page's own files and states that a test puts in, over plain HTTP, as `ciuic dash` does."""

    def __init__(self, *, with_charts: bool = True) -> None:
        self.files = PageFiles()
        self.with_charts = with_charts
        self.answers: dict[str, Any] = {}
        self.streams: list[queue.Queue[bytes | None]] = []
        self.first: dict[str, Any] = {}
        self.is_away = False
        self._lock = threading.Lock()
        canned = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                canned.serve(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def reset(self) -> None:
        """As new, for the next test."""
        self.go_away()
        self.answers, self.first, self.is_away = {}, {}, False

    def say(self, state: dict[str, Any]) -> None:
        """A message to all streams; the first one of streams still to come."""
        with self._lock:
            self.first = state
            for stream in self.streams:
                stream.put(f"data: {json.dumps(state)}\n\n".encode())

    def go_away(self) -> None:
        with self._lock:
            self.is_away = True
            for stream in self.streams:
                stream.put(None)

    def come_back(self) -> None:
        self.is_away = False

    def close(self) -> None:
        self.go_away()
        self.server.shutdown()
        self.server.server_close()

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        if path == "/favicon.ico":  # asked for by the browser itself when it shows a single file
            self._send(handler, 200, b"", "image/x-icon")
        elif self.is_away and not path.startswith("/assets/"):
            error = {
                "code": "CIUIC-300",
                "message": "the hub does not answer",
                "cause": "connection refused",
                "next": "",
            }
            self._send(handler, 502, json.dumps({"error": error}).encode(), "application/json")
        elif path == "/api/stream":
            self._stream(handler)
        elif path in self.answers:
            self._send(handler, 200, json.dumps(self.answers[path]).encode(), "application/json")
        else:
            self._file(handler, "index.html" if path == "/" else path.removeprefix("/assets/"))

    def _file(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        if name == "plotly.min.js" and not self.with_charts:
            self._send(handler, 404, b"", "text/plain")
            return
        try:
            asset = self.files.get(name)
        except CiuicError:
            self._send(handler, 404, b"", "text/plain")
            return
        caching = dict(asset.answer().headers)["cache-control"]
        self._send(handler, 200, asset.body, asset.media_type, caching)

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, body: bytes, media_type: str, caching: str = "no-store"
    ) -> None:
        handler.send_response(status)
        headers = {"content-type": media_type, "content-length": str(len(body)), "cache-control": caching}
        for name, value in {**SECURITY_HEADERS, **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        with suppress(ConnectionError):
            handler.wfile.write(body)

    def _stream(self, handler: BaseHTTPRequestHandler) -> None:
        stream: queue.Queue[bytes | None] = queue.Queue()
        with self._lock:
            self.streams.append(stream)
            if self.first:
                stream.put(f"data: {json.dumps(self.first)}\n\n".encode())
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.end_headers()
        with suppress(ConnectionError):
            while (piece := stream.get()) is not None:
                handler.wfile.write(piece)
        with self._lock:
            self.streams.remove(stream)
