"""The DDP hook on real gloo ranks: conservation, equality of ranks, buckets, unused parameters, infinities."""

from typing import Any

import pytest
from ddp_world import run_ranks

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two-phase": (3, {}),
    "two-phase of two": (2, {}),
    "all-gather": (3, {"form": "all-gather"}),
    "4 bits on four ranks": (4, {"codec": "int4"}),
    "8 bits": (2, {"codec": "int8"}),
    "2 bits": (3, {"codec": "2-bit"}),
    "no compression": (3, {"codec": "none"}),
    "bf16 on the wire": (2, {"codec": "bf16"}),
    "static graph": (3, {"static_graph": True}),
    "bf16 gradients": (3, {"dtype": "bfloat16"}),
    "bf16 gradients gathered": (3, {"dtype": "bfloat16", "form": "all-gather"}),
    "fp16 gradients": (2, {"dtype": "float16", "form": "two-phase"}),
    "no_sync and accumulation": (3, {"accumulate": 3}),
    "gradients as bucket views": (3, {"bucket_view": True}),
    "unused on one rank": (3, {"find_unused": True, "unused": "on rank 0"}),
    "unused now and then": (3, {"find_unused": True, "unused": "now and then"}),
    "unused everywhere": (3, {"find_unused": True, "unused": "everywhere"}),
    "unused in a static graph": (2, {"static_graph": True, "unused": "everywhere", "form": "two-phase"}),
    "one bucket": (3, {"bucket_mb": 25}),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost_and_all_ranks_get_the_same_bits(case: str) -> None:
    ranks, how = CASES[case]
    told = run_ranks(ranks, "ddp_ranks.train", steps=5, **how)
    assert max(one["law"] for one in told) < 1e-6
    assert len({tuple(one["outs"]) for one in told}) == 1
    assert len({one["parameters"] for one in told}) == 1
    assert [one["steps"] for one in told] == [5] * ranks
    assert not any(one["skipped"] for one in told)


def test_result_does_not_depend_on_buckets() -> None:
    """Residuals and scale blocks follow parameters: one bucket or seven give the same bits."""
    one, many = (run_ranks(3, "ddp_ranks.train", steps=4, bucket_mb=size) for size in (25, 0.01))
    assert one[0]["outs"] == many[0]["outs"]
    assert one[0]["bytes"] < many[0]["bytes"]


def test_infinity_on_one_rank_is_told_to_all_and_leaves_every_residual_alone() -> None:
    told = run_ranks(3, "ddp_ranks.train", steps=5, bad={2: 1})
    assert {tuple(map(tuple, one["non_finite"])) for one in told} == {tuple(map(tuple, told[0]["non_finite"]))}
    bad = told[0]["non_finite"]
    assert [bool(names) for names in bad] == [False, False, True, False, False]
    assert "head.weight" in bad[2]
    assert "embedding.weight" not in bad[2], "its bucket was finite; its residual must be left alone all the same"
    for one in told:
        assert one["kept"][2] == one["kept"][1] != one["kept"][3]
        assert (one["skipped"], one["steps"]) == (1, 5)
        assert one["law"] < 1e-6


def test_grad_scaler_skips_the_bad_step_and_changing_scales_change_nothing() -> None:
    plain = run_ranks(2, "ddp_ranks.train", steps=5, form="two-phase")
    scaled = run_ranks(2, "ddp_ranks.train", steps=5, form="two-phase", scaler=True)
    assert scaled[0]["scale"] > 1024
    assert scaled[0]["outs"] == plain[0]["outs"]
    assert scaled[0]["parameters"] == plain[0]["parameters"]
    bad = run_ranks(2, "ddp_ranks.train", steps=5, form="two-phase", scaler=True, bad={2: 1})
    left_out = run_ranks(2, "ddp_ranks.train", steps=5, form="two-phase", bad={2: 1})
    assert [one["skipped"] for one in bad] == [1, 1]
    assert bad[0]["scale"] < scaled[0]["scale"]
    assert bad[0]["parameters"] == left_out[0]["parameters"] != plain[0]["parameters"]


def test_resumed_equals_uninterrupted_bit_for_bit() -> None:
    """The fresh process has other buckets in its first step than the one that went on."""
    whole = run_ranks(3, "ddp_ranks.train", steps=6, form="auto")
    half = run_ranks(3, "ddp_ranks.train", steps=3, form="auto")
    again = run_ranks(3, "ddp_ranks.train", steps=6, form="auto", resume=[one["state"] for one in half])
    assert half[0]["outs"] + again[0]["outs"] == whole[0]["outs"]
    assert [one["parameters"] for one in again] == [one["parameters"] for one in whole]
    assert [one["kept"][-1] for one in again] == [one["kept"][-1] for one in whole]


@pytest.mark.parametrize(("before", "after", "form"), [(3, 2, "auto"), (2, 4, "two-phase"), (4, 3, "all-gather")])
def test_another_number_of_ranks_goes_on_with_what_was_not_sent_yet(before: int, after: int, form: str) -> None:
    half = run_ranks(before, "ddp_ranks.train", steps=3, form="two-phase")
    states = [one["state"] for one in half]
    told = run_ranks(after, "ddp_more.go_on", states=states, steps=6, form=form)
    assert max(one["law"] for one in told) < 1e-6
    assert len({one["parameters"] for one in told}) == 1


def test_ranks_that_differ_are_told_so() -> None:
    assert run_ranks(2, "ddp_more.other_codec") == ["CIUIC-400: rank 1", "CIUIC-400: rank 0"]
    assert run_ranks(2, "ddp_more.other_step") == ["CIUIC-400: rank 1", "CIUIC-400: rank 0"]


def test_states_of_another_model_rank_or_with_damage_are_refused() -> None:
    (told, _) = run_ranks(2, "ddp_more.bad_states")
    assert told == {
        "other rank": "CIUIC-402",
        "damaged": "CIUIC-500",
        "other model": "CIUIC-402",
        "not one": "CIUIC-500",
    }


def test_after_close_ddp_averages_in_full_precision() -> None:
    for one in run_ranks(2, "ddp_more.closed"):
        assert one < 1e-7


def test_two_models_side_by_side_and_a_collective_in_between() -> None:
    assert len(set(run_ranks(2, "ddp_more.side_by_side"))) == 1


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_two_phase_bytes_are_the_formula_and_30_times_below_the_ring(ranks: int) -> None:
    rows = 48 * ranks
    told = run_ranks(ranks, "ddp_bytes.count_bytes", width=4096, rows=rows)
    elements = 4096 * rows
    fraction = 2 * (ranks - 1) / ranks
    heads = 9 * (ranks - 1)
    for one in told:
        assert one["counted"] == fraction * elements * (1 / 8 + 2 / 4096) + heads
        assert one["socket"] < 1.01 * one["counted"]
        assert one["plain"] >= fraction * 4 * elements
        assert fraction * 4 * elements >= 30 * one["socket"]


def test_all_gather_bytes_are_the_formula() -> None:
    (one, *_) = run_ranks(3, "ddp_bytes.count_bytes", width=4096, rows=144, form="all-gather")
    assert one["counted"] == 2 * (4096 * 144 * (1 / 8 + 2 / 4096) + 9)
    assert one["socket"] < 1.01 * one["counted"]


def test_error_feedback_reaches_the_optimum_of_two_unlike_workers_and_the_naive_formula_does_not() -> None:
    """The founding articles' formula: sum of signs times sum of mean |g|, nothing remembered."""
    (told, _) = run_ranks(2, "ddp_more.quadratics", steps=300)
    assert told["plain"] < 0.01
    assert told["two-phase"] < 0.01
    assert told["all-gather"] < 0.01
    assert told["naive"] > 1
