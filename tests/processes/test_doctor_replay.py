"""One batch replayed on two real ranks: the first module that differs is named, and nothing changes."""

from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks
from replay_ranks import nothing_changes, one_does_not_come, run_faults


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By fault; the same on both ranks."""
    one, other = on_ranks(run_faults, tmp_path_factory.mktemp("replay"))
    assert one == other
    return one


@pytest.mark.parametrize(
    ("fault", "direction", "module", "what"),
    [
        ("weight", "forward", "blocks.1.wide", "parameters blocks.1.wide.weight"),
        ("evaluating", "forward", "blocks.0.norm", "mode of blocks.0.norm (eval, not train)"),
        ("no_dropout", "forward", "blocks.2.drop", "mode of blocks.2.drop (eval, not train)"),
        ("buffer", "forward", "Net", "buffers scale"),
        ("branch", "forward", "blocks.1", ""),
        ("branch_at_the_end", "forward", "blocks.1", ""),
        ("skipped", "forward", "Net", "Net goes another way: it calls blocks.2 where it otherwise calls blocks.1"),
        ("bfloat16", "forward", "Net", "(bfloat16, not float32)"),
        ("backward", "backward", "blocks.1", ""),
        ("loss", "loss", "loss", ""),
        ("autocast", "forward", "blocks.0.wide", "autocast bfloat16, not off"),
        ("others_batch", "forward", "Net", "the batch"),
    ],
)
def test_the_first_difference_is_named(verdicts: dict[str, Any], fault: str, direction: str, module: str, what: str):
    found = verdicts[fault]
    assert (found.result, found.direction, found.module, found.ranks) == ("differs", direction, module, (1,)), found
    assert what in found.cause
    assert found.fix


@pytest.mark.parametrize("case", ["clean", "evaluating_alike", "own_loss"])
def test_equal_ranks_agree_bit_for_bit(verdicts: dict[str, Any], case: str):
    found = verdicts[case]
    assert found.result == "equal"
    assert found.compared > 40
    assert found.could_not_look == ()
    assert [each.what for each in found.already if each.what != "random state"] == []


def test_a_difference_of_rounding_is_within_the_tolerance(verdicts: dict[str, Any]):
    found = verdicts["weight_by_one_bit"]
    assert (found.result, found.module) == ("close", "blocks.1.wide")
    assert 0 < found.distance < 1e-5
    assert found.already[0].names == ("blocks.1.wide.weight",)


def test_statistics_that_are_not_used_are_told_and_no_difference(verdicts: dict[str, Any]):
    found = verdicts["unused_buffer"]
    assert found.result == "equal"
    assert found.already[0].names == ("blocks.0.norm.running_mean",)


def test_distance_is_that_of_the_outputs(verdicts: dict[str, Any]):
    assert verdicts["buffer"].distance == pytest.approx(0.5, rel=0.3)
    assert verdicts["backward"].distance == pytest.approx(0.5, rel=0.5)
    assert verdicts["loss"].losses["1"] == pytest.approx(2 * verdicts["loss"].losses["0"])


def test_training_goes_on_as_if_nothing_had_been_replayed(tmp_path: Path):
    for found in on_ranks(nothing_changes, tmp_path):
        assert found == {"losses": True, "state": True, "torch": True, "python": True, "attributes": (3, 3)}


def test_a_rank_that_does_not_come_is_named_in_time(tmp_path: Path):
    result, missing, seconds = on_ranks(one_does_not_come, tmp_path)[0]
    assert (result, missing) == ("unknown", (1,))
    assert seconds < 10
