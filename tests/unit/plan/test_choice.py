"""Codec and interval: what is chosen on known links, and what must hold on all."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_cases import (
    KNOWN,
    any_facts,
    any_wishes,
    facts_at,
    faster_codecs,
    powers,
    slower_link,
)

from ciuic.codec import FragmentShape
from ciuic.plan.choice import LADDER, alternatives, bytes_per_step, choose, frontier
from ciuic.plan.facts import Facts, Wishes
from ciuic.plan.predict import Setting, break_even_bits_per_s, predict

ALL = [Setting(codec_up=name, codec_down=name, interval=steps) for name in KNOWN for steps in LADDER]
BITS = {"none": 32, "bf16": 16, "int8": 8, "int4": 4, "2-bit": 2, "1-bit": 1}


def test_a_far_slow_link_gets_one_bit_every_few_steps_and_hides_it() -> None:
    choice = choose(facts_at(20e6, 0.22))
    assert (choice.setting.codec_up, choice.setting.codec_down) == ("1-bit", "1-bit")
    assert 4 <= choice.setting.interval <= 10
    assert choice.overlap
    assert choice.round.exposed_share < 0.03


def test_a_network_inside_a_building_gets_full_numbers_and_the_smallest_interval() -> None:
    choice = choose(facts_at(10e9, 0.0002))
    assert choice.setting.codec_up in ("none", "bf16")
    assert choice.setting.interval == 2


def test_a_modem_gets_one_bit_and_a_long_interval() -> None:
    choice = choose(facts_at(100e3, 0.3))
    assert choice.setting.codec_up == "1-bit"
    assert choice.setting.interval >= 100
    assert choice.round.exposed_share < 0.1


def test_where_even_the_longest_interval_does_not_fit_it_is_taken_and_the_cost_is_told() -> None:
    choice = choose(facts_at(1e3, 0.3))
    assert (choice.setting.codec_up, choice.setting.interval) == ("1-bit", 500)
    assert choice.round.exposed_share > 0.5


def test_a_long_way_alone_makes_the_interval_longer() -> None:
    near, far = choose(facts_at(1e9, 0.005)), choose(facts_at(1e9, 0.25))
    assert far.setting.interval > near.setting.interval


def test_a_slow_codec_is_not_worth_a_fast_link() -> None:
    facts = faster_codecs(facts_at(1e9, 0.001), 1)
    slow = {
        name: speed if name == "none" else replace(speed, encode_bytes_per_s=1e7, decode_bytes_per_s=1e7)
        for name, speed in facts.speeds.by_name.items()
    }
    facts = replace(facts, speeds=replace(facts.speeds, by_name=slow))
    assert choose(facts).setting.codec_up == "none"


@given(facts=any_facts(), factor=st.floats(1.0, 1000.0))
@settings(max_examples=80, deadline=None)
def test_a_slower_link_never_gives_more_bytes_per_step(facts: Facts, factor: float) -> None:
    slower = slower_link(facts, factor)
    before, after = choose(facts).setting, choose(slower).setting
    assert bytes_per_step(slower, after) <= bytes_per_step(facts, before)


@given(facts=any_facts(), wishes=any_wishes(), factor=st.floats(1.0, 1000.0))
@settings(max_examples=50, deadline=None)
def test_a_slower_link_never_gives_more_bytes_per_step_whatever_the_job_fixes(
    facts: Facts, wishes: Wishes, factor: float
) -> None:
    slower = slower_link(facts, factor)
    before, after = choose(facts, wishes).setting, choose(slower, wishes).setting
    assert bytes_per_step(slower, after) <= bytes_per_step(facts, before)


@given(facts=any_facts(), factor=st.floats(1.0, 100.0), interval=st.integers(2, 500))
@settings(max_examples=50, deadline=None)
def test_faster_codecs_never_give_less_compression_for_their_time(facts: Facts, factor: float, interval: int) -> None:
    """At a given interval: fewer bits remain, or the choice now has less loss."""
    wishes = Wishes(interval=interval)
    before, after = choose(facts, wishes), choose(faster_codecs(facts, factor), wishes)
    fewer_bits = BITS[after.setting.codec_up] <= BITS[before.setting.codec_up]
    assert fewer_bits or after.round.loss_at_equal_time <= before.round.loss_at_equal_time


@given(facts=any_facts(), wishes=any_wishes())
@settings(max_examples=50, deadline=None)
def test_what_the_job_fixes_is_respected(facts: Facts, wishes: Wishes) -> None:
    choice = choose(facts, wishes)
    assert wishes.codec_up in ("auto", choice.setting.codec_up)
    assert wishes.codec_down in ("auto", choice.setting.codec_down)
    assert wishes.interval in ("auto", choice.setting.interval)
    assert wishes.overlap in ("auto", choice.overlap)


@given(bits_per_s=powers(5, 10.5), rtt_s=powers(-3.5, -0.4), step_s=powers(-1.5, 1), millions=powers(-1, 3))
@settings(max_examples=40, deadline=None)
def test_nothing_loses_less_for_as_few_bytes_and_the_best_of_all_candidates_is_hardly_better(
    bits_per_s: float, rtt_s: float, step_s: float, millions: float
) -> None:
    shape = FragmentShape(rows=((1, int(1e6 * millions)),), small_count=0, buffer_count=0)
    facts = facts_at(bits_per_s, rtt_s, step_s=step_s, shape=shape)
    chosen = choose(facts, Wishes(overlap=True)).setting
    least, sent = predict(facts, chosen, True), bytes_per_step(facts, chosen)
    rounds = [(setting, predict(facts, setting, True)) for setting in ALL]
    assert least.loss_at_equal_time <= min(found.loss_at_equal_time for _, found in rounds) + 0.02
    for setting, found in rounds:
        is_better = found.exposed_share <= least.exposed_share and found.loss_cost < least.loss_cost - 1e-9
        assert not (is_better and bytes_per_step(facts, setting) <= sent), setting


@given(facts=any_facts(), wishes=any_wishes())
@settings(max_examples=60, deadline=None)
def test_along_the_frontier_bytes_per_step_fall_and_intervals_grow(facts: Facts, wishes: Wishes) -> None:
    path = frontier(facts, wishes)
    assert path
    for earlier, later in pairwise(path):
        assert bytes_per_step(facts, later) < bytes_per_step(facts, earlier)
        assert later.interval >= earlier.interval


@given(facts=any_facts(), interval=st.integers(1, 500))
@settings(max_examples=50, deadline=None)
def test_above_the_break_even_link_waiting_nodes_send_full_numbers(facts: Facts, interval: int) -> None:
    rates = [break_even_bits_per_s(facts.nodes, facts.speeds, name) for name in KNOWN if name != "none"]
    faster = 1.01 * max(rates)
    if faster == float("inf"):
        return
    shape = FragmentShape(rows=((1, 1 << 20),), small_count=0, buffer_count=0)
    link = replace(facts.link, up_bits_per_s=faster, down_bits_per_s=faster, rtt_s=0.0)
    choice = choose(replace(facts, link=link, shape=shape), Wishes(interval=interval, overlap=False))
    assert choice.setting.codec_up == "none"


def test_alternatives_have_a_reason_and_are_sorted_by_loss_at_equal_time() -> None:
    found = alternatives(choose(facts_at(20e6, 0.22)))
    assert len(found) >= 4
    assert all(other.why_not for other in found)
    losses = [other.round.loss_at_equal_time for other in found]
    assert losses == sorted(losses)
    assert any(other.setting.codec_up == "bf16" for other in found)


def test_alternatives_keep_to_what_the_job_fixes() -> None:
    wishes = Wishes(codec_up="int4", interval=7)
    for other in alternatives(choose(facts_at(20e6), wishes)):
        assert (other.setting.codec_up, other.setting.interval) == ("int4", 7)


@pytest.mark.parametrize("interval", [1, 3, 700])
def test_a_given_interval_outside_the_usual_ones_is_used(interval: int) -> None:
    assert choose(facts_at(20e6), Wishes(interval=interval)).setting.interval == interval


def test_gradients_go_every_step_and_never_below_four_bits() -> None:
    slow, fast = choose(facts_at(20e6), Wishes(gradients=True)), choose(facts_at(100e9, 0.0), Wishes(gradients=True))
    assert (slow.setting.codec_up, slow.setting.interval, slow.overlap) == ("int4", 1, False)
    assert (fast.setting.codec_up, fast.setting.interval) == ("none", 1)
    assert {other.setting.codec_up for other in alternatives(slow)} == {"none", "bf16", "int8"}


def test_intervals_too_short_for_the_round_trip_are_not_looked_at() -> None:
    """One round trip of 0.25 s and twice five doublings of the window: no codec hides that behind ten steps."""
    facts = facts_at(10e9, 0.25, step_s=0.1)
    assert min(setting.interval for setting in frontier(facts, Wishes())) * 0.1 > 2.0
