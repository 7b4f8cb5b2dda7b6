"""The `ciuic` program beside a small hub with canned answers (real sockets, real TLS).

`ciuic` runs a command line in this process, which costs a twentieth of a program's start; `program` starts one.
"""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import msgspec
from support.net_server import SmallHub, answer

from ciuic.cli.main import main
from ciuic.errors import CiuicError, error_to_dict
from ciuic.net.client import HubClient

Done = subprocess.CompletedProcess[str]
SOURCES = Path(__file__).parents[2] / "src"


class CliWorld:
    """A hub that answers what a test puts into `answers`, and a CIUIC_HOME with an operator profile for it."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.hub = SmallHub(folder / "hub-folder")
        self.hub.misbehave = self._serve
        self.answers: dict[tuple[str, str], list[Any]] = {}
        """(method, path): the answers one after the other; the last one stays. CiuicError: refused; bytes: as it is."""
        self.bodies: list[tuple[str, str, Any]] = []
        """(method, path, decoded body) of each request."""
        self.queries: list[dict[str, list[str]]] = []
        self.asked = threading.Condition()
        self.hub.start()
        self._write_profile()

    def _write_profile(self) -> None:
        operator = self.home / "operator"
        operator.mkdir(parents=True)
        cert, key = self.hub.client_files()
        (operator / "authority.pem").write_bytes(self.hub.authority.certificate_pem)
        profile = {"url": self.hub.url, "authority": "authority.pem", "cert": str(cert), "key": str(key)}
        (operator / "profile.json").write_text(json.dumps(profile))

    def close(self) -> None:
        self.hub.stop()

    def on(self, method: str, path: str, *answers: Any) -> None:
        """Answer `method path` with these, one after the other; the last one stays."""
        self.answers[method, path] = list(answers)

    def wait_for_requests(self, count: int, deadline_s: float = 30.0) -> None:
        with self.asked:
            if not self.asked.wait_for(lambda: len(self.bodies) >= count, deadline_s):
                raise AssertionError(f"only {len(self.bodies)} requests came: {self.bodies}")

    def _serve(self, handler: BaseHTTPRequestHandler) -> bool:
        path = urlsplit(handler.path)
        body = handler.rfile.read(int(handler.headers.get("Content-Length", "0")))
        with self.asked:
            self.bodies.append((handler.command, path.path, json.loads(body) if body else None))
            self.queries.append(parse_qs(path.query))
            self.asked.notify_all()
            left = self.answers.get((handler.command, path.path), [])
            reply = left.pop(0) if len(left) > 1 else left[0] if left else None
        if reply is None:
            return False
        if isinstance(reply, CiuicError):
            answer(handler, json.dumps({"error": error_to_dict(reply)}).encode(), status=400)
        else:
            answer(handler, reply if isinstance(reply, bytes) else msgspec.json.encode(reply))
        return True

    def environment(self, **more: str) -> dict[str, str]:
        return program_environment(CIUIC_HOME=str(self.home), **more)

    def ciuic(self, *arguments: str, **environment: str) -> Done:
        return ciuic(*arguments, environment=self.environment(**environment))

    def program(self, *arguments: str, **environment: str) -> Done:
        return program(*arguments, environment=self.environment(**environment))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """The program while it runs."""
        return subprocess.Popen(
            command(*arguments),
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "ciuic.cli.main", *arguments]


def program_environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("CIUIC_")}
    return {**kept, "PYTHONPATH": str(SOURCES), "COLUMNS": "100", **more}


def ciuic(*arguments: str, environment: dict[str, str]) -> Done:
    """One command line in this process: nothing may be asked, and output goes to no terminal."""
    out, err, clients = Captured(), Captured(), []

    def remembered(*words: Any, **options: Any) -> HubClient:
        clients.append(HubClient(*words, **options))
        return clients[-1]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        stack.enter_context(mock.patch("ciuic.net.client.HubClient", remembered))
        stack.enter_context(mock.patch("sys.stdin", io.StringIO()))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        code = main(arguments)
    for client in clients:  # a program leaves that to its end
        client.close()
    return Done(["ciuic", *arguments], code, out.text(), err.text())


class Captured(io.TextIOWrapper):
    """Text that was written, with bytes below it as in a real stream."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        super().__init__(self._bytes, encoding="utf-8", newline="\n", write_through=True)

    def text(self) -> str:
        self.flush()
        return self._bytes.getvalue().decode()


def program(*arguments: str, environment: dict[str, str]) -> Done:
    """Run the program to its end."""
    return subprocess.run(
        command(*arguments),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What ctrl-c does; everything the program printed."""
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=30)
