"""What is measured of a node: names, units, and how people read them. The one list of the registry's values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ciuic.units import format_bytes, format_duration, format_rate


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One measured value."""

    what: str
    """For people."""
    show: Callable[[float], str]
    claims: Mapping[str, float]
    """Claims about the same thing, with their size in the measured value's unit."""


def _plain(value: float) -> str:
    return f"{value:g}"


def _flops(value: float) -> str:
    return format_rate(value).replace("bit/s", "flop/s")


def _bytes_rate(value: float) -> str:
    return f"{format_bytes(value)}/s"


def _signed_duration(value: float) -> str:
    return f"-{format_duration(-value)}" if value < 0 else format_duration(value)


def _quantity(what: str, show: Callable[[float], str], **claims: float) -> Quantity:
    return Quantity(what=what, show=show, claims=claims)


QUANTITIES: dict[str, Quantity] = {
    "up_bits_per_s": _quantity("to the hub", format_rate, bandwidth_gbit_s=1e9, bandwidth=1e9, up_mbit=1e6),
    "up_1_stream_bits_per_s": _quantity("to the hub, one stream", format_rate),
    "up_streams": _quantity("streams that pay, up", _plain),
    "down_bits_per_s": _quantity("from the hub", format_rate, bandwidth_gbit_s=1e9, bandwidth=1e9, down_mbit=1e6),
    "down_1_stream_bits_per_s": _quantity("from the hub, one stream", format_rate),
    "down_streams": _quantity("streams that pay, down", _plain),
    "rtt_s": _quantity("round trip", format_duration, rtt_ms=1e-3),
    "rtt_jitter_s": _quantity("jitter of the round trip", format_duration),
    "loss_share": _quantity("sent again (loss estimate)", lambda value: f"{value:.2%}"),
    "clock_offset_s": _quantity("hub's clock minus the node's", _signed_duration),
    "cpu_count": _quantity("processors", _plain, cpu=1.0, cpus=1.0),
    "cpu_flops": _quantity("processors, matrix product", _flops, cpu_tflops=1e12),
    "gpu_count": _quantity("GPUs", _plain, gpu=1.0, gpus=1.0),
    "gpu_flops": _quantity("all GPUs, matrix product", _flops, gpu_tflops=1e12),
    "gpu_memory_bytes": _quantity("memory of the smallest GPU", format_bytes, gpu_mem_gb=1e9, gpu_memory_gb=1e9),
    "gpu_memory_free_bytes": _quantity("free in the fullest GPU", format_bytes),
    "memory_bytes": _quantity("memory", format_bytes, memory_gb=1e9, mem_gb=1e9),
    "memory_free_bytes": _quantity("free memory", format_bytes),
    "disk_free_bytes": _quantity("free disk", format_bytes, disk_gb=1e9),
    "disk_write_bytes_per_s": _quantity("disk, writing", _bytes_rate),
}
"""By the names of HeartbeatRequest.measured, in the order in which they are shown."""


def claimed_value(name: str, claimed: Mapping[str, float]) -> float | None:
    """What is claimed of a measured quantity, in its unit; None when nothing is."""
    for claim, size in QUANTITIES[name].claims.items():
        if claim in claimed:
            return claimed[claim] * size
    return None
