"""A snapshot's pieces wait for what is urgent, and never for long."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from ciuic.errors import NotFoundError
from ciuic.hub.run import courtesy as courtesy_module
from ciuic.hub.run.courtesy import FRESH_S, LONGEST_WAIT_S, SOCKET, ChunkLists, Courtesy, unsent_bytes
from ciuic.net.chunks import LARGE_BYTES, list_in
from ciuic.net.messages import FragmentState


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.02
        return self.now_s


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


def fill(sock: socket.socket) -> None:
    sock.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            sock.send(bytes(65536))


def test_nothing_urgent_means_no_waiting() -> None:
    clock = Clock()
    asyncio.run(Courtesy(clock).turn())
    assert clock.now_s < 0.2


def test_a_piece_waits_while_an_entry_is_in_the_kernel_but_not_for_ever(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = pair
    fill(near)
    assert unsent_bytes(near) > 0
    clock = Clock()
    courtesy = Courtesy(clock)
    courtesy.urgent({SOCKET: near})
    asyncio.run(courtesy.turn())
    assert clock.now_s > LONGEST_WAIT_S
    assert courtesy.is_busy


def test_an_entry_that_was_sent_is_forgotten_after_a_moment(pair: tuple[socket.socket, socket.socket]) -> None:
    clock = Clock()
    courtesy = Courtesy(clock)
    courtesy.urgent({SOCKET: pair[0]})
    assert courtesy.is_busy, "it is about to be sent"
    clock.now_s += FRESH_S
    assert not courtesy.is_busy


def test_a_closed_connection_is_not_waited_for(pair: tuple[socket.socket, socket.socket]) -> None:
    clock = Clock()
    courtesy = Courtesy(clock)
    courtesy.urgent({SOCKET: pair[0]})
    pair[0].close()
    clock.now_s += FRESH_S
    assert not courtesy.is_busy


def test_a_list_of_chunks_follows_its_file(tmp_path: Path) -> None:
    lists, file = ChunkLists(), tmp_path / "snapshot"
    file.write_bytes(b"first")
    first = lists.of(file)
    first.check(5)
    assert lists.of(file) is first
    file.write_bytes(b"second")
    assert lists.of(file).digests != first.digests
    file.unlink()
    with pytest.raises(NotFoundError):
        lists.of(file)


def test_an_attachment_names_the_chunks_of_a_snapshot_that_is_here_and_quickly_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists, file = ChunkLists(), tmp_path / "snapshot"
    file.write_bytes(bytes(LARGE_BYTES + 1))
    state = FragmentState(version=9, digest="d", snapshot_version=7, snapshot_bytes=LARGE_BYTES + 1)
    listed = list_in(lists.into(state, lambda: file))
    assert listed == lists.of(file)
    for other in (replace(state, url="https://shard:1"), replace(state, snapshot_bytes=LARGE_BYTES)):
        assert list_in(lists.into(other, lambda: file)) is None, "at a shard; or replaced meanwhile"
    assert list_in(lists.into(state, lambda: tmp_path / "gone")) is None
    monkeypatch.setattr(courtesy_module, "LISTED_AT_ONCE_BYTES", LARGE_BYTES)
    assert list_in(lists.into(state, lambda: file)) is None
