"""What the agent tells about its machine: facts once, measurements in the background."""

import importlib.metadata
import logging
import platform
import socket
import threading
import time
from pathlib import Path

import psutil

from ciuic import __version__
from ciuic.errors import CiuicError
from ciuic.net.client import HubClient, backoff_s
from ciuic.net.probe import gpu_names, measure, measure_machine

_REFRESH_S = 60.0
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


def installed_version(package: str) -> str:
    """The installed version of a package, empty when it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class Vitals:
    """Probes the link once the hub is there, and refreshes free memory and disk once a minute."""

    def __init__(self, client: HubClient, folder: Path) -> None:
        self._client, self._folder = client, folder
        self._lock = threading.Lock()
        self._measured: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ciuic-probe", daemon=True)

    @property
    def measured(self) -> dict[str, float]:
        """A copy of what is known so far."""
        with self._lock:
            return dict(self._measured)

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._client.interrupt()
            self._thread.join()

    def hub_said_time(self, hub_time: float) -> None:
        """The hub's clock in an answer that has just arrived (better than the probe's: not cut to seconds)."""
        if hub_time <= 0:
            return
        with self._lock:
            offset_s = hub_time - (time.time() - self._measured.get("rtt_s", 0.0) / 2)
            known_s = self._measured.get("clock_offset_s")
            if known_s is None or abs(offset_s - known_s) > _CLOCK_CHANGE_S:
                self._measured["clock_offset_s"] = offset_s

    def _run(self) -> None:
        try:
            self._probe()
            while not self._stop.wait(_REFRESH_S):
                self._merge(measure_machine(self._folder))
        finally:
            self._client.close()

    def _probe(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                self._merge(measure(self._client, self._folder))
                return
            except CiuicError as error:
                failures += 1
                _log.info("the link cannot be measured now: %s", error.message)
                self._stop.wait(10 * backoff_s(failures))

    def _merge(self, new: dict[str, float]) -> None:
        with self._lock:
            known_offset_s = self._measured.get("clock_offset_s")
            self._measured |= new
            if known_offset_s is not None:
                self._measured["clock_offset_s"] = known_offset_s
