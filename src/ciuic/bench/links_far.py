"""What `ciuic bench links` runs at the far end of the link: a node that pushes, and a plain TCP stream."""

import json
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from ciuic.bench.links_hub import LinkHub
from ciuic.errors import RunFailedError
from ciuic.lab.switch_sites import HUB, Sites

PLAIN_PORT = 5201


class Told:
    """A process at a place that does what it reads, one line of JSON each way."""

    def __init__(self, sites: Sites, place: str, module: str, arguments: list[str]) -> None:
        argv = [sys.executable, "-m", module, *arguments]
        self._what = f"{module} at {place}"
        self._process = sites.popen(
            place, argv, env={"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, **order: Any) -> None:
        """One order; its answer is read with `answer`."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def ask(self, **order: Any) -> dict[str, Any]:
        """Raises RunFailedError when the process has ended."""
        self.tell(**order)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line."""
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise RunFailedError(f"{self._what} has ended", cause=f"exit code {self._process.wait(5)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class PushingNode:
    """A node of the run; see links_node. It ends with the sites."""

    def __init__(self, sites: Sites, place: str, hub: LinkHub, size_bytes: int) -> None:
        arguments = ["--url", hub.url, "--token-file", str(hub.token_file), "--run", hub.run_id]
        arguments += ["--folder", str(hub.folder), "--place", f"node-{place}", "--bytes", str(size_bytes)]
        self._told = Told(sites, place, "ciuic.bench.links_node", arguments)

    def begin_to_attach(self) -> None:
        """The nodes of a run wait for each other: all begin, then all are awaited with `attached`."""
        self._told.tell(do="attach")

    def attached(self) -> None:
        """Until it has its place in the run."""
        self._told.answer()

    def push(self) -> dict[str, Any]:
        """{bits_per_s, streams, repeated_share} of one push."""
        return self._told.ask(do="push")

    def pull(self) -> None:
        """Take the entry of the round."""
        self._told.ask(do="pull")


class PlainStream:
    """One TCP connection from a place to the hub's with the congestion control given."""

    def __init__(self, sites: Sites, place: str, algorithm: str) -> None:
        address = sites.address(HUB)
        self._sink = Told(sites, HUB, "ciuic.bench.links_plain", ["sink", address, str(PLAIN_PORT)])
        self._sink.answer()
        arguments = ["source", address, str(PLAIN_PORT), "--algorithm", algorithm]
        self._source = Told(sites, place, "ciuic.bench.links_plain", arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.end()
        self._sink.end()

    def send(self, size_bytes: int, within_s: float) -> float:
        """Bits per second of one transfer; what has arrived after `within_s` is all that counts."""
        return float(self._source.ask(bytes=size_bytes, within_s=within_s)["bits_per_s"])
