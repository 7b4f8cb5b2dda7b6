"""The relay reads the purpose of a connection from a ClientHello, whatever bytes come."""

import itertools
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.lab.hello import MAX_HELLO_BYTES, PURPOSES, PurposeReader, alpn_of, purpose_of


def client_hello(alpn: list[str], server_name: str | None = "hub.example") -> bytes:
    """What a real TLS client sends first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(alpn)
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=server_name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


HELLO = client_hello(["ciuic-updates", "http/1.1"])


@pytest.mark.parametrize("purpose", ["control", "updates", "snapshots", "operator"])
@pytest.mark.parametrize("server_name", [None, "hub.example"])
def test_a_real_hello_tells_its_purpose(purpose: str, server_name: str | None) -> None:
    hello = client_hello([f"ciuic-{purpose}", "http/1.1"], server_name)
    assert alpn_of(hello) == (f"ciuic-{purpose}", "http/1.1")
    assert purpose_of(alpn_of(hello) or ()) == purpose


def test_a_hello_without_alpn_is_other() -> None:
    assert alpn_of(client_hello([])) == ()
    assert purpose_of(()) == "other"
    assert purpose_of(("http/1.1", "ciuic-unheard-of")) == "other"


@given(cut=st.integers(0, len(HELLO) - 1))
def test_a_truncated_hello_is_not_decided_yet(cut: int) -> None:
    assert alpn_of(HELLO[:cut]) is None


@given(cuts=st.lists(st.integers(0, len(HELLO)), max_size=12))
def test_a_hello_cut_at_any_byte_tells_the_same(cuts: list[int]) -> None:
    reader = PurposeReader()
    edges = [0, *sorted(cuts), len(HELLO)]
    for start, stop in itertools.pairwise(edges):
        reader.feed(HELLO[start:stop])
    assert reader.purpose == "updates"


@given(cuts=st.lists(st.integers(1, len(HELLO) - 6), max_size=6, unique=True))
def test_a_hello_split_into_several_tls_records_tells_the_same(cuts: list[int]) -> None:
    message = HELLO[5:]
    edges = [0, *sorted(cuts), len(message)]
    records = b"".join(
        b"\x16\x03\x01" + (stop - start).to_bytes(2, "big") + message[start:stop]
        for start, stop in itertools.pairwise(edges)
    )
    assert alpn_of(records) == ("ciuic-updates", "http/1.1")
    assert alpn_of(records[:-1]) is None


@given(garbage=st.binary(max_size=2000))
def test_garbage_never_raises(garbage: bytes) -> None:
    alpn = alpn_of(garbage)
    assert alpn is None or isinstance(alpn, tuple)


@given(at=st.integers(0, len(HELLO) - 1), flip=st.integers(1, 255))
def test_a_flipped_byte_never_raises(at: int, flip: int) -> None:
    damaged = bytearray(HELLO)
    damaged[at] ^= flip
    alpn = alpn_of(bytes(damaged))
    assert alpn is None or purpose_of(alpn) in PURPOSES


def test_an_endless_hello_is_given_up_at_the_limit() -> None:
    reader = PurposeReader()
    promise = b"\x16\x03\x01\x40\x00\x01\x00\x3f\x00"  # a ClientHello of 16128 bytes in a record of 16384
    reader.feed(promise)
    assert reader.purpose is None
    for _ in range(MAX_HELLO_BYTES):
        reader.feed(b"\x00")
    assert reader.purpose == "other"
    too_long = b"\x16\x03\x01\x40\x00\x01\xff\xff\xff"
    assert alpn_of(too_long) == ()


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n", b"SSH-2.0-x\r\n", b"\x17\x03\x03\x00\x10", b"\x16\x04"])
def test_another_protocol_is_other_at_once(start: bytes) -> None:
    assert alpn_of(start) == ()
