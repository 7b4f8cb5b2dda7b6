"""Fragments at shards: who may push there, what a move carries over, and what ends a move half way."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ledger_frames import memory_folder
from shard_world import ShardWorld

from ciuic.errors import ConflictError, LedgerDamagedError, MovedError, SupersededError, UsageError
from ciuic.hub.shards.book import PRESENT_S, ShardBook


@contextmanager
def a_world(fragments: int = 3) -> Iterator[ShardWorld]:
    with memory_folder() as folder:
        world = ShardWorld(folder, nodes=2, fragments=fragments, codec="1-bit", total=60, max_staleness=2)
        world.agree()
        try:
            yield world
        finally:
            world.hub.close()


def owners(world: ShardWorld) -> dict[int, str]:
    return {f: name for f, (name, _) in world.hub.ledger.sharding.owners.items()}


def pushed(world: ShardWorld, name: str, fragment: int) -> bytes:
    """A push of a node that has trained a step."""
    world.lease(name, 1)
    world.step(name)
    world.push(name, fragment)
    return world.network.pop().frame


def test_a_new_run_is_spread_over_the_shards_but_for_the_samples_fragment() -> None:
    with a_world() as world:
        assert owners(world) == {1: "s1", 2: "s2"}
        assert [f.number for f in world.hub.ledger.local_fragments()] == [0]
        with pytest.raises(MovedError):
            world.hub.ledger.push("n0", pushed(world, "n0", 1))


def test_a_shard_serves_nothing_before_its_first_view() -> None:
    with a_world() as world:
        frame = pushed(world, "n0", 1)
        world.kill_shard("s1")
        world.start_shard("s1")
        with pytest.raises(MovedError):
            world.hub.push("n0", frame)
        world.see("s1")
        assert world.hub.push("n0", frame).status == "accepted"
        assert world.hub.push("n0", frame).status == "duplicate"


def test_a_superseded_process_is_refused_by_a_shard_and_a_new_one_when_it_has_heard_of_it() -> None:
    with a_world() as world:
        old = pushed(world, "n0", 1)
        view = world.hub.part_for("s1")
        world.start("n0")
        with pytest.raises(SupersededError):
            world.hub.push("n0", old)
        frame = pushed(world, "n0", 1)
        world.kill_shard("s1")
        world.start_shard("s1")
        world.apply("s1", view)  # the shard still has the view from before
        with pytest.raises(MovedError, match="not heard"):
            world.hub.push("n0", frame)
        world.see("s1")
        assert world.hub.push("n0", frame).status == "accepted"


def test_a_waiting_push_goes_with_its_fragment_and_merges_at_the_new_place() -> None:
    with a_world() as world:
        world.whole_round({"n0", "n1"})
        assert not world.network
        world.agree()
        frame = pushed(world, "n0", 1)
        assert world.hub.push("n0", frame).status == "accepted"  # n1 has not pushed: it waits
        world.move(1, "s2")
        world.see("s1")
        with pytest.raises(MovedError):
            world.hub.push("n1", pushed(world, "n1", 1))
        world.agree()
        assert owners(world)[1] == "s2"
        fragment = world.hub.fragments[1]
        assert [key[0] for key in fragment.inbox.waiting] == ["n0"]
        assert world.hub.push("n0", frame).status == "duplicate"
        version = fragment.version
        world.tick(6.0)
        assert world.hub.fragments[1].version == version + 1
        assert not list((world.root / "s1").glob("*/fragment-1-*")), "the old owner dropped its files"


def test_a_fragment_of_the_hub_can_move_to_a_shard_that_came_later() -> None:
    with memory_folder() as folder:
        world = ShardWorld(folder, nodes=2, fragments=3, codec="1-bit", total=60, max_staleness=2, shards=())
        assert owners(world) == {}
        world.whole_round({"n0", "n1"})
        before = [(f.version, f.digest) for f in world.hub.fragments]
        world.start_shard("s1")
        world.move(2, "s1")
        world.agree()
        assert owners(world) == {2: "s1"}
        assert [(f.version, f.digest) for f in world.hub.fragments] == before
        assert not (world.folder / "fragment-2").exists()
        world.crash_hub()
        world.agree()
        assert owners(world) == {2: "s1"}
        world.drain()
        world.hub.close()


def test_a_move_that_stops_half_way_leaves_the_fragment_where_it_was() -> None:
    with a_world() as world:
        world.move(1, "s2")
        world.see("s1")
        world.tell("s1", is_lost=False)
        world.see("s2")  # it has the copy, but has not said so
        world.crash_hub()
        world.agree()
        assert owners(world)[1] == "s1"
        assert world.hub.push("n0", pushed(world, "n0", 1)).status == "accepted"
        assert not list((world.root / "s2").glob("*/fragment-1-*"))
        world.move(1, "s2")
        world.kill_shard("s2")
        world.tick(0.1)
        assert "fragment.stayed" in [kind for kind, _ in world.events]
        world.see("s1")
        assert world.hub.push("n1", pushed(world, "n1", 1)).status == "accepted"


def test_what_cannot_be_moved_is_refused() -> None:
    with a_world() as world:
        sharding = world.hub.ledger.sharding
        with pytest.raises(UsageError, match="samples"):
            sharding.start(0, "s1")
        with pytest.raises(UsageError):
            sharding.start(3, "s1")
        with pytest.raises(ConflictError):
            sharding.start(1, "s1")
        sharding.start(1, "s2")
        with pytest.raises(ConflictError):
            sharding.start(1, "s2")


def test_a_shard_that_lost_a_moved_fragment_does_not_begin_it_anew() -> None:
    with a_world() as world:
        world.move(1, "s2")
        world.agree()
        world.kill_shard("s2")
        for folder in (world.root / "s2").glob("*/fragment-1-*"):
            folder.rename(folder.parent / "lost")
        world.start_shard("s2")
        world.see("s2")
        with pytest.raises(MovedError):
            world.hub.push("n0", pushed(world, "n0", 1))
        host, part = world.hosts["s2"], world.hub.part_for("s2")
        assert host is not None
        with pytest.raises(LedgerDamagedError):
            host._open(part, part.places[1])


def test_rounds_at_shards_are_told_once_also_after_a_restart_of_the_hub() -> None:
    with a_world() as world:
        world.whole_round({"n0", "n1"})
        world.agree()
        told = [text for kind, text in world.events if kind == "round.closed"]
        rounds = world.hub.info(full=True)["rounds"]
        world.crash_hub()
        world.agree()
        assert [text for kind, text in world.events if kind == "round.closed"] == told
        again = world.hub.info(full=True)["rounds"]
        assert sorted((r.fragment, r.version) for r in again) == sorted((r.fragment, r.version) for r in rounds)


def test_names_and_addresses_of_shards_outlive_the_hub_and_presence_does_not(tmp_path: Path) -> None:
    now = [0.0]
    book = ShardBook(tmp_path / "shards.json", clock=lambda: now[0])
    assert (book.take_name("s"), book.take_name("s")) == ("s", "s-2")
    book.heard("s", "https://a:1")
    book.heard("s-2")
    assert book.present() == ["s"]
    now[0] = PRESENT_S + 1
    assert book.present() == []
    again = ShardBook(tmp_path / "shards.json", clock=lambda: now[0])
    assert again.url("s") == "https://a:1"
    assert again.take_name("s") == "s-3"


def test_the_share_of_a_fragment_that_pushes_move_is_measured_wherever_it_is() -> None:
    with a_world() as world:
        for _ in range(8):
            world.whole_round({"n0", "n1"})
            world.agree()
        load = world.hub.ledger.shards().fragments
        assert [one.shard for one in load] == ["", "s1", "s2"]
        assert all(0 < one.touched <= 1 for one in load)
        assert min(one.touched for one in load) < 1, "some embedding rows were not touched"
