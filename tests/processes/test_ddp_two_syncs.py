"""The trap of two syncs on real gloo ranks: what it does without the watch, and how it is refused."""

import pytest
from ddp_world import run_ranks


def test_without_a_watch_gradients_are_n_times_too_large_and_nothing_says_so() -> None:
    for ratios in run_ranks(3, "ddp_twice.too_large", watched=False):
        assert ratios == pytest.approx([3.0] * 4)


def test_with_a_watch_the_second_sync_is_refused_before_it_changes_anything() -> None:
    for code, text, unchanged in run_ranks(3, "ddp_twice.too_large", watched=True):
        assert code == "CIUIC-107"
        assert "the gradient of 0.weight is synchronised twice" in text
        assert "3 times too large (factor 3" in text
        assert unchanged


@pytest.mark.parametrize("bucket_view", [False, True])
def test_every_way_of_reducing_is_seen_with_its_factor(bucket_view: bool) -> None:
    for told in run_ranks(2, "ddp_twice.refused", bucket_view=bucket_view):
        assert told == {
            "module function": "2",
            "imported before": "2",
            "average": "1",
            "asynchronous": "2",
            "reduce to one": "2",
            "coalesced": "2",
            "part of a gradient": "2",
            "largest": "refused",
            "another tensor": "allowed",
            "a parameter": "allowed",
        }


def test_a_manual_reduction_that_is_the_only_one_is_let_through() -> None:
    for told in run_ranks(2, "ddp_twice.allowed"):
        assert told == {
            "no_sync": "allowed",
            "sum": True,
            "a group of its own": "allowed",
            "after evaluation": "2",
            "after close": "allowed",
        }


def test_communication_hooks_of_torch_are_no_second_sync() -> None:
    assert run_ranks(2, "ddp_twice.hooks_of_torch") == ["2", "2"]


def test_compress_ddp_watches_by_itself_and_torch_is_as_before_when_the_last_watch_closes() -> None:
    assert run_ranks(2, "ddp_twice.compressed") == [["2", "allowed", "2", "restored"]] * 2


def test_what_run_prepare_synchronises_is_watched_and_not_synchronised_again() -> None:
    for told in run_ranks(2, "ddp_twice.prepared"):
        assert told == [
            "2",
            "CIUIC-104 run.prepare",
            "CIUIC-107 run.prepare",
            "CIUIC-107 run.prepare",
            "CIUIC-107 DistributedDataParallel",
            "taken",
            "restored",
        ]
