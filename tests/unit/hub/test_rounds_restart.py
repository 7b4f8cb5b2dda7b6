"""A hub that was killed knows what it knew, from its files alone."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_world import Make, Rounds, many_rounds

from ciuic.errors import LedgerDamagedError
from ciuic.net import messages as m

NODES = ["n0", "n1", "n2"]


@pytest.fixture
def make() -> Iterator[Make]:
    with many_rounds() as made:
        yield made


def known(rounds: Rounds) -> dict[str, Any]:
    """Everything of a run that must outlive a restart."""
    ledger = rounds.ledger
    info = ledger.info(full=True)
    kept = ("versions", "digests", "parameters", "epoch", "samples", "push_bytes", "entry_bytes", "progress", "rounds")
    return {
        **{name: info[name] for name in (*kept, "evaluations", "loss_consistent")},
        "members": {
            name: (
                x.incarnation,
                x.is_present or x.state,
                x.pushes_merged,
                x.pushes_accepted,
                x.last_lease,
            )
            for name, x in sorted(ledger.members.items())
        },
        "free": list(ledger.samples.free),
        "leased": {name: list(x) for name, x in sorted(ledger.samples.leased.items()) if x},
        "waiting": [sorted(f.inbox.waiting) for f in ledger.fragments],
        "sequences": [sorted(f.sequences.items()) for f in ledger.fragments],
        "residuals": [f.aggregator.residual.tobytes() for f in ledger.fragments],
        "momenta": [
            m.tobytes() if (m := f.aggregator.outer_state.momentum) is not None else None for f in ledger.fragments
        ],
        "started": ledger.started,
        "finished": ledger.finished,
    }


EVENTS = st.tuples(
    st.sampled_from(["train", "train", "lease", "push", "attach", "gone", "silent", "done", "evaluate", "wait"]),
    st.sampled_from(NODES),
    st.integers(1, 6),
)


def play(rounds: Rounds, held: dict[str, list[tuple[int, int]]], event: tuple[str, str, int]) -> None:
    what, node, count = event
    is_done = rounds.ledger.members[node].state == "done"
    match what:
        case "attach":
            rounds.attach(node)
            held[node] = []
        case "gone":
            rounds.ledger.node_gone(node)
            held[node] = []
        case "silent":  # it lives, keeps what it holds and speaks again later
            rounds.ledger.node_gone(node)
        case "wait":
            rounds.tick(count)
        case "evaluate":
            message = m.EvaluationRequest(
                incarnation=rounds.incarnations[node], version=rounds.version, loss=count / 3, samples=count
            )
            rounds.ledger.evaluation(node, message)
        case "done" if not is_done:
            reason = m.DetachRequest(incarnation=rounds.incarnations[node], reason="finished")
            rounds.ledger.detach(node, reason)
            held[node] = []
        case "lease" | "train" if not is_done:
            held[node] += rounds.lease(node, count).ranges
    if what in ("train", "push") and held[node] and not is_done:
        rounds.push(node, *held[node])
        held[node] = []


@settings(max_examples=60)
@given(events=st.lists(EVENTS, min_size=5, max_size=40), momentum=st.sampled_from([0.0, 0.9]), share=st.integers(1, 5))
def test_whatever_happened_a_restart_changes_nothing(
    events: list[tuple[str, str, int]], momentum: float, share: int
) -> None:
    with many_rounds() as make:
        rounds = make(samples=40, outer_momentum=momentum, max_staleness=2, min_fraction=0.5)
        rounds.start(*NODES)
        held: dict[str, list[tuple[int, int]]] = {node: [] for node in NODES}
        for number, event in enumerate(events):
            play(rounds, held, event)
            if number % share == 0:
                before = known(rounds)
                rounds.restart()
                assert known(rounds) == before
        assert rounds.counts().lost == 0


def test_a_restart_before_the_start_waits_for_the_nodes_again(make: Make) -> None:
    rounds = make(min_nodes=2)
    rounds.attach("n0")
    rounds.restart()
    assert rounds.attach("n1").state == "initialize"
    rounds.upload("n1")
    rounds.restart()
    assert rounds.attach("n0").state == "wait"
    assert rounds.attach("n1").state == "ready"


def test_pushes_that_waited_wait_again_and_their_round_closes(make: Make) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    rounds.train("n0")
    rounds.restart()
    rounds.tick(6)
    assert rounds.version == 2, "the deadline runs again from the restart on"
    rounds.train("n1")
    rounds.train("n0")
    assert rounds.version == 3
    assert rounds.entry_nodes(3) == ["n0", "n1"]


def test_a_round_that_was_complete_when_the_hub_died_closes_after_the_restart(make: Make) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    first, second = rounds.frame("n0", (10, 12)), rounds.frame("n1", (12, 14))
    rounds.ledger.push("n0", first)
    store = rounds.ledger.fragments[0].store
    store.save_push(("n1", 1, rounds.sequences["n1", 0]), second)  # stored, and then killed
    rounds.restart()
    rounds.tick()
    assert rounds.version == 2
    assert rounds.ledger.push("n1", second).status == "duplicate"


def test_a_restart_needs_no_more_than_the_newest_snapshot_and_what_came_after_it(make: Make) -> None:
    rounds = make(samples=1000)
    rounds.start("n0")
    for _ in range(30):
        rounds.train("n0", 5)
    store = rounds.ledger.fragments[0].store
    newest = max(store.snapshot_versions())
    assert newest > 20, "snapshots follow the entries"
    assert all(key[2] > min(store.snapshot_versions()) for key in store.push_keys())
    before = known(rounds)
    rounds.restart()
    assert known(rounds) == before
    assert rounds.attach("n1").fragments[0].snapshot_version == newest


def test_a_ledger_with_a_damaged_push_is_not_opened_and_can_be_opened_when_it_is_back(make: Make) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    rounds.train("n0")
    path = next((rounds.folder / "fragment-0" / "pushes").glob("n0.1.2"))
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(LedgerDamagedError, match=r"n0\.1\.2"):
        rounds.restart()
    path.write_bytes(good)
    rounds.restart()
    assert rounds.version == 1
