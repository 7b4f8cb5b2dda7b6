"""Speeds of this machine: processors and GPUs in child processes, the disk with a file.

What cannot be measured is left out: a machine without torch, with a full disk or a broken driver is still a node.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from ciuic.net.child import ask_child, installed_version
from ciuic.net.probe import usable_cpus

DISK_BYTES = 16 * 1024 * 1024
CHILD_LIMIT_S = 60.0
DEVICE_LIMIT_S = 180.0
"""torch's import and CUDA's start can take a minute on a slow disk."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_log = logging.getLogger(__name__)


def measure_speeds(folder: Path, gpu_count: int, keep_going: Callable[[], bool]) -> dict[str, float]:
    """cpu_flops, gpu_flops (all GPUs together), disk_write_bytes_per_s: those that could be measured."""
    measured = {}
    rate = measure_disk(folder)
    if rate is not None:
        measured["disk_write_bytes_per_s"] = rate
    threads = dict.fromkeys(_THREADS, str(usable_cpus()))
    processors = ask_child("ciuic.node.processor_speed", limit_s=CHILD_LIMIT_S, keep_going=keep_going, more=threads)
    flops = processors.get("cpu_flops")
    if isinstance(flops, int | float) and flops > 0:
        measured["cpu_flops"] = float(flops)
    if gpu_count and installed_version("torch") and keep_going():
        found = ask_child("ciuic.train.device_speed", "--speed", limit_s=DEVICE_LIMIT_S, keep_going=keep_going)
        devices = found.get("devices")
        listed = devices if isinstance(devices, list) else []
        speeds = [device.get("flops") for device in listed if isinstance(device, dict)]
        numbers = [float(speed) for speed in speeds if isinstance(speed, int | float)]
        if numbers and len(numbers) == len(listed):
            measured["gpu_flops"] = sum(numbers)
    return measured


def measure_disk(folder: Path) -> float | None:
    """Bytes per second of a file that is written and made durable; None when the disk refuses."""
    path, content = folder / ".speed", os.urandom(DISK_BYTES)
    try:
        began = time.perf_counter()
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return DISK_BYTES / max(time.perf_counter() - began, 1e-6)
    except OSError as error:
        _log.info("the disk cannot be measured: %s", error)
        return None
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
