"""What this machine is: the text to paste into a bug report."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import psutil

from ciuic import __version__
from ciuic.codec.native import describe_back_end
from ciuic.net.probe import usable_cpus

PACKAGES = ("torch", "transformers", "datasets", "numpy", "pydantic", "msgspec", "cryptography", "starlette", "uvicorn")
NVIDIA_SMI_S = 5.0


def environment(home: Path) -> dict[str, str]:
    """Versions and machine facts by name. Holds no secrets, host names or user names beyond the path of `home`."""
    memory = psutil.virtual_memory()
    facts = {
        "ciuic": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "cores": f"{usable_cpus()} usable of {os.cpu_count()}",
        "memory": f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB free",
        "cuda": gpus() or "no (nvidia-smi finds no GPU)",
        "codec": describe_back_end(),
        "CIUIC_HOME": str(home),
    }
    return {**facts, **{name: package_version(name) or "not installed" for name in PACKAGES}}


def package_version(name: str) -> str:
    """The installed version, found without importing the package; "" when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def gpus() -> str:
    """What nvidia-smi lists, "" when there is none (or it does not answer)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(line.strip() for line in done.stdout.splitlines() if line.strip()) if done.returncode == 0 else ""
