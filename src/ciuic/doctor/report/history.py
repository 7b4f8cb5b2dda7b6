"""What the evidence says about the course of a run: curves by rank, movement by module, phases, when findings came."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ciuic.doctor.evidence import read_evidence
from ciuic.doctor.facts import MOVEMENT
from ciuic.doctor.facts_model import MODE, NAMES, UNOWNED
from ciuic.doctor.facts_training import LOSS, RATES, SCALER, SKIPPED
from ciuic.doctor.record import Beat, Bye, FromRank, Hello, Notice, Record

CLOCK_S = 2.0
"""Clocks of ranks that are further apart are put together, and the report says so."""
COST = "cost_s"

Curve = list[tuple[float, float]]
"""(step, value), in order."""


class _Moved(msgspec.Struct, frozen=True):
    """Facts of a movement notice."""

    optimizer: int
    step: int
    moved: bytes
    flags: bytes
    grads: bytes = b""
    modules: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One sampled step of one optimizer on one rank: a byte for each module, as in `facts.MOVEMENT`."""

    step: int
    modules: tuple[str, ...]
    moved: bytes
    grads: bytes
    flags: bytes


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A sign of life: what a rank did, and for how long."""

    time_s: float
    phase: str
    phase_s: float
    step: int


@dataclass(kw_only=True)
class History:
    """By rank, what is drawn."""

    world: int = 0
    hosts: dict[int, str] = field(default_factory=dict)
    losses: dict[int, Curve] = field(default_factory=lambda: defaultdict(list))
    not_finite: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Steps whose loss was infinite or no number."""
    modes: set[str] = field(default_factory=set)
    """See facts_model.MODE."""
    rates: dict[tuple[int, int], dict[int, Curve]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Learning rate by (optimizer, group)."""
    scales: dict[int, Curve] = field(default_factory=lambda: defaultdict(list))
    skipped: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Steps that a scaler left out."""
    moments: dict[int, dict[int, list[Moment]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """By optimizer and rank."""
    unowned: dict[str, int] = field(default_factory=dict)
    """Parameters that get gradients and have no optimizer, as the last sample says: since step."""
    signs: dict[int, list[Sign]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, tuple[float, str]] = field(default_factory=dict)
    """Time of the last word, and how the rank ended; a rank without one was cut."""
    steps: dict[int, int] = field(default_factory=dict)
    """The newest, of the first optimizer."""
    cost_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """What the samples took."""
    shifts_s: dict[int, float] = field(default_factory=dict)
    """Ranks whose clock is wrong, and by how much their times were moved."""

    @property
    def began_s(self) -> float:
        """The first sign of life."""
        return min((signs[0].time_s - signs[0].phase_s for signs in self.signs.values() if signs), default=0.0)

    @property
    def ended_s(self) -> float:
        """The last sign of life."""
        return max((signs[-1].time_s for signs in self.signs.values() if signs), default=self.began_s)


def read_history(folder: Path) -> History:
    """Of a doctor's folder; empty when there is no evidence in it."""
    history = History()
    modules: dict[tuple[int, int], tuple[str, ...]] = {}
    times: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for message in _messages(folder):
        match message:
            case Hello():
                history.world = max(history.world, message.world)
                history.hosts[message.rank] = message.host
                history.ends.pop(message.rank, None)
            case Record():
                times[message.rank][message.optimizer, message.step] = message.time_s
                _take_record(history, message)
            case Beat():
                sign = Sign(time_s=message.time_s, phase=message.phase, phase_s=message.phase_s, step=message.step)
                history.signs[message.rank].append(sign)
                history.steps[message.rank] = max(message.step, history.steps.get(message.rank, 0))
            case Notice():
                _take_notice(history, message, modules)
            case Bye():
                signs = history.signs.get(message.rank)
                history.steps[message.rank] = max(message.step, history.steps.get(message.rank, 0))
                history.ends[message.rank] = (signs[-1].time_s if signs else 0.0, message.how or "end")
            case _:
                continue
    _put_clocks_together(history, times)
    return history


def _messages(folder: Path) -> Iterable[Any]:
    for kind, body in read_evidence(folder):
        if kind not in ("note", "answer"):
            with suppress(msgspec.ValidationError):
                yield msgspec.convert(body, FromRank, strict=False)


def _take_record(history: History, record: Record) -> None:
    facts, rank, step = record.facts, record.rank, record.step
    history.steps[rank] = max(step if record.optimizer == 0 else 0, history.steps.get(rank, 0))
    history.cost_s[rank] += _number(facts.get(COST)) or 0.0
    if MODE in facts:
        history.modes.add(str(facts[MODE]))
    if LOSS in facts and record.optimizer == 0:
        loss = _number(facts[LOSS])
        if loss is None:
            history.not_finite[rank].append(step)
        else:
            history.losses[rank].append((step, loss))
    for group, rate in enumerate(facts.get(RATES) or ()):
        if (value := _number(rate)) is not None:
            history.rates[record.optimizer, group][rank].append((step, value))
    scaler = facts.get(SCALER)
    if isinstance(scaler, list) and scaler and (scale := _number(scaler[0])) is not None:
        history.scales[rank].append((step, scale))


def _take_notice(history: History, notice: Notice, modules: dict[tuple[int, int], tuple[str, ...]]) -> None:
    facts, rank = notice.facts, notice.rank
    if notice.kind == SKIPPED:
        history.skipped[rank].append(notice.step)
        if (scale := _number(facts.get("scale"))) is not None:
            history.scales[rank].append((notice.step, scale))
    elif notice.kind == NAMES and facts.get("what") == UNOWNED:
        names = [str(name) for name in facts.get("names", ())]
        history.unowned = {name: history.unowned.get(name, notice.step) for name in names}
    elif notice.kind == MOVEMENT:
        with suppress(msgspec.ValidationError):
            moved = msgspec.convert(facts, _Moved)
            key = moved.optimizer, rank
            modules[key] = tuple(moved.modules) or modules.get(key, ())
            if len(modules[key]) == len(moved.moved) == len(moved.flags):
                history.moments[moved.optimizer][rank].append(_moment(moved, modules[key]))


def _moment(moved: _Moved, modules: tuple[str, ...]) -> Moment:
    grads = moved.grads if len(moved.grads) == len(modules) else bytes(len(modules))
    return Moment(step=moved.step, modules=modules, moved=moved.moved, grads=grads, flags=moved.flags)


def _number(value: Any) -> float | None:
    """JSON has no infinities and no NaN: they come as null, and are left out."""
    return float(value) if isinstance(value, int | float) and abs(value) < float("inf") else None


def _put_clocks_together(history: History, times: dict[int, dict[tuple[int, int], float]]) -> None:
    """By the records of equal steps, which are made at about the same time."""
    if not times:
        return
    first = times[min(times)]
    for rank, mine in times.items():
        apart = [mine[key] - first[key] for key in mine.keys() & first.keys()]
        shift_s = statistics.median(apart) if apart else 0.0
        if abs(shift_s) > CLOCK_S:
            history.shifts_s[rank] = -shift_s
            _shift(history, rank, lambda time_s, by_s=shift_s: time_s - by_s)


def _shift(history: History, rank: int, moved: Callable[[float], float]) -> None:
    history.signs[rank] = [
        Sign(time_s=moved(sign.time_s), phase=sign.phase, phase_s=sign.phase_s, step=sign.step)
        for sign in history.signs[rank]
    ]
    if rank in history.ends:
        time_s, how = history.ends[rank]
        history.ends[rank] = moved(time_s), how
