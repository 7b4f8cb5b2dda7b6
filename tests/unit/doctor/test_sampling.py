from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor.record import Record, Schedule
from ciuic.doctor.sampling import ALLOWANCE_S, BUDGET, COST, DENSE_STEPS, FIRST_STEPS, STEP_TIME, Pace, Sampler


def _record(step: int, *, cost_s: float, step_s: float) -> Record:
    return Record(rank=0, optimizer=0, step=step, time_s=0.0, facts={COST: cost_s, STEP_TIME: step_s})


def _pace() -> Pace:
    """One whose allowance is used up."""
    pace = Pace(every=10)
    pace.seen(_record(1, cost_s=ALLOWANCE_S, step_s=1.0))
    return pace


def test_the_first_steps_and_then_every_tenth_are_looked_at():
    sampler = Sampler(every=10)
    assert [step for step in range(1, 41) if sampler.due(step)] == [1, 2, 3, 4, 10, 20, 30, 40]


@given(st.lists(st.tuples(st.integers(5, 500), st.integers(1, 300)), max_size=5, unique_by=lambda pair: pair[0]))
def test_ranks_that_heard_the_same_schedules_look_at_the_same_steps(schedules):
    one, other = Sampler(), Sampler()
    for start, every in sorted(schedules):
        one.follow(Schedule(start=start, every=every))
        other.follow(Schedule(start=start, every=every))
        other.follow(Schedule(start=start, every=every))  # heard twice, after a new connection
    assert [one.due(step) for step in range(600)] == [other.due(step) for step in range(600)]


def test_dear_samples_are_taken_less_often_until_they_fit_the_budget():
    pace = _pace()
    schedule = pace.seen(_record(30, cost_s=0.02, step_s=0.05))
    assert schedule is not None
    assert 0.02 / (schedule.every * 0.05) <= BUDGET
    assert schedule.start > 30


def test_small_programs_are_looked_at_closely_for_longer():
    pace = Pace(every=10)
    for step in range(20, 100, 10):
        assert pace.seen(_record(step, cost_s=0.001, step_s=0.001)) is None
    assert pace.seen(_record(1100, cost_s=ALLOWANCE_S, step_s=0.001)) is not None


def test_a_slow_spell_does_not_make_samples_more_frequent():
    pace = _pace()
    first = pace.seen(_record(20, cost_s=0.02, step_s=0.2))
    assert first is not None
    assert pace.seen(_record(first.start + 10, cost_s=0.02, step_s=0.9)) is None
    assert pace.seen(_record(first.start + 60, cost_s=0.04, step_s=0.9)) is not None


def test_the_first_steps_are_never_thinned_out():
    pace = Pace(every=10)
    assert pace.seen(_record(DENSE_STEPS - 1, cost_s=9.0, step_s=0.001)) is None
    assert FIRST_STEPS >= 3


def test_cheap_samples_stay_as_frequent_as_asked():
    assert Pace(every=10).seen(_record(50, cost_s=1e-4, step_s=0.1)) is None


def test_strict_is_strict():
    assert Pace(every=1, adapt=False).seen(_record(50, cost_s=1.0, step_s=0.1)) is None
