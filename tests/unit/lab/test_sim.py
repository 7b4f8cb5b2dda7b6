"""`ciuic lab sim`: the hub's machines and many nodes in virtual time, and whether its proof can fail."""

import pytest

from ciuic.errors import UsageError
from ciuic.lab.sim import SimConfig, growth_exponent, growth_sizes, simulate
from ciuic.ledger.intervals import Range
from ciuic.ledger.samples import SampleLedger


@pytest.mark.parametrize("profile", ["homogeneous", "continents", "flapping"])
def test_every_invariant_holds_through_failures_and_one_seed_gives_one_story(profile: str) -> None:
    config = SimConfig(nodes=12, rounds=8, seed=3, profile=profile)
    first, second = simulate(config), simulate(config)
    assert first.proof.problems == []
    assert first.proof.all_hold
    assert first.versions >= 8
    assert first.story_digest == second.story_digest
    assert first.story_digest != simulate(SimConfig(nodes=12, rounds=8, seed=4, profile=profile)).story_digest


def test_fifty_nodes_and_twenty_rounds_with_failures_hold() -> None:
    found = simulate(SimConfig(nodes=50, rounds=20, seed=1, profile="flapping"))
    assert found.proof.problems == []
    assert found.troubles
    assert found.proof.samples["committed"] == found.proof.samples["total"]


def test_the_cost_of_a_round_grows_at_most_about_linearly_with_the_nodes() -> None:
    cost = {n: simulate(SimConfig(nodes=n, rounds=6, faults=False)).round_s for n in (20, 200)}
    assert growth_exponent(cost) < 1.3


def test_samples_that_are_given_out_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lease(self: SampleLedger, node: str, count: int) -> list[Range]:
        ranges = self.free.copy().take(count)  # and they stay free
        self._own(node, ranges)
        return ranges

    monkeypatch.setattr(SampleLedger, "lease", lease)
    found = simulate(SimConfig(nodes=4, rounds=4, faults=False))
    assert not found.proof.all_hold
    assert found.proof.problems


def test_sizes_and_what_cannot_be_simulated() -> None:
    assert growth_sizes(1000) == [10, 100, 1000]
    with pytest.raises(UsageError, match="cannot be simulated"):
        simulate(SimConfig(nodes=0))
