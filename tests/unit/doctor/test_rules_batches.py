from collections.abc import Iterable
from typing import Any

import pytest

from ciuic.doctor.case import Case, Round
from ciuic.doctor.facts import PARAMETERS
from ciuic.doctor.facts_data import FEED, LOADER, PEERS, RESUMED_AT, SAME_ORDER, SHARED_MEMORY
from ciuic.doctor.facts_model import EXCHANGE, MODE
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.record import Bye, Hello, Notice, Record
from ciuic.doctor.rules.batches import Batches


def _case(world: int = 2) -> Case:
    case = Case(ask=lambda *_, **__: None, world=world)
    for rank in range(world):
        case.hellos[rank] = Hello(token="", rank=rank, world=world, host="h", pid=1)
    return case


def _round(step: int, by_rank: dict[int, dict[str, Any]]) -> Round:
    round_ = Round(optimizer=0, step=step, began_s=0.0)
    for rank, facts in by_rank.items():
        round_.records[rank] = Record(rank=rank, optimizer=0, step=step, time_s=0.0, facts=facts)
    return round_


def _run(rule: Batches, case: Case, rounds: Iterable[Round]) -> list[Finding]:
    return [found for round_ in rounds for found in rule.round(case, round_)]


def _feeds(steps: int, batch: Any, *, mode: str = "ddp", world: int = 2, **facts: Any) -> list[Round]:
    """One batch a step; `batch(source, rank, number)` is its digest, None for none."""
    rounds = []
    for step in range(1, steps + 1):
        by_rank = {}
        for rank in range(world):
            feeds = [[s, step, d] for s in (0, 1) if (d := batch(s, rank, step)) is not None]
            by_rank[rank] = {MODE: mode, FEED: feeds, **facts}
        rounds.append(_round(step, by_rank))
    return rounds


def _number(*parts: int) -> bytes:
    return bytes([*parts, *[0] * (4 - len(parts))])


def test_equal_batches_on_both_ranks_are_found_at_the_third():
    found = _run(Batches(), _case(), _feeds(4, lambda s, r, n: _number(s, n)))
    assert [f.code for f in found] == ["CIUIC-H2"]
    assert "3 batches" in found[0].cause
    assert found[0].severity is None


def test_two_of_three_ranks_are_named():
    found = _run(Batches(), _case(3), _feeds(4, lambda s, r, n: _number(s, n, max(r, 1)), world=3))
    assert found[0].ranks == (0, 1)


def test_different_batches_are_no_finding():
    assert not _run(Batches(), _case(), _feeds(9, lambda s, r, n: _number(s, n, r)))


def test_each_rank_may_take_its_rows_from_the_same_batch():
    rows = _feeds(9, lambda s, r, n: _number(s, n) if s == 0 else _number(s, n, r))
    assert not _run(Batches(), _case(), rows)


def test_one_batch_all_the_time_is_a_note():
    found = _run(Batches(), _case(), _feeds(4, lambda s, r, n: _number(s)))
    assert [f.severity for f in found] == [Severity.NOTE]


def test_ranks_that_share_one_copy_of_the_model_may_read_the_same():
    assert not _run(Batches(), _case(), _feeds(5, lambda s, r, n: _number(s, n), mode="sharded", **{PEERS: []}))


def test_independent_runs_may_read_the_same():
    assert not _run(Batches(), _case(), _feeds(5, lambda s, r, n: _number(s, n), mode="plain"))
    together = {EXCHANGE: [1, 0, 0, 0], PARAMETERS: b"p"}
    assert _run(Batches(), _case(), _feeds(5, lambda s, r, n: _number(s, n), mode="plain", **together))


def _notices(rule: Batches, case: Case, kind: str, ranks: Iterable[int] = (0, 1), **facts: Any) -> list[Finding]:
    for rank in ranks:
        list(rule.notice(case, Notice(rank=rank, step=6, kind=kind, facts=facts)))
    return list(rule.end(case))


def test_a_repeated_order_is_told_once_with_the_epoch():
    found = _notices(Batches(), _case(), SAME_ORDER, sampler="DistributedSampler", epoch=0, batches=6, how="epoch")
    assert [(f.code, f.step, f.ranks) for f in found] == [("CIUIC-H1", 7, ())]
    found = _notices(Batches(), _case(), SAME_ORDER, (1,), sampler="the sampler", epoch=-1, batches=6, how="digests")
    assert found[0].ranks == (1,)
    assert "generator" in found[0].fix


@pytest.mark.parametrize(
    ("epoch", "position", "saved_epoch", "expected"),
    [
        (1, 4, -1, None),  # where it should be
        (1, 5, -1, None),  # a loader that reads ahead
        (0, 0, -1, "reads 14 batches again"),
        (1, 0, -1, "reads 4 batches again"),
        (1, 9, -1, "leaves 5 batches out"),
        (1, 0, 1, None),  # the file counts epochs: it says where it is
        (3, 0, -1, "note"),  # perhaps there were more ranks
    ],
)
def test_where_a_resumed_run_goes_on(epoch: int, position: int, saved_epoch: int, expected: str | None):
    rule, case = Batches(), _case()
    _run(rule, case, _feeds(3, lambda s, r, n: _number(s, n, r)))
    where = {"steps": 14, "epoch": epoch, "position": position, "length": 10, "saved_epoch": saved_epoch}
    found = _notices(rule, case, RESUMED_AT, **where)
    assert bool(found) == (expected is not None)
    if expected == "note":
        assert found[0].severity is Severity.NOTE
    elif expected:
        assert expected in found[0].cause


def test_batches_left_out_before_the_first_step_are_not_batches_of_a_step():
    rule, case = Batches(), _case()
    rounds = [
        _round(step, {r: {MODE: "ddp", FEED: [[0, 4 + step, _number(step, r)]]} for r in (0, 1)}) for step in (1, 2, 3)
    ]
    _run(rule, case, rounds)
    where = {"steps": 14, "epoch": 1, "position": 4, "length": 10, "saved_epoch": -1}
    assert not _notices(rule, case, RESUMED_AT, **where)


def test_a_dead_worker_is_named_with_its_signal():
    case = _case()
    how = "RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that"
    case.byes[1] = Bye(rank=1, step=4, how=how)
    found = list(Batches().left(case, 1, how))
    assert [(f.code, f.ranks, f.step) for f in found] == [("CIUIC-H5", (1,), 5)]
    assert "by Bus error" in found[0].cause
    assert not list(Batches().left(case, 0, "ValueError: could not read sample 48"))


def test_too_little_shared_memory_is_a_warning():
    found = _notices(Batches(), _case(), SHARED_MEMORY, free=1 << 20, wanted=8 << 20, workers=4)
    assert (found[0].code, found[0].severity) == ("CIUIC-H5", Severity.WARNING)


def _loader(rank: int, **facts: Any) -> Notice:
    return Notice(rank=rank, step=0, kind=LOADER, facts={"number": 0, "stream": True, "workers": 2, **facts})


def test_a_stream_that_every_worker_reads_whole():
    rule, case = Batches(), _case()
    for rank in (0, 1):
        assert not list(rule.notice(case, _loader(rank)))
    found = _run(rule, case, _feeds(8, lambda s, r, n: _number(r, (n + 1) // 2)))
    assert [(f.code, f.ranks) for f in found] == [("CIUIC-H9", ())]
    assert "2 times" in found[0].cause


@pytest.mark.parametrize(
    ("facts", "batch"),
    [
        ({}, lambda s, r, n: _number(r, n)),  # shared out
        ({}, lambda s, r, n: _number(r, 1)),  # one batch again and again
        ({"workers": 0}, lambda s, r, n: _number(r, (n + 1) // 2)),
        ({"stream": False}, lambda s, r, n: _number(r, (n + 1) // 2)),  # the sampler's order
        ({}, lambda s, r, n: _number(r, n % 4)),  # a short epoch
    ],
)
def test_batches_that_come_again_for_another_reason(facts: dict[str, Any], batch: Any):
    rule, case = Batches(), _case()
    for rank in (0, 1):
        assert not list(rule.notice(case, _loader(rank, **facts)))
    assert "CIUIC-H9" not in [f.code for f in _run(rule, case, _feeds(12, batch))]
