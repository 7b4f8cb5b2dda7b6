"""A page that puts the news together knows what the whole state says."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from support.page_states import closed_round, event, held_out, member, plain, run, state

from ciuic.hub.api.news import News, State
from ciuic.net.messages import RunInfo


def test_the_first_message_is_the_whole_state() -> None:
    whole = state(briefs=[run("old-1", state="finished")])
    assert News().of(whole) == whole


def test_what_has_been_told_is_not_told_again() -> None:
    news = News()
    news.of(state(briefs=[run("old-1", state="finished")]))
    told = news.of(state(briefs=[run("old-1", state="finished")]))
    assert told.hub.runs == []
    assert told.events == []
    (only,) = told.runs
    assert (only.rounds, only.evaluations, only.job) == ([], [], {})
    assert only.nodes == run().nodes
    assert told.hub.nodes == state().hub.nodes


def test_what_is_new_is_told() -> None:
    news = News()
    news.of(state())
    later = run(
        rounds=[*run().rounds, closed_round(13)],
        evaluations=[*run().evaluations, held_out(12, 2.39)],
        nodes=[member("us-west", step=130)],
    )
    told = news.of(state(runs=[later], events=[*state().events, event(2, "round.closed", "round 13 closed")]))
    (only,) = told.runs
    assert [item.version for item in only.rounds] == [13]
    assert [item.version for item in only.evaluations] == [12]
    assert only.nodes[0].step == 130
    assert [item.id for item in told.events] == [2]


def test_an_older_run_is_told_again_when_it_changes() -> None:
    news = News()
    news.of(state(briefs=[run("old-1", state="stopped")]))
    told = news.of(state(briefs=[run("old-1", state="running")]))
    assert [(item.run_id, item.state) for item in told.hub.runs] == [("old-1", "running")]


def test_two_readers_are_told_separately() -> None:
    one, other = News(), News()
    one.of(state())
    assert other.of(state()) == state()


def test_a_long_run_costs_little_to_follow() -> None:
    rounds = [closed_round(version) for version in range(1, 201)]
    evaluations = [held_out(version, 2.0) for version in range(1000)]
    long = run(rounds=rounds, evaluations=evaluations)
    news = News()
    first = len(msgspec.json.encode(news.of(state(runs=[long]))))
    following = len(msgspec.json.encode(news.of(state(runs=[long]))))
    assert first > 100_000
    assert following < 5_000


def merge(known: dict[str, Any], told: State) -> None:
    """What the page does (model.js)."""
    for info in [*told.hub.runs, *told.runs]:
        old: RunInfo | None = known.get(info.run_id)
        if old is not None:
            rounds = {(item.fragment, item.version): item for item in [*old.rounds, *info.rounds]}
            points = {(x.version, x.node_id, x.final, x.time): x for x in [*old.evaluations, *info.evaluations]}
            job = info.job or old.job
            info = msgspec.structs.replace(
                info, job=job, rounds=list(rounds.values())[-5:], evaluations=list(points.values())
            )
        known[info.run_id] = info


steps = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.booleans()), min_size=1, max_size=20)


@given(steps)
def test_news_put_together_are_the_state(steps: list[tuple[int, int, bool]]) -> None:
    news, known = News(), {}
    version, evaluated, is_second = 0, 0, False
    for new_rounds, new_evaluations, starts_second in steps:
        version, evaluated, is_second = version + new_rounds, evaluated + new_evaluations, is_second or starts_second
        first = run(
            versions=[version],
            rounds=[closed_round(number) for number in range(1, version + 1)][-5:],
            evaluations=[held_out(number, 2.0) for number in range(evaluated)],
        )
        runs = [first, run("demo-2")] if is_second else [first]
        whole = state(runs=runs)
        merge(known, news.of(whole))
        assert plain(known["demo-1"]) == plain(first)
        assert set(known) == {item.run_id for item in runs}
