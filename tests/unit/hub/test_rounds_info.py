"""What people see of a run: sums over workers, held-out losses, the end."""

from collections.abc import Iterator

import pytest
from rounds_world import Make, many_rounds

from ciuic.net import messages as m


@pytest.fixture
def make() -> Iterator[Make]:
    with many_rounds() as made:
        yield made


def test_counts_of_a_member_are_summed_over_its_workers(make: Make) -> None:
    rounds = make()
    rounds.start("n0")
    report = m.ReportRequest(incarnation=1, step=3, samples=12, tokens=120, loss=2.5, wall_s=4.0, longest_stall_s=0.5)
    rounds.ledger.report("n0", report)
    rounds.attach("n0")
    rounds.ledger.report("n0", m.ReportRequest(incarnation=2, step=2, samples=8, tokens=80, wall_s=1.0))
    seen = rounds.member("n0")
    assert (seen.step, seen.samples, seen.tokens, seen.wall_s) == (5, 20, 200, 5.0)
    assert (seen.loss, seen.longest_stall_s, seen.incarnation) == (None, 0.5, 2)
    rounds.restart()
    assert rounds.member("n0").step == 3, "of earlier workers at least"


def test_evaluations_are_remembered_over_a_restart_and_compared_in_the_end(make: Make) -> None:
    rounds = make(samples=4)
    rounds.settled("n0", "n1")
    assert rounds.lease("n0").status == "finished"
    assert rounds.ledger.info(full=False)["loss_consistent"] is None
    for node in ("n0", "n1"):
        rounds.ledger.evaluation(node, m.EvaluationRequest(incarnation=1, version=1, loss=1.25, samples=64, final=True))
        report = m.ReportRequest(incarnation=1, step=1, samples=2, tokens=2, final_digests=["d"])
        rounds.ledger.report(node, report)
    assert rounds.ledger.info(full=False)["loss_consistent"] is True
    rounds.restart()
    points = rounds.ledger.info(full=True)["evaluations"]
    assert [(p.version, p.loss, p.node_id, p.samples_committed, p.final) for p in points] == [
        (1, 1.25, "n0", 4, True),
        (1, 1.25, "n1", 4, True),
    ]
    assert rounds.ledger.info(full=False)["loss_consistent"] is True


@pytest.mark.parametrize("what", ["loss", "digest"])
def test_nodes_that_end_with_different_numbers_are_noticed(make: Make, what: str) -> None:
    rounds = make(samples=4)
    rounds.settled("n0", "n1")
    for number, node in enumerate(("n0", "n1")):
        loss = 1.0 + (number if what == "loss" else 0)
        rounds.ledger.evaluation(node, m.EvaluationRequest(incarnation=1, version=1, loss=loss, samples=1, final=True))
        digests = [f"d{number if what == 'digest' else 0}"]
        rounds.ledger.report(node, m.ReportRequest(incarnation=1, step=1, samples=2, tokens=2, final_digests=digests))
    assert rounds.ledger.info(full=False)["loss_consistent"] is False


def test_a_run_is_finished_when_all_is_committed_and_everybody_has_left(make: Make) -> None:
    rounds = make(samples=4)
    rounds.settled("n0", "n1")
    assert not rounds.ledger.finished
    for node in ("n0", "n1"):
        rounds.ledger.detach(node, m.DetachRequest(incarnation=1, reason="finished"))
    assert rounds.ledger.finished
    assert rounds.member("n0").state == "done"
    rounds.restart()
    assert rounds.ledger.finished
