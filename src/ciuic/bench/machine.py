"""What a result was measured on."""

import platform
from pathlib import Path

import psutil

from ciuic.net.probe import gpu_names, usable_cpus


def machine_facts() -> dict[str, object]:
    """Processor, cores, memory, GPUs and Python; no host or user names."""
    return {
        "processor": processor_name(),
        "cores": usable_cpus(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": gpu_names(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def processor_name() -> str:
    """As the kernel names it; the architecture where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
