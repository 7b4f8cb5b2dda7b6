"""Was a fault found, was its cause named first, were rank and module right: one row for each case of the zoo."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ciuic.doctor.catalogue import code_of
from ciuic.doctor.finding import Severity
from ciuic.doctor.rules.hang import LEAST_S

WITH_MODULES = "ABCD"
"""Classes in which a module is guilty."""
HANG_WITHIN_S = 2 * LEAST_S
"""From LEAST_S on a wait is longer than expected (`ciuic.doctor.rules.hang`); a hang is to be found within twice."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault in one program."""

    program: str
    fault: str
    letter: str
    kind: str
    expected: tuple[str, ...]
    named: tuple[str, ...]
    """Causes of the incidents that are alarms, in the order in which they are told."""
    detected: bool
    top1: bool
    top3: bool
    rank_right: bool | None
    """None: no rank is guilty."""
    module_right: bool | None
    """None: no module is guilty, or the class has none."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def alarms(incidents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Incidents that ask something of a person: a note does not."""
    return [incident for incident in incidents if _severity(incident["cause"]) != Severity.NOTE]


def row_of(fault: Any, program: Any, outcome: Any, *, patience_s: float) -> Row:
    """Judge one case; `patience_s` is the time-out of its collectives."""
    found = alarms(outcome.findings)
    causes = [incident["cause"] for incident in found]
    named = tuple(cause["code"] for cause in causes)
    right = next((cause for cause in causes[:3] if cause["code"] in fault.codes), causes[0] if causes else None)
    module = program.module_of(fault) if fault.letter in WITH_MODULES else None
    return Row(
        program=program.name,
        fault=fault.id,
        letter=fault.letter,
        kind=fault.kind,
        expected=tuple(fault.codes),
        named=named,
        detected=bool(found) and _in_time(fault, outcome, causes, patience_s),
        top1=bool(named) and named[0] in fault.codes,
        top3=any(code in fault.codes for code in named[:3]),
        rank_right=None if fault.rank is None else bool(right and tuple(right["ranks"]) == (fault.rank,)),
        module_right=None if module is None else bool(right and _has_module(right["modules"], module)),
        seconds=outcome.seconds,
    )


def _in_time(fault: Any, outcome: Any, causes: list[dict[str, Any]], patience_s: float) -> bool:
    """A hang must be named within HANG_WITHIN_S after the last step of any rank, and before the library's time-out.

    If no step was made: before the time-out, counted from the program's start. All else is in time when it is found
    at all, for a case runs only the steps within which it is to be found.
    """
    if fault.kind != "hang":
        return True
    first_s = min(cause["found_s"] for cause in causes)
    if not outcome.last_step_s:
        return first_s - outcome.began_s < patience_s
    return first_s - outcome.last_step_s < min(HANG_WITHIN_S, patience_s)


def _has_module(found: Iterable[str], wanted: str) -> bool:
    """The first module that is named is the guilty one, or in it, or holds it."""
    first = next(iter(found), "")
    return bool(first) and (first == wanted or first.startswith(f"{wanted}.") or wanted.startswith(f"{first}."))


def _severity(cause: dict[str, Any]) -> Severity:
    return Severity(cause["severity"]) if cause.get("severity") else code_of(cause["code"]).severity


def shares(rows: list[Row]) -> dict[str, float]:
    """The numbers a person looks for; each a share of the rows to which it applies."""

    def share(values: list[bool]) -> float:
        return round(sum(values) / len(values), 4) if values else float("nan")

    return {
        "detected": share([row.detected for row in rows]),
        "cause_top1": share([row.top1 for row in rows]),
        "cause_top3": share([row.top3 for row in rows]),
        "rank_right": share([row.rank_right for row in rows if row.rank_right is not None]),
        "module_right": share([row.module_right for row in rows if row.module_right is not None]),
    }
