"""Put on PYTHONPATH, this moves a process to a machine with another clock and other names.

CIUIC_TEST_SKEW_S    its wall clock is so far off; the monotonic one is not
CIUIC_TEST_HOSTS     a file that plays the name server: lines "name address", read again at each look-up
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

SKEW_S = float(os.environ.get("CIUIC_TEST_SKEW_S", "0"))
HOSTS = os.environ.get("CIUIC_TEST_HOSTS", "")

if SKEW_S:
    real_time, real_time_ns = time.time, time.time_ns
    time.time = lambda: real_time() + SKEW_S
    time.time_ns = lambda: real_time_ns() + int(SKEW_S * 1e9)

if HOSTS:
    look_up = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **named: Any) -> Any:
        known = dict(line.split() for line in Path(HOSTS).read_text().splitlines() if line)
        return look_up(known.get(host, host), *rest, **named)

    socket.getaddrinfo = getaddrinfo
