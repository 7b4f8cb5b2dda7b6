import time
from typing import Any

import pytest

from ciuic.doctor.case import Case
from ciuic.doctor.facts_launch import HOST, LAYOUT
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.record import Beat, Bye, Hello, Notice
from ciuic.doctor.rules.launch import Launch


def _case(worlds: tuple[int, ...] = (2, 2)) -> Case:
    case = Case(ask=lambda *_, **__: None, world=max(worlds))
    for rank, world in enumerate(worlds):
        case.hellos[rank] = Hello(token="", rank=rank, world=world, host="h", pid=1)
    return case


def _tell(kind: str, *by_rank: dict[str, Any]) -> list[Finding]:
    rule, case = Launch(), _case((len(by_rank),) * len(by_rank))
    for rank, facts in enumerate(by_rank):
        list(rule.notice(case, Notice(rank=rank, step=0, kind=kind, facts=facts)))
    return list(rule.end(case))


def _beats(rule: Launch, offsets_s: dict[int, float], count: int) -> list[Finding]:
    found = []
    for _ in range(count):
        for rank, offset_s in offsets_s.items():
            beat = Beat(rank=rank, step=1, time_s=time.time() + offset_s, phase="data", phase_s=0.0, facts={})
            found += rule.beat(_case((2,) * len(offsets_s)), beat)
    return found


@pytest.mark.parametrize(
    ("offsets", "rank", "side"), [({0: 0, 1: 900}, 1, "ahead"), ({0: -40, 1: 0, 2: 0}, 0, "behind")]
)
def test_a_wrong_clock_is_found_after_two_beats(offsets: dict[int, float], rank: int, side: str):
    found = _beats(Launch(), offsets, 3)
    assert [(f.code, f.ranks) for f in found] == [("CIUIC-K2", (rank,))]
    assert side in found[0].cause


def test_a_slow_line_is_no_wrong_clock():
    rule = Launch()
    assert not _beats(rule, {0: 0, 1: -8.0}, 5), "these came late"
    assert not _beats(rule, {0: 0, 1: 0}, 9)


def test_variables_that_name_no_interface():
    found = _tell(HOST, *[{"versions": {}, "gloo": "no interface 'eth9'", "nccl": ""}] * 2)
    assert [(f.code, f.ranks) for f in found] == [("CIUIC-K1", ())]
    assert not _tell(HOST, *[{"versions": {"torch": "2.13"}, "gloo": "", "nccl": ""}] * 2)


def test_other_versions_are_a_warning():
    found = _tell(HOST, *({"versions": {"torch": v}, "gloo": "", "nccl": ""} for v in ("2.13", "2.12", "2.13")))
    assert [(f.code, f.ranks, f.severity) for f in found] == [("CIUIC-K3", (1,), Severity.WARNING)]


def test_another_number_of_ranks():
    case = _case((2, 4))
    found = list(Launch().hello(case, case.hellos[1]))
    assert [f.code for f in found] == ["CIUIC-K3"]
    case = _case()
    assert not list(Launch().hello(case, case.hellos[1]))


def _layout(digest: bytes, **parts: list[int]) -> dict[str, Any]:
    return {"number": 0, "ranks": [], "tensors": len(parts), "elements": 9, "digest": digest, "parts": parts}


def test_another_model_is_told_with_the_first_module_that_differs():
    found = _tell(LAYOUT, _layout(b"a", body=[1, 4], head=[1, 5]), _layout(b"b", body=[1, 4], head=[1, 6]))
    assert [(f.code, f.ranks, f.modules) for f in found] == [("CIUIC-K3", (1,), ("head",))]
    assert not _tell(LAYOUT, _layout(b"a", body=[1, 4]), _layout(b"a", body=[1, 4]))


def test_stages_of_a_pipeline_are_compared_inside_their_groups_only():
    assert not _tell(LAYOUT, _layout(b"a", one=[1, 4]) | {"ranks": [0]}, _layout(b"b", two=[1, 4]) | {"ranks": [1]})


def test_a_wrong_clock_in_a_program_that_ends_at_once():
    rule, case = Launch(), _case()
    found = _beats(rule, {0: 0, 1: 900}, 1)
    for rank, offset_s in ((0, 0.0), (1, 900.0)):
        case.byes[rank] = Bye(rank=rank, step=24, how="end", time_s=time.time() + offset_s)
        found += rule.left(case, rank, "end")
    assert [(f.code, f.ranks) for f in found] == [("CIUIC-K2", (1,))]
