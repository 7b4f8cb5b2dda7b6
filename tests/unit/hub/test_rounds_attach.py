"""How a run begins: who uploads version 0, who waits, and who takes a node's place."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from ledger_world import small_layout
from rounds_world import Make, many_rounds

from ciuic.errors import (
    CiuicError,
    ConflictError,
    DataError,
    FrameError,
    LayoutMismatchError,
    LedgerDamagedError,
    NonFiniteError,
    NotFoundError,
    ProtocolError,
    SupersededError,
)
from ciuic.hub.run.gathering import ARRIVAL_S, UPLOAD_S
from ciuic.ledger.entry import snapshot_from_frame
from ciuic.net import messages as m


@pytest.fixture
def make() -> Iterator[Make]:
    with many_rounds() as made:
        yield made


# ---- version 0


def test_the_first_worker_uploads_and_the_others_wait(make: Make) -> None:
    rounds = make(min_nodes=2)
    assert rounds.attach("n0").state == "initialize"
    assert rounds.attach("n1").state == "wait"
    rounds.upload("n0")
    assert rounds.attach("n0").state == "ready"
    reply = rounds.attach("n1")
    assert (reply.state, reply.incarnation, reply.total_samples) == ("ready", 1, 100)
    assert rounds.kinds() == ["base.uploaded", "run.training", "worker.attached", "worker.attached"]


def test_the_reply_says_where_the_newest_base_is(make: Make) -> None:
    rounds = make(fragments=2)
    rounds.start("n0")
    reply = rounds.attach("n0")
    for f, state in enumerate(reply.fragments):
        path = rounds.ledger.snapshot_path(f, state.snapshot_version)
        assert path.stat().st_size == state.snapshot_bytes
        count = rounds.layout.fragment_shape(f).element_count
        snapshot = snapshot_from_frame(path.read_bytes(), count)
        assert (state.version, state.digest) == (0, snapshot.header.digest)


def test_an_initializer_that_is_gone_is_replaced_at_once_and_the_first_whole_upload_wins(make: Make) -> None:
    rounds = make(min_nodes=2)
    assert rounds.attach("n0").state == "initialize"
    rounds.ledger.node_gone("n0")
    assert rounds.attach("n1").state == "initialize"
    with pytest.raises(ConflictError, match="n2 is not the one"):
        rounds.upload("n2")
    rounds.upload("n0")  # it was only slow
    rounds.upload("n1")  # the same parameters
    with pytest.raises(ConflictError, match="n1 is not the one"):
        rounds.upload("n1", base=bad_base(1.0))
    assert rounds.attach("n1").state == "wait"
    assert rounds.attach("n0").state == "ready"


def test_an_initializer_that_is_silent_for_long_is_replaced(make: Make) -> None:
    rounds = make(min_nodes=2)
    rounds.attach("n0")
    rounds.now += UPLOAD_S
    assert rounds.attach("n1").state == "wait"
    rounds.now += 1
    assert rounds.attach("n1").state == "initialize"
    assert rounds.attach("n0").state == "wait"


def test_an_initializer_that_asks_again_stays_the_one(make: Make) -> None:
    rounds = make(min_nodes=2)
    for _ in range(5):
        assert rounds.attach("n0").state == "initialize"
        rounds.now += UPLOAD_S
        assert rounds.attach("n1").state == "wait"


def test_an_upload_whose_reply_was_lost_may_come_again_and_another_one_may_not(make: Make) -> None:
    rounds = make()
    rounds.attach("n0")
    rounds.upload("n0")
    rounds.upload("n0")
    assert rounds.kinds().count("base.uploaded") == 1
    with pytest.raises(ConflictError):
        rounds.upload("n0", base=np.zeros(rounds.layout.fragment_shape(0).element_count, np.float32))


def test_a_hub_killed_between_two_uploads_asks_for_them_again_and_keeps_what_it_has(make: Make) -> None:
    rounds = make(fragments=2)
    rounds.attach("n0")
    rounds.upload("n0", 0)
    rounds.restart()
    with contextlib.suppress(ConflictError):
        rounds.upload("n0", 1)  # was on its way: the hub may ask to attach again first
    if rounds.attach("n0").state == "initialize":
        for fragment in (0, 1):
            rounds.upload("n0", fragment)
    assert rounds.attach("n0").state == "ready"
    uploads = [text for kind, text, _ in rounds.events if kind == "base.uploaded"]
    assert uploads == [f"n0 uploaded version 0 of fragment {f}" for f in (0, 1)]


def bad_base(value: float) -> np.ndarray:
    base = np.zeros(small_layout(1).fragment_shape(0).element_count, np.float32)
    base[40] = value
    return base


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"layout_digest": "0" * 32}, LayoutMismatchError, "another layout"),
        ({"parts": ("residual",)}, LayoutMismatchError, "another layout"),
        ({"digest": "0" * 32}, ProtocolError, "another digest"),
        ({"counters": ()}, LayoutMismatchError, "0 counters, the layout has 1"),
        ({"counters": (1, 2)}, LayoutMismatchError, "2 counters"),
        ({"base": bad_base(np.nan)}, NonFiniteError, r"f0.matrix\[5\]"),
        ({"base": bad_base(np.inf)}, NonFiniteError, "the upload holds"),
        ({"base": np.zeros(7, np.float32)}, FrameError, "the snapshot has"),
    ],
    ids=str,
)
def test_parameters_with_which_no_run_can_start_are_refused_and_good_ones_taken_after_that(
    make: Make, changes: dict[str, Any], error: type[CiuicError], says: str
) -> None:
    rounds = make()
    rounds.attach("n0")
    with pytest.raises(error, match=says):
        rounds.upload("n0", **changes)
    assert rounds.attach("n0").state == "initialize"
    rounds.upload("n0")
    assert rounds.attach("n0").state == "ready"


# ---- the start


def test_the_run_starts_when_enough_nodes_wait_at_the_same_time(make: Make) -> None:
    rounds = make(min_nodes=3)
    rounds.attach("n0")
    rounds.upload("n0")
    assert [rounds.attach(n).state for n in ("n0", "n1", "n0", "n1")] == ["wait"] * 4
    rounds.now += ARRIVAL_S + 1  # n1 has given up
    assert [rounds.attach(n).state for n in ("n0", "n2")] == ["wait"] * 2
    assert rounds.attach("n1").state == "ready"
    assert rounds.events[-2][1] == "3 nodes start: 100 samples"


def test_a_node_that_died_while_it_waited_does_not_count(make: Make) -> None:
    rounds = make(min_nodes=3)
    rounds.attach("n0")
    rounds.upload("n0")
    rounds.attach("n1")
    rounds.ledger.node_gone("n0")
    assert rounds.attach("n2").state == "wait"
    assert rounds.attach("n0").state == "ready"


def test_once_started_a_run_takes_joiners_one_by_one_also_after_a_restart(make: Make) -> None:
    rounds = make(min_nodes=2)
    rounds.start("n0", "n1")
    rounds.now += 100
    assert rounds.attach("n2").state == "ready"
    rounds.restart()
    assert rounds.attach("n3").state == "ready"


def test_without_a_number_of_samples_the_run_has_that_of_the_data_set(make: Make) -> None:
    rounds = make(samples=None)
    rounds.attach("n0")
    rounds.upload("n0")
    with pytest.raises(DataError, match="no samples"):
        rounds.attach("n0", dataset_samples=0)
    assert rounds.attach("n0", dataset_samples=77).total_samples == 77


def test_another_model_is_refused_with_the_first_parameter_that_differs(make: Make) -> None:
    rounds = make()
    rounds.start("n0")
    other = msgspec.structs.replace(
        rounds.layout,
        tensors=tuple(
            msgspec.structs.replace(t, shape=(10, 5)) if t.name == "f0.matrix" else t for t in rounds.layout.tensors
        ),
    )
    with pytest.raises(LayoutMismatchError, match=r"f0\.matrix"):
        rounds.attach("n1", layout=other)
    with pytest.raises(ProtocolError, match="not a layout"):
        rounds.ledger.attach("n1", m.AttachRequest(layout={}))
    rounds.restart()
    with pytest.raises(LayoutMismatchError):
        rounds.attach("n1", layout=other)


def test_a_node_with_other_data_is_pointed_out_and_may_train(make: Make) -> None:
    rounds = make()
    rounds.attach("n0", data_digest="aa")
    rounds.upload("n0")
    for node, digest in (("n0", "aa"), ("n1", ""), ("n2", "aa"), ("n3", "bb")):
        assert "data.differs" not in rounds.kinds()
        assert rounds.attach(node, data_digest=digest).state == "ready"
    assert [node for kind, _, node in rounds.events if kind == "data.differs"] == ["n3"]


def test_a_node_with_other_frozen_parameters_is_refused(make: Make) -> None:
    rounds = make()
    rounds.attach("n0", frozen_digest="aa")
    rounds.upload("n0")
    assert rounds.attach("n0", frozen_digest="aa").state == "ready"
    with pytest.raises(LayoutMismatchError, match="the parameters of n1 that are not trained differ"):
        rounds.attach("n1", frozen_digest="bb")
    assert rounds.attach("n1", frozen_digest="aa").state == "ready"


# ---- incarnations


def test_a_new_worker_of_a_node_supersedes_the_older_one_in_everything(make: Make) -> None:
    rounds = make()
    rounds.start("n0")
    old = rounds.incarnations["n0"]
    frame = rounds.frame("n0", (0, 1))
    assert rounds.attach("n0").incarnation == old + 1
    calls: list[Callable[[], Any]] = [
        lambda: rounds.ledger.push("n0", frame),
        lambda: rounds.ledger.lease("n0", m.LeaseRequest(incarnation=old, count=1, request_id=1)),
        lambda: rounds.ledger.report("n0", m.ReportRequest(incarnation=old, step=1, samples=1, tokens=1)),
        lambda: rounds.ledger.detach("n0", m.DetachRequest(incarnation=old, reason="finished")),
        lambda: rounds.ledger.evaluation("n0", m.EvaluationRequest(incarnation=old, version=0, loss=1.0, samples=1)),
    ]
    for call in calls:
        with pytest.raises(SupersededError, match="incarnation 1 of n0 is not the present one"):
            call()
    assert rounds.version == 0
    assert rounds.member("n0").state == "warming"


def test_incarnations_only_grow_also_over_restarts_of_the_hub(make: Make) -> None:
    rounds = make()
    rounds.start("n0")
    seen = [rounds.incarnations["n0"]]
    for _ in range(3):
        rounds.restart()
        seen.append(rounds.attach("n0").incarnation)
    assert seen == [1, 2, 3, 4]


def test_leases_of_the_older_worker_are_free_when_a_new_one_attaches(make: Make) -> None:
    rounds = make(samples=10)
    rounds.start("n0", "n1")
    assert rounds.lease("n0", 10).ranges == [(0, 10)]
    assert rounds.lease("n1", 10).status == "wait"
    rounds.attach("n0")
    assert "10 leased samples went back" in rounds.events[-1][1]
    assert rounds.lease("n1", 10).ranges == [(0, 10)]
    assert rounds.counts().lost == 0


def test_someone_who_never_attached_is_refused(make: Make) -> None:
    rounds = make()
    rounds.start("n0")
    with pytest.raises(SupersededError):
        rounds.ledger.lease("n9", m.LeaseRequest(incarnation=1, count=1, request_id=1))
    rounds.ledger.node_gone("n9")  # nothing happens


# ---- what is not there


def test_fragments_versions_and_snapshots_that_are_not_there_are_named(make: Make) -> None:
    rounds = make()
    with pytest.raises(NotFoundError, match="no fragment 0"):
        rounds.ledger.entries_after(0, 0, 1)
    rounds.start("n0")
    for fragment in (-1, 1):
        with pytest.raises(NotFoundError, match="no fragment"):
            rounds.ledger.entries_after(fragment, 0, 1)
        with pytest.raises(NotFoundError, match="no fragment"):
            rounds.ledger.put_snapshot("n0", fragment, b"")
    with pytest.raises(NotFoundError, match="no snapshot of version 3"):
        rounds.ledger.snapshot_path(0, 3)
    with pytest.raises(ConflictError, match="the hub has version 0 of fragment 0, not 1"):
        rounds.ledger.entries_after(0, 1, 1)
    assert rounds.ledger.entries_after(0, 0, 1) == []


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"tensors": []}', b"\xff\xff"])
def test_a_damaged_layout_file_is_named(make: Make, content: bytes) -> None:
    rounds = make()
    rounds.start("n0")
    (rounds.folder / "layout.json").write_bytes(content)
    with pytest.raises(LedgerDamagedError, match=r"layout\.json") as caught:
        rounds.restart()
    assert caught.value.next
    (rounds.folder / "layout.json").write_bytes(msgspec.json.encode(rounds.layout))
    rounds.restart()


def test_a_damaged_journal_is_an_error_that_leaves_it_as_it_is(make: Make) -> None:
    rounds = make()
    rounds.start("n0", "n1")
    path: Path = rounds.folder / "journal.bin"
    good = path.read_bytes()
    path.write_bytes(good[:30] + bytes([good[30] ^ 1]) + good[31:])
    with pytest.raises(LedgerDamagedError, match=r"journal\.bin"):
        rounds.restart()
    path.write_bytes(good)
    rounds.restart()
