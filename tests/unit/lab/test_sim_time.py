"""Virtual time: events come in order of their times, whatever slot they lie in."""

from hypothesis import given
from hypothesis import strategies as st

from ciuic.lab.sim_time import SLOTS_PER_S, Timeline

DELAYS = st.one_of(
    st.floats(0.0, 0.05), st.floats(0.0, 200.0), st.integers(0, 400).map(lambda n: n / SLOTS_PER_S), st.just(0.0)
)


@given(st.lists(st.tuples(DELAYS, st.lists(DELAYS, max_size=3)), max_size=30))
def test_events_come_in_order_of_time_and_of_planning(plans: list[tuple[float, list[float]]]) -> None:
    """Each event may plan others when it comes, also at once."""
    timeline, planned, seen = Timeline(), [], []

    def plan(delay_s: float, then: list[float]) -> None:
        planned.append((timeline.now_s + delay_s, len(planned)))
        timeline.after(delay_s, come, planned[-1], then)

    def come(event: tuple[float, int], then: list[float]) -> None:
        assert timeline.now_s == event[0]
        seen.append(event)
        for delay_s in then:
            plan(delay_s, [])

    for delay_s, then in plans:
        plan(delay_s, then)
    timeline.run(until_s=1000.0, stop=lambda: False)
    assert seen == sorted(planned)
    assert timeline.count == len(planned)


def test_what_lies_behind_the_end_stays_planned() -> None:
    timeline, seen = Timeline(), []
    for delay_s in (3.0, 1.0, 2.0):
        timeline.after(delay_s, seen.append, delay_s)
    timeline.run(until_s=2.0, stop=lambda: False)
    assert seen == [1.0, 2.0]
    timeline.run(until_s=9.0, stop=lambda: False)
    assert seen == [1.0, 2.0, 3.0]


def test_stop_is_asked_once_per_second() -> None:
    timeline, asked = Timeline(), []
    for tenth in range(50):
        timeline.after(tenth / 10, lambda: None)

    def stop() -> bool:
        asked.append(timeline.now_s)
        return len(asked) == 3

    timeline.run(until_s=100.0, stop=stop)
    assert asked == [0.0, 1.0, 2.0]
    assert timeline.count == 21
