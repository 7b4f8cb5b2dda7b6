"""What a node can measure about itself and its way to the hub, at little cost.

The transfers grow from 64 KiB until one takes half a second and several round trips (or reaches 8 MiB), so a slow link
carries a few hundred kilobytes and a fast one about twenty megabytes in each direction.
"""

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from ciuic.errors import ProtocolError
from ciuic.net.client import HubClient

SMALLEST_BYTES = 64 * 1024
LARGEST_BYTES = 8 * 1024 * 1024
LONG_ENOUGH_S = 0.5
ROUND_TRIPS_ENOUGH = 4
_ROUND_TRIPS = 5
_GPU_QUERY_S = 10.0
_DATE_RESOLUTION_S = 1.0
_log = logging.getLogger(__name__)


class Health(msgspec.Struct, kw_only=True):
    """The answer to GET /health; later versions may add fields."""

    ok: bool
    boot_id: str = ""
    version: str = ""


class _Received(msgspec.Struct, kw_only=True):
    bytes: int


def measure(client: HubClient, folder: Path) -> dict[str, float]:
    """The link to the hub and what this machine has free; keys as in HeartbeatRequest.measured, units in the names.

    `folder`: where runs will be kept (its file system's free space counts). Takes one to three seconds. Raises what
    the client raises.
    """
    round_trips, offset_s = measure_round_trips(client)
    rtt_s = min(round_trips)
    measured = {"rtt_s": rtt_s, "rtt_jitter_s": sorted(round_trips)[len(round_trips) // 2] - rtt_s}
    if offset_s is not None:
        measured["clock_offset_s"] = offset_s
    measured["up_bits_per_s"] = measure_rate(lambda count: send(client, count), rtt_s)
    measured["down_bits_per_s"] = measure_rate(lambda count: receive(client, count), rtt_s)
    return measured | measure_machine(folder)


def measure_round_trips(client: HubClient) -> tuple[list[float], float | None]:
    """(seconds of several small requests, hub clock minus ours in seconds from the Date header: good to 0.5 s)."""
    client.call("GET", "/health", None, Health)  # opens the connection; the handshake does not count
    times: list[float] = []
    offset_s: float | None = None
    for _ in range(_ROUND_TRIPS):
        began, began_wall = time.perf_counter(), time.time()
        client.call("GET", "/health", None, Health)
        times.append(time.perf_counter() - began)
        if client.server_time is not None:
            # Date is cut to whole seconds, so the middle of its second is the best guess
            offset_s = client.server_time + _DATE_RESOLUTION_S / 2 - (began_wall + times[-1] / 2)
    return times, offset_s


def measure_rate(transfer: Callable[[int], float], rtt_s: float) -> float:
    """Bits per second of the largest of a growing series of transfers, made twice; the faster one counts.

    `transfer(count)` moves `count` bytes and returns the seconds it took. The round trip that every request costs is
    taken off, but never more than three quarters of the time. A new connection starts slowly: the last transfer lasts
    several round trips, and its repetition runs at full speed.
    """
    count, enough_s = SMALLEST_BYTES, max(LONG_ENOUGH_S, ROUND_TRIPS_ENOUGH * rtt_s)
    while True:
        moving_s = _moving_s(transfer, count, rtt_s)
        if moving_s >= enough_s or count >= LARGEST_BYTES:
            return 8.0 * count / min(moving_s, _moving_s(transfer, count, rtt_s))
        wanted = count * enough_s * 1.2 / moving_s
        count = min(LARGEST_BYTES, max(2 * count, min(8 * count, int(wanted))))


def _moving_s(transfer: Callable[[int], float], count: int, rtt_s: float) -> float:
    took_s = max(transfer(count), 1e-6)
    return max(took_s - rtt_s, took_s / 4)


def measure_machine(folder: Path) -> dict[str, float]:
    """Processors this process may use; memory and disk in bytes; number and memory of GPUs. Takes milliseconds."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    memory, gpus = psutil.virtual_memory(), list_gpus()
    measured = {
        "cpu_count": float(usable_cpus()),
        "memory_bytes": float(memory.total),
        "memory_free_bytes": float(memory.available),
        "disk_free_bytes": float(shutil.disk_usage(existing).free),
        "gpu_count": float(len(gpus)),
    }
    if gpus:
        measured["gpu_memory_bytes"] = min(gpu.memory_bytes for gpu in gpus)
        measured["gpu_memory_free_bytes"] = min(gpu.free_bytes for gpu in gpus)
    return measured


def usable_cpus() -> int:
    """How many processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as the driver's own tool lists it."""

    name: str
    memory_bytes: float
    free_bytes: float


def list_gpus() -> list[Gpu]:
    """The NVIDIA GPUs of this machine; empty when the driver's tool is not there (torch is not loaded for this)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("nvidia-smi does not work: %s", error)
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(listed: str) -> list[Gpu]:
    """Lines of `name, MiB, MiB free`; a number that the driver does not know counts as 0."""
    found = []
    for line in listed.splitlines():
        name, _, numbers = line.strip().partition(", ")
        if name:
            total, _, free = numbers.partition(", ")
            found.append(Gpu(name=name, memory_bytes=_mebibytes(total), free_bytes=_mebibytes(free)))
    return found


def _mebibytes(text: str) -> float:
    return float(text) * 1024**2 if text.strip().isdigit() else 0.0


def gpu_names() -> list[str]:
    """The names of the GPUs."""
    return [gpu.name for gpu in list_gpus()]


def send(client: HubClient, count: int) -> float:
    """Seconds for `count` random bytes to the hub. Raises ProtocolError and what the client raises."""
    payload = os.urandom(count)
    began = time.perf_counter()
    received = client.send_frame("/v1/node/probe", payload, _Received)
    took_s = time.perf_counter() - began
    if received.bytes != count:
        raise ProtocolError(f"the hub counted {received.bytes} of {count} probe bytes")
    return took_s


def receive(client: HubClient, count: int) -> float:
    """The same from the hub."""
    moved = 0

    def sink(piece: bytes) -> None:
        nonlocal moved
        moved += len(piece)

    began = time.perf_counter()
    client.fetch(f"/v1/node/probe?bytes={count}", sink, limit_bytes=LARGEST_BYTES)
    took_s = time.perf_counter() - began
    if moved != count:
        raise ProtocolError(f"the hub sent {moved} of {count} probe bytes")
    return took_s
