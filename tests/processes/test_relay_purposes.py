"""The relay counts bytes per purpose without decrypting anything: real TLS through a real relay."""

import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ciuic.lab.links import Link
from ciuic.lab.relay import LinkRelay

ANSWER_BYTES = 30_000


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "relay test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


class CountingServer:
    """TLS with no buffering of its own: counts the raw bytes it read from and wrote to each socket."""

    def __init__(self, certificate: Path) -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate)
        self._context.set_alpn_protocols(["http/1.1"])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self.read_bytes = 0
        self.written_bytes = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # ends when the listener is shut
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(ConnectionResetError):  # the relay stopped
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        """Reads requests of 10 bytes `<count>` and answers with so many zeros, until the client is done."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self._context.wrap_bio(incoming, outgoing, server_side=True)
        steps = [tls.do_handshake, lambda: tls.write(bytes(int(tls.read(10))))]
        while steps:
            wants_more = False
            try:
                steps[0]()
                steps.pop(0)
            except ssl.SSLWantReadError:
                wants_more = True  # the request may have come together with the end of the handshake
            reply = outgoing.read()
            connection.sendall(reply)
            self.written_bytes += len(reply)
            if wants_more:
                data = connection.recv(65536)
                self.read_bytes += len(data)
                incoming.write(data)
        connection.shutdown(socket.SHUT_WR)
        while data := connection.recv(65536):
            self.read_bytes += len(data)

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # stopped before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def server(certificate: Path) -> Iterator[CountingServer]:
    made = CountingServer(certificate)
    yield made
    made.stop()


def fetch(relay: LinkRelay, certificate: Path, alpn: list[str], answer_bytes: int = ANSWER_BYTES) -> None:
    context = ssl.create_default_context(cafile=certificate)
    if alpn:
        context.set_alpn_protocols(alpn)
    with (
        socket.create_connection(relay.address, timeout=20) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as tls,
    ):
        tls.sendall(f"{answer_bytes:10d}".encode())
        got = 0
        while got < answer_bytes:
            got += len(tls.recv(65536))


def make_relay(server: CountingServer) -> LinkRelay:
    link = Link(name="eu", up_bits_per_s=100e6, down_bits_per_s=100e6, one_way_delay_s=0.005, jitter_s=0.002)
    return LinkRelay(link, server.address)


def test_each_connection_counts_for_its_purpose(server: CountingServer, certificate: Path) -> None:
    with make_relay(server) as relay:
        for times, purpose in enumerate(("control", "updates", "snapshots", "operator"), start=1):
            fetch(relay, certificate, [f"ciuic-{purpose}", "http/1.1"], times * ANSWER_BYTES)
        fetch(relay, certificate, [], 5 * ANSWER_BYTES)
        stats = relay.stats()
    for times, purpose in enumerate(("control", "updates", "snapshots", "operator", "other"), start=1):
        assert times * ANSWER_BYTES < stats.down_by_purpose[purpose] < times * ANSWER_BYTES + 4000
        assert 200 < stats.up_by_purpose[purpose] < 4000
        assert stats.purpose_bytes(purpose) == stats.up_by_purpose[purpose] + stats.down_by_purpose[purpose]
    assert stats.connections_total == 5


def test_the_counts_are_what_the_server_read_and_wrote(server: CountingServer, certificate: Path) -> None:
    with make_relay(server) as relay:
        for _ in range(3):
            fetch(relay, certificate, ["ciuic-updates", "http/1.1"])
    server.stop()
    stats = relay.stats()
    assert stats.up_bytes == stats.up_by_purpose["updates"] == server.read_bytes
    assert stats.down_bytes == stats.down_by_purpose["updates"] == server.written_bytes


def test_a_hello_that_dribbles_in_is_counted_for_its_purpose(server: CountingServer, certificate: Path) -> None:
    context = ssl.create_default_context(cafile=certificate)
    context.set_alpn_protocols(["ciuic-snapshots", "http/1.1"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with make_relay(server) as relay, socket.create_connection(relay.address, timeout=20) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        for byte in outgoing.read():
            raw.sendall(bytes([byte]))
        assert raw.recv(5, socket.MSG_WAITALL)[0] == 22, "the server's answer is a TLS handshake record"
        assert relay.stats().up_by_purpose["snapshots"] > 200
        assert relay.stats().up_by_purpose["other"] == 0
