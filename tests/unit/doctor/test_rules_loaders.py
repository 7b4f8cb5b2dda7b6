from typing import Any

from ciuic.doctor.case import Case, Round
from ciuic.doctor.facts_data import EPOCH, LOADER, LOADER_ENDS
from ciuic.doctor.facts_waiting import UNEVEN
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.record import Beat, Hello, Notice, Record
from ciuic.doctor.rules.loaders import Loaders


def _case() -> Case:
    case = Case(ask=lambda *_, **__: None, world=2)
    for rank in range(2):
        case.hellos[rank] = Hello(token="", rank=rank, world=2, host="h", pid=1)
    return case


def _loader(rank: int, **facts: Any) -> Notice:
    usual = {
        "number": 0, "length": 6, "batch": 8, "samples": 96, "sampler": "DistributedSampler", "shuffle": True,
        "drop_last": False, "workers": 0, "split": "index", "replicas": 2, "place": rank, "seed": 0,
        "contents": {"x": [b"same", 1]},
    }  # fmt: skip
    return Notice(rank=rank, step=0, kind=LOADER, facts=usual | facts)


def _judge(case: Case, rule: Loaders, *notices: Notice) -> list[Finding]:
    for notice in notices:
        list(rule.notice(case, notice))
    return list(rule.tick(case, 0.0))


def test_loaders_that_fit_together_are_no_finding():
    assert not _judge(_case(), Loaders(), _loader(0), _loader(1))


def test_shares_of_different_orders_overlap():
    for name, value in {"shuffle": False, "seed": 7, "samples": 95, "drop_last": True}.items():
        found = _judge(_case(), Loaders(), _loader(0), _loader(1, **{name: value}))
        assert [(f.code, f.ranks) for f in found] == [("CIUIC-H8", (1,))], name


def test_other_batch_sizes_and_seeds_without_shuffle_are_not_meant():
    assert not _judge(_case(), Loaders(), _loader(0), _loader(1, batch=16))
    assert not _judge(_case(), Loaders(), _loader(0, shuffle=False), _loader(1, shuffle=False, seed=3))


def test_data_sets_that_differ_and_are_shared_out_lose_samples():
    found = _judge(_case(), Loaders(), *(_loader(r, contents={"indices": [bytes([r]), 0]}) for r in (0, 1)))
    assert [(f.code, f.severity) for f in found] == [("CIUIC-H3", None)]
    assert "indices" in found[0].cause


def test_drawn_numbers_may_differ_and_one_equal_part_shows_that_the_data_are_the_same():
    drawn = [_loader(r, contents={"x": [bytes([r]), 1]}) for r in (0, 1)]
    assert [f.severity for f in _judge(_case(), Loaders(), *drawn)] == [Severity.NOTE]
    mixed = [_loader(r, contents={"x": [b"same", 1], "noise": [bytes([r]), 0]}) for r in (0, 1)]
    assert not _judge(_case(), Loaders(), *mixed)


def test_a_rank_may_have_a_shard_of_its_own_without_a_sampler():
    assert not _judge(_case(), Loaders(), *(_loader(r, split="", contents={"i": [bytes([r]), 0]}) for r in (0, 1)))


def test_shares_that_nobody_reads():
    found = _judge(_case(), Loaders(), *(_loader(r, replicas=4) for r in (0, 1)))
    assert [f.code for f in found] == ["CIUIC-H3"]
    found = _judge(_case(), Loaders(), *(_loader(r, place=0) for r in (0, 1)))
    assert [f.code for f in found] == ["CIUIC-H2"]


def test_a_stream_that_is_a_share_already():
    found = _judge(_case(), Loaders(), *(_loader(r, split="stream", sharded=True, length=-1) for r in (0, 1)))
    assert [f.code for f in found] == ["CIUIC-H3"]


def _uneven(case: Case, rule: Loaders) -> list[Finding]:
    return _judge(case, rule, _loader(0, split="", length=6), _loader(1, split="", length=4))


def test_uneven_lengths_are_a_note_until_a_rank_leaves_at_the_end_of_the_short_pass():
    case, rule = _case(), Loaders()
    assert [(f.code, f.severity) for f in _uneven(case, rule)] == [("CIUIC-H6", Severity.NOTE)]
    ends = {"number": 0, "batches": 4, "pass": 1}
    assert not _judge(case, rule, Notice(rank=1, step=4, kind=LOADER_ENDS, facts=ends))
    left = Finding(code="CIUIC-J1", cause="rank 1 ended", step=5, ranks=(1,))
    case.findings[left.key] = left
    found = list(rule.tick(case, 0.0))
    assert [(f.code, f.severity, f.ranks) for f in found] == [("CIUIC-H6", None, (1,))]
    assert found[0].confidence > 0.5, "it replaces the note"


def test_join_makes_uneven_lengths_harmless():
    case, rule = _case(), Loaders()
    list(rule.beat(case, Beat(rank=0, step=1, time_s=0.0, phase="data", phase_s=0.0, facts={UNEVEN: 1})))
    _uneven(case, rule)
    left = Finding(code="CIUIC-J1", cause="rank 1 ended", step=5, ranks=(1,))
    case.findings[left.key] = left
    assert not list(rule.tick(case, 0.0))


def test_epochs_that_differ_twice():
    rule, found = Loaders(), []
    for step in (7, 8):
        round_ = Round(optimizer=0, step=step, began_s=0.0)
        for rank in (0, 1):
            round_.records[rank] = Record(rank=rank, optimizer=0, step=step, time_s=0.0, facts={EPOCH: 1 - rank})
        found.append(list(rule.round(_case(), round_)))
    assert not found[0]
    assert [(f.code, f.ranks) for f in found[1]] == [("CIUIC-H8", (1,))]
