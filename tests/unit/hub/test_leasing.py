"""Leases over outages, silences and deaths: nobody is trained out of, nobody sits on samples, duplicates are honest."""

from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from examples import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rounds_world import Make, Rounds, many_rounds

from ciuic.errors import CiuicError
from ciuic.ledger.intervals import IntervalSet, Range
from ciuic.net import messages as m
from ciuic.train.leases import Leases


@pytest.fixture
def make() -> Iterator[Make]:
    with many_rounds() as made:
        yield made


def numbers(ranges: list[Range]) -> list[int]:
    return [n for start, stop in ranges for n in range(start, stop)]


class Hands:
    """A worker as far as samples go: its leases are the real ones, its training is counting."""

    def __init__(self, rounds: Rounds, node: str, *, step: int = 1, rate: float = 0.0, ahead: int = 4) -> None:
        self.rounds, self.node, self.step, self.rate = rounds, node, step, rate
        self.ahead = ahead
        self.unpushed: list[int] = []
        self.budget = 0.0
        self.idle_s = 0.0
        self.finished = False
        self.begin()

    def begin(self) -> None:
        """A new worker process."""
        incarnation = self.rounds.incarnations[self.node]
        self.leases = Leases("r1", incarnation, chunk=self.step, ahead=self.ahead, step=self.step)
        self.unpushed = []

    @property
    def ready(self) -> list[int]:
        return numbers(self.leases.ready)

    def ask(self, *, is_lost: bool = False) -> m.LeaseReply:
        """One request; its reply may be lost."""
        ready = len(self.ready)
        request = self.leases.request(max(self.step, self.ahead - ready) if ready < self.ahead else 0)
        reply = self.rounds.ledger.lease(self.node, request)
        if not is_lost:
            self.leases.take_reply(reply)
            self.finished = reply.status == "finished"
        return reply

    def train(self, count: int) -> list[int]:
        taken = numbers(self.leases.take(count))
        self.unpushed += taken
        return taken

    def push(self) -> list[int]:
        """All that was trained since the last push, unless that one still waits for its round."""
        if self.rounds.ledger.fragments[0].inbox.has_from(self.node):
            return []
        pushed, self.unpushed = self.unpushed, []
        if pushed:
            ranges = list(IntervalSet((n, n + 1) for n in pushed))
            reply = self.rounds.push(self.node, *ranges)
            assert reply.status == "accepted", f"{reply.reason}: {reply.detail}"
            self.leases.accepted(ranges)
        return pushed

    def report(self) -> None:
        step_s = self.step / self.rate if self.rate else 0.0
        request = m.ReportRequest(incarnation=self.leases.incarnation, step=0, samples=0, tokens=0, step_s=step_s)
        self.rounds.ledger.report(self.node, request)

    def live(self, seconds: float) -> None:
        """Train for so long at its speed; ask and report once."""
        self.report()
        self.budget += self.rate * seconds
        while self.budget >= self.step and not self.finished:
            if not self.ready:
                self.ask()
            if not self.train(self.step):
                self.push()
                self.ask()
                if not self.ready:
                    self.idle_s += seconds
                    self.budget = 0.0
                    break
            self.budget -= self.step
        self.push()
        self.ask()


def crew(rounds: Rounds, *nodes: str, **options: float) -> list[Hands]:
    rounds.start(*nodes)
    return [Hands(rounds, node, **options) for node in nodes]


# ---- the end of a run


@pytest.mark.parametrize("rates", [(10, 10, 10), (40, 10, 10), (100, 5, 1)])
@pytest.mark.parametrize("outage_s", [30, 180])
def test_all_workers_run_dry_at_the_same_time_however_unlike_and_however_far_they_lease_ahead(
    make: Make, rates: tuple[int, ...], outage_s: int
) -> None:
    total = sum(rates) * 100
    rounds = make(samples=total)
    nodes = [f"n{i}" for i in range(len(rates))]
    rounds.start(*nodes)
    workers = [
        Hands(rounds, node, rate=rate, step=max(1, rate // 5), ahead=rate * outage_s)
        for node, rate in zip(nodes, rates, strict=True)
    ]
    seconds = 0
    while not all(worker.finished for worker in workers):
        rounds.tick(1.0)
        seconds += 1
        for worker in workers:
            worker.live(1.0)
        assert seconds < 200, "somebody sits on samples"
    assert seconds <= 100 + 12
    assert max(worker.idle_s for worker in workers) <= 8
    assert rounds.counts().duplicated == 0


def test_far_from_the_end_each_worker_has_samples_for_the_outage_it_must_outlast(make: Make) -> None:
    rounds = make(samples=10_000)
    rounds.start("n0", "n1")
    workers = [Hands(rounds, node, rate=rate, ahead=180 * rate) for node, rate in (("n0", 10), ("n1", 2))]
    for _ in range(5):
        rounds.tick(1.0)
        for worker in workers:
            worker.live(1.0)
    assert [len(worker.ready) >= 178 * worker.rate for worker in workers] == [True, True]


def test_a_worker_that_has_become_slow_gives_back_what_it_has_not_started(make: Make) -> None:
    rounds = make(samples=1000)
    rounds.start("n0", "n1")
    fast, slow = (Hands(rounds, node, rate=20, ahead=3600) for node in ("n0", "n1"))
    for _ in range(3):
        rounds.tick(1.0)
        for worker in (fast, slow):
            worker.live(1.0)
    held = len(slow.ready)
    assert held > 200
    slow.rate = 0.5
    seconds = 3
    while not (fast.finished and slow.finished):
        rounds.tick(1.0)
        seconds += 1
        for worker in (fast, slow):
            worker.live(1.0)
        assert seconds < 60
    assert rounds.counts().duplicated == 0


def test_what_comes_back_is_not_the_workers_any_more_and_the_same_request_again_changes_nothing(make: Make) -> None:
    rounds = make(samples=20)
    rounds.start("n0", "n1")
    rounds.lease("n0", 8)
    returned = m.LeaseRequest(incarnation=1, count=0, request_id=2, ready=4, holds=[(0, 4)], returned=[(4, 8)])
    assert rounds.ledger.lease("n0", returned).void == []
    assert numbers(rounds.lease("n1", 4).ranges) == [4, 5, 6, 7]
    assert rounds.ledger.lease("n0", returned).status == "wait"
    assert rounds.ledger.samples.outstanding("n1") == 4
    rounds.restart()
    assert rounds.ledger.samples.outstanding("n0") == 4
    assert rounds.counts().lost == 0


@pytest.mark.parametrize("ranges", [[(0, 21)], [(5, 5)], [(-1, 3)], [(n, n + 1) for n in range(4097)]])
@pytest.mark.parametrize("field", ["holds", "returned"])
def test_ranges_that_no_run_has_are_refused(make: Make, field: str, ranges: list[Range]) -> None:
    rounds = make(samples=20)
    rounds.start("n0")
    request = m.LeaseRequest(incarnation=1, count=1, request_id=1, **{field: ranges})
    with pytest.raises(CiuicError, match="names samples that the run does not have"):
        rounds.ledger.lease("n0", request)
    assert rounds.counts().leased == 0


# ---- silence


def silence(rounds: Rounds, *speaking: Hands, seconds: int = 12) -> None:
    for _ in range(seconds):
        rounds.tick(1.0)
        for worker in speaking:
            worker.report()


def test_a_worker_that_stands_still_is_not_waited_for_after_the_grace_although_its_node_lives(make: Make) -> None:
    rounds = make(samples=100, deadline=1e6)
    rounds.settled("n0", "n1")
    a, b = Hands(rounds, "n0"), Hands(rounds, "n1")
    for worker in (a, b):
        worker.ask()  # the answer to request 1, which `settled` has used up
        worker.ask()
    a.train(2)
    a.push()
    version = rounds.version
    silence(rounds, a, b)
    assert rounds.version == version, "b speaks: the round waits for it"
    silence(rounds, a)
    assert rounds.version == version + 1
    b.report()
    a.ask()
    a.train(1)
    a.push()
    silence(rounds, a, b, seconds=3)
    assert rounds.version == version + 1, "b speaks again: the round waits for it"


def test_samples_of_a_worker_that_stands_still_are_trained_by_others_only_when_they_have_nothing_else(
    make: Make,
) -> None:
    rounds = make(samples=12)
    a, b = crew(rounds, "n0", "n1", ahead=6)
    b.ask()
    assert b.ready == [0, 1, 2, 3, 4, 5]
    silence(rounds, a)
    a.ask()
    assert a.ready == [6, 7, 8, 9, 10, 11], "there are others"
    assert "worker.silent" not in rounds.kinds()
    a.train(6)
    a.push()
    a.ask()
    assert a.ready == [0, 1, 2, 3, 4, 5]
    assert rounds.kinds().count("worker.silent") == 1
    b.ask()
    assert b.ready == []


def test_a_worker_that_wakes_up_keeps_what_nobody_else_has_taken(make: Make) -> None:
    rounds = make(samples=12)
    a, b = crew(rounds, "n0", "n1", ahead=6)
    b.ask()
    b.train(2)
    a.ask()
    a.train(6)
    a.push()
    silence(rounds, a)
    a.ahead = 3
    a.ask()
    assert a.ready == [0, 1, 2]
    rounds.restart()
    b.ask()
    assert b.ready == [3, 4, 5], "0 and 1 it has trained, 2 is started by the other"
    b.push()
    a.ask()
    assert a.ready == [2], "what b has trained need not be trained again"
    a.train(1)
    b.train(3)
    a.push()
    b.push()
    rounds.tick(60.0)
    counts = rounds.counts()
    assert (counts.committed, counts.duplicated, counts.lost) == (12, 0, 0)


def test_nobody_is_silent_because_the_hub_was_away(make: Make) -> None:
    rounds = make(samples=12)
    a, b = crew(rounds, "n0", "n1", ahead=6)
    a.ask()
    b.ask()
    rounds.now += 3600
    rounds.restart()
    a.train(6)
    a.push()
    rounds.tick(1.0)
    a.ask()
    assert a.ready == []
    rounds.tick(3600.0)  # the hub's process stood still
    a.ask()
    assert a.ready == []
    assert b.ready == [6, 7, 8, 9, 10, 11]


# ---- out of touch


@pytest.mark.parametrize("restart", [False, True])
def test_a_node_that_was_cut_off_and_comes_back_drops_only_what_others_have_taken(make: Make, restart: bool) -> None:
    rounds = make(samples=100)
    a, b = crew(rounds, "n0", "n1", ahead=10)
    b.ask()
    rounds.ledger.node_gone("n1")
    b.train(4)
    a.ahead = 6
    a.ask()
    assert a.ready == [0, 1, 2, 3, 4, 5]
    if restart:
        rounds.restart()
    b.ask()
    assert b.ready[:4] == [6, 7, 8, 9]
    b.push()  # 0..3, which the other has not started
    a.ask()
    assert a.ready[:2] == [4, 5]
    a.train(20)
    a.push()
    assert rounds.counts().duplicated == 0


# ---- any order


class Leasings(RuleBasedStateMachine):
    """Requests, lost replies, training, pushes, deaths, silences, kills of the hub: in any order."""

    nodes = ("n0", "n1", "n2")

    @initialize(total=st.integers(1, 80), ahead=st.integers(1, 60))
    def begin(self, total: int, ahead: int) -> None:
        self.context = many_rounds()
        self.rounds = self.context.__enter__()(samples=total)
        self.total = total
        self.workers = {w.node: w for w in crew(self.rounds, *self.nodes, ahead=ahead)}
        self.pushed: Counter[int] = Counter()
        self.has_lost_touch = False

    def worker(self, index: int) -> Hands:
        return self.workers[self.nodes[index]]

    NODE = st.integers(0, 2)

    @rule(node=NODE, is_lost=st.booleans())
    def asks(self, node: int, is_lost: bool) -> None:
        worker = self.worker(node)
        worker.ask(is_lost=is_lost)
        if not is_lost:
            owned = numbers(list(self.rounds.ledger.samples.leased.get(worker.node, ())))
            assert set(worker.ready) <= set(owned), "it would train what others have"

    @rule(node=NODE, count=st.integers(1, 9))
    def trains(self, node: int, count: int) -> None:
        self.worker(node).train(count)

    @rule(node=NODE)
    def pushes(self, node: int) -> None:
        self.pushed.update(self.worker(node).push())

    @rule(node=NODE)
    def work_is_lost(self, node: int) -> None:
        worker = self.worker(node)
        worker.leases.put_back(IntervalSet((n, n + 1) for n in worker.unpushed))
        worker.unpushed = []

    @rule(node=NODE, count=st.integers(1, 30))
    def is_asked_for_samples(self, node: int, count: int) -> None:
        worker = self.worker(node)
        reply = self.rounds.ledger.lease(worker.node, worker.leases.request(0))
        worker.leases.take_reply(msgspec.structs.replace(reply, give_back=count))

    @rule(node=NODE)
    def dies_and_comes_back(self, node: int) -> None:
        worker = self.worker(node)
        self.rounds.attach(worker.node)
        worker.begin()

    @rule(node=NODE)
    def is_thought_dead(self, node: int) -> None:
        self.has_lost_touch = True
        self.rounds.ledger.node_gone(self.worker(node).node)

    @rule(node=NODE)
    def stands_still(self, node: int) -> None:
        self.has_lost_touch = True
        silence(self.rounds, *(w for w in self.workers.values() if w is not self.worker(node) and self.speaks(w)))

    def speaks(self, worker: Hands) -> bool:
        return self.rounds.ledger.members[worker.node].is_present

    @rule(seconds=st.sampled_from([0.3, 1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.rounds.tick(seconds)

    @rule()
    def hub_is_killed(self) -> None:
        self.rounds.restart()

    @invariant()
    def no_sample_is_nowhere(self) -> None:
        assert self.rounds.counts().lost == 0

    def teardown(self) -> None:
        try:
            self._finish()
            counts = self.rounds.counts()
            assert counts.committed == self.total
            assert counts.duplicated == sum(self.pushed.values()) - self.total, "duplicates are told as they are"
            if not self.has_lost_touch:
                assert counts.duplicated == 0
        finally:
            self.context.__exit__(None, None, None)

    def _finish(self) -> None:
        for _ in range(400):
            for worker in self.workers.values():
                worker.ask()
                worker.train(3)
                self.pushed.update(worker.push())
            self.rounds.tick(6.0)
            if all(worker.finished for worker in self.workers.values()):
                return
        raise AssertionError("the run does not come to its end")


TestLeasings = Leasings.TestCase
TestLeasings.settings = settings(
    max_examples=examples(30, 600), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
