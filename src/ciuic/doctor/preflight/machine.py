"""What this machine has free, and its limits. Each check is a function of numbers, so that it can be tried."""

import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ciuic.doctor.preflight.records import Check, fail, ok, unknown, warn
from ciuic.units import format_bytes

SHARED_FAIL_BYTES = 32 * 1024**2
SHARED_WARN_BYTES = 1024**3
"""Containers get 64 MiB by default; DataLoader workers hand every batch over through it."""
FILES_FAIL, FILES_WARN = 256, 4096
"""Each tensor that a DataLoader worker hands over takes a descriptor, and so does each connection."""
PROCESSES_WARN = 1024
DISK_FAIL_BYTES, DISK_WARN_BYTES = 500 * 1000**2, 5 * 1000**3
MEMORY_FAIL_BYTES, MEMORY_WARN_BYTES = 500 * 1000**2, 2 * 1000**3
SHARED = Path("/dev/shm")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_INFINIBAND = Path("/sys/class/infiniband")


def check_shared_memory(folder: Path = SHARED) -> Check:
    """Free bytes of /dev/shm."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return unknown(
            "shared memory", f"{folder}: {error.strerror}", next="use DataLoader(num_workers=0), or mount it"
        )
    return judge_shared_memory(usage.free, usage.total)


def judge_shared_memory(free_bytes: int, total_bytes: int) -> Check:
    """DataLoader workers die with `Bus error` when it is full."""
    detail = f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)} in /dev/shm"
    remedy = "in a container: docker run --shm-size=8g (or --ipc=host); else remove old files there"
    values: dict[str, Any] = {"free_bytes": free_bytes, "total_bytes": total_bytes}
    if free_bytes < SHARED_FAIL_BYTES:
        return fail("shared memory", f"{detail}: DataLoader workers would die of a bus error", next=remedy, **values)
    if free_bytes < SHARED_WARN_BYTES:
        return warn("shared memory", f"{detail}: large batches from DataLoader workers fill it", next=remedy, **values)
    return ok("shared memory", detail, **values)


def check_limits() -> list[Check]:
    """Open files, processes and, where there is InfiniBand, locked memory."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    checks = [judge_files(files), judge_processes(processes)]
    if _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        checks.append(judge_locked(locked))
    return checks


def judge_files(limit: int) -> Check:
    """`limit`: RLIMIT_NOFILE; infinity is negative."""
    if limit == resource.RLIM_INFINITY or limit >= FILES_WARN:
        return ok("open files", f"at most {_count(limit)}", limit=limit)
    detail = f"at most {limit}: DataLoader workers end with 'too many open files'"
    remedy = f"ulimit -n {16 * FILES_WARN} before the run (or torch.multiprocessing's file_system sharing)"
    if limit < FILES_FAIL:
        return fail("open files", detail, next=remedy, limit=limit)
    return warn("open files", detail, next=remedy, limit=limit)


def judge_processes(limit: int) -> Check:
    """`limit`: RLIMIT_NPROC; it counts threads of all processes of the user."""
    if limit == resource.RLIM_INFINITY or limit >= PROCESSES_WARN:
        return ok("processes", f"at most {_count(limit)}", limit=limit)
    return warn("processes", f"at most {limit} threads of this user", next="raise ulimit -u", limit=limit)


def judge_locked(limit: int) -> Check:
    """`limit`: RLIMIT_MEMLOCK in bytes; InfiniBand pins its buffers."""
    if limit == resource.RLIM_INFINITY:
        return ok("locked memory", "without limit")
    detail = f"at most {format_bytes(limit)}, and this machine has InfiniBand, which pins its buffers"
    return warn("locked memory", detail, next="ulimit -l unlimited (docker: --ulimit memlock=-1)", limit_bytes=limit)


def _count(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else f"{limit}"


def check_room(folder: Path) -> list[Check]:
    """Disk under `folder` and the folder for temporary files, and memory."""
    checks = []
    for name, place in (("disk", folder), ("temporary files", Path(tempfile.gettempdir()))):
        try:
            checks.append(_judge_disk(name, place, shutil.disk_usage(place).free, os.access(place, os.W_OK)))
        except OSError as error:
            checks.append(unknown(name, f"{place}: {error.strerror}"))
    free_bytes = psutil.virtual_memory().available
    detail, remedy = f"{format_bytes(free_bytes)} free", "end other programs; training takes 12 to 16 bytes a parameter"
    judge = ok if free_bytes >= MEMORY_WARN_BYTES else warn if free_bytes >= MEMORY_FAIL_BYTES else fail
    checks.append(judge("memory", detail, next="" if judge is ok else remedy, free_bytes=free_bytes))
    return checks


def _judge_disk(name: str, place: Path, free_bytes: int, writable: bool) -> Check:
    detail = f"{format_bytes(free_bytes)} free in {place}"
    if not writable:
        return fail(name, f"{place} cannot be written", next="start in a folder of yours", free_bytes=free_bytes)
    if free_bytes < DISK_FAIL_BYTES:
        return fail(name, detail, next="make room: a checkpoint would not fit", free_bytes=free_bytes)
    if free_bytes < DISK_WARN_BYTES:
        return warn(name, detail, next="make room before checkpoints fill it", free_bytes=free_bytes)
    return ok(name, detail, free_bytes=free_bytes)


@dataclass(frozen=True, kw_only=True)
class Processors:
    """What a process may use."""

    usable: int
    """By affinity."""
    quota: float | None = None
    """By the container's share of time; None: no limit."""


def read_quota(path: Path = _QUOTA) -> float | None:
    """Processors' worth of time that the control group allows; None without a limit."""
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def check_threads(environment: Mapping[str, str], processors: Processors, nproc: int) -> Check:
    """Threads of all training processes of this node against the processors that they may use."""
    room = processors.usable if processors.quota is None else min(processors.usable, processors.quota)
    wish = environment.get("OMP_NUM_THREADS", "")
    by_quota = "" if processors.quota is None else f" (the container may use {processors.quota:g} of them)"
    have = f"{processors.usable} processors{by_quota}"
    values: dict[str, Any] = {"processors": float(room), "nproc": nproc}
    if wish and not wish.split(",")[0].strip().isdigit():
        detail = f"OMP_NUM_THREADS={wish} is not a number"
        return fail("threads", detail, next="give a number, for example OMP_NUM_THREADS=1", **values)
    if not wish and nproc > 1:
        share = max(1, int(room // nproc))
        detail = f"OMP_NUM_THREADS is not set: torchrun gives each of {nproc} processes 1 thread; {have}"
        if share == 1:
            return ok("threads", detail, threads=nproc, **values)
        return warn("threads", detail, next=f"export OMP_NUM_THREADS={share}", threads=nproc, **values)
    each = int(wish.split(",")[0]) if wish else processors.usable
    threads = each * nproc
    detail = f"{nproc} process{'es' if nproc > 1 else ''} x {each} threads on {have}"
    if threads > 1.5 * room and threads > 1:
        share = max(1, int(room // nproc))
        remedy = f"export OMP_NUM_THREADS={share}" if share * nproc <= 1.5 * room else "start fewer processes here"
        return warn("threads", f"{detail}: they take each other's time", next=remedy, threads=threads, **values)
    return ok("threads", detail, threads=threads, **values)
