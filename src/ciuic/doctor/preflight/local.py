"""One machine: all checks that need neither torch nor another node, and the facts for comparison."""

import platform
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from ciuic import __version__
from ciuic.codec import native
from ciuic.codec.build import source_hash
from ciuic.doctor.preflight.interfaces import Interface, check_interfaces, gloo_choice, list_interfaces, own_addresses
from ciuic.doctor.preflight.machine import (
    Processors,
    check_limits,
    check_room,
    check_shared_memory,
    check_threads,
    read_quota,
)
from ciuic.doctor.preflight.master import check_master
from ciuic.doctor.preflight.records import Check, Facts, Settings
from ciuic.doctor.preflight.variables import check_variables, compared_variables
from ciuic.errors import CodecUnavailableError
from ciuic.net.child import installed_version
from ciuic.net.probe import list_gpus, usable_cpus

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def look_here(settings: Settings, environment: Mapping[str, str], folder: Path) -> Facts:
    """Everything about this machine. Takes about a second; nothing is changed."""
    interfaces, resolved = list_interfaces(), own_addresses()
    gpus = tuple(gpu.name for gpu in list_gpus())
    gloo = gloo_choice(environment, interfaces, resolved)
    checks = _checks(settings, environment, folder, (interfaces, resolved), len(gpus))
    return Facts(
        rank=settings.node_rank,
        host=socket.gethostname(),
        machine=_machine(),
        address=gloo.address,
        nnodes=settings.nnodes,
        nproc=settings.nproc,
        versions=_versions(),
        variables=compared_variables(environment),
        gpus=gpus,
        checks=tuple(checks),
    )


def _checks(
    settings: Settings,
    environment: Mapping[str, str],
    folder: Path,
    network: tuple[Sequence[Interface], Sequence[str]],
    gpus: int,
) -> list[Check]:
    interfaces, resolved = network
    gloo = gloo_choice(environment, interfaces, resolved)
    processors = Processors(usable=usable_cpus(), quota=read_quota())
    return [
        *check_interfaces(environment, interfaces, resolved, nnodes=settings.nnodes, gpus=gpus),
        *check_master(settings, interfaces, gloo.interface),
        *check_variables(environment),
        check_threads(environment, processors, settings.nproc),
        check_shared_memory(),
        *check_limits(),
        *check_room(folder),
    ]


def _versions() -> dict[str, str]:
    """Without importing any of them; the process with torch adds torch, CUDA and NCCL."""
    try:
        engine = "numpy" if native.choose_kernel() is None else "native"
    except CodecUnavailableError as error:
        engine = error.message
    source = source_hash(Path(native.__file__).parent / "kernel.c")
    return {
        "ciuic": __version__,
        "python": platform.python_version(),
        "numpy": installed_version("numpy"),
        "codec kernel": f"{source} ({engine})",
        "processor": platform.machine(),
    }


def _machine() -> str:
    """Equal in all containers of one machine."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()
