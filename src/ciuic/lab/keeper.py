"""The background process of `ciuic lab up`: holds the places, the links and the processes until it is told to stop.

`python -m ciuic.lab.keeper` reads its settings as JSON from standard input and writes lines of JSON to standard output:
{"say": ...} while it begins, then {"ok": ...} or {"error": ...}. After that it answers on the folder's socket.
"""

import contextlib
import json
import os
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgspec

from ciuic.errors import CiuicError, ProtocolError, UsageError, error_to_dict
from ciuic.lab.faults import Faults, Order, path_text, rate_text
from ciuic.lab.flapper import Flapper
from ciuic.lab.lab import Lab, LabConfig, claim_folder, clear_folder
from ciuic.lab.lab_state import LOG, MAX_LINE_BYTES, SOCKET, LabState, held, remove_state, socket_name, write_state
from ciuic.lab.profiles import profile_named, with_sites
from ciuic.lab.switch_sites import DATACENTRE_BITS_PER_S, HUB

Tell = Callable[[dict[str, Any]], None]


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `ciuic lab up` asks for."""

    folder: str
    profile: str
    namespaces: bool
    nodes: int = 0
    """0: as many as the profile has sites."""
    bare: bool = False
    """Places and links only: no hub, no agents."""
    hub_bits_per_s: float = DATACENTRE_BITS_PER_S
    seed: int = 0


def keep(wish: Wish, tell: Tell) -> None:
    """Be the lab until told to stop. Raises CiuicError when it cannot begin."""
    profile = profile_named(wish.profile)
    folder = Path(wish.folder)
    config = LabConfig(
        profile=with_sites(profile, wish.nodes) if wish.nodes else profile,
        folder=folder,
        namespaces=wish.namespaces,
        hub_bits_per_s=wish.hub_bits_per_s,
        seed=wish.seed,
    )
    claim_folder(folder)
    with held(folder), _told_to_stop() as stop:
        clear_folder(folder)
        _speak_to_log(folder)
        remove_state(folder)
        try:
            with Lab(config) as lab, contextlib.closing(Flapper(lab, on_change=_note)):
                tell({"say": f"{len(lab.sites)} places and the hub's, over {lab.network.kind}"})
                if not wish.bare:
                    _populate(lab, tell, stop)
                _serve(_Desk(lab, wish, stop), tell)
        finally:
            remove_state(folder)
            _note("the lab is down")


def _populate(lab: Lab, tell: Tell, stop: threading.Event) -> None:
    lab.start_hub()
    tell({"say": "the hub is ready"})
    for place in lab.sites:
        if stop.is_set():
            return
        lab.start_node(place)
    lab.await_nodes(lab.sites)


@dataclass(frozen=True)
class _Desk:
    """Answers requests; each is a method `do_...` whose arguments are the request's fields."""

    lab: Lab
    wish: Wish
    stop: threading.Event

    @property
    def state(self) -> LabState:
        lab = self.lab
        return LabState(
            pid=os.getpid(),
            profile=self.wish.profile,
            network=lab.network.kind,
            bare=self.wish.bare,
            places=lab.network.places,
            namespaces={place: _handle(lab, place) for place in lab.network.places},
            environment={place: lab.environment(place) for place in lab.network.places},
            operator_url=lab.network.operator_url,
        )


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    faults: Faults
    desk: _Desk


class _Handler(socketserver.StreamRequestHandler):
    """One request of one command."""

    def handle(self) -> None:
        try:
            answer = {"ok": self._answer(self.rfile.readline(MAX_LINE_BYTES))}
        except CiuicError as error:
            answer = {"error": error_to_dict(error)}
        with contextlib.suppress(OSError):  # whoever asked does not wait any more
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    def _answer(self, line: bytes) -> Any:
        try:
            request = json.loads(line)
            what = request.pop("do")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ProtocolError("this is not a request to a lab") from None
        server = cast("_Server", self.server)
        if what == "status":
            return _status(server)
        if what == "down":
            server.desk.stop.set()
            return {"pid": os.getpid()}
        if what == "fault":
            return _fault(server, request)
        raise ProtocolError(f"a lab cannot do {what!r}")


def _fault(server: _Server, request: dict[str, Any]) -> dict[str, str]:
    try:
        order = Order(**request)
    except TypeError:
        raise UsageError("this is not a fault", cause=f"got {', '.join(request)}") from None
    done = server.faults.apply(order)
    _note(done)
    return {"done": done}


def _status(server: _Server) -> dict[str, Any]:
    lab, now = server.desk.lab, time.monotonic()
    return {
        "pid": os.getpid(),
        "profile": server.desk.wish.profile,
        "network": lab.network.kind,
        "hub": lab.network.operator_url,
        "places": [_place(lab, place) for place in lab.network.places],
        "faults": [{"fault": a.text, "left_s": round(max(0.0, a.until - now), 1)} for a in server.faults.active()],
    }


def _place(lab: Lab, place: str) -> dict[str, Any]:
    link, path = lab.network.links.get(place), lab.network.paths.get(frozenset({HUB, place}))
    process = lab.process(place)
    return {
        "place": place,
        "process": "-" if process is None else f"{process.pid} {_state_of(process)}",
        "link": rate_text(link.up_bits_per_s, link.down_bits_per_s) if link else "-",
        "to the hub": path_text(path) if path else "-",
        "address": lab.environment(place)["CIUIC_LAB_HUB"] if place == HUB else "",
    }


def _state_of(process: Any) -> str:
    import psutil

    with contextlib.suppress(psutil.Error):
        return "stopped" if process.status() == psutil.STATUS_STOPPED else "runs"
    return "gone"


def _handle(lab: Lab, place: str) -> str:
    """The argument of `switch_enter` that names the place's namespaces."""
    command = lab.command(place, [])
    return command[-2] if lab.network.kind == "namespaces" else ""


def _serve(desk: _Desk, tell: Tell) -> None:
    folder = desk.lab.folder
    with socket_name(folder) as name, _Server(name, _Handler) as server:
        (folder / SOCKET).chmod(0o600)
        server.desk, server.faults = desk, Faults(desk.lab, on_undone=_note)
        write_state(folder, desk.state)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        tell({"ok": {"pid": os.getpid(), "hub": desk.state.operator_url, "places": list(desk.state.places)}})
        desk.stop.wait()
        server.faults.close()
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def _told_to_stop() -> Generator[threading.Event]:
    """An event that SIGTERM and SIGINT set."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    yield stop


def _speak_to_log(folder: Path) -> None:
    """From here on what this process says goes to the folder: whoever started it may go away."""
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 2)
    os.close(log)


def _note(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
    sys.stderr.flush()


def main() -> int:
    """The process."""
    gone = threading.Event()

    def tell(line: dict[str, Any]) -> None:
        if not gone.is_set():
            try:
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
            except OSError:  # the command that started us has gone away
                gone.set()

    try:
        keep(msgspec.json.decode(sys.stdin.buffer.read(), type=Wish), tell)
    except CiuicError as error:
        tell({"error": error_to_dict(error)})
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
