"""Pushes at the hub: what is accepted, what is refused, and when a round closes over them."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_world import Make, Rounds, many_rounds

from ciuic.errors import FrameError, NotFoundError, RoleError
from ciuic.hub.run import fragment_rounds
from ciuic.ledger.entry import Push, entry_from_frame, push_from_frame


@pytest.fixture
def make() -> Iterator[Make]:
    with many_rounds() as made:
        yield made


def altered(frame: bytes, *, size: int | None = None, **changes: Any) -> bytes:
    """The frame of a push with another header, or with so many bytes of payload; its checksum is right."""
    push = push_from_frame(frame)
    payload = push.payload if size is None else np.resize(push.payload, size)
    return Push(header=msgspec.structs.replace(push.header, **changes), payload=payload).to_frame()


def unharmed(rounds: Rounds) -> tuple[Any, ...]:
    """What a refused push must not change."""
    fragment = rounds.ledger.fragments[0]
    waiting = sorted(fragment.inbox.waiting)
    files = sorted(path.name for path in (fragment.store.folder / "pushes").iterdir())
    return fragment.aggregator.digest, waiting, files, rounds.counts(), rounds.ledger.epoch


# ---- rounds


def test_a_round_closes_when_all_have_pushed_and_everybody_is_woken(make: Make) -> None:
    rounds = make()
    rounds.settled("n0", "n1", "n2")
    version, wakes = rounds.version, rounds.wakes
    for node in ("n0", "n1"):
        reply = rounds.train(node)
        assert (reply.status, reply.hub_version) == ("accepted", version)
    assert rounds.wakes == wakes
    assert rounds.train("n2").hub_version == version + 1
    assert rounds.entry_nodes(version + 1) == ["n0", "n1", "n2"]
    assert rounds.wakes > wakes
    told = rounds.latest("round.closed")
    assert f"round {version + 1} closed by complete: n0, n1, n2; 15 tokens" in told


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_all_who_ask_for_the_newest_entry_get_what_is_in_the_log(
    make: Make, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    monkeypatch.setattr(fragment_rounds, "KEPT_BYTES", kept_bytes)
    rounds = make()
    rounds.settled("n0")
    for _ in range(3):
        rounds.train("n0")
        before, log = rounds.version - 1, rounds.ledger.local_fragments()[0].store.log
        first, second = (rounds.ledger.entries_after(0, before, 1) for _ in range(2))
        assert first == second == [log.read(len(log) - 1)]
        assert rounds.ledger.entries_after(0, rounds.version, 1) == []


def test_a_round_closes_at_its_deadline_without_the_missing_node(make: Make) -> None:
    rounds = make(min_fraction=0.5)
    rounds.settled("n0", "n1")
    version = rounds.version
    rounds.train("n0")
    assert rounds.tick() == 1.0  # asks to be called again before the deadline, at least once a second
    assert rounds.tick(4.5) == pytest.approx(0.5)
    assert rounds.version == version
    rounds.tick(0.6)
    assert rounds.version == version + 1
    assert rounds.entry_nodes(version + 1) == ["n0"]
    assert "closed by deadline" in rounds.latest("round.closed")


def test_two_of_three_make_a_round_and_one_does_not(make: Make) -> None:
    rounds = make()
    rounds.settled("n0", "n1", "n2")
    version = rounds.version
    rounds.train("n0")
    rounds.tick(1000)
    assert rounds.version == version
    rounds.train("n1")
    assert rounds.version == version + 1


def test_a_late_push_is_carried_into_the_next_round_with_its_weight(make: Make) -> None:
    rounds = make(min_fraction=0.5)
    rounds.settled("n0", "n1")
    late = rounds.frame("n1", *rounds.lease("n1", 7).ranges)
    rounds.train("n0")
    rounds.tick(6)
    version = rounds.version
    assert rounds.ledger.push("n1", late).status == "accepted"
    rounds.tick(1000)
    assert rounds.version == version, "a late push starts no clock"
    rounds.train("n0", 5)
    assert rounds.version == version + 1
    info = rounds.ledger.info(full=True)["rounds"][-1]
    assert (info.nodes, info.staleness, info.tokens) == (["n0", "n1"], [0, 1], 12)
    assert "carried: n1 (1 behind)" in rounds.latest("round.closed")
    assert rounds.member("n1").staleness == 1


def test_a_joiner_is_not_waited_for_before_its_first_merged_push(make: Make) -> None:
    rounds = make()
    rounds.settled("n0")
    rounds.attach("joiner")
    held = rounds.lease("joiner", 5)
    version = rounds.version
    rounds.train("n0")
    assert rounds.version == version + 1, "nobody waits for the joiner"
    assert rounds.push("joiner", *held.ranges).status == "accepted"
    assert rounds.member("joiner").state == "warming"
    rounds.train("n0")
    assert rounds.entry_nodes(version + 2) == ["joiner", "n0"]
    assert rounds.member("joiner").state == "training"
    rounds.train("n0")
    assert rounds.version == version + 2, "now it is waited for"
    rounds.train("joiner")
    assert rounds.version == version + 3


def test_a_node_without_samples_is_not_waited_for(make: Make) -> None:
    rounds = make(samples=10)
    rounds.settled("n0", "n1")  # 4 samples
    version = rounds.version
    last = rounds.lease("n0", 6)
    assert rounds.lease("n1", 1).status == "wait"
    rounds.push("n0", *last.ranges)
    assert rounds.version == version + 1
    assert rounds.member("n1").state == "idle"


def test_a_round_does_not_wait_for_a_node_that_is_gone(make: Make) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    version = rounds.version
    rounds.lease("n1", 5)
    rounds.train("n0")
    assert rounds.version == version
    rounds.ledger.node_gone("n1")
    assert rounds.version == version + 1


@pytest.mark.parametrize("how", ["gone", "attached again"])
def test_an_accepted_push_of_a_worker_that_died_still_merges(make: Make, how: str) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    version = rounds.version
    assert rounds.train("n1").status == "accepted"
    if how == "gone":
        rounds.ledger.node_gone("n1")
    else:
        rounds.attach("n1")
    rounds.train("n0")
    assert rounds.version == version + 1
    assert rounds.entry_nodes(version + 1) == ["n0", "n1"]
    assert rounds.counts().lost == 0
    assert rounds.member("n1").pushes_merged == 2
    assert rounds.member("n1").state == ("gone" if how == "gone" else "warming"), "that push was not of this worker"


def test_both_pushes_of_a_node_that_restarted_merge_one_round_after_the_other(make: Make) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    version = rounds.version
    rounds.train("n1")
    rounds.attach("n1")
    rounds.train("n1")
    rounds.train("n0")
    rounds.train("n0")
    incarnations = []
    for frame in rounds.ledger.entries_after(0, version, 1 << 30):
        contributors = entry_from_frame(frame).header.contributors
        incarnations.append([c.incarnation for c in contributors if c.node == "n1"])
    assert incarnations == [[1], [2]]


def test_fragments_have_rounds_of_their_own_and_samples_count_once(make: Make) -> None:
    rounds = make(fragments=2)
    rounds.start("n0")
    held = rounds.lease("n0", 5)
    rounds.push("n0", fragment=1, tokens=5)
    assert rounds.ledger.info(full=False)["versions"] == [0, 1]
    rounds.push("n0", *held.ranges)
    assert rounds.ledger.info(full=False)["versions"] == [1, 1]
    assert rounds.counts().committed == 5
    assert rounds.counts().duplicated == 0


def test_entries_say_how_many_samples_of_the_run_are_committed(make: Make) -> None:
    rounds = make()
    rounds.start("n0")
    for expected in (5, 10, 15):
        rounds.train("n0", 5)
        frame = rounds.ledger.entries_after(0, rounds.version - 1, 1 << 30)[0]
        assert entry_from_frame(frame).header.samples_committed == expected


# ---- duplicates


def test_a_push_that_comes_again_is_a_duplicate_before_and_after_its_round_and_a_restart(make: Make) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    frame = rounds.frame("n0", *rounds.lease("n0", 5).ranges)
    assert rounds.ledger.push("n0", frame).status == "accepted"
    before = unharmed(rounds)
    assert rounds.ledger.push("n0", frame).status == "duplicate"
    assert unharmed(rounds) == before
    rounds.restart()
    assert rounds.ledger.push("n0", frame).status == "duplicate"
    rounds.train("n1")
    before = unharmed(rounds)
    assert rounds.ledger.push("n0", frame).status == "duplicate"
    rounds.restart()
    assert rounds.ledger.push("n0", frame).status == "duplicate"
    assert unharmed(rounds) == before
    assert rounds.member("n0").pushes_accepted == 2


def test_an_older_sequence_number_is_a_duplicate_whatever_it_holds(make: Make) -> None:
    rounds = make()
    rounds.start("n0")
    rounds.train("n0")
    rounds.train("n0")
    before = unharmed(rounds)
    assert rounds.push("n0", (50, 60), sequence=1, value=9.0).status == "duplicate"
    assert unharmed(rounds) == before


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        ({"base_version": 99}, "ahead", "its base is version 99, the hub has 1"),
        ({"layout_digest": "0" * 32}, "wrong-layout", "another layout or codec"),
        ({"codec": "1-bit"}, "wrong-layout", "another layout or codec"),
        ({"counters": (1, 2, 3)}, "wrong-layout", "3 counters"),
        ({"ranges": ((90, 101),)}, "wrong-layout", "samples past the end of the run (100)"),
        ({"ranges": ((0, 2**62),)}, "wrong-layout", "samples past the end"),
    ],
    ids=str,
)
def test_a_push_that_does_not_fit_is_rejected_with_the_reason_and_harms_nothing(
    make: Make, changes: dict[str, Any], reason: str, says: str
) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    before = unharmed(rounds)
    reply = rounds.push("n0", **changes)
    assert (reply.status, reply.reason) == ("rejected", reason)
    assert says in reply.detail
    assert unharmed(rounds) == before
    assert rounds.events[-1][0] == "push.rejected"
    assert rounds.member("n0").pushes_rejected == 1
    assert rounds.train("n0").status == "accepted"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_push_that_is_not_finite_is_rejected_with_its_parameter(make: Make, bad: float) -> None:
    rounds = make(compression="none")
    rounds.settled("n0", "n1")
    before = unharmed(rounds)
    reply = rounds.push("n0", (10, 12), value=bad)
    assert (reply.status, reply.reason) == ("rejected", "not-finite")
    assert "f0.embed[0]" in reply.detail
    assert unharmed(rounds) == before


@pytest.mark.parametrize(("behind", "status"), [(2, "accepted"), (3, "rejected")])
def test_a_push_on_a_base_that_is_too_old_is_rejected_as_stale(make: Make, behind: int, status: str) -> None:
    rounds = make(max_staleness=2)
    rounds.start("n0", "n1")
    old = rounds.frame("n1", *rounds.lease("n1", 5).ranges)
    for _ in range(behind):
        rounds.train("n0")
        rounds.tick(6)
    assert rounds.version == behind
    reply = rounds.ledger.push("n1", old)
    assert reply.status == status
    if status == "rejected":
        assert reply.reason == "stale"
        assert rounds.counts().lost == 0
        assert rounds.ledger.samples.outstanding("n1") == 5, "its samples stay with the node"


@pytest.mark.parametrize("changes", [{"node": "n1"}, {"run": "r2"}, {"node": ""}, {"node": "../n1"}], ids=str)
def test_a_push_in_another_name_or_for_another_run_is_refused(make: Make, changes: dict[str, str]) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    before = unharmed(rounds)
    with pytest.raises(RoleError, match="n0 sent a push of"):
        rounds.ledger.push("n0", altered(rounds.frame("n0", (10, 12)), **changes))
    assert unharmed(rounds) == before


def test_a_push_for_a_fragment_that_is_not_there_is_refused(make: Make) -> None:
    rounds = make()
    rounds.start("n0")
    for fragment in (-1, 1, 2**40):
        with pytest.raises(NotFoundError, match="no fragment"):
            rounds.ledger.push("n0", altered(rounds.frame("n0"), fragment=fragment))


@settings(max_examples=30)
@given(place=st.integers(0), bit=st.integers(0, 7), keep=st.integers(0))
def test_a_damaged_or_cut_push_is_refused_and_the_good_one_is_accepted_after_it(
    place: int, bit: int, keep: int
) -> None:
    with many_rounds() as make:
        rounds = make()
        rounds.settled("n0", "n1")
        frame = rounds.frame("n0", (10, 12))
        before = unharmed(rounds)
        flipped = bytearray(frame)
        flipped[place % len(frame)] ^= 1 << bit
        for bad in (bytes(flipped), frame[: keep % len(frame)], frame + b"\0", b""):
            with pytest.raises(FrameError):
                rounds.ledger.push("n0", bad)
        assert unharmed(rounds) == before
        assert rounds.ledger.push("n0", frame).status == "accepted"


@pytest.mark.parametrize("change", [-1, 1, -(10**9)])
def test_a_push_whose_payload_has_another_size_is_refused(make: Make, change: int) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    before = unharmed(rounds)
    good = rounds.frame("n0", (10, 12))
    size = max(0, len(push_from_frame(good).payload) + change)
    with pytest.raises(FrameError, match="the payload has"):
        rounds.ledger.push("n0", altered(good, size=size))
    assert unharmed(rounds) == before


# ---- pushes that become too old while they wait


def stale_while_waiting(rounds: Rounds) -> list[tuple[int, int]]:
    """A push of n2's second worker that waits behind one of its first, on a base as old as is accepted."""
    rounds.settled("n0", "n2")
    rounds.train("n2", 3)
    rounds.attach("n2")
    held = rounds.lease("n2", 4).ranges
    assert rounds.push("n2", *held, base_version=0).status == "accepted"
    return held


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("node_is", ["alive", "gone", "attached again"])
def test_a_waiting_push_that_became_too_old_is_rejected_and_its_samples_are_trained_again(
    make: Make, node_is: str, restart: bool
) -> None:
    rounds = make(samples=40, max_staleness=1)
    held = stale_while_waiting(rounds)
    version = rounds.version
    if node_is == "gone":
        rounds.ledger.node_gone("n2")
    elif node_is == "attached again":
        rounds.attach("n2")
    rounds.train("n0", 3)
    assert rounds.version == version + 1
    assert ("n2", 2, 1) in rounds.ledger.fragments[0].inbox.waiting
    rounds.train("n0", 3)
    entry = entry_from_frame(rounds.ledger.entries_after(0, rounds.version - 1, 0)[0])
    assert [(r.node, r.incarnation, r.reason) for r in entry.header.rejected] == [("n2", 2, "stale")]
    if restart:
        rounds.restart()
    assert rounds.counts().lost == 0
    assert rounds.member("n2").pushes_rejected == 1
    assert rounds.member("n2").pushes_accepted == 3
    if node_is == "alive":
        assert rounds.push("n2", *held).status == "accepted", "it pushes them again"
    else:
        again = rounds.lease("n0", 4).ranges
        assert again == held, "they are free: another node gets them"
        rounds.push("n0", *again)
    rounds.train("n0", 3)
    assert rounds.counts().duplicated == 0
    assert all(rounds.ledger.samples.committed.within(a, b) == [(a, b)] for a, b in held)


def test_the_last_round_closes_also_when_all_that_waits_is_too_old(make: Make) -> None:
    rounds = make(samples=12, max_staleness=0)
    rounds.start("n0", "n2")
    last = rounds.lease("n0", 4)
    rounds.train("n2", 4)
    rounds.attach("n2")
    rounds.train("n2", 4)  # waits behind the push of the worker before
    rounds.push("n0", *last.ranges)
    assert rounds.version == 1
    rounds.tick()
    assert rounds.version == 2
    assert rounds.ledger.info(full=True)["rounds"][-1].staleness == [1]
    assert rounds.lease("n0").status == "finished"
    counts = rounds.counts()
    assert (counts.committed, counts.duplicated, counts.lost) == (12, 0, 0)
