"""Speeds of this machine: processors and GPUs in child processes, the disk with a file.

What cannot be measured is left out: a machine without torch, with a full disk or a broken driver is still a node.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ciuic.net.probe import usable_cpus
from ciuic.node.packages import installed_version

DISK_BYTES = 16 * 1024 * 1024
CHILD_LIMIT_S = 60.0
DEVICE_LIMIT_S = 180.0
"""torch's import and CUDA's start can take a minute on a slow disk."""
ANSWER_LIMIT = 65536
_POLL_S = 0.1
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


def ask_child(
    module: str,
    *arguments: str,
    limit_s: float,
    keep_going: Callable[[], bool] = lambda: True,
    more: dict[str, str] | None = None,
) -> dict[str, object]:
    """What `python -m module` prints (one JSON object). Without an answer: {"problem": its last line, or the reason}.

    It is killed after `limit_s`, and as soon as `keep_going` says no.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    environment = {**os.environ, **(more or {})}
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return {"problem": str(error)}
    until, text, said = time.monotonic() + limit_s, "", ""
    while True:
        try:
            text, said = child.communicate(timeout=_POLL_S)
            break
        except subprocess.TimeoutExpired:
            if keep_going() and time.monotonic() < until:
                continue
            child.kill()
            child.communicate()
            return {"problem": f"no answer within {limit_s:.0f} s"}
    try:
        answer = json.loads(text[-ANSWER_LIMIT:])
    except ValueError:
        last = (said.strip().splitlines() or [f"it ended with code {child.returncode} and said nothing"])[-1]
        _log.info("%s: %s", module, last[:300])
        return {"problem": last[:300]}
    return answer if isinstance(answer, dict) else {"problem": "it did not print an object"}
