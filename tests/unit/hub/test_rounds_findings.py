"""What the hub finds in a run from the reports of its nodes."""

from collections.abc import Iterator

import pytest
from rounds_world import Make, many_rounds

from ciuic.net import messages as m


@pytest.fixture
def make() -> Iterator[Make]:
    with many_rounds() as made:
        yield made


def test_a_base_with_another_digest_is_found_after_two_reports_and_gone_after_a_right_one(make: Make) -> None:
    rounds = make(samples=4)
    rounds.settled("n0", "n1")
    known = rounds.ledger.fragments[0]

    def report(digest: str) -> list[tuple[str, list[str], str]]:
        base = {"base_versions": [known.version], "base_digests": [digest]}
        rounds.ledger.report("n1", m.ReportRequest(incarnation=1, step=1, samples=2, tokens=2, **base))
        return [(f.code, f.nodes, f.severity) for f in rounds.ledger.info(full=True)["findings"]]

    assert report("another") == []
    assert report("another") == [("CIUIC-M1", ["n1"], "critical")]
    assert report(known.digest) == []


def test_a_worker_that_ended_because_of_its_base_is_remembered(make: Make) -> None:
    rounds = make(samples=4)
    rounds.settled("n0", "n1")
    detail = "DigestMismatchError: version 1 came out different here"
    rounds.ledger.detach("n1", m.DetachRequest(incarnation=1, reason="failed", detail=detail))
    assert [f.code for f in rounds.ledger.info(full=True)["findings"]] == ["CIUIC-M1"]


def test_losses_of_the_same_step_count_once(make: Make) -> None:
    rounds = make(samples=4)
    rounds.settled("n0", "n1")
    for step in [1] * 12 + list(range(2, 7)):
        for node, loss in (("n0", 1.0), ("n1", 4.0)):
            rounds.ledger.report(node, m.ReportRequest(incarnation=1, step=step, samples=2, tokens=2, loss=loss))
    assert rounds.ledger.info(full=True)["findings"] == []
    for step in (7, 8):
        for node, loss in (("n0", 1.0), ("n1", 4.0)):
            rounds.ledger.report(node, m.ReportRequest(incarnation=1, step=step, samples=2, tokens=2, loss=loss))
    assert [(f.code, f.nodes) for f in rounds.ledger.info(full=True)["findings"]] == [("CIUIC-M4", ["n1"])]
