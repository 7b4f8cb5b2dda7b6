"""Class I: what was loaded, and what training began with."""

from collections.abc import Iterable, Iterator
from typing import Any

from ciuic.doctor.case import Case, Rule
from ciuic.doctor.facts_data import LOADED, NOT_ACTIVE, NOT_RESTORED, SAVED_TO, UNTIED
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.record import Notice
from ciuic.doctor.rules.gathered import Gathered, Together, ranks_text
from ciuic.doctor.rules.memory import listed

LITTLE = 0.5
"""Less of what was given used, because of a prefix: nothing that matters was loaded."""
SURE = 0.6
"""Below it a finding is a note."""
PATHS_MAX = 1024


class Restored(Rule):
    """I1 to I8."""

    def __init__(self) -> None:
        self._notices = Gathered()
        self._loads: dict[int, list[dict[str, Any]]] = {}
        self._compared = False
        self._saves: dict[tuple[str, str], dict[int, int]] = {}

    def notice(self, case: Case, notice: Notice) -> Iterable[Finding]:
        """Keep it; a file that two ranks write is judged at once."""
        facts = notice.facts
        if notice.kind == LOADED:
            loads = self._loads.setdefault(notice.rank, [])
            self._notices.add(
                (LOADED, facts.get("module"), sum(each["module"] == facts["module"] for each in loads)), notice
            )
            loads.append(facts)
        elif notice.kind == NOT_RESTORED:
            self._notices.add((NOT_RESTORED, facts.get("what")), notice)
        elif notice.kind in (UNTIED, NOT_ACTIVE):
            self._notices.add((notice.kind,), notice)
        elif notice.kind == SAVED_TO:
            return self._saved(case, notice)
        return ()

    def tick(self, case: Case, now_s: float) -> Iterable[Finding]:
        """What all ranks have told."""
        yield from self._judge(case, now_s, force=False)

    def end(self, case: Case) -> Iterable[Finding]:
        """What some have told."""
        yield from self._judge(case, 0.0, force=True)

    def _judge(self, case: Case, now_s: float, *, force: bool) -> Iterator[Finding]:
        for together in self._notices.ready(case, now_s, force=force):
            kind = together.key[0]  # ty: ignore[not-subscriptable]
            if kind == LOADED:
                yield from _load(case, together)
            elif kind == NOT_RESTORED:
                yield _not_restored(case, together)
            elif kind == UNTIED:
                yield _untied(case, together)
            else:
                yield _not_active(case, together)
        yield from self._apart(case)

    def _apart(self, case: Case) -> Iterator[Finding]:
        """Ranks began with different parameters: did they load different things?"""
        if self._compared or not self._loads or not case.has("CIUIC-D1"):
            return
        self._compared = True
        by_rank = {
            rank: tuple(bytes(each["contents"]) for each in self._loads.get(rank, ()) if each.get("trained"))
            for rank in case.hellos
        }
        if len(set(by_rank.values())) < 2:
            return
        with_load = tuple(rank for rank, loads in sorted(by_rank.items()) if loads)
        name = next(each["module"] for each in self._loads[with_load[0]] if each.get("trained"))
        if len(with_load) < len(by_rank):
            on = ranks_text(with_load)
            cause = f"a state was loaded into {name} on {on} only, and the ranks began with different parameters"
            ranks = tuple(rank for rank in sorted(by_rank) if rank not in with_load)
        else:
            cause, ranks = f"the ranks loaded different states into {name}, and began with different parameters", ()
        modules = next(found.modules for found in case.findings.values() if found.code == "CIUIC-D1")
        yield Finding(
            code="CIUIC-I6",
            cause=cause,
            step=1,
            ranks=ranks,
            modules=modules,
            evidence={"ranks_with_load": len(with_load)},
            confidence=0.95,
        )

    def _saved(self, case: Case, notice: Notice) -> Iterator[Finding]:
        hello = case.hellos.get(notice.rank)
        key = hello.host if hello is not None else "", str(notice.facts.get("path"))
        if key not in self._saves and len(self._saves) >= PATHS_MAX:
            return
        saves = self._saves.setdefault(key, {})
        saves[notice.rank] = notice.step
        ranks = tuple(sorted(rank for rank, step in saves.items() if abs(step - notice.step) <= 1))
        if len(ranks) > 1:
            yield Finding(
                code="CIUIC-I7",
                cause=f"{ranks_text(ranks)} wrote {key[1]} at the same step {notice.step}: what is in it is chance",
                step=max(1, notice.step),
                ranks=ranks,
                evidence={"path": key[1]},
                confidence=0.85,
            )


def _load(case: Case, together: Together) -> Iterator[Finding]:
    facts = min(together.facts.values(), key=lambda each: int(each["used"]) / max(1, int(each["given"])))
    given, used, prefixed = int(facts["given"]), int(facts["used"]), int(facts["prefixed"])
    if not given or used == given:
        return  # all of it was taken, be it an adapter of a few tensors
    evidence: dict[str, float | int | str] = {
        "tensors_given": given,
        "tensors_used": used,
        "tensors_of_model": int(facts["own"]),
    }
    ranks, prefix = together.ranks(case), str(facts["prefix"])
    more = ""
    if prefixed:
        more = (
            f": names of the state lack the prefix `{prefix[1:]}`"
            if prefix[0] == "-"
            else f": names of the state begin with `{prefix}`"
        )
    fix = (
        f"strip the prefix: {{name.removeprefix('{prefix}'): tensor for name, tensor in state.items()}}"
        if prefixed and prefix[0] != "-"
        else ""
    )
    what = f"load_state_dict put {used or 'none'} of {given} tensors into {facts['module']}{more}"
    modules = tuple(facts["missing"])
    if used == 0 or (prefixed and used < LITTLE * given):
        yield Finding(
            code="CIUIC-I2",
            cause=what,
            step=1,
            ranks=ranks,
            modules=modules,
            evidence=evidence,
            fix=fix,
            confidence=0.95 if facts["trained"] else 0.7,
        )
    elif facts["trained"]:
        absent = listed(facts["missing"], count=int(facts["missing_count"])) or "none"
        yield Finding(
            code="CIUIC-I5",
            cause=f"{what}; left out: {listed(facts['unexpected'], count=given - used)}; not in the state: {absent}",
            step=1,
            ranks=ranks,
            modules=modules,
            evidence=evidence,
            fix=fix,
            confidence=0.8 if prefixed else 0.4,
            severity=None if prefixed else Severity.NOTE,
        )


def _not_restored(case: Case, together: Together) -> Finding:
    facts, ranks = together.any, together.ranks(case)
    sure = max(float(f["sure"]) for f in together.facts.values())
    severity = Severity.NOTE if sure < SURE else Severity.CRITICAL if ranks else None
    sure = 0.98 if ranks and sure >= SURE else sure
    numbers = {name: facts[name] for name in ("saved", "now") if name in facts}
    if facts["what"] == "optimizer":
        why = {
            "in the file and not loaded": f"{facts['file']} has the optimizer's state, and it was never loaded: "
            f"its moments start again",
            "empty in the file": f"{facts['file']} was written after {facts.get('saved', 0)} steps and its state of "
            f"the optimizer is empty: the moments are lost",
        }.get(facts["why"], f"the optimizer's state was {facts['why']}: its moments start again")
        return Finding(
            code="CIUIC-I1",
            cause=f"{why} ({ranks_text(ranks)})",
            step=1,
            ranks=ranks,
            evidence=numbers,
            confidence=sure,
            severity=severity,
        )
    what = "the scheduler's state" if facts["what"] == "scheduler" else "the loss scale"
    return Finding(
        code="CIUIC-I3",
        cause=f"{facts['file']} has {what} ({facts['saved']}), and it was never loaded: "
        f"training went on with {facts['now']} ({ranks_text(ranks)})",
        step=1,
        ranks=ranks,
        evidence=numbers,
        fix=f"{facts['what']}.load_state_dict(checkpoint['{facts['what']}'])",
        confidence=sure,
        severity=severity,
    )


def _untied(case: Case, together: Together) -> Finding:
    facts = together.any
    how = {
        "load": "were one parameter before load_state_dict and are two after it",
        "config": "are two parameters although the configuration says tie_word_embeddings",
        "values": "begin with the same values and are two parameters: a tie was copied, not kept",
    }[facts["how"]]
    return Finding(
        code="CIUIC-I4",
        cause=f"{facts['one']} and {facts['other']} {how}",
        step=1,
        ranks=together.ranks(case),
        modules=(str(facts["other"]), str(facts["one"])),
        confidence=0.95 if facts["how"] == "load" else 0.8,
    )


def _not_active(case: Case, together: Together) -> Finding:
    facts, ranks = together.any, together.ranks(case)
    names = listed(facts["names"], count=int(facts["count"]))
    if facts["how"] == "copy":
        source = f"what was loaded from {facts['file']} is" if facts.get("file") else "the weights to go on with are"
        cause = f"{source} in the optimizer's copy and not in the model: {names} differ at the first forward pass"
    else:
        cause = f"{names} were written to after load_state_dict: the first forward pass used other values"
    return Finding(
        code="CIUIC-I8",
        cause=f"{cause} ({ranks_text(ranks)})",
        step=1,
        ranks=ranks,
        modules=tuple(facts["names"]),
        evidence={"tensors_changed": int(facts["count"]), "tensors_loaded": int(facts["total"])},
        confidence=0.9,
    )
