"""Samples: each goes to one node, and comes back when that node is gone."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_world import Make, Rounds, many_rounds

from ciuic.errors import ConflictError
from ciuic.net import messages as m


@pytest.fixture
def make() -> Iterator[Make]:
    with many_rounds() as made:
        yield made


def numbers(reply: m.LeaseReply) -> set[int]:
    return {n for start, stop in reply.ranges for n in range(start, stop)}


@pytest.mark.parametrize("restart", [False, True])
def test_a_lease_whose_reply_was_lost_is_given_again(make: Make, restart: bool) -> None:
    rounds = make(samples=1000)
    rounds.start("n0", "n1")
    first = rounds.lease("n0", 10)
    if restart:
        rounds.restart()
    assert rounds.lease("n0", 10, request_id=1) == first
    assert rounds.lease("n0", 99, request_id=1) == first
    assert numbers(rounds.lease("n1", 10)) == set(range(10, 20))
    assert numbers(rounds.lease("n0", 10)) == set(range(20, 30))
    assert rounds.counts().leased == 30


def test_a_request_that_was_overtaken_by_a_newer_one_gets_no_samples(make: Make) -> None:
    rounds = make()
    rounds.start("n0")
    rounds.lease("n0", 5)
    second = rounds.lease("n0", 5)
    with pytest.raises(ConflictError, match="request 1 of n0 is older than its request 2"):
        rounds.lease("n0", 5, request_id=1)
    assert rounds.counts().leased == 10
    assert rounds.lease("n0", 5, request_id=2) == second


def test_a_new_worker_of_the_node_numbers_its_requests_from_one_again(make: Make) -> None:
    rounds = make()
    rounds.start("n0")
    rounds.lease("n0", 5)
    rounds.lease("n0", 5)
    rounds.attach("n0")
    assert numbers(rounds.lease("n0", 7, request_id=1)) == set(range(7))
    rounds.restart()
    assert numbers(rounds.lease("n0", 7, request_id=1)) == set(range(7))


def test_the_smallest_lease_is_one_sample(make: Make) -> None:
    rounds = make()
    rounds.start("n0")
    assert rounds.lease("n0", 1).ranges == [(0, 1)]


@pytest.mark.parametrize("count", [0, -5])
def test_a_request_for_nothing_only_tells(make: Make, count: int) -> None:
    rounds = make()
    rounds.start("n0")
    assert rounds.lease("n0", count) == m.LeaseReply(status="wait")


def test_nobody_gets_everything_at_once(make: Make) -> None:
    rounds = make(samples=10_000)
    rounds.start("n0", "n1")
    assert len(numbers(rounds.lease("n0", 1 << 62))) <= 5_000
    assert rounds.lease("n1", 10).status == "granted"


def test_a_node_that_asks_often_never_holds_more_than_half_of_its_part_of_what_is_left(make: Make) -> None:
    rounds = make(samples=10_000)
    rounds.start("n0", "n1")
    while rounds.lease("n0", 1 << 62).status == "granted":
        pass
    assert rounds.ledger.samples.outstanding("n0") <= 2_500
    assert len(numbers(rounds.lease("n1", 1 << 62))) > 2_000


def test_leases_are_whole_steps_until_the_last_samples(make: Make) -> None:
    total, step = 10_005, 24
    rounds = make(samples=total)
    rounds.start("n0", "n1")
    sizes: list[int] = []
    for request_id in range(1, 1000):
        request = m.LeaseRequest(incarnation=1, count=1000, request_id=request_id, step=step)
        reply = rounds.ledger.lease("n0", request)
        if reply.status == "finished":
            break
        sizes.append(len(numbers(reply)))
        rounds.push("n0", *reply.ranges)
        rounds.tick(60.0)
    assert sum(sizes) == total
    assert [size for size in sizes if size % step] == [total % step]


def test_while_nothing_is_free_nodes_wait_and_in_the_end_they_hear_the_final_version(make: Make) -> None:
    rounds = make(samples=6)
    rounds.start("n0", "n1")
    first, second = rounds.lease("n0", 3), rounds.lease("n1", 3)
    assert rounds.lease("n0", 3) == m.LeaseReply(status="wait")
    rounds.push("n0", *first.ranges)
    assert rounds.lease("n0", 3).status == "wait"
    rounds.push("n1", *second.ranges)
    assert rounds.version == 1
    for node in ("n0", "n1"):
        assert rounds.lease(node, 3) == m.LeaseReply(status="finished", final_versions=[1])
    rounds.restart()
    assert rounds.lease("n0", 3).status == "finished"


def test_a_request_that_had_to_wait_may_use_its_number_again(make: Make) -> None:
    rounds = make(samples=3)
    rounds.start("n0", "n1")
    rounds.lease("n0", 3)
    assert rounds.lease("n1", 3, request_id=1).status == "wait"
    rounds.ledger.node_gone("n0")
    assert numbers(rounds.lease("n1", 3, request_id=1)) == {0, 1, 2}


@pytest.mark.parametrize("how", ["gone", "detached", "attached again"])
@pytest.mark.parametrize("restart", [False, True])
def test_samples_of_a_node_that_left_are_trained_by_another(make: Make, how: str, restart: bool) -> None:
    rounds = make(samples=6)
    rounds.start("n0", "n1")
    rounds.lease("n0", 4)
    match how:
        case "gone":
            assert rounds.ledger.node_gone("n0") == 4
            assert rounds.ledger.node_gone("n0") == 0
        case "detached":
            rounds.ledger.detach("n0", m.DetachRequest(incarnation=1, reason="drained", detail="asked to"))
            assert "n0 left the run: drained (asked to); 4 leased samples went back" in rounds.events[-1][1]
        case _:
            rounds.attach("n0")
    if restart:
        rounds.restart()
    assert rounds.counts().lost == 0
    assert numbers(rounds.lease("n1", 6)) == set(range(6))


@pytest.mark.parametrize("reason", ["finished", "drained", "stopped", "failed"])
def test_a_request_that_was_still_on_its_way_when_its_worker_left_gets_no_samples(make: Make, reason: Any) -> None:
    rounds = make(samples=20)
    rounds.start("n0", "n1")
    rounds.lease("n0", 5)
    frame = rounds.frame("n0", (0, 5))
    goodbye = m.DetachRequest(incarnation=1, reason=reason)
    rounds.ledger.detach("n0", goodbye)
    told = len(rounds.events)
    rounds.ledger.detach("n0", goodbye)
    assert len(rounds.events) == told, "once is enough"
    with pytest.raises(ConflictError, match="n0 has left the run"):
        rounds.lease("n0", 5)
    with pytest.raises(ConflictError, match="n0 has left the run"):
        rounds.ledger.push("n0", frame)
    assert rounds.member("n0").state == ("done" if reason == "finished" else "gone")
    assert numbers(rounds.lease("n1", 20)) == set(range(20))
    assert rounds.attach("n0").state == "ready"
    assert rounds.lease("n0", 5).status == "wait"


def test_a_node_that_was_thought_dead_speaks_again_and_is_a_member_again(make: Make) -> None:
    rounds = make(samples=20)
    rounds.start("n0", "n1")
    held = rounds.lease("n0", 4)
    epoch = rounds.ledger.epoch
    rounds.ledger.node_gone("n0")
    assert rounds.member("n0").state == "gone"
    assert rounds.lease("n0", 4).status == "granted"
    assert rounds.member("n0").state == "warming"
    assert rounds.ledger.epoch == epoch + 2
    assert rounds.kinds()[-1] == "worker.revived"
    rounds.restart()
    assert rounds.ledger.epoch == epoch + 2
    assert rounds.member("n0").state == "warming"
    # Its old lease went back; what it trained of it merges all the same, and is counted once.
    rounds.push("n0", *held.ranges)
    rounds.train("n1", 4)
    assert rounds.counts().duplicated == 0
    assert rounds.counts().lost == 0


def test_samples_trained_twice_are_counted_as_duplicated(make: Make) -> None:
    rounds = make(samples=8)
    rounds.start("n0", "n1")
    held = rounds.lease("n0", 4)
    rounds.ledger.node_gone("n0")
    rounds.train("n1", 4)
    assert rounds.version == 1
    assert rounds.push("n0", *held.ranges).status == "accepted"
    rounds.train("n1", 4)
    assert rounds.version == 2
    counts = rounds.counts()
    assert (counts.committed, counts.duplicated, counts.lost, counts.leased) == (8, 4, 0, 8)
    rounds.restart()
    assert rounds.counts() == counts


NODES = ["n0", "n1", "n2"]
EVENTS = st.tuples(st.sampled_from(["train", "train", "dies", "restart"]), st.sampled_from(NODES), st.integers(1, 9))


@settings(max_examples=40)
@given(total=st.integers(1, 60), events=st.lists(EVENTS, max_size=20))
def test_whatever_the_order_of_leases_and_deaths_each_sample_is_trained_once(
    total: int, events: list[tuple[str, str, int]]
) -> None:
    with many_rounds() as make:
        rounds = make(samples=total)
        rounds.start(*NODES)
        for event, node, count in events:
            if event == "restart":
                rounds.restart()
            elif event == "dies":
                rounds.lease(node, count)
                rounds.attach(node)
            else:
                train(rounds, node, count)
            rounds.tick(6.0)
        finish(rounds)
        info, counts = rounds.ledger.info(full=True), rounds.counts()
        assert (counts.committed, counts.duplicated, counts.lost) == (total, 0, 0)
        assert info["progress"] == 1.0
        assert sum(r.tokens for r in info["rounds"]) == total


def train(rounds: Rounds, node: str, count: int) -> str:
    if rounds.ledger.fragments[0].inbox.has_from(node):
        return "its push is on its way"
    reply = rounds.lease(node, count)
    if reply.ranges:
        assert rounds.push(node, *reply.ranges).status == "accepted"
    return reply.status


def finish(rounds: Rounds) -> None:
    for _ in range(200):
        states = {train(rounds, node, 4) for node in NODES}
        rounds.tick(6.0)
        if states == {"finished"}:
            return
    pytest.fail("the run does not come to its end")
