"""Bytes, times and break-even rates by formula."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_cases import FIVE_MILLION, SPEEDS, any_facts, facts_at, powers, slower_link

from ciuic.codec import CODEC_NAMES, FragmentCodec, FragmentShape
from ciuic.plan.facts import CodecSpeed, CodecSpeeds, Facts
from ciuic.plan.predict import (
    BITS,
    ROOM,
    Setting,
    break_even_bits_per_s,
    latency_floor_s,
    predict,
    ring_break_even_bits_per_s,
    start_up_s,
)
from ciuic.plan.wire import bits_per_parameter, payload_bytes

ONE_BIT = Setting(codec_up="1-bit", codec_down="1-bit", interval=5)


@given(
    rows=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9000)), max_size=4),
    small=st.integers(0, 50),
    buffers=st.integers(0, 50),
)
@settings(max_examples=60, deadline=None)
def test_the_formula_counts_the_bytes_that_the_codecs_write(
    rows: list[tuple[int, int]], small: int, buffers: int
) -> None:
    shape = FragmentShape(rows=tuple(rows), small_count=small, buffer_count=buffers)
    for name in CODEC_NAMES:
        if name != "topk":
            assert payload_bytes(name, shape) == FragmentCodec(name, shape).payload_bytes, name


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_bits_per_element_with_scales_are_those_of_a_large_tensor(name: str) -> None:
    shape = FragmentShape(rows=((1, 1 << 20),), small_count=0, buffer_count=0)
    assert 8 * FragmentCodec(name, shape).payload_bytes / (1 << 20) == pytest.approx(BITS[name], rel=0.02)
    assert bits_per_parameter(name, shape) == pytest.approx(BITS[name], rel=0.02)


def test_a_model_of_671_billion_parameters_is_counted_without_memory() -> None:
    shape = FragmentShape(rows=((58 * 256 * 3 * 2048, 7168),), small_count=0, buffer_count=0)
    assert bits_per_parameter("1-bit", shape) == pytest.approx(1 + 2 * 16 / 7168, rel=1e-6)


def test_a_round_adds_up() -> None:
    found = predict(facts_at(20e6, 0.0), ONE_BIT, overlap=False)
    assert found.compute_s == pytest.approx(3.0)
    assert found.transfer_s == pytest.approx(8 * 2 * payload_bytes("1-bit", FIVE_MILLION) / 20e6)
    assert found.latency_s == 0
    assert found.exposed_s == pytest.approx(found.on_thread_s + found.flight_s)
    assert found.round_s == pytest.approx(found.compute_s + found.exposed_s)


def test_overlap_exposes_only_what_does_not_fit_into_the_steps() -> None:
    fits = predict(facts_at(20e6, 0.1), ONE_BIT, overlap=True)
    assert fits.exposed_s == fits.on_thread_s
    slow = predict(facts_at(1e6, 0.1), ONE_BIT, overlap=True)
    assert slow.exposed_s == pytest.approx(slow.on_thread_s + ROOM * slow.flight_s - slow.compute_s)


def test_entries_that_come_late_cost_loss_and_waiting_costs_time() -> None:
    facts = facts_at(20e6, 0.1)
    waits, overlaps = predict(facts, ONE_BIT, overlap=False), predict(facts, ONE_BIT, overlap=True)
    assert waits.loss_cost < overlaps.loss_cost
    assert waits.exposed_share > overlaps.exposed_share


def test_what_takes_almost_no_time_is_waited_for() -> None:
    assert not predict(facts_at(10e9, 0.0002), ONE_BIT).is_overlapped
    assert predict(facts_at(20e6, 0.2), ONE_BIT).is_overlapped


@given(facts=any_facts(), factor=st.floats(1, 1000), overlap=st.sampled_from((True, False)))
@settings(max_examples=100, deadline=None)
def test_a_slower_link_never_makes_a_round_shorter(facts: Facts, factor: float, overlap: bool) -> None:
    fast, slow = predict(facts, ONE_BIT, overlap), predict(slower_link(facts, factor), ONE_BIT, overlap)
    assert slow.round_s >= fast.round_s * (1 - 1e-9)
    assert slow.loss_at_equal_time >= fast.loss_at_equal_time - 1e-9


@given(size=powers(2, 10), rate=powers(4, 11), rtt=powers(-4, 0))
@settings(max_examples=100, deadline=None)
def test_slow_start_costs_something_but_never_more_than_on_an_infinitely_fast_link(
    size: float, rate: float, rtt: float
) -> None:
    extra = start_up_s(size, rate, rtt)
    assert extra >= 0
    assert 8 * size / rate + extra + 1e-9 >= (latency_floor_s(size, rtt) - rtt) / 2


def test_slow_start_takes_a_round_trip_per_doubling() -> None:
    """14.6 kB at once, then 29.2, 58.4 ...: six and a half doublings bring 2.6 MB."""
    assert start_up_s(2.6e6, 1e12, 0.1) == pytest.approx(0.1 * 6.5, rel=0.01)
    assert start_up_s(14_600, 1e12, 0.1) == 0
    assert start_up_s(2.6e6, 1e12, 0.0) == 0


@pytest.mark.parametrize(
    ("nodes", "encode", "reduce", "decode", "fp32_gbit", "bf16_gbit"),
    [(3, 5.6e9, 53e9, 8e9, 26.6, 12.9), (3, 3.0e9, 18.6e9, 7e9, 16, 7.7), (8, 5.6e9, 53e9, 8e9, 38.6, 18.7)],
)
def test_the_ring_formula_gives_the_published_rates(
    nodes: int, encode: float, reduce: float, decode: float, fp32_gbit: float, bf16_gbit: float
) -> None:
    speed = CodecSpeed(encode_bytes_per_s=encode, decode_bytes_per_s=decode)
    fp32 = ring_break_even_bits_per_s(nodes, speed, "1-bit", "none", reduce)
    bf16 = ring_break_even_bits_per_s(nodes, speed, "1-bit", "bf16", reduce)
    assert fp32 == pytest.approx(1e9 * fp32_gbit, rel=0.05)
    assert bf16 == pytest.approx(1e9 * bf16_gbit, rel=0.05)


@given(nodes=st.integers(1, 16), factor=st.floats(0.2, 0.99))
@settings(max_examples=50, deadline=None)
def test_at_the_break_even_rate_rounds_are_equally_long(nodes: int, factor: float) -> None:
    shape = FragmentShape(rows=((1, 1 << 22),), small_count=0, buffer_count=0)
    for name in ("bf16", "int8", "int4", "1-bit"):
        rate = break_even_bits_per_s(nodes, SPEEDS, name)
        plain = Setting(codec_up="none", codec_down="none", interval=4)
        packed = Setting(codec_up=name, codec_down=name, interval=4)
        at = replace(facts_at(rate, 0.0, shape=shape), nodes=nodes)
        assert predict(at, packed, False).round_s == pytest.approx(predict(at, plain, False).round_s, rel=1e-6)
        below = replace(facts_at(rate * factor, 0.0, shape=shape), nodes=nodes)
        assert predict(below, packed, False).round_s < predict(below, plain, False).round_s


def test_faster_codecs_pay_on_faster_links() -> None:
    quick = {n: CodecSpeed(encode_bytes_per_s=1e10, decode_bytes_per_s=1e10) for n in SPEEDS.by_name if n != "none"}
    quicker = CodecSpeeds(by_name={**quick, "none": SPEEDS.by_name["none"]})
    assert break_even_bits_per_s(3, quicker, "1-bit") > break_even_bits_per_s(3, SPEEDS, "1-bit")


def test_a_codec_that_costs_no_time_always_pays_and_one_that_saves_nothing_never() -> None:
    free = CodecSpeeds(by_name={"none": SPEEDS.by_name["1-bit"], "1-bit": SPEEDS.by_name["none"]})
    assert break_even_bits_per_s(3, free, "1-bit") == inf
    assert break_even_bits_per_s(3, SPEEDS, "none", "none") == 0
