import struct
from typing import Any

import pytest
from doctor_rounds import Room

from ciuic.doctor.facts_training import (
    CLIP,
    EARLY_CLIP,
    GRADIENT_NOT_FINITE,
    HALF,
    LOSS_NOT_FINITE,
    PARTIAL_CLIP,
    PASSES,
    PROJECTIONS,
    SCALED_STEP,
    SCALER,
    SKIPPED,
    TAKEN,
    WITNESS,
)
from ciuic.doctor.rules.numbers import Numbers

STEPS = (1, 2, 3, 4, 10, 20)
VALUES = (1.0, -2.0, 0.5, 3.0)


def _pack(factor: float) -> bytes:
    return struct.pack(f"<{PROJECTIONS}f", *(factor * value for value in VALUES))


def _clipped(factor: float, *, kind: str = "ddp", expected: float | None = None) -> list[Any]:
    return [3, _pack(1.0), _pack(factor), factor if expected is None else expected, kind]


def _codes(room: Room) -> set[str]:
    return {finding.code for finding in room.found}


def _loss(room: Room, rank: int, step: int, **where: str) -> None:
    room.notice(
        rank, LOSS_NOT_FINITE, step=step, **({"value": "nan", "input": "", "parameter": "", "module": ""} | where)
    )


def _skip(room: Room, rank: int, times: int, scale: float, first: int = 4) -> None:
    facts = {"optimizer": 0, "scale": scale, "in_a_row": times, "finite_loss": True, "attempt": first + times - 1}
    room.notice(rank, SKIPPED, step=first + times - 2, **facts)


def test_clipping_scaled_gradients_is_found_with_the_scale():
    room = Room(Numbers())
    found = room.step(1, {EARLY_CLIP: [1, 65536.0], CLIP: [1, 9e4, 1.0, 1]})
    assert [finding.code for finding in found] == ["CIUIC-F1"]
    assert "65536" in found[0].cause


def test_clipping_after_each_micro_batch_is_found_at_its_second_sample():
    room = Room(Numbers())
    assert not room.step(2, {PARTIAL_CLIP: 3})
    assert [finding.code for finding in room.step(3, {PARTIAL_CLIP: 3})] == ["CIUIC-F9"]


def test_an_optimizer_that_steps_with_scaled_gradients_is_found_at_its_second_step():
    room = Room(Numbers())
    assert not room.step(1, {SCALED_STEP: [1, 65536.0]}, optimizer=1)
    found = room.step(2, {1: {SCALED_STEP: [2, 65536.0]}, 0: {}}, optimizer=1)
    assert [(finding.code, finding.ranks) for finding in found] == [("CIUIC-F8", (1,))]


def test_a_limit_far_below_every_norm_is_found_after_five_calls():
    room = Room(Numbers())
    assert not room.step(4, {CLIP: [4, 1.4, 1e-3, 4]})
    assert [finding.code for finding in room.step(10, {CLIP: [6, 1.4, 1e-3, 10]})] == ["CIUIC-F6"]


def test_clipping_on_one_rank_names_it():
    room = Room(Numbers())
    clip = {CLIP: [1, 3.2, 1.0, 0]}
    found = room.step(2, {0: {WITNESS: _clipped(0.31), **clip}, 1: {WITNESS: _clipped(1.0)}})
    assert [(finding.code, finding.ranks) for finding in found] == [("CIUIC-F2", (0,))]


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_norms_of_each_rank_are_found_even_when_clipped_by_hand(kind: str):
    facts = {rank: {WITNESS: _clipped(factor, kind=kind, expected=1.0)} for rank, factor in enumerate((0.4, 0.2))}
    room = Room(Numbers())
    found = room.step(2, facts)
    assert [(finding.code, finding.ranks) for finding in found] == [("CIUIC-F2", ())]


@pytest.mark.parametrize(("second", "codes"), [(0.2, {"CIUIC-F2"}), (0.5, set())])
def test_clipping_before_a_reduction_by_hand_is_found_when_it_scales_ranks_apart(second: float, codes: set[str]):
    own = {0: (1.0, -2.0, 0.5, 3.0), 1: (0.2, 1.0, -4.0, 1.5)}
    factors = {0: 0.5, 1: second}
    mean = [sum(factors[rank] * own[rank][at] for rank in own) / 2 for at in range(PROJECTIONS)]
    after = struct.pack(f"<{PROJECTIONS}f", *mean)
    room = Room(Numbers())
    for step in STEPS:
        before = {rank: struct.pack(f"<{PROJECTIONS}f", *own[rank]) for rank in own}
        room.step(step, {rank: {WITNESS: [3, before[rank], after, factors[rank], "plain"]} for rank in own})
    assert _codes(room) == codes


def test_one_norm_for_all_is_no_finding():
    room = Room(Numbers())
    for step in STEPS:
        room.step(step, {WITNESS: _clipped(0.31), CLIP: [1, 3.2, 1.0, 0]})
    assert not room.found


def test_bad_losses_of_one_rank_that_make_all_skip_name_it():
    room = Room(Numbers())
    for times in range(1, 5):
        _loss(room, 1, 2 + times, input="0")
        for rank in range(2):
            _skip(room, rank, times, 65536.0 / 2**times)
    assert _codes(room) == {"CIUIC-F3"}
    assert room.found[0].ranks == (1,)
    assert room.found[0].step == 4
    assert "input of rank 1" in room.found[0].cause


def test_bad_gradients_of_one_rank_name_the_parameter():
    room = Room(Numbers())
    for times in range(1, 9):
        if times > 2:
            room.notice(1, GRADIENT_NOT_FINITE, step=2 + times, parameter="head.weight", value="inf")
        for rank in range(2):
            _skip(room, rank, times, 65536.0 / 2**times)
    assert {(finding.code, finding.ranks) for finding in room.found} == {("CIUIC-F3", (1,))}
    assert room.found[0].modules == ("head.weight",)


def test_the_first_skips_of_a_scale_that_finds_its_place_are_no_finding():
    room = Room(Numbers())
    for times in range(1, 11):
        for rank in range(2):
            room.notice(rank, GRADIENT_NOT_FINITE, step=times, parameter="a", value="inf")
            _skip(room, rank, times, 2.0**40 / 2**times, first=1)
    room.step(20, {SCALER: [2.0**30, 10, 0], TAKEN: 10, PASSES: 20})
    assert not room.found


def test_a_scale_that_is_gone_is_found_without_any_rank():
    room = Room(Numbers())
    for times in range(1, 17):
        _skip(room, 0, times, 65536.0 / 2**times)
    assert {(finding.code, finding.ranks) for finding in room.found} == {("CIUIC-F3", ())}


def test_one_bad_loss_under_a_scaler_is_skipped_and_no_finding():
    room = Room(Numbers())
    _loss(room, 1, 6)
    for rank in range(2):
        _skip(room, rank, 1, 32768.0, first=7)
    room.end()
    assert not room.found


def test_a_scaler_that_skips_on_one_rank_alone_is_found():
    room = Room(Numbers())
    facts = {rank: {SCALER: [1.0, skipped, 0], TAKEN: 10 - skipped, PASSES: 10} for rank, skipped in enumerate((0, 1))}
    found = room.step(10, facts)
    assert [(finding.code, finding.ranks) for finding in found] == [("CIUIC-F4", (1,))]


@pytest.mark.parametrize(("passes", "guilty"), [((20, 24), (1,)), ((20, 10), (1,)), ((22, 20), (0,))])
def test_a_rank_that_leaves_steps_out_or_makes_more_is_named(passes: tuple[int, int], guilty: tuple[int, ...]):
    room = Room(Numbers())
    room.step(1, {PASSES: 2, TAKEN: 1})
    found = room.step(10, {rank: {PASSES: count, TAKEN: 10} for rank, count in enumerate(passes)})
    assert [(finding.code, finding.ranks) for finding in found] == [("CIUIC-F4", guilty)]


def test_the_same_gap_later_is_not_told_again():
    room = Room(Numbers())
    room.step(1, {PASSES: 1, TAKEN: 1})
    room.step(2, {0: {PASSES: 2}, 1: {PASSES: 3}})
    assert not room.step(3, {0: {PASSES: 3}, 1: {PASSES: 4}})


def test_the_rank_with_the_first_bad_loss_is_named():
    room = Room(Numbers())
    _loss(room, 0, 7, parameter="body.weight", module="body")
    _loss(room, 1, 6, input="0")
    _loss(room, 1, 7, parameter="body.weight", module="body")
    found = room.end()
    assert [(finding.code, finding.ranks, finding.step) for finding in found] == [("CIUIC-F5", (1,), 7)]
    assert "input 0" in found[0].cause
    assert found[0].modules == ()


def test_a_bad_loss_on_all_ranks_at_once_names_none():
    room = Room(Numbers())
    for rank in range(2):
        _loss(room, rank, 6, parameter="body.weight")
    found = room.end()
    assert [(finding.ranks, finding.modules) for finding in found] == [((), ("body.weight",))]


def test_half_precision_without_a_scale_needs_zeros_and_small_numbers_three_times():
    room = Room(Numbers())
    for step in STEPS:
        room.step(step, {HALF: [0.4, 0.1]})
    assert not room.found
    for step in STEPS:
        room.step(step, {HALF: [0.4, 0.9]})
    assert _codes(room) == {"CIUIC-F7"}
