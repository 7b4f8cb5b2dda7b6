"""What torch finds on this machine: a short program of its own, started by the agent and by `ciuic node check`.

    python -m ciuic.train.device_speed [--speed]

prints {"torch": ..., "cuda": ..., "devices": [{"name", "memory_bytes", "free_bytes", "flops"}]}. With --speed each GPU
multiplies bfloat16 matrices (2 n^3 operations each) for half a second; else `flops` is null. The context of CUDA takes
a few hundred megabytes of each GPU while it runs.
"""

import json
import sys
import time

import torch

SIZE = 4096
FOR_S = 0.5


def device_report(*, speed: bool) -> dict[str, object]:
    """The answer; see the top of the file."""
    devices = []
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        devices.append(
            {
                "name": torch.cuda.get_device_name(index),
                "memory_bytes": total_bytes,
                "free_bytes": free_bytes,
                "flops": matrix_flops(torch.device("cuda", index)) if speed else None,
            }
        )
    return {"torch": torch.__version__, "cuda": torch.version.cuda or "", "devices": devices}


def matrix_flops(device: torch.device, *, size: int = SIZE, for_s: float = FOR_S) -> float:
    """Floating-point operations per second of bfloat16 matrix products on one device."""
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    out = left @ left
    _finish(device)
    best_s, until = float("inf"), time.perf_counter() + for_s
    while time.perf_counter() < until:
        began = time.perf_counter()
        torch.matmul(left, left, out=out)
        _finish(device)
        best_s = min(best_s, time.perf_counter() - began)
    return 2.0 * size**3 / best_s


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(device_report(speed="--speed" in sys.argv[1:])) + "\n")
