"""The sample ledger against plain sets: no sample is ever nowhere, and the run ends with each one committed."""

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ciuic.hub.run.history import sample_counts
from ciuic.ledger.intervals import IntervalSet, Range
from ciuic.ledger.samples import SampleLedger

TOTAL = 12
NODES = st.sampled_from(["n0", "n1", "n2"])


def numbers(intervals: IntervalSet | list[Range]) -> set[int]:
    return {n for start, stop in intervals for n in range(start, stop)}


def ranges_of(samples: set[int]) -> list[Range]:
    return list(IntervalSet([(n, n + 1) for n in samples]))


class Samples(RuleBasedStateMachine):
    """Leases, pushes, rounds and deaths in any order; `belief` is what each node thinks it should train."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SampleLedger(TOTAL)
        self.belief: dict[str, set[int]] = {"n0": set(), "n1": set(), "n2": set()}
        self.pushes: list[tuple[str, set[int]]] = []
        self.committed: set[int] = set()
        self.leased: set[int] = set()
        self.duplicated = 0

    @rule(node=NODES, count=st.integers(1, TOTAL))
    def lease(self, node: str, count: int) -> None:
        free = numbers(self.ledger.free)
        got = numbers(self.ledger.lease(node, count))
        assert got == set(sorted(free)[:count]), "the smallest free samples come first"
        self.belief[node] |= got
        self.leased |= got

    @rule(node=NODES, share=st.integers(1, TOTAL))
    def push(self, node: str, share: int) -> None:
        trained = set(sorted(self.belief[node])[:share])
        if trained:
            self.belief[node] -= trained
            self.ledger.accept(ranges_of(trained))
            assert not trained & numbers(self.ledger.free)
            self.pushes.append((node, trained))

    @precondition(lambda self: self.pushes)
    @rule(which=st.integers(0))
    def merge(self, which: int) -> None:
        _, samples = self.pushes.pop(which % len(self.pushes))
        self.duplicated += len(self.committed & samples)
        self.committed |= samples
        self.ledger.commit(ranges_of(samples))

    @precondition(lambda self: self.pushes)
    @rule(which=st.integers(0))
    def reject_of_a_living_node(self, which: int) -> None:
        node, samples = self.pushes.pop(which % len(self.pushes))
        self.ledger.reject(node, ranges_of(samples))
        self.belief[node] |= samples

    @precondition(lambda self: self.pushes)
    @rule(which=st.integers(0))
    def reject_of_a_node_that_is_gone(self, which: int) -> None:
        _, samples = self.pushes.pop(which % len(self.pushes))
        self.ledger.release(ranges_of(samples))

    @rule(node=NODES)
    def restart(self, node: str) -> None:
        held = self.ledger.outstanding(node)
        returned = numbers(self.ledger.give_back(node))
        assert len(returned) == held
        assert self.ledger.outstanding(node) == 0
        self.belief[node] = set()

    @rule(node=NODES)
    def a_living_node_is_thought_dead(self, node: str) -> None:
        self.ledger.give_back(node)

    @rule(node=NODES, share=st.integers(1, TOTAL))
    def gives_back_what_it_has_not_started(self, node: str, share: int) -> None:
        given = set(sorted(self.belief[node])[-share:])
        owned = numbers(self.ledger.owned(node, ranges_of(given)))
        assert owned == given - numbers(self.ledger.not_owned(node, ranges_of(given)))
        self.ledger.give_back(node, ranges_of(owned))
        self.belief[node] -= given
        assert not owned & numbers(self.ledger.owned(node, ranges_of(given)))

    @rule(node=NODES)
    def gets_back_what_nobody_else_took(self, node: str) -> None:
        """It was thought dead and speaks again."""
        again = self.ledger.free.common(ranges_of(self.belief[node]))
        self.ledger.restore_lease(node, again)
        assert numbers(self.ledger.owned(node, again)) == numbers(again)
        self.leased |= numbers(again)

    @invariant()
    def no_sample_is_nowhere_and_no_committed_one_is_free(self) -> None:
        counts = sample_counts(self.ledger)
        assert numbers(self.ledger.committed) == self.committed
        assert numbers(self.ledger.ever_leased) == self.leased
        assert counts.duplicated == self.duplicated
        free = numbers(self.ledger.free)
        assert not free & self.committed
        assert counts.lost == 0
        everywhere = free | self.committed | numbers(self.ledger.waiting)
        for owned in self.ledger.leased.values():
            assert not numbers(owned) & free
            everywhere |= numbers(owned)
        assert everywhere == set(range(TOTAL))

    def teardown(self) -> None:
        for node in self.belief:
            self.ledger.give_back(node)
        while self.ledger.free:
            self.ledger.commit(self.ledger.lease("n0", 7))
        self.ledger.commit(list(self.ledger.waiting))
        assert self.ledger.complete
        assert sample_counts(self.ledger).lost == 0


TestSamples = Samples.TestCase
TestSamples.settings = settings(max_examples=examples(80, 2000), stateful_step_count=30, deadline=None)


def test_every_sample_is_leased_once_and_committed_once_when_nobody_dies() -> None:
    ledger = SampleLedger(10)
    first, second = ledger.lease("n0", 6), ledger.lease("n1", 6)
    assert (first, second) == ([(0, 6)], [(6, 10)])
    assert ledger.lease("n2", 1) == []
    for ranges in (first, second):
        ledger.accept(ranges)
        assert not ledger.complete
    for ranges in (first, second):
        ledger.commit(ranges)
    assert ledger.complete
    assert ledger.duplicated == 0


def test_a_late_push_of_samples_that_were_leased_again_counts_the_overlap() -> None:
    ledger = SampleLedger(10)
    ledger.lease("n0", 6)
    assert ledger.give_back("n0") == [(0, 6)]
    ledger.lease("n1", 4)
    ledger.accept([(0, 6)])  # the late push: its samples are nobody's lease any more
    assert ledger.outstanding("n1") == 0
    assert list(ledger.free) == [(6, 10)]
    ledger.commit([(0, 6)])
    ledger.commit([(0, 4)])
    assert ledger.duplicated == 4
    assert list(ledger.committed) == [(0, 6)]


def test_a_rejected_sample_that_another_push_committed_is_not_free_when_its_node_dies() -> None:
    ledger = SampleLedger(4)
    ledger.lease("n0", 4)
    ledger.give_back("n0")  # thought dead, but it lives
    ledger.lease("n1", 4)
    ledger.accept([(0, 4)])
    ledger.accept([(0, 4)])
    ledger.commit([(0, 4)])
    ledger.reject("n0", [(0, 4)])
    ledger.give_back("n0")
    assert not ledger.free
    assert sample_counts(ledger).lost == 0


def test_part_of_a_lease_can_go_back() -> None:
    ledger = SampleLedger(10)
    ledger.lease("n0", 6)
    assert ledger.give_back("n0", [(2, 4)]) == [(2, 4)]
    assert ledger.outstanding("n0") == 4
    assert ledger.lease("n1", 3) == [(2, 4), (6, 7)]


def test_a_lease_from_the_journal_is_the_same_lease() -> None:
    ledger, again = SampleLedger(10), SampleLedger(10)
    ranges = ledger.lease("n0", 4)
    again.restore_lease("n0", iter(ranges))
    assert (again.free, again.leased, again.ever_leased) == (ledger.free, ledger.leased, ledger.ever_leased)


def test_a_run_of_no_samples_is_complete() -> None:
    ledger = SampleLedger(0)
    assert ledger.complete
    assert ledger.lease("n0", 5) == []
    assert ledger.outstanding("nobody") == 0
    assert ledger.give_back("nobody") == []
    assert sample_counts(ledger).lost == 0
