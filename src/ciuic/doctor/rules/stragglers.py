"""Who is slow, and in which phase: own work is compared between ranks, waiting is what the others do."""

import statistics
from collections.abc import Iterable

from ciuic.doctor.case import Case, Round, Rule
from ciuic.doctor.facts_waiting import QUEUED, TIMES, WAITS_LEAST, WINDOW
from ciuic.doctor.finding import Finding

WORK = {
    "forward": "forward pass",
    "backward": "backward pass",
    "update": "optimizer's step",
    "data": "data loading",
    "other": "own code between the passes",
}
"""Phases in which a rank works by itself, and what they are called."""
MUST_BE_WAITED_FOR = ("data", "other")
"""A rank may wait for others in there, unseen: it is slow only where the others wait for it."""
RATIO = 1.5
LEAST_S = 0.005
SHARE = 0.15
"""A rank is slow in a phase when it takes RATIO times what the others take, LEAST_S and SHARE of a step more."""
WINDOWS = 2
"""In so many windows in a row."""
INPUT_SHARE, INPUT_S, INPUT_WINDOWS = 0.6, 0.05, 3
"""All ranks wait for data so long."""
LINK_SHARE, LINK_S = 0.5, 0.02
"""Every rank spends this in communication, in every step."""

Times = dict[int, dict[str, float]]


class Stragglers(Rule):
    """L1, L2, L3."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], int] = {}
        """Windows in a row, by phase (or `input`, `link`) and rank."""

    def round(self, case: Case, round: Round) -> Iterable[Finding]:
        if round.optimizer:
            return
        times = times_of(round.values(WINDOW))
        if not times:
            return
        seen: set[tuple[str, int]] = set()
        groups = [group for group in round.groups() if set(group) <= set(times)]
        for group in groups:
            seen |= {(phase, rank) for rank, phase in slow_in({rank: times[rank] for rank in group})}
        if is_input_bound(times):
            seen.add(("input", -1))
        if groups and is_link_slow(times, round.values(QUEUED)):
            seen.add(("link", -1))
        self._rows = {key: self._rows.get(key, 0) + 1 for key in seen}
        yield from self._judge(round, times)

    def _judge(self, round: Round, times: Times) -> Iterable[Finding]:
        for (phase, rank), count in sorted(self._rows.items()):
            if phase == "input" and count == INPUT_WINDOWS:
                yield _input(round.step, times)
            elif phase == "link" and count == WINDOWS:
                yield _link(round.step, times)
            elif phase in WORK and count == WINDOWS:
                yield _slow(round.step, rank, phase, times)


def times_of(windows: dict[int, list[int]]) -> Times:
    """Seconds by rank and name."""
    names = (*TIMES, WAITS_LEAST)
    return {rank: {name: us / 1e6 for name, us in zip(names, row[1:], strict=True)} for rank, row in windows.items()}


def slow_in(times: Times) -> Iterable[tuple[int, str]]:
    """(rank, phase) of what is much slower than on the other ranks. Time without a processor is not the rank's own."""
    for rank, own in times.items():
        others = [each for other, each in times.items() if other != rank]
        if not others:
            return
        queued_s = max(each["queued"] for each in times.values())
        waits_less_s = statistics.median(each["waits"] for each in others) - own["waits"]
        for phase in WORK:
            usual_s = statistics.median(each[phase] for each in others)
            more_s = own[phase] - usual_s - max(0.0, own["queued"] - min(each["queued"] for each in others))
            least_s = max(LEAST_S, (RATIO - 1) * usual_s, SHARE * own["step"], 2 * queued_s)
            waited_for = phase not in MUST_BE_WAITED_FOR or waits_less_s > 0.5 * more_s
            if more_s > least_s and waited_for:
                yield rank, phase


def is_input_bound(times: Times) -> bool:
    """All ranks wait for their data for most of the step."""
    return all(own["data"] > max(INPUT_S, INPUT_SHARE * own["step"]) for own in times.values())


def is_link_slow(times: Times, queued: dict[int, int]) -> bool:
    """Even in the step with the shortest wait, every rank waits long: a rank that is late would not wait itself.

    `queued`, in microseconds by rank, is taken off: on a machine that is too busy the threads of the exchange wait too.
    """
    if set(queued) != set(times):
        return False
    least_s = min(own[WAITS_LEAST] for own in times.values()) - max(queued.values()) / 1e6
    step_s = statistics.median(own["step"] for own in times.values())
    return least_s > max(LINK_S, LINK_SHARE * step_s)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


def _slow(step: int, rank: int, phase: str, times: Times) -> Finding:
    others = [each for other, each in times.items() if other != rank]
    own_ms, usual_ms = _ms(times[rank][phase]), _ms(statistics.median(each[phase] for each in others))
    waits_ms = _ms(statistics.median(each["waits"] for each in others))
    code = "CIUIC-L2" if phase == "data" else "CIUIC-L1"
    return Finding(
        code=code,
        cause=f"rank {rank} is slow in its {WORK[phase]}: {own_ms} ms a step, {usual_ms} ms on the others, which wait {waits_ms} ms a step",
        step=step,
        ranks=(rank,),
        evidence={
            "phase": phase,
            "own_ms": own_ms,
            "others_ms": usual_ms,
            "others_wait_ms": waits_ms,
            "own_wait_ms": _ms(times[rank]["waits"]),
        },
        confidence=0.85,
    )


def _input(step: int, times: Times) -> Finding:
    data_ms = _ms(statistics.median(own["data"] for own in times.values()))
    step_ms = _ms(statistics.median(own["step"] for own in times.values()))
    return Finding(
        code="CIUIC-L2",
        cause=f"all ranks wait for their data: {data_ms} of {step_ms} ms a step",
        step=step,
        evidence={"phase": "data", "data_ms": data_ms, "step_ms": step_ms},
        confidence=0.8,
    )


def _link(step: int, times: Times) -> Finding:
    rank, own = min(times.items(), key=lambda item: item[1]["waits"])
    waits_ms, step_ms = _ms(own["waits"]), _ms(own["step"])
    return Finding(
        code="CIUIC-L3",
        cause=f"communication takes {waits_ms} of {step_ms} ms a step even on rank {rank}, which waits least: the link is slow, no rank is late",
        step=step,
        evidence={"phase": "communication", "waits_ms": waits_ms, "step_ms": step_ms},
        confidence=0.75,
    )
