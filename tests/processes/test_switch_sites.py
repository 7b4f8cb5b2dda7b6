"""The lab's sites with real kernel TCP: rates, delays, faults, and nothing left behind. Needs root and /dev/net/tun."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ciuic.errors import UsageError
from ciuic.lab.namespaces import Namespace, why_not_here
from ciuic.lab.profiles import evenly_far
from ciuic.lab.switch_sites import HUB, Sites

REASON = why_not_here()
pytestmark = [pytest.mark.lab, pytest.mark.skipif(bool(REASON), reason=f"the lab needs namespaces: {REASON}")]

SINK = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
connection, _ = listener.accept()
points, total = [], 0
while data := connection.recv(1 << 20):
    total += len(data)
    points.append((time.monotonic(), total))
half = points[0][0] + (points[-1][0] - points[0][0]) / 2  # without slow start
first = next(p for p in points if p[0] >= half)
print((points[-1][1] - first[1]) * 8 / (points[-1][0] - first[0]) / 1e6, flush=True)
"""
SOURCE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    connection.sendall(bytes(65536))
"""
ECHO = """
import socket, sys
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind((sys.argv[1], 6000))
print("up", flush=True)
while True:
    data, sender = end.recvfrom(2000)
    end.sendto(data, sender)
"""


@pytest.fixture(scope="module")
def sites() -> Iterator[Sites]:
    with Sites(evenly_far(bits_per_s=100e6), seed=5) as made:
        yield made


def start(sites: Sites, place: str, program: str, *arguments: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", program, *map(str, arguments)]
    return sites.popen(place, argv, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def rate_mbit_s(sites: Sites, source: str, target: str, seconds: float) -> float:
    """Of one kernel TCP stream, in the second half of the time."""
    sink = start(sites, target, SINK, sites.address(target))
    assert first_line(sink) == "up"
    with start(sites, source, SOURCE, sites.address(target), seconds), sink:
        return float(first_line(sink))


def round_trips_s(sites: Sites, source: str, target: str, *, count: int = 5, timeout_s: float = 2.0) -> list[float]:
    """Of small datagrams; the lost ones are left out."""
    found = []
    echo = start(sites, target, ECHO, sites.address(target))
    with echo:
        assert first_line(echo) == "up"
        with sites.inside(source), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.settimeout(timeout_s)
            for _ in range(count):
                began = time.monotonic()
                end.sendto(b"x" * 100, (sites.address(target), 6000))
                with suppress(TimeoutError):
                    end.recv(2000)
                    found.append(time.monotonic() - began)
        echo.kill()
    return found


@pytest.mark.alone
@pytest.mark.parametrize(("pair", "one_way_s"), [("us eu", 0.045), ("us ap", 0.075), ("eu ap", 0.110)])
def test_the_delay_is_the_one_that_was_set(sites: Sites, pair: str, one_way_s: float) -> None:
    assert min(round_trips_s(sites, *pair.split())) == pytest.approx(2 * one_way_s, rel=0.05, abs=0.002)


@pytest.mark.alone
@pytest.mark.parametrize("mbit_s", [20, 100])
def test_one_tcp_stream_fills_the_rate_that_was_set(sites: Sites, mbit_s: float) -> None:
    sites.set_link("us", up_bits_per_s=mbit_s * 1e6)
    try:
        reached = rate_mbit_s(sites, "us", "eu", 5.0)
    finally:
        sites.set_link("us", up_bits_per_s=100e6)
    assert 0.9 * mbit_s < reached <= 1.01 * mbit_s


def test_what_is_counted_is_what_crossed(sites: Sites) -> None:
    def counted() -> tuple[int, int]:
        found = {(t.source, t.target): t for t in sites.traffic()}
        return found["eu", HUB].sent_bytes, found[HUB, "eu"].sent_bytes

    before = counted()
    assert len(round_trips_s(sites, "eu", HUB, count=4)) == 4
    up, down = (after - earlier for after, earlier in zip(counted(), before, strict=True))
    assert up == down == 4 * (100 + 28)  # IP and UDP headers


def test_a_cut_site_hears_nobody_until_it_is_mended(sites: Sites) -> None:
    sites.cut("ap")
    try:
        assert round_trips_s(sites, "us", "ap", count=1, timeout_s=0.5) == []
        assert len(round_trips_s(sites, "us", "eu", count=1)) == 1
    finally:
        sites.mend("ap")
    assert len(round_trips_s(sites, "us", "ap", count=1)) == 1


def test_loss_loses_packets_of_its_path_only(sites: Sites) -> None:
    sites.set_path("us", "eu", delay_s=0.001, loss=0.5)
    try:
        assert 2 <= len(round_trips_s(sites, "us", "eu", count=30, timeout_s=0.05)) <= 20
    finally:
        sites.set_path("us", "eu", delay_s=0.045, loss=0.0)
    assert len(round_trips_s(sites, "us", "eu", count=3)) == 3


def test_sites_are_hosts_of_their_own(sites: Sites) -> None:
    one = start(sites, "us", "import socket; socket.create_server(('', 7000)); print('bound'); input()")
    other = start(sites, "eu", "import socket; socket.create_server(('', 7000)); print('bound')")
    with one, other:
        assert [first_line(one), first_line(other)] == ["bound", "bound"]
        one.kill()


def test_unknown_places_and_impossible_links_are_refused(sites: Sites) -> None:
    for call in (
        lambda: sites.address("mars"),
        lambda: sites.set_link("mars", up_bits_per_s=1e6),
        lambda: sites.set_link("us", up_bits_per_s=0),
        lambda: sites.set_path("us", "eu", loss=2.0),
        lambda: sites.cut("us", "mars"),
    ):
        with pytest.raises(UsageError):
            call()


def test_leaving_ends_the_processes_and_frees_the_namespaces() -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    others = psutil.Process().children(recursive=True)
    with suppress(ZeroDivisionError), Sites(evenly_far(bits_per_s=1e6)) as made:
        sleeper = made.popen("us", [sys.executable, "-c", "import time; time.sleep(600)"])
        children = [child for child in psutil.Process().children(recursive=True) if child not in others]
        assert len(children) == 2
        raise ZeroDivisionError
    assert sleeper.poll() == -signal.SIGKILL
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_the_switch_does_not_outlive_a_killed_owner(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from ciuic.lab.profiles import evenly_far\n"
        "from ciuic.lab.switch_sites import Sites\n"
        "with Sites(evenly_far(bits_per_s=1e6)) as sites:\n"
        "    print(sites.switch_pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with owner:
        switch = psutil.Process(int(first_line(owner)))
        owner.kill()
    with suppress(psutil.NoSuchProcess):
        switch.wait(10)
    assert not psutil.pid_exists(switch.pid)


def test_a_thread_comes_back_from_a_namespace() -> None:
    home = os.readlink("/proc/thread-self/ns/net")
    with Namespace("10.77.0.9") as space:
        with space.inside():
            assert os.readlink("/proc/thread-self/ns/net") != home
        assert os.readlink("/proc/thread-self/ns/net") == home
