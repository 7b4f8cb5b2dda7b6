"""Large bodies in chunks over real TLS connections: cuts at every chunk, slow links, wrong bytes, several sources."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chunk_world import PATH, ChunkWorld

from ciuic.errors import DigestMismatchError, FrameError, StorageError, SupersededError, UnreachableError
from ciuic.hub.run.courtesy import ChunkLists
from ciuic.lab.links import Link
from ciuic.lab.relay import LinkRelay
from ciuic.net.chunks import NUMBER, ChunksReply, Manifest, encode_manifest, manifest_of
from ciuic.net.messages import decode
from ciuic.net.sockets import congestion_facts, congestion_of
from ciuic.net.transfer import MOST_STREAMS
from ciuic.net.transfer_down import Source, fetch_file
from ciuic.net.transfer_up import Uploader

SIZE = 16 * 1024
CHUNKS = 12
ON_THE_WAY = 4
"""Chunks that a cut may cost: one per connection, when the port has not finished it as it is asked what is missing."""
BODY = os.urandom(SIZE * CHUNKS - 100)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ChunkWorld]:
    with ChunkWorld(tmp_path) as made:
        yield made


def small(body: bytes) -> Manifest:
    digests = b"".join(manifest_of(body[at : at + SIZE], "push", 0).digests for at in range(0, len(body), SIZE))
    return Manifest(what="push", fragment=0, total_bytes=len(body), chunk_bytes=SIZE, digests=digests)


def link(world: ChunkWorld, bits_per_s: float = 1e9, one_way_delay_s: float = 0.0) -> LinkRelay:
    made = Link(name="x", up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s, one_way_delay_s=one_way_delay_s)
    return LinkRelay(made, world.address())


# ---- up


def test_a_body_arrives_whole_over_several_connections(world: ChunkWorld) -> None:
    body = os.urandom(9 * 1024 * 1024 + 5)
    uploader = world.uploader()
    reply = uploader.send(PATH, memoryview(body), manifest_of(body, "push", 0))
    assert reply.push is not None
    assert reply.push.status == "accepted"
    assert world.taken == [body]
    assert not list((world.folder / "spool").glob("*/*"))


def test_a_cut_at_any_chunk_costs_only_what_had_not_arrived(world: ChunkWorld) -> None:
    with link(world) as relay:
        for cut_at in range(1, CHUNKS):
            body = os.urandom(len(BODY))
            world.spool.count = 0
            world.spool.stored = lambda count, at=cut_at: relay.reset() if count == at else None
            world.uploader(port=relay.address[1]).send(PATH, body, small(body))
            assert world.taken[-1] == body
            assert world.spool.count <= CHUNKS + ON_THE_WAY
        assert len(world.taken) == CHUNKS - 1


def test_cuts_at_every_chunk_one_after_the_other(world: ChunkWorld) -> None:
    with link(world) as relay:
        world.spool.stored = lambda count: relay.reset() if count < CHUNKS else None
        uploader = world.uploader(port=relay.address[1])
        for _ in range(CHUNKS):
            try:
                uploader.send(PATH, BODY, small(BODY))
                break
            except UnreachableError:  # a question was cut, too: its caller asks again
                continue
    assert world.taken == [BODY]
    assert world.spool.count <= CHUNKS + 2 * ON_THE_WAY


def test_a_lost_answer_is_given_again_and_the_body_taken_once(world: ChunkWorld) -> None:
    uploader = world.uploader()
    first = uploader.send(PATH, BODY, small(BODY))
    assert uploader.send(PATH, BODY, small(BODY)) == first
    assert world.uploader().send(PATH, BODY, small(BODY)) == first, "another process sends it all again"
    assert world.taken == [BODY]


def test_chunks_twice_and_in_any_order_are_as_good(world: ChunkWorld) -> None:
    lane, manifest = world.fan().lanes(1)[0], small(BODY)

    def post(*indexes: int) -> ChunksReply:
        parts = [NUMBER.pack(i) + BODY[slice(*manifest.span(i))] for i in indexes]
        response = lane.request("POST", PATH, encode_manifest(manifest) + b"".join(parts))
        return decode(lane.read(response, 1 << 20), ChunksReply)

    assert post(5, 3, 5).missing == ((0, 3), (4, 5), (6, CHUNKS))
    assert post(*reversed(range(CHUNKS))).done
    assert world.taken == [BODY]


def test_a_wrong_chunk_is_refused_and_not_kept(world: ChunkWorld) -> None:
    damaged = bytearray(BODY)
    damaged[3 * SIZE + 7] ^= 1
    uploader = world.uploader()
    with pytest.raises(FrameError, match="chunk 3 "):
        uploader.send(PATH, damaged, small(BODY))
    assert world.taken == []
    assert uploader.send(PATH, BODY, small(BODY)).done
    assert world.taken == [BODY]


@pytest.mark.parametrize("tail", [NUMBER.pack(CHUNKS) + b"x", NUMBER.pack(0) + b"short", b"\0"])
def test_a_body_that_is_none_is_refused(world: ChunkWorld, tail: bytes) -> None:
    lane = world.fan().lanes(1)[0]
    with pytest.raises(FrameError):
        lane.request("POST", PATH, encode_manifest(small(BODY)) + tail)
    assert world.taken == []


def test_what_the_ledger_refuses_is_told_and_forgotten(world: ChunkWorld) -> None:
    world.refusals = [SupersededError("a newer process has taken its place")]
    with pytest.raises(SupersededError):
        world.uploader().send(PATH, BODY, small(BODY))
    assert len(world.spool) == 0


def test_a_full_disk_while_it_is_taken_keeps_the_chunks(world: ChunkWorld) -> None:
    world.refusals = [StorageError("no space left")]
    uploader = world.uploader()
    with pytest.raises(StorageError):
        uploader.send(PATH, BODY, small(BODY))
    assert uploader.send(PATH, BODY, small(BODY)).done
    assert world.spool.count == CHUNKS
    assert world.taken == [BODY]


def test_a_slow_link_is_no_reason_to_give_up_while_something_moves(world: ChunkWorld) -> None:
    with link(world, bits_per_s=1e6, one_way_delay_s=0.02) as relay:
        uploader = world.uploader(port=relay.address[1], timeout_s=1.0)
        assert uploader.send(PATH, BODY, small(BODY)).done  # takes more than the time-out as a whole
    assert world.taken == [BODY]


def test_a_link_on_which_nothing_moves_is_given_up(world: ChunkWorld) -> None:
    with link(world) as relay:
        uploader = world.uploader(port=relay.address[1], timeout_s=0.5)
        relay.set_down(True)
        with pytest.raises(UnreachableError):
            uploader.send(PATH, BODY, small(BODY))


def test_an_upload_can_be_ended_from_another_thread(world: ChunkWorld) -> None:
    fan = world.fan()
    world.spool.stored = lambda count: fan.interrupt()
    with link(world), pytest.raises(UnreachableError, match="was ended"):
        Uploader(fan).send(PATH, BODY, small(BODY))


def test_memory_does_not_grow_with_what_is_half_uploaded(world: ChunkWorld) -> None:
    process, size = psutil.Process(), 24 * 1024 * 1024
    body = bytearray(os.urandom(size))
    lane = world.fan().lanes(1)[0]

    def all_but_one() -> None:
        body[0] = (body[0] + 1) % 256
        manifest = manifest_of(body, "push", 0)
        parts = [x for i in range(manifest.count - 1) for x in (NUMBER.pack(i), body[slice(*manifest.span(i))])]
        lane.read(lane.request("POST", PATH, encode_manifest(manifest) + b"".join(parts)), 1 << 20)

    all_but_one()
    before = process.memory_info().rss
    for _ in range(3):
        all_but_one()
    assert process.memory_info().rss - before < 2 * size, "two bodies of this test's own, none of the port's"


def test_connections_stay_open_between_pushes_and_ask_for_bbr(world: ChunkWorld) -> None:
    fan = world.fan()
    uploader, socks = Uploader(fan), []
    for _ in range(2):
        body = os.urandom(8 * 1024 * 1024)
        uploader.send(PATH, body, manifest_of(body, "push", 0))
        socks.append([lane.sock for lane in fan.lanes(fan.streams.count)])
    assert 1 <= fan.streams.count <= MOST_STREAMS
    shared = [sock for sock in socks[1] if sock is not None and sock in socks[0]]
    assert shared
    assert congestion_of(shared[0]) == congestion_facts().name


# ---- down


def test_a_file_comes_in_ranges_from_several_connections(world: ChunkWorld, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(5 * 1024 * 1024 + 3))
    world.files["base"] = source
    fetch_file(world.fan(), "/file/base", tmp_path / "got", ChunkLists().of(source))
    assert (tmp_path / "got").read_bytes() == source.read_bytes()
    assert len(world.ranges) > 1
    assert not (tmp_path / "got.chunks").exists()


def test_a_download_goes_on_after_cuts_and_from_what_an_earlier_process_left(world: ChunkWorld, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(6 * 1024 * 1024))
    world.files["base"] = source
    chunks = ChunkLists().of(source)
    left = bytearray(source.read_bytes())
    left[4 * 1024 * 1024] ^= 1  # one chunk is damaged
    (tmp_path / "got.chunks").write_bytes(left)
    with link(world) as relay:
        timer = threading.Timer(0.05, relay.reset)
        timer.start()
        fetch_file(world.fan(port=relay.address[1]), "/file/base", tmp_path / "got", chunks)
        timer.cancel()
    assert (tmp_path / "got").read_bytes() == source.read_bytes()
    wanted = f"bytes={4 * 1024 * 1024}-{5 * 1024 * 1024 - 1}"
    assert set(world.ranges) == {wanted}


def test_a_source_with_other_bytes_or_none_is_replaced_by_the_hub(world: ChunkWorld, tmp_path: Path) -> None:
    source, wrong = tmp_path / "source", tmp_path / "wrong"
    source.write_bytes(os.urandom(6 * 1024 * 1024))
    wrong.write_bytes(bytes(6 * 1024 * 1024))
    world.files["base"] = source
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    with ChunkWorld(other_folder) as other:
        other.files["base"] = wrong
        liar, gone = other.fan().lanes(1)[0], world.fan(port=1).lanes(1)[0]
        sources = [Source(exchange=exchange, path="/file/base") for exchange in (liar, gone)]
        fetch_file(world.fan(), "/file/base", tmp_path / "got", ChunkLists().of(source), sources)
        assert other.ranges
        assert isinstance(sources[0].problem, DigestMismatchError)
        assert isinstance(sources[1].problem, UnreachableError)
    assert (tmp_path / "got").read_bytes() == source.read_bytes()


def test_a_source_that_holds_it_relieves_the_hub(world: ChunkWorld, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(6 * 1024 * 1024))
    world.files["base"] = source
    others = [Source(exchange=exchange, path="/file/base") for exchange in world.fan().lanes(3)]
    fetch_file(world.fan(), "/file/base", tmp_path / "got", ChunkLists().of(source), others)
    assert sum(other.taken_bytes for other in others) > 0
    assert (tmp_path / "got").read_bytes() == source.read_bytes()


def test_a_hub_that_sends_other_bytes_is_an_error_and_nothing_is_left_as_the_file(
    world: ChunkWorld, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2 * 1024 * 1024))
    chunks = ChunkLists().of(source)
    source.write_bytes(os.urandom(2 * 1024 * 1024))
    world.files["base"] = source
    with pytest.raises(DigestMismatchError):
        fetch_file(world.fan(), "/file/base", tmp_path / "got", chunks)
    assert not (tmp_path / "got").exists()
