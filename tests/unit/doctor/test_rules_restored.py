from collections.abc import Iterable
from typing import Any

import pytest

from ciuic.doctor.case import Case
from ciuic.doctor.facts_data import LOADED, NOT_ACTIVE, NOT_RESTORED, SAVED_TO, UNTIED
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.incidents import fold
from ciuic.doctor.record import Hello, Notice
from ciuic.doctor.rules.restored import Restored


def _case(hosts: tuple[str, ...] = ("h", "h")) -> Case:
    case = Case(ask=lambda *_, **__: None, world=len(hosts))
    for rank, host in enumerate(hosts):
        case.hellos[rank] = Hello(token="", rank=rank, world=len(hosts), host=host, pid=1)
    return case


def _tell(rule: Restored, case: Case, kind: str, ranks: Iterable[int] = (0, 1), **facts: Any) -> list[Finding]:
    found = [f for r in ranks for f in rule.notice(case, Notice(rank=r, step=0, kind=kind, facts=facts))]
    return [*found, *rule.end(case)]


def _load(**facts: Any) -> dict[str, Any]:
    usual = {
        "module": "Net", "given": 18, "own": 18, "used": 18, "unexpected": [], "missing": [], "missing_count": 0,
        "prefix": "", "prefixed": 0, "contents": b"c", "trained": True,
    }  # fmt: skip
    return usual | facts


def test_a_whole_load_and_an_adapter_are_no_finding():
    assert not _tell(Restored(), _case(), LOADED, **_load())
    assert not _tell(Restored(), _case(), LOADED, **_load(given=4, used=4, own=400, missing_count=396, missing=["a"]))


def test_a_load_that_used_nothing_names_the_prefix_and_strips_it():
    names = {"unexpected": ["module.a"], "missing": ["a"], "missing_count": 18}
    found = _tell(Restored(), _case(), LOADED, **_load(used=0, prefix="module.", prefixed=18, **names))
    assert [(f.code, f.modules, f.ranks) for f in found] == [("CIUIC-I2", ("a",), ())]
    assert "`module.`" in found[0].cause
    assert "removeprefix('module.')" in found[0].fix


def test_a_new_head_is_a_note_and_a_part_behind_a_prefix_a_warning():
    head = _load(given=18, used=16, unexpected=["head.weight"], missing=["fc.weight"], missing_count=2)
    assert [(f.code, f.severity) for f in _tell(Restored(), _case(), LOADED, **head)] == [("CIUIC-I5", Severity.NOTE)]
    part = head | {"prefix": "model.", "prefixed": 2}
    assert [(f.code, f.severity) for f in _tell(Restored(), _case(), LOADED, **part)] == [("CIUIC-I5", None)]


@pytest.mark.parametrize(
    ("what", "code"), [("optimizer", "CIUIC-I1"), ("scheduler", "CIUIC-I3"), ("scaler", "CIUIC-I3")]
)
def test_what_was_not_restored(what: str, code: str):
    facts = {"what": what, "file": "c.pt", "sure": 0.95, "why": "in the file and not loaded", "saved": 14, "now": 1}
    found = _tell(Restored(), _case(), NOT_RESTORED, **facts)
    assert [(f.code, f.ranks, f.severity) for f in found] == [(code, (), None)]
    assert "c.pt" in found[0].cause
    found = _tell(Restored(), _case(), NOT_RESTORED, (1,), **facts)
    assert [(f.ranks, f.severity) for f in found] == [((1,), Severity.CRITICAL)]
    found = _tell(Restored(), _case(), NOT_RESTORED, **(facts | {"sure": 0.3}))
    assert found[0].severity is Severity.NOTE


def test_a_load_on_one_rank_explains_different_parameters():
    case, rule = _case(), Restored()
    assert not _tell(rule, case, LOADED, (0,), **_load()), "a wrapper may have broadcast it"
    start = Finding(code="CIUIC-D1", cause="the ranks began with different parameters", step=1, ranks=(1,))
    case.findings[start.key] = start
    found = list(rule.tick(case, 0.0))
    assert [(f.code, f.ranks) for f in found] == [("CIUIC-I6", (1,))]
    assert [i.cause.code for i in fold([start, *found])] == ["CIUIC-I6"]


def test_the_same_load_everywhere_explains_nothing():
    case, rule = _case(), Restored()
    _tell(rule, case, LOADED, **_load())
    start = Finding(code="CIUIC-D1", cause="different", step=1)
    case.findings[start.key] = start
    assert not list(rule.tick(case, 0.0))


def test_two_ranks_that_write_one_file():
    assert [f.ranks for f in _tell(Restored(), _case(), SAVED_TO, path="/a/m.pt")] == [(0, 1)]
    assert not _tell(Restored(), _case(("h", "g")), SAVED_TO, path="/a/m.pt"), "each machine has its own disk"
    rule, case = Restored(), _case()
    assert not _tell(rule, case, SAVED_TO, (0,), path="/a/0.pt") + _tell(rule, case, SAVED_TO, (1,), path="/a/1.pt")


def test_ties_and_copies():
    found = _tell(Restored(), _case(), UNTIED, one="tokens.weight", other="head.weight", how="load")
    assert [(f.code, f.modules[0]) for f in found] == [("CIUIC-I4", "head.weight")]
    facts = {"names": ["a", "b"], "count": 5, "total": 5}
    for how in ("copy", "overwritten"):
        found = _tell(Restored(), _case(), NOT_ACTIVE, (1,), how=how, file="c.pt", **facts)
        assert [(f.code, f.ranks) for f in found] == [("CIUIC-I8", (1,))]
