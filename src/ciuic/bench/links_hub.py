"""The hub of `ciuic bench links`, in a namespace of its own, with one run that two nodes take part in."""

import contextlib
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ciuic.errors import RunFailedError, UnreachableError
from ciuic.lab.crew import CLI, Crew
from ciuic.lab.stage import operator_client
from ciuic.lab.switch_sites import HUB, Sites
from ciuic.net import messages as m
from ciuic.net.client import HubClient
from ciuic.net.tls import write_private_file

START_S = 60.0
NODES = 2


class LinkHub:
    """Leaving the `with` block leaves its end to the crew."""

    def __init__(self, sites: Sites, crew: Crew, folder: Path, port: int) -> None:
        self._sites, self._crew, self.folder = sites, crew, folder
        self._port, self.url = port, ""
        self.token_file = folder / "token"
        self.run_id = ""

    def __enter__(self) -> Self:
        home, address = self.folder / "hub", self._sites.address(HUB)
        self.url = f"https://{address}:{self._port}"
        command = [sys.executable, *CLI, "hub", "start", "--home", str(home), "--host", address]
        self._crew.run("hub", self._sites.command(HUB, [*command, "--port", str(self._port)]), {"OMP_NUM_THREADS": "1"})
        with self._sites.inside(HUB):
            client = self._connect(home)
            request = m.CreateTokenRequest(lifetime_s=3600, uses=NODES)
            token = client.call("POST", "/v1/tokens", request, m.CreateTokenReply).token
            write_private_file(self.token_file, token.encode())
            job = {
                "name": "links",
                "nodes": {"min": NODES},
                "train": {"samples": 1_000_000},
                "sync": {"interval": 1, "compression": {"up": "none", "down": "1-bit"}, "deadline": "600 s"},
            }
            self.run_id = client.call("POST", "/v1/runs", m.SubmitRequest(job=job), m.SubmitReply).run_id
            client.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to do."""

    def _connect(self, home: Path) -> HubClient:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            self._crew.check()
            with contextlib.suppress(UnreachableError, FileNotFoundError):
                client = operator_client(home)
                client.call("GET", "/v1/nodes", None, list[m.NodeInfo])
                return client
            time.sleep(0.1)
        raise RunFailedError("the benchmark's hub does not answer", next=f"read {self.folder}/logs")
