"""The switch's arithmetic: rates, queues, delays, loss and cuts, with a clock of our own."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.lab.switch import MIN_QUEUE_BYTES, QUEUE_S, Host, Lane, Path, Switch

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


def packet(target: str, size: int = 1000, *, version: int = 4) -> bytes:
    head = bytes([version << 4]) + bytes(15) + socket.inet_aton(ADDRESSES[target])
    return head + bytes(size - len(head))


@dataclass
class World:
    """Three hosts; what the switch writes to a host's device comes out of `outside[name]`."""

    switch: Switch
    hosts: dict[str, Host]
    outside: dict[str, socket.socket]

    def path(self, one: str, other: str) -> Path:
        return self.hosts[one].paths[self.hosts[other].address]

    def received(self, name: str) -> list[bytes]:
        found = []
        while True:
            try:
                found.append(self.outside[name].recv(65536))
            except BlockingIOError:
                return found


@pytest.fixture
def world() -> Iterator[World]:
    outside: dict[str, socket.socket] = {}
    hosts: dict[str, Host] = {}
    kept = []
    for name, address in ADDRESSES.items():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        theirs.setblocking(False)
        outside[name] = theirs
        kept.append(ours)
        lanes = {"up": Lane(bits_per_s=8e6), "down": Lane(bits_per_s=8e6)}  # 1000 bytes take 1 ms
        hosts[name] = Host(name=name, address=socket.inet_aton(address), fd=ours.fileno(), **lanes)
    for one in hosts.values():
        one.paths = {o.address: Path(source=one, target=o, delay_s=0.1) for o in hosts.values() if o is not one}
    yield World(Switch(list(hosts.values()), seed=3, clock=lambda: 0.0), hosts, outside)
    for end in [*kept, *outside.values()]:
        end.close()


def test_a_packet_takes_both_lanes_and_the_delay(world: World) -> None:
    world.switch.take(world.hosts["a"], packet("b"), 0.0)
    world.switch.advance(0.10199)
    assert world.received("b") == []
    world.switch.advance(0.10201)
    assert world.received("b") == [packet("b")]


def test_a_lane_sends_one_packet_after_the_other_at_its_rate(world: World) -> None:
    for _ in range(100):
        world.switch.take(world.hosts["a"], packet("b"), 0.0)
    world.switch.advance(0.1515)
    assert len(world.received("b")) == 50  # the first after 102 ms, then one each ms


def test_two_sources_share_the_lane_of_their_target(world: World) -> None:
    for _ in range(20):
        world.switch.take(world.hosts["a"], packet("c"), 0.0)
        world.switch.take(world.hosts["b"], packet("c"), 0.0)
    world.switch.advance(0.1215)
    assert len(world.received("c")) == 20
    world.switch.advance(0.1415)
    assert len(world.received("c")) == 20


def test_a_near_packet_overtakes_an_earlier_far_one(world: World) -> None:
    world.path("b", "c").delay_s = 0.01
    world.switch.take(world.hosts["a"], packet("c", 500), 0.0)
    world.switch.take(world.hosts["b"], packet("c", 700), 0.05)
    world.switch.advance(1.0)
    assert [len(p) for p in world.received("c")] == [700, 500]


@given(sizes=st.lists(st.integers(20, 9000), min_size=1, max_size=80), gap_s=st.floats(0, 0.01))
def test_a_lane_never_exceeds_its_rate_nor_its_queue(sizes: list[int], gap_s: float) -> None:
    lane = Lane(bits_per_s=20e6)
    free_at, passed = 0.0, 0
    for number, size in enumerate(sizes):
        at = number * gap_s
        leaves_at = lane.admit(at, size)
        if leaves_at < 0:
            assert (free_at - at) * 20e6 / 8 + size > max(QUEUE_S * 20e6 / 8, MIN_QUEUE_BYTES)
            continue
        passed += size
        assert leaves_at == pytest.approx(max(at, free_at) + size * 8 / 20e6)
        free_at = leaves_at
    assert lane.free_at == free_at
    assert free_at >= passed * 8 / 20e6 - 1e-9


def test_a_full_queue_drops_the_packet_and_counts_it(world: World) -> None:
    for _ in range(200):
        world.switch.take(world.hosts["a"], packet("b"), 0.0)
    path = world.path("a", "b")
    assert path.sent_packets == 200
    assert path.dropped_packets == 200 - MIN_QUEUE_BYTES // 1000
    for due in range(1, 400):  # in turns: a host's device holds few packets
        world.switch.advance(due / 1000)
        world.received("b")
    assert path.delivered_bytes == 1000 * (200 - path.dropped_packets)
    assert path.lost_packets == 0


def test_loss_takes_about_its_share_and_nothing_from_other_paths(world: World) -> None:
    world.path("a", "b").loss = 0.1
    for number in range(2000):
        for target in "bc":
            world.switch.take(world.hosts["a"], packet(target, 20), number * 0.001)
        world.switch.advance(number * 0.001)
        world.received("b"), world.received("c")
    assert 140 < world.path("a", "b").lost_packets < 260
    assert world.path("a", "c").lost_packets == 0


def test_a_cut_stops_what_is_under_way_and_mending_lets_new_packets_through(world: World) -> None:
    path = world.path("a", "b")
    world.switch.take(world.hosts["a"], packet("b"), 0.0)
    path.is_cut = True
    world.switch.take(world.hosts["a"], packet("b"), 0.01)
    world.switch.advance(1.0)
    assert world.received("b") == []
    assert path.lost_packets == 2
    path.is_cut = False
    world.switch.take(world.hosts["a"], packet("b"), 1.0)
    world.switch.advance(2.0)
    assert len(world.received("b")) == 1


@pytest.mark.parametrize("strange", [packet("b", version=6), packet("a"), b"", b"E", bytes(64)])
def test_what_is_not_for_another_host_is_not_carried_or_counted(world: World, strange: bytes) -> None:
    world.switch.take(world.hosts["a"], strange, 0.0)
    world.switch.advance(1.0)
    assert all(world.received(name) == [] for name in ADDRESSES)
    assert all(p.sent_packets == 0 for host in world.hosts.values() for p in host.paths.values())


def test_it_reads_whole_packets_from_a_device_until_it_is_empty(world: World) -> None:
    for size in (40, 9000):
        world.outside["a"].send(packet("b", size))
    world.switch.read(world.hosts["a"])
    world.switch.advance(1.0)
    assert [len(p) for p in world.received("b")] == [40, 9000]


def test_a_device_that_refuses_a_packet_loses_it(world: World) -> None:
    world.hosts["b"].fd = os.open(os.devnull, os.O_RDONLY)
    world.switch.take(world.hosts["a"], packet("b"), 0.0)
    world.switch.advance(1.0)
    os.close(world.hosts["b"].fd)
    assert world.path("a", "b").lost_packets == 1
    assert world.path("a", "b").delivered_bytes == 0
