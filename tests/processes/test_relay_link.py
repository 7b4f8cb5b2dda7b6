"""The relay on real sockets: rate, delay, order, fairness, faults."""

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ciuic.errors import UsageError
from ciuic.lab.links import Link
from ciuic.lab.relay import LinkRelay

Handler = Callable[[socket.socket], None]


class Server:
    """Calls `handle` in a thread for each connection."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # ends when the listener is shut
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # tests reset connections on purpose
            self._handle(connection)

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)


@contextlib.contextmanager
def relayed(handle: Handler, **link: float) -> Generator[LinkRelay]:
    """A server behind a link of 800 Mbit/s without delay, or with what is given."""
    rate = link.pop("bits_per_s", 800e6)
    server = Server(handle)
    made = Link(name="x", **{"up_bits_per_s": rate, "down_bits_per_s": rate, "one_way_delay_s": 0.0, **link})
    with LinkRelay(made, server.address) as relay:
        yield relay
    server.stop()


def connect(relay: LinkRelay) -> socket.socket:
    return socket.create_connection(relay.address, timeout=20)


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def echo(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


def digest(connection: socket.socket) -> None:
    """Answers with the hash of everything, once the client has finished."""
    connection.sendall(hashlib.sha256(read_all(connection)).digest())


def send_digested(relay: LinkRelay, data: bytes) -> float:
    """Seconds until the far end has `data` and said so."""
    start = time.monotonic()
    with connect(relay) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == hashlib.sha256(data).digest()
    return time.monotonic() - start


def assert_takes(measure: Callable[[], float], low_s: float, high_s: float) -> None:
    """Never faster than `low_s`; within `high_s` at the best of five, for this machine may be busy."""
    times_s: list[float] = []
    while len(times_s) < 5 and (not times_s or min(times_s) > high_s):
        times_s.append(measure())
    assert low_s <= min(times_s) <= high_s, times_s


@pytest.mark.parametrize(("bits_per_s", "size"), [(4e6, 300_000), (50e6, 3_000_000)])
def test_upload_takes_size_over_rate(bits_per_s: float, size: int) -> None:
    ideal_s = 8 * size / bits_per_s
    with relayed(digest, bits_per_s=bits_per_s) as relay:
        assert_takes(lambda: send_digested(relay, bytes(size)), 0.99 * ideal_s, 1.1 * ideal_s)


def test_download_has_its_own_rate() -> None:
    size, bits_per_s = 600_000, 8e6
    ideal_s = 8 * size / bits_per_s
    with relayed(lambda c: c.sendall(bytes(size)), up_bits_per_s=1e5, down_bits_per_s=bits_per_s) as relay:

        def download() -> float:
            start = time.monotonic()
            with connect(relay) as connection:
                assert len(read_all(connection)) == size
            return time.monotonic() - start

        assert_takes(download, 0.99 * ideal_s, 1.1 * ideal_s)


def test_a_rate_changed_on_the_way_counts_from_then_on() -> None:
    with relayed(digest, bits_per_s=1e6) as relay:
        relay.set_rate(16e6, 16e6)
        assert_takes(lambda: send_digested(relay, bytes(1_000_000)), 0.49, 0.55)
        with pytest.raises(UsageError, match="rate of 0"):
            relay.set_rate(0, 1)


def test_a_message_and_its_answer_take_a_round_trip_and_so_does_the_set_up() -> None:
    def trip(connection: socket.socket) -> float:
        start = time.monotonic()
        connection.sendall(b"ping")
        assert connection.recv(100) == b"ping"
        return time.monotonic() - start

    with relayed(echo, one_way_delay_s=0.08) as relay, connect(relay) as connection:
        first_s = trip(connection)
        assert 0.32 <= first_s <= 1.0, "the first one also waits for the set-up"
        assert_takes(lambda: trip(connection), 0.16, 0.2)


def test_a_server_that_speaks_first_is_heard_after_two_round_trips() -> None:
    with relayed(lambda c: c.sendall(b"hello"), one_way_delay_s=0.05) as relay:

        def listen() -> float:
            start = time.monotonic()
            with connect(relay) as connection:
                assert read_all(connection) == b"hello"
            return time.monotonic() - start

        assert_takes(listen, 0.2, 0.26)


def test_delay_does_not_cost_rate() -> None:
    with relayed(digest, bits_per_s=40e6, one_way_delay_s=0.1) as relay:
        # 0.5 s on the lane, 0.2 s set-up, 0.2 s there and back
        assert_takes(lambda: send_digested(relay, bytes(2_500_000)), 0.9, 1.0)


def test_what_is_on_the_way_is_bounded_and_the_sender_blocks() -> None:
    release = threading.Event()

    def stuck(connection: socket.socket) -> None:
        release.wait(20)
        read_all(connection)

    with relayed(stuck, bits_per_s=80e6, one_way_delay_s=0.02) as relay, connect(relay) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        connection.settimeout(1.0)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 30_000_000:
                sent += connection.send(bytes(65536))
        release.set()
    assert sent < 12_000_000


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pieces=st.lists(st.integers(1, 70_000), min_size=1, max_size=12), seed=st.integers(0, 2**32 - 1))
def test_content_and_order_survive_any_cutting_and_jitter(pieces: list[int], seed: int) -> None:
    data = hashlib.shake_256(seed.to_bytes(4, "big")).digest(sum(pieces))
    received = b""
    with relayed(echo, bits_per_s=200e6, one_way_delay_s=0.005, jitter_s=0.01) as relay, connect(relay) as connection:
        at = 0
        for size in pieces:
            connection.sendall(data[at : at + size])
            at += size
        connection.shutdown(socket.SHUT_WR)
        received = read_all(connection)
        stats = relay.stats()
    assert received == data
    assert (stats.up_bytes, stats.down_bytes) == (len(data), len(data))


def test_two_connections_share_the_rate() -> None:
    size = 500_000
    ideal_s = 2 * 8 * size / 8e6
    with relayed(digest, bits_per_s=8e6) as relay, ThreadPoolExecutor(2) as pool:

        def send_both() -> float:
            times_s = list(pool.map(lambda _: send_digested(relay, bytes(size)), range(2)))
            assert min(times_s) >= 0.9 * ideal_s, "neither may get ahead of the other"
            return max(times_s)

        assert_takes(send_both, 0.99 * ideal_s, 1.1 * ideal_s)


def flood(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the test resets it
        connection.sendall(bytes(2_000_000))


def test_a_small_message_does_not_wait_for_a_long_transfer() -> None:
    with relayed(echo, bits_per_s=2e6, one_way_delay_s=0.01) as relay, connect(relay) as bulk, connect(relay) as small:
        small.sendall(b"warm")
        small.recv(10)
        threading.Thread(target=flood, args=(bulk,), daemon=True).start()
        time.sleep(0.2)  # the transfer fills its queue
        start = time.monotonic()
        small.sendall(b"now")
        assert small.recv(10) == b"now"
        assert time.monotonic() - start < 0.4, "the queue in front of it is 0.5 s long in each direction"
        relay.reset()


def test_a_reset_is_seen_at_both_ends_and_new_connections_work() -> None:
    seen: list[BaseException] = []

    def note(connection: socket.socket) -> None:
        try:
            echo(connection)
        except OSError as error:
            seen.append(error)

    with relayed(note) as relay:
        with connect(relay) as connection:
            connection.sendall(b"x")
            connection.recv(1)
            relay.reset()
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
        with connect(relay) as connection:
            connection.sendall(b"again")
            assert connection.recv(10) == b"again"
    assert isinstance(seen[0], ConnectionResetError)


def test_an_outage_stalls_what_is_open_and_what_is_new_and_loses_nothing() -> None:
    data = hashlib.shake_256(b"outage").digest(400_000)
    with relayed(echo, bits_per_s=8e6, one_way_delay_s=0.02) as relay, connect(relay) as connection:
        reader_got: list[bytes] = []
        reader = threading.Thread(target=lambda: reader_got.append(read_all(connection)))
        reader.start()
        start = time.monotonic()
        connection.sendall(data[:200_000])
        relay.outage(1.0)
        before = relay.stats()
        assert before.is_down
        with connect(relay) as new:
            new.settimeout(0.5)
            new.sendall(b"hello?")
            with pytest.raises(TimeoutError):
                new.recv(10)
            during = relay.stats()
            assert (during.up_bytes, during.down_bytes) == (before.up_bytes, before.down_bytes)
            new.settimeout(20)
            assert new.recv(10) == b"hello?"
        assert time.monotonic() - start >= 1.0
        connection.sendall(data[200_000:])
        connection.shutdown(socket.SHUT_WR)
        reader.join(20)
        assert reader_got == [data]
        assert not relay.stats().is_down


def test_a_link_set_down_stays_down_until_it_is_restored() -> None:
    with relayed(echo) as relay, connect(relay) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        relay.outage(0.05)
        relay.set_down(True)
        connection.sendall(b"b")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        relay.set_down(False)
        connection.settimeout(20)
        assert connection.recv(1) == b"b"


def test_a_target_that_refuses_resets_the_client_after_a_round_trip() -> None:
    closed = socket.create_server(("127.0.0.1", 0))
    address = closed.getsockname()[:2]
    closed.close()
    link = Link(name="x", up_bits_per_s=1e6, down_bits_per_s=1e6, one_way_delay_s=0.05)
    with LinkRelay(link, address) as relay:
        start = time.monotonic()
        with connect(relay) as connection, pytest.raises(ConnectionResetError):
            connection.recv(1)
        assert 0.1 <= time.monotonic() - start <= 1.0
        assert relay.stats().connections_open == 0


def test_a_client_that_resets_is_seen_by_the_server() -> None:
    ended = threading.Event()

    def wait_for_reset(connection: socket.socket) -> None:
        try:
            read_all(connection)
        except ConnectionResetError:
            ended.set()

    with relayed(wait_for_reset, one_way_delay_s=0.01) as relay:
        connection = connect(relay)
        connection.sendall(b"x")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()
        assert ended.wait(10)


def test_a_server_that_closes_while_the_client_sends_ends_the_client() -> None:
    with (
        relayed(lambda c: None, bits_per_s=8e6, one_way_delay_s=0.01) as relay,
        connect(relay) as connection,
        pytest.raises((ConnectionResetError, BrokenPipeError)),
    ):
        connection.sendall(bytes(20_000_000))


def test_stop_resets_closes_the_port_and_keeps_the_numbers() -> None:
    before = threading.active_count()
    server = Server(echo)
    relay = LinkRelay(Link(name="x", up_bits_per_s=1e9, down_bits_per_s=1e9, one_way_delay_s=0), server.address)
    with pytest.raises(UsageError, match="was not started"):
        _ = relay.address
    relay.start()
    with connect(relay) as connection:
        connection.sendall(b"12345")
        assert connection.recv(10) == b"12345"
        stats = relay.stop()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    assert (stats.up_bytes, stats.down_bytes, stats.connections_total, stats.connections_open) == (5, 5, 1, 0)
    assert relay.stats() == stats
    with pytest.raises(UsageError, match="not running"):
        relay.reset()
    with pytest.raises(ConnectionRefusedError):
        connect(relay)
    server.stop()
    assert threading.active_count() == before
