"""Where the calls of ranks differ, from the last calls of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ciuic.doctor.case import odd_ones
from ciuic.doctor.facts_waiting import DDP_BUFFERS, DDP_GRADIENTS

NUMBER, NAME, DETAIL, SITE, STEP = range(5)
"""Of one call in an answer to HISTORY."""
OWN_CALLS = {DDP_BUFFERS: "DDP's broadcast of buffers", DDP_GRADIENTS: "DDP's reduction of gradients"}
CONTEXTS = (1, 2, 3, 4, 6, 8)
"""How many calls before one are looked at to tell whether a rank made it as usual: the fewest that tell ranks apart."""
RECORDED_SAME_SHAPE = frozenset({"all_reduce", "broadcast", "reduce"})

Row = Sequence[Any]


def name_of(name: str) -> str:
    """As a person would call it."""
    return OWN_CALLS.get(name, name)


def called(name: str, detail: str, site: str) -> str:
    """`all_reduce (float32[4] SUM) at train.py:10 in main`."""
    return f"{name_of(name)}{f' ({detail})' if detail else ''} at {site}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first call at which ranks differ, after as many calls of the group on each of them."""

    number: int
    calls: Mapping[int, Row]
    """By rank, the first ones that do not belong together."""
    odd: tuple[int, ...]
    """Ranks that left their own pattern, or the majority's; empty: nobody is odder than the others."""
    same_call: bool
    """From the same line; only shapes, types or operations differ."""

    @property
    def step(self) -> int:
        """The optimizer step in which it happened."""
        return min(row[STEP] for row in self.calls.values()) + 1

    @property
    def by_ddp(self) -> bool:
        """Whether one of the calls is DDP's own, which is counted by its forward and backward passes only."""
        return any(row[NAME] in OWN_CALLS for row in self.calls.values())

    @property
    def meets_evaluation(self) -> bool:
        """A training pass of DDP on one rank meets a pass without gradients on another."""
        return self.by_ddp and len({row[NAME] for row in self.calls.values()}) == 1


def first_difference(histories: Mapping[int, Sequence[Row]]) -> Difference | None:
    """Of at least two ranks; None when they agree wherever they can be compared."""
    by_number = {rank: {row[NUMBER]: row for row in rows} for rank, rows in histories.items() if rows}
    numbers = sorted({number for rows in by_number.values() for number in rows})
    for number in numbers:
        here = {rank: rows[number] for rank, rows in by_number.items() if number in rows}
        if len({(row[NAME], row[DETAIL]) for row in here.values()}) > 1:
            return _difference(by_number, number, sorted(here))
    return None


def _difference(by_number: dict[int, dict[int, Row]], number: int, ranks: list[int]) -> Difference:
    first = number
    while all(first - 1 in by_number[rank] for rank in ranks) and _sites_differ(by_number, first - 1, ranks):
        first -= 1  # equal calls from different places: they have met by mistake
    calls = {rank: by_number[rank][first] for rank in ranks}
    kinds = {rank: (by_number[rank][number][NAME], by_number[rank][number][DETAIL]) for rank in ranks}
    strange: tuple[int, ...] = ()
    for before in CONTEXTS:
        strange = tuple(r for r in ranks if any(_is_new(by_number[r], at, before) for at in range(first, number + 1)))
        if strange:
            break
    if not strange or len(strange) == len(ranks):
        strange = odd_ones(kinds) if len(ranks) > 2 else ()
    same = first == number and is_same_call(calls)
    return Difference(number=first, calls=calls, odd=strange, same_call=same)


def is_same_call(calls: Mapping[int, Row]) -> bool:
    """Whether ranks make it at the same place under the same name."""
    return len({(row[NAME], row[SITE]) for row in calls.values()}) == 1


def _sites_differ(by_number: dict[int, dict[int, Row]], number: int, ranks: list[int]) -> bool:
    return len({by_number[rank][number][SITE] for rank in ranks}) > 1


def _is_new(rows: dict[int, Row], number: int, before: int) -> bool:
    """Whether this call never came after the `before` ones before it so far."""

    def run(at: int) -> list[Any] | None:
        if any(each not in rows for each in range(at - before, at + 1)):
            return None
        return [tuple(rows[each][NAME:STEP]) for each in range(at - before, at + 1)]

    wanted = run(number)
    return wanted is not None and all(run(at) != wanted for at in rows if at < number)


def recorded_difference(recorded: Mapping[int, Sequence[Row]]) -> tuple[int, dict[int, Row]] | None:
    """The first entry of the Flight Recorder that differs: its number, and by rank [number, name, sizes]."""
    by_number = {rank: {row[0]: row for row in rows} for rank, rows in recorded.items() if rows}
    for number in sorted({number for rows in by_number.values() for number in rows}):
        here = {rank: rows[number] for rank, rows in by_number.items() if number in rows}
        kinds = {(row[1], row[2] if row[1] in RECORDED_SAME_SHAPE else "") for row in here.values()}
        if len(kinds) > 1:
            return number, here
    return None


def recorded_in_common(recorded: Mapping[int, Sequence[Row]]) -> bool:
    """Whether the Flight Recorders of all ranks have entries that can be compared."""
    numbers = [{row[0] for row in rows} for rows in recorded.values()]
    return len(numbers) > 1 and bool(set.intersection(*numbers))


def steps_differ(histories: Mapping[int, Sequence[Row]]) -> tuple[int, dict[int, Row]] | None:
    """The first equal call that ranks made in different optimizer steps."""
    by_number = {rank: {row[NUMBER]: row for row in rows} for rank, rows in histories.items() if rows}
    if len(by_number) < 2:
        return None
    for number in sorted(set.intersection(*(set(rows) for rows in by_number.values()))):
        here = {rank: rows[number] for rank, rows in by_number.items()}
        if len({row[STEP] for row in here.values()}) > 1:
            return number, here
    return None
