"""How fast this machine's processors multiply matrices: a short program of its own, so that the agent stays small.

    python -m ciuic.node.processor_speed

prints {"cpu_flops": ...}: 2 n^3 operations of a product of two n x n float32 matrices (numpy's BLAS, as many threads as
it may use), the fastest of those made within half a second.
"""

import json
import sys
import time

import numpy as np

SIZE = 1024
FOR_S = 0.5


def measure_flops(size: int = SIZE, for_s: float = FOR_S) -> float:
    """Floating-point operations per second."""
    draw = np.random.default_rng(0)
    left, right = (draw.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    out = np.empty_like(left)
    np.matmul(left, right, out=out)  # starts the threads
    best_s, until = float("inf"), time.perf_counter() + for_s
    while time.perf_counter() < until:
        began = time.perf_counter()
        np.matmul(left, right, out=out)
        best_s = min(best_s, time.perf_counter() - began)
    return 2.0 * size**3 / best_s


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"cpu_flops": measure_flops()}) + "\n")
