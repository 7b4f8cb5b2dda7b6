"""The switch as a process of its own, told what to do over a socket: one line of JSON per request and per answer.

    {"do": "start", "hosts": [...], "paths": [...], "seed": 0}     the first line; files are inherited
    {"do": "link", "host": "us", "up_bits_per_s": 1e8}
    {"do": "path", "source": "us", "target": "eu", "delay_s": 0.04, "loss": 0.001, "is_cut": false}
    {"do": "count"}

It ends when the other end of the socket closes: nothing keeps it alive after whoever started it.
"""

import contextlib
import gc
import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ciuic.errors import RunFailedError
from ciuic.lab.switch import Host, Lane, Path, Switch
from ciuic.lab.switch_enter import set_nice

START_S = 30.0
_NICE = -15
"""The switch must be on time on a busy machine."""
_LINE_BYTES = 1 << 20
_COUNTERS = ("sent_bytes", "sent_packets", "delivered_bytes", "dropped_packets", "lost_packets")


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One host as the switch is told of it."""

    name: str
    address: str
    tun_fd: int
    up_bits_per_s: float
    down_bits_per_s: float


@dataclass(frozen=True, kw_only=True)
class PathPlan:
    """One direction between two hosts."""

    source: str
    target: str
    delay_s: float
    loss: float = 0.0
    jitter_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one direction between two hosts has carried: IP packets, headers included."""

    source: str
    target: str
    sent_bytes: int
    """What the source's kernel gave out, dropped and lost packets included."""
    sent_packets: int
    delivered_bytes: int
    dropped_packets: int
    lost_packets: int


class SwitchProcess:
    """Starts the switch and speaks to it. Raises RunFailedError when it has ended by itself."""

    def __init__(self, hosts: list[HostPlan], paths: list[PathPlan], *, seed: int = 0) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(START_S)
        fds = [host.tun_fd for host in hosts]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ciuic.lab.switch_process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *fds),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches whoever uses the network first
            )
        self._socket, self._lines = ours, ours.makefile("rb")
        try:
            self.ask(do="start", hosts=[asdict(h) for h in hosts], paths=[asdict(p) for p in paths], seed=seed)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: Any) -> Any:
        """One request and its answer."""
        answer = b""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            answer = self._lines.readline(_LINE_BYTES)
        if not answer:
            raise RunFailedError("the lab's switch has ended", cause=f"exit code {self._process.poll()}")
        return json.loads(answer)

    def traffic(self) -> list[Traffic]:
        """All counters, as of now."""
        return [Traffic(**counted) for counted in self.ask(do="count")]

    def close(self) -> None:
        """End it."""
        self._lines.close()
        self._socket.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Server:
    """The other end, in the switch's process."""

    def __init__(self, control: socket.socket) -> None:
        self._socket, self._lines = control, control.makefile("rb")

    def run(self) -> None:
        """Serve until the socket closes."""
        first = self._lines.readline(_LINE_BYTES)
        if not first:
            return
        request = json.loads(first)
        hosts = [_make_host(plan) for plan in request["hosts"]]
        self._hosts = {host.name: host for host in hosts}
        for plan in request["paths"]:
            source, target = self._hosts[plan["source"]], self._hosts[plan["target"]]
            shape = {name: plan[name] for name in ("delay_s", "loss", "jitter_s")}
            path = Path(source=source, target=target, **shape)
            source.paths[target.address] = path
        self._switch = Switch(hosts, seed=request["seed"])
        self._switch.watch(self._socket.fileno(), self._serve)
        self._answer(True)
        gc.disable()  # nothing here makes cycles, and a collection would delay packets
        self._switch.run()

    def _serve(self) -> None:
        line = self._lines.readline(_LINE_BYTES)
        if not line:
            self._switch.stop()
            return
        request = json.loads(line)
        self._answer(getattr(self, f"_{request.pop('do')}")(**request))

    def _answer(self, body: Any) -> None:
        with contextlib.suppress(OSError):  # nobody waits for it any more
            self._socket.sendall(json.dumps(body).encode() + b"\n")

    def _link(self, host: str, **rates: float) -> bool:
        found = self._hosts[host]
        found.up.bits_per_s = rates.get("up_bits_per_s", found.up.bits_per_s)
        found.down.bits_per_s = rates.get("down_bits_per_s", found.down.bits_per_s)
        return True

    def _path(self, source: str, target: str, **changes: Any) -> bool:
        path = self._hosts[source].paths[self._hosts[target].address]
        for name in ("delay_s", "loss", "is_cut"):
            setattr(path, name, changes.get(name, getattr(path, name)))
        return True

    def _count(self) -> list[dict[str, Any]]:
        paths = [path for host in self._hosts.values() for path in host.paths.values()]
        return [
            {"source": p.source.name, "target": p.target.name, **{name: getattr(p, name) for name in _COUNTERS}}
            for p in paths
        ]


def _make_host(plan: Mapping[str, Any]) -> Host:
    return Host(
        name=plan["name"],
        address=socket.inet_aton(plan["address"]),
        fd=plan["tun_fd"],
        up=Lane(bits_per_s=plan["up_bits_per_s"]),
        down=Lane(bits_per_s=plan["down_bits_per_s"]),
    )


def main() -> None:
    """The process."""
    set_nice(_NICE)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        _Server(control).run()


if __name__ == "__main__":
    main()
