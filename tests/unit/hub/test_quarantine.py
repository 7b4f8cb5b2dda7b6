"""Pushes that move a fragment much further than others: clipped, refused, reported; honest ones never."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounds_world import Make, Rounds, many_rounds

from ciuic.errors import ConflictError
from ciuic.hub.run.quarantine import FIRST_FACTOR, LEAST_SEEN, OutlierRule, Outliers, SetAside
from ciuic.ledger.entry import Contributor, EntryHeader, PushHeader

RULE = OutlierRule()


def push(node: str = "a", *, sequence: int = 5, tokens: int = 1000) -> PushHeader:
    return PushHeader(
        run="r",
        node=node,
        incarnation=1,
        sequence=sequence,
        fragment=0,
        base_version=0,
        epoch=0,
        tokens=tokens,
        codec="int8",
        layout_digest="x",
    )


def entry(*merged: tuple[PushHeader, float, float]) -> EntryHeader:
    contributors = tuple(
        Contributor(
            node=header.node,
            incarnation=1,
            sequence=header.sequence,
            tokens=header.tokens,
            weight=1.0,
            payload_bytes=1,
            norm=norm,
            clip=clip,
        )
        for header, norm, clip in merged
    )
    fields: dict[str, Any] = {"run": "r", "fragment": 0, "version": 1, "codec": "int8", "epoch": 0}
    return EntryHeader(
        **fields, contributors=contributors, outer_lr=1.0, outer_momentum=0.0, digest="", previous_digest=""
    )


def measured(outliers: Outliers, *norms: float, tokens: int = 1000) -> Outliers:
    for norm in norms:
        outliers.merged(entry((push(tokens=tokens), norm, 1.0)))
    return outliers


def clip_of(outliers: Outliers, header: PushHeader, norm: float) -> float:
    outliers.wait((header.node, header.incarnation, header.sequence), norm)
    return outliers.marks([header])[header.node, header.incarnation, header.sequence][1]


def test_a_push_far_from_the_median_is_clipped_to_the_limit() -> None:
    outliers = measured(Outliers(RULE), *[1.0, 1.1, 0.9] * 4)
    assert clip_of(outliers, push(), 1.2) == 1.0
    assert clip_of(outliers, push(), 9.9) == 1.0
    assert clip_of(outliers, push(), 1000.0) * 1000.0 == pytest.approx(10.0, rel=0.02)


def test_nothing_is_clipped_before_enough_was_seen() -> None:
    outliers = measured(Outliers(RULE), *[1.0] * (LEAST_SEEN - 1))
    assert clip_of(outliers, push(), 1e9) == 1.0
    assert clip_of(measured(outliers, 1.0), push(), 1e9) < 1e-7


def test_a_node_that_comes_back_with_the_work_of_a_hundred_intervals_is_not_clipped() -> None:
    outliers = measured(Outliers(RULE), *[1.0] * 20)
    assert clip_of(outliers, push(tokens=100_000), 100.0) == 1.0
    assert clip_of(outliers, push(tokens=100_000), 10.0) == 1.0


def test_what_a_long_push_left_in_the_residual_is_not_clipped_from_the_next_ones() -> None:
    """The first push after an outage of the hub is long, and with 1 bit much of it goes out with those after it."""
    outliers = measured(Outliers(RULE), *[1.0] * 20)
    outliers.merged(entry((push("b", sequence=1, tokens=100_000), 100.0, 1.0)))
    norm, times = 60.0, 0
    while norm > 1.0:
        header = push("b", sequence=2 + times)
        assert clip_of(outliers, header, norm) == 1.0
        outliers.merged(entry((header, norm, 1.0)))
        norm, times = 0.6 * norm, times + 1
    assert clip_of(outliers, push("c"), 60.0) < 1.0, "of others it would be an outlier"


def test_a_push_of_one_step_beside_pushes_of_a_hundred_is_not_clipped() -> None:
    outliers = measured(Outliers(RULE), *[10.0] * 20, tokens=100_000)
    assert clip_of(outliers, push(tokens=1_000), 1.0) == 1.0


def test_the_first_push_of_an_incarnation_may_be_longer() -> None:
    outliers = measured(Outliers(RULE), *[1.0] * 20)
    longest = 10.0 * FIRST_FACTOR
    assert clip_of(outliers, push(sequence=1), 0.99 * longest) == 1.0
    assert clip_of(outliers, push(sequence=2), 0.99 * longest) < 0.3


def test_claiming_many_tokens_does_not_buy_any_length() -> None:
    outliers = measured(Outliers(RULE), *[1.0] * 20)
    assert clip_of(outliers, push(tokens=1 << 53), 1e9) < 1e-5


def test_what_was_clipped_does_not_move_the_measure_by_more_than_the_limit() -> None:
    outliers = measured(Outliers(RULE), *[1.0] * 40)
    for _ in range(20):
        header = push("evil")
        clip = clip_of(outliers, header, 1e6)
        outliers.merged(entry((header, 1e6, clip)))
    assert clip_of(outliers, push(), 11.0) < 1.0


def test_quarantine_refuses_instead_and_off_does_nothing() -> None:
    strict = measured(Outliers(OutlierRule(mode="quarantine")), *[1.0] * 20)
    assert "more than the limit" in strict.refusal(push(), 50.0)
    assert strict.refusal(push(), 5.0) == ""
    assert clip_of(strict, push(), 50.0) == 1.0
    off = measured(Outliers(OutlierRule(mode="off")), *[1.0] * 20)
    assert (off.refusal(push(), 1e9), clip_of(off, push(), 1e9)) == ("", 1.0)


def test_gradients_are_compared_as_they_are() -> None:
    rule = OutlierRule(depends_on_tokens=False)
    outliers = measured(Outliers(rule), *[1.0] * 20)
    assert clip_of(outliers, push(tokens=10), 9.0) == 1.0
    assert clip_of(outliers, push(tokens=100_000), 100.0) < 1.0


def test_pushes_of_zeros_are_no_measure_and_never_outliers() -> None:
    outliers = measured(Outliers(RULE), *[0.0] * 50)
    assert clip_of(outliers, push(), 5.0) == 1.0
    assert clip_of(measured(outliers, *[1.0] * 20), push(), 0.0) == 1.0


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=LEAST_SEEN, max_size=80),
    st.floats(0, 1e30),
    st.integers(1, 1 << 53),
)
def test_a_clipped_push_is_never_longer_than_the_limit_and_never_longer_than_before(
    norms: list[float], norm: float, tokens: int
) -> None:
    outliers = measured(Outliers(RULE), *norms)
    header = push(tokens=tokens)
    clip, limit = clip_of(outliers, header, norm), outliers.limit(header)
    assert limit is not None
    assert 0 < clip <= 1
    assert norm * clip <= limit * (1 + 1e-9)
    assert math.isfinite(limit)


def test_so_many_outliers_in_a_row_set_a_node_aside_and_an_honest_push_forgives() -> None:
    aside = SetAside(3)
    seen = [aside.saw("a", is_outlier=bad) for bad in (True, True, False, True, True, True, True)]
    assert seen == [False, False, False, False, False, True, False]
    assert aside.nodes == {"a"}
    never = SetAside(0)
    assert not any(never.saw("a", is_outlier=True) for _ in range(100))


# ---- in the ledger of a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    with many_rounds() as maker:
        yield maker


def rounds_with(make: Make, **security: Any) -> Rounds:
    rounds = make(samples=2000, min_nodes=2)
    if security:
        rounds.job = rounds.job.model_copy(
            update={"security": rounds.job.security.model_copy(update=security)},
        )
        rounds.restart()
    return rounds


def one_round(rounds: Rounds, evil: float = 0.01) -> None:
    for node, value in (("a", 0.01), ("b", 0.011), ("c", evil)):
        ranges = rounds.lease(node, 5).ranges
        rounds.ledger.push(node, rounds.frame(node, *ranges, value=value))
    rounds.ledger.tick()


def newest(rounds: Rounds) -> EntryHeader:
    fragment = rounds.ledger.fragments[0]
    return fragment.store.entry(fragment.version).header  # type: ignore[union-attr]


def clips(rounds: Rounds) -> dict[str, float]:
    return {one.node: one.clip for one in newest(rounds).contributors}


def test_an_outlier_is_clipped_reported_and_replayed_bit_by_bit(make: Make) -> None:
    rounds = rounds_with(make)
    rounds.start("a", "b", "c")
    for _ in range(4):
        one_round(rounds)
        assert set(clips(rounds).values()) == {1.0}
    one_round(rounds, evil=50.0)
    assert clips(rounds)["a"] == clips(rounds)["b"] == 1.0
    assert clips(rounds)["c"] < 0.01
    (line,) = [text for kind, text, _ in rounds.events if kind == "push.clipped"]
    assert "a push of c was clipped" in line
    before = rounds.ledger.fragments[0].digest
    rounds.restart()
    assert rounds.ledger.fragments[0].digest == before
    assert clips(rounds)["c"] < 0.01


def test_the_measure_is_the_same_after_a_restart(make: Make) -> None:
    rounds = rounds_with(make)
    rounds.start("a", "b", "c")
    for _ in range(4):
        one_round(rounds)
    header = push("c", tokens=5)
    before = rounds.ledger.fragments[0].outliers.limit(header)  # type: ignore[union-attr]
    rounds.restart()
    assert rounds.ledger.fragments[0].outliers.limit(header) == pytest.approx(before)  # type: ignore[union-attr]


def test_a_node_with_outlier_after_outlier_is_set_aside_and_the_others_go_on(make: Make) -> None:
    rounds = rounds_with(make, set_aside_after=2)
    rounds.start("a", "b", "c")
    for _ in range(4):
        one_round(rounds)
    for _ in range(2):
        one_round(rounds, evil=50.0)
    assert "node.set_aside" in rounds.kinds()
    assert "c" not in rounds.ledger.present()
    for forbidden in (lambda: rounds.lease("c", 5), lambda: rounds.attach("c")):
        with pytest.raises(ConflictError, match="set aside"):
            forbidden()
    rounds.restart()
    with pytest.raises(ConflictError, match="set aside"):
        rounds.attach("c")
    version = rounds.ledger.fragments[0].version
    for node in ("a", "b"):
        ranges = rounds.lease(node, 5).ranges
        rounds.ledger.push(node, rounds.frame(node, *ranges))
    assert rounds.ledger.fragments[0].version == version + 1


def test_quarantine_does_not_merge_the_push_and_its_samples_stay_with_the_node(make: Make) -> None:
    rounds = rounds_with(make, outliers="quarantine")
    rounds.start("a", "b", "c")
    for _ in range(4):
        one_round(rounds)
    ranges = rounds.lease("c", 5).ranges
    reply = rounds.ledger.push("c", rounds.frame("c", *ranges, value=50.0))
    assert (reply.status, reply.reason) == ("rejected", "quarantined")
    assert "more than the limit" in reply.detail
    again = rounds.ledger.push("c", rounds.frame("c", *ranges, value=0.01))
    assert again.status == "accepted"


def test_the_norm_counts_every_element(make: Make) -> None:
    rounds = rounds_with(make)
    rounds.start("a", "b", "c")
    one_round(rounds)
    count = rounds.layout.fragment_shape(0).element_count
    norms = {one.node: one.norm for one in newest(rounds).contributors}
    assert norms["a"] == pytest.approx(0.01 * np.sqrt(count), rel=0.05)
