"""What the agent tells about its machine: facts once, measurements in the background.

Round trip, rates with one connection and free resources are measured once the hub is there, even when the node has got
work at once. What takes longer (more connections, speeds of processors, GPUs and disk) waits until the node has nothing
to do, and is given up when it gets work. All of it is kept in the node's folder and repeated when it is a day old, when
the machine or the hub has another address, and when an operator asks.
"""

import logging
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec
import psutil

from ciuic import __version__
from ciuic.errors import CiuicError
from ciuic.net.child import installed_version
from ciuic.net.client import HubClient, backoff_s
from ciuic.net.measured_link import GivenUpError, StreamSet, find_streams
from ciuic.net.probe import gpu_names, measure, measure_machine, measure_round_trips
from ciuic.net.url import HubAddress
from ciuic.node.measurements import keep_measurements, load_measurements
from ciuic.node.speeds import measure_speeds

REFRESH_S = 60.0
LOOK_S = 0.5
"""How often to look whether the node has nothing to do, while something is to be measured."""
_CLOCK_CHANGE_S = 0.05
_log = logging.getLogger(__name__)


def machine_facts() -> dict[str, str]:
    """host, platform, python, torch, device, ciuic; nothing is imported for it."""
    gpus = gpu_names()
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": installed_version("torch") or "not installed",
        "ciuic": __version__,
        "device": f"{len(gpus)} x {gpus[0]}" if gpus else f"cpu ({psutil.cpu_count(logical=True)} processors)",
    }


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a heartbeat says."""

    measured: dict[str, float]
    age_s: float | None
    ticket: int


class Vitals:
    """Measures in a thread of its own."""

    def __init__(
        self,
        connect: Callable[[], HubClient],
        folder: Path,
        *,
        is_busy: Callable[[], bool] = lambda: False,
        on_measured: Callable[[], None] = lambda: None,
        measure_peers: Callable[[Mapping[str, str], Callable[[], bool]], None] = lambda peers, may_go_on: None,
        settle_s: float = 5.0,
    ) -> None:
        """`measure_peers(addresses by node, may it go on)` measures direct connections when an operator asks.

        `connect` makes a client (of its own each time). `on_measured` is called when an operator's wish is done.

        `settle_s`: how long the node must have had nothing to do before it measures what takes long.
        """
        self._connect, self._folder = connect, folder
        self._is_busy, self._on_measured, self._settle_s = is_busy, on_measured, settle_s
        self._client = connect()
        self._lock = threading.Lock()
        self._kept = load_measurements(folder)
        self._now: dict[str, float] = dict(self._kept.values)
        self._asked = 0
        self._measure_peers = measure_peers
        self._peers: dict[str, str] = {}
        self._idle_since_s = time.monotonic()
        self._failures = 0
        self._streams: StreamSet | None = None
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ciuic-probe", daemon=True)

    @property
    def told(self) -> Told:
        """What is known so far."""
        with self._lock:
            age_s = max(0.0, time.time() - self._kept.at) if self._kept.values else None
            return Told(measured=dict(self._now), age_s=age_s, ticket=self._kept.ticket)

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._client.interrupt()
            if self._streams is not None:
                self._streams.interrupt()
            self._thread.join()

    def ask(self, ticket: int, peers: Mapping[str, str] = MappingProxyType({})) -> None:
        """An operator wants the node to measure itself; the same ticket again is the same wish.

        `peers`: other nodes that may be dialled directly, and where.
        """
        if ticket and ticket != self._asked:
            self._asked, self._peers = ticket, dict(peers)
            self._wake.set()

    def refresh(self) -> None:
        """Something has ended here: free memory and disk are other ones now."""
        self._wake.set()

    def hub_said_time(self, hub_time: float) -> None:
        """The hub's clock in an answer that has just arrived (better than the probe's: not cut to seconds)."""
        if hub_time <= 0:
            return
        with self._lock:
            offset_s = hub_time - (time.time() - self._now.get("rtt_s", 0.0) / 2)
            known_s = self._now.get("clock_offset_s")
            if known_s is None or abs(offset_s - known_s) > _CLOCK_CHANGE_S:
                self._now["clock_offset_s"] = offset_s

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._wake.clear()
                self._wake.wait(self._round())
        finally:
            self._client.close()

    def _round(self) -> float:
        """Do what is due; seconds until the next look."""
        try:
            self._merge(measure_machine(self._folder))
            wait_s = self._measure_what_is_due()
        except CiuicError as error:
            if self._stop.is_set():
                return 0.0
            self._failures += 1
            _log.info("the link cannot be measured now: %s", error.message)
            return 10 * backoff_s(self._failures)
        self._failures = 0
        return wait_s

    def _measure_what_is_due(self) -> float:
        why = self._why()
        if not why:
            return REFRESH_S
        is_first = not self._kept.values
        if is_first:
            self._store(measure(self._client, self._folder), is_complete=False)
        busy, is_asked = self._is_busy(), self._asked not in (0, self._kept.ticket)
        if busy:
            self._idle_since_s = time.monotonic()
            if is_asked:  # only what does not disturb the worker
                round_trips, _ = measure_round_trips(self._client)
                self._merge({"rtt_s": min(round_trips)})
                self._fulfil()
            return 4 * LOOK_S
        if not is_asked and time.monotonic() - self._idle_since_s < self._settle_s:
            return LOOK_S
        _log.info("measuring this node: %s", why)
        self._measure_all(has_basics=is_first)
        return LOOK_S

    def _why(self) -> str:
        return self._kept.why_again(
            time.time(), hub_url=self._client.address.url, address=own_address(self._client.address), ticket=self._asked
        )

    def _measure_all(self, *, has_basics: bool) -> None:
        ticket = self._asked
        with self._lock:
            measured = dict(self._now)
        if not has_basics:
            measured |= measure(self._client, self._folder)
        try:
            measured |= self._several_streams(measured)
        except GivenUpError:
            return
        gpus = int(self._now.get("gpu_count", 0))
        measured |= measure_speeds(self._folder, gpus, self._may_go_on)
        if ticket:
            self._measure_peers(self._peers, self._may_go_on)
        if self._may_go_on():
            self._store(measured, is_complete=True)
            if ticket:
                self._fulfil(ticket)

    def _may_go_on(self) -> bool:
        return not self._stop.is_set() and not self._is_busy()

    def _several_streams(self, known: dict[str, float]) -> dict[str, float]:
        """Rates and loss; `known` has the round trip, and the rates of one connection."""
        streams = self._streams = StreamSet(self._connect, keep_going=self._may_go_on)
        try:
            up = find_streams(streams.up, known["up_bits_per_s"], known["rtt_s"])
            down = find_streams(streams.down, known["down_bits_per_s"], known["rtt_s"])
            loss_share = streams.loss_share(up.bits_per_s)
        finally:
            streams.close()
            self._streams = None
        measured = {
            "up_bits_per_s": up.bits_per_s,
            "up_1_stream_bits_per_s": up.one_bits_per_s,
            "up_streams": float(up.streams),
            "down_bits_per_s": down.bits_per_s,
            "down_1_stream_bits_per_s": down.one_bits_per_s,
            "down_streams": float(down.streams),
        }
        if loss_share is not None:
            measured["loss_share"] = loss_share
        return measured

    # ---- what is known ---------------------------------------------------------------------------------------------

    def _store(self, new: dict[str, float], *, is_complete: bool) -> None:
        self._merge(new)
        with self._lock:
            self._kept = msgspec.structs.replace(
                self._kept,
                at=time.time(),
                values=dict(self._now),
                hub_url=self._client.address.url,
                address=own_address(self._client.address),
                is_complete=is_complete,
            )
        keep_measurements(self._folder, self._kept)

    def _fulfil(self, ticket: int = 0) -> None:
        with self._lock:
            self._kept = msgspec.structs.replace(self._kept, ticket=ticket or self._asked)
        keep_measurements(self._folder, self._kept)
        self._on_measured()

    def _merge(self, new: dict[str, float]) -> None:
        with self._lock:
            known_offset_s = self._now.get("clock_offset_s")
            self._now |= new
            if known_offset_s is not None:
                self._now["clock_offset_s"] = known_offset_s


def own_address(hub: HubAddress) -> str:
    """This machine's address on its way to the hub, from the routing table (nothing is sent); empty without a way."""
    try:
        family, _, _, _, target = socket.getaddrinfo(hub.host, hub.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
