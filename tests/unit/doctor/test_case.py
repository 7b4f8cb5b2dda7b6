from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor.case import REPLICAS, ROUNDS_HELD, Asked, Case, Round, Rule, odd_ones
from ciuic.doctor.probe.digests import children, root
from ciuic.doctor.record import Record
from ciuic.doctor.rules.drill import Drill, drill, follow

NAMES = st.lists(
    st.lists(st.sampled_from(["a", "b", "layer", "0", "1"]), min_size=1, max_size=4).map(".".join),
    min_size=1,
    max_size=12,
)


def _record(rank: int, step: int = 1, **facts: Any) -> Record:
    return Record(rank=rank, optimizer=0, step=step, time_s=0.0, facts=facts)


def _nothing(*_: Any, **__: Any) -> None: ...


def test_the_minority_is_odd_and_in_a_tie_the_lowest_rank_is_right():
    assert odd_ones({0: b"x", 1: b"y", 2: b"x"}) == (1,)
    assert odd_ones({0: b"x", 1: b"y", 2: b"y"}) == (0,)
    assert odd_ones({0: b"x", 1: b"y"}) == (1,)
    assert odd_ones({0: [1, 2], 1: [1, 2]}) == ()


def test_ranks_are_compared_inside_their_replica_groups_only():
    round_ = Round(optimizer=0, step=1, began_s=0.0)
    for rank, group in enumerate(([0, 2], [1, 3], [0, 2], [1, 3])):
        round_.records[rank] = _record(rank, **{REPLICAS: group})
    assert round_.groups() == [(0, 2), (1, 3)]
    del round_.records[3]
    assert round_.groups() == [(0, 2)]


def test_old_rounds_are_forgotten():
    case = Case(ask=_nothing)
    for step in range(1, 3 * ROUNDS_HELD):
        case.round_of(_record(0, step), 0.0)
    assert len(case.rounds) == ROUNDS_HELD


class _Rule(Rule):
    def answered(self, case: Case, asked: Asked) -> Iterable[Any]:
        return follow(case, self, asked)


@given(NAMES, st.data())
def test_a_drill_ends_at_exactly_the_tensors_that_differ(names, data):
    names = [name for name in dict.fromkeys(names) if not any(other.startswith(f"{name}.") for other in names)]
    one = {name: bytes([at]) * 8 for at, name in enumerate(names)}
    changed = data.draw(st.sets(st.sampled_from(names), max_size=4)) if names else set()
    held = {0: one, 1: {name: b"z" * 8 if name in changed else value for name, value in one.items()}}
    assert (root(held[0]) == root(held[1])) == (not changed)
    waiting: list[Asked] = []
    found: list[Drill] = []

    def ask(rule: Rule, kind: str, ranks: Iterable[int], *, facts: dict[str, Any], about: Any = None) -> None:
        answers = {rank: children(held[rank], facts["path"]) for rank in ranks}
        asked = Asked(number=1, kind=kind, facts=facts, ranks=tuple(ranks), until_s=1.0, about=about, answers=answers)
        waiting.append(asked)

    case, rule = Case(ask=ask), _Rule()
    search = Drill(
        of="params",
        round=Round(optimizer=0, step=1, began_s=0.0),
        ranks=(0, 1),
        found=lambda _, done: found.append(done) or (),
    )
    drill(case, rule, search)
    while waiting:
        list(rule.answered(case, waiting.pop(0)))
    assert len(found) == 1
    assert set(found[0].leaves) == changed
    assert found[0].odd == ((1,) if changed else ())
