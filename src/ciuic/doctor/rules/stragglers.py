"""Who is slow, and in which phase: own work is compared between ranks, waiting is what the others do."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ciuic.doctor.case import Case, Round, Rule
from ciuic.doctor.facts_waiting import QUEUED, TIMES, WINDOW
from ciuic.doctor.finding import Finding

WORK = {
    "forward": "forward pass",
    "backward": "backward pass",
    "update": "optimizer's step",
    "data": "data loading",
    "other": "own code between the passes",
}
"""Phases in which a rank works by itself, and what they are called."""
RATIO = 1.5
LEAST_S = 0.005
SHARE = 0.15
"""A rank is slow in a phase when even its fastest step takes RATIO times what the others usually take, LEAST_S and
SHARE of a step more, and half of that shows in all its work: what looks like work may be an unseen wait for others."""
WAITS_SHARE = 0.2
"""Of what a rank takes longer: whoever else would have to wait does so for at least this."""
DATA_S = 0.02
WINDOWS = 2
"""In so many windows in a row."""
INPUT_SHARE, INPUT_S, INPUT_WINDOWS = 0.6, 0.05, 3
"""All ranks wait for data so long."""
LINK_SHARE, LINK_S = 0.35, 0.015
"""Every rank spends this in communication."""
QUEUED_PART = 0.6
"""Of the time for which all threads of a rank had no processor, this may have made the others wait."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Seconds by name, of one rank."""

    usual: dict[str, float]
    """The lower quartile over the steps."""
    least: dict[str, float]


Times = dict[int, Window]


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
        yield from self._judge(round.step, times)

    def _judge(self, step: int, times: Times) -> Iterable[Finding]:
        for (phase, rank), count in sorted(self._rows.items()):
            if phase == "input" and count == INPUT_WINDOWS:
                yield _input(step, times)
            elif phase == "link" and count == WINDOWS:
                yield _link(step, times)
            elif phase in WORK and count == WINDOWS:
                yield _slow(step, rank, phase, times)


def times_of(rows: dict[int, list[int]]) -> Times:
    """From the records' facts; rows of another length are left out."""
    count, found = len(TIMES), {}
    for rank, row in rows.items():
        if len(row) == 1 + 2 * count:
            seconds = [us / 1e6 for us in row[1:]]
            found[rank] = Window(
                usual=dict(zip(TIMES, seconds[:count], strict=True)),
                least=dict(zip(TIMES, seconds[count:], strict=True)),
            )
    return found


def slow_in(times: Times) -> Iterable[tuple[int, str]]:
    """(rank, phase) of what is much slower than on the other ranks."""
    for rank, own in times.items():
        others = [each.usual for other, each in times.items() if other != rank]
        if not others:
            return
        works_more_s = own.usual["work"] - statistics.median(each["work"] for each in others)
        for phase in WORK:
            usual_s = statistics.median(each[phase] for each in others)
            more_s = own.least[phase] - usual_s
            enough_s = max(LEAST_S, (RATIO - 1) * usual_s, SHARE * own.usual["step"])
            long_s = max(DATA_S, 3 * usual_s, 2 * SHARE * own.usual["step"])
            if phase == "data" and own.usual[phase] - usual_s > long_s:
                more_s = (
                    own.usual[phase] - usual_s
                )  # who fetches ahead has steps without a fetch at the end of an epoch
            if more_s > enough_s and works_more_s > 0.5 * more_s and not _harms_nobody(rank, more_s, times):
                yield rank, phase


def _harms_nobody(rank: int, more_s: float, times: Times) -> bool:
    """The others wait less than this rank, and hardly at all: a processor was busy with something else."""
    waits_s = statistics.median(each.usual["waits"] for other, each in times.items() if other != rank)
    return times[rank].usual["waits"] > waits_s and waits_s < WAITS_SHARE * more_s


def is_input_bound(times: Times) -> bool:
    """All ranks wait for their data for most of the step."""
    return all(own.usual["data"] > max(INPUT_S, INPUT_SHARE * own.usual["step"]) for own in times.values())


def is_link_slow(times: Times, queued: dict[int, int]) -> bool:
    """Even the rank that waits least waits long: a rank that is late would not wait itself.

    `queued` is microseconds by rank: on a machine that is too busy, threads of the exchange wait for a processor too.
    """
    if set(queued) != set(times):
        return False
    least_s = min(own.usual["waits"] for own in times.values()) - QUEUED_PART * max(queued.values()) / 1e6
    step_s = statistics.median(own.usual["step"] for own in times.values())
    return least_s > max(LINK_S, LINK_SHARE * step_s)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


def _slow(step: int, rank: int, phase: str, times: Times) -> Finding:
    others = [each.usual for other, each in times.items() if other != rank]
    own = times[rank].usual
    own_ms, usual_ms = _ms(own[phase]), _ms(statistics.median(each[phase] for each in others))
    waits_ms = _ms(statistics.median(each["waits"] for each in others))
    code = "CIUIC-L2" if phase == "data" else "CIUIC-L1"
    return Finding(
        code=code,
        cause=f"rank {rank} is slow in its {WORK[phase]}: {own_ms} ms a step, {usual_ms} ms on the others, which wait "
        f"{waits_ms} ms a step",
        step=step,
        ranks=(rank,),
        evidence={
            "phase": phase,
            "own_ms": own_ms,
            "others_ms": usual_ms,
            "others_wait_ms": waits_ms,
            "own_wait_ms": _ms(own["waits"]),
        },
        confidence=0.85,
    )


def _input(step: int, times: Times) -> Finding:
    data_ms = _ms(statistics.median(own.usual["data"] for own in times.values()))
    step_ms = _ms(statistics.median(own.usual["step"] for own in times.values()))
    return Finding(
        code="CIUIC-L2",
        cause=f"all ranks wait for their data: {data_ms} of {step_ms} ms a step",
        step=step,
        evidence={"phase": "data", "data_ms": data_ms, "step_ms": step_ms},
        confidence=0.8,
    )


def _link(step: int, times: Times) -> Finding:
    rank, own = min(times.items(), key=lambda item: item[1].usual["waits"])
    waits_ms, step_ms = _ms(own.usual["waits"]), _ms(own.usual["step"])
    return Finding(
        code="CIUIC-L3",
        cause=f"communication takes {waits_ms} of {step_ms} ms a step even on rank {rank}, which waits least: the link "
        "is slow, no rank is late",
        step=step,
        evidence={"phase": "communication", "waits_ms": waits_ms, "step_ms": step_ms},
        confidence=0.75,
    )
