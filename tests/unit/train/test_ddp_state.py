"""Residuals over steps that do not count, and states of N ranks made into states of M."""

from typing import Any

import pytest
import torch

from ciuic.errors import LayoutMismatchError, StorageError
from ciuic.train.ddp import merge_ddp_states
from ciuic.train.ddp.plan import Parameter, cut
from ciuic.train.ddp.residuals import Residuals

PARAMETERS = [
    Parameter(name="embedding", element_count=6400, row_length=64, is_coded=True),
    Parameter(name="bias", element_count=7, row_length=7, is_coded=False),
    Parameter(name="weight", element_count=40_001, row_length=40_001, is_coded=True),
]


def states(ranks: int, *, zero: bool = False) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(ranks)
    parts = cut(PARAMETERS, ranks)

    def draw(count: int) -> torch.Tensor:
        return torch.zeros(count) if zero else torch.randn(count, generator=random)

    return [
        {
            "format": 1,
            "rank": rank,
            "world_size": ranks,
            "steps": 12,
            "codec": "1-bit",
            "form": "two-phase",
            "parameters": [[p.name, p.element_count, p.row_length, p.is_coded] for p in PARAMETERS],
            "worker": {p.name: draw(p.element_count) for p in PARAMETERS},
            "owner": {
                p.name: [ranges[rank][0], draw(ranges[rank][1] - ranges[rank][0])]
                for p, ranges in zip(PARAMETERS, parts, strict=True)
            },
        }
        for rank in range(ranks)
    ]


def owner_of(found: list[dict[str, Any]], name: str, count: int) -> torch.Tensor:
    whole = torch.full((count,), torch.nan)
    for state in found:
        start, values = state["owner"][name]
        assert whole[start : start + len(values)].isnan().all(), "two owners of one element"
        whole[start : start + len(values)] = values
    return whole


@pytest.mark.parametrize(("before", "after"), [(3, 2), (4, 3), (2, 5), (8, 1), (1, 4), (4, 2)])
def test_mean_of_worker_residuals_and_owner_residuals_stay(before: int, after: int) -> None:
    old = states(before)
    new = merge_ddp_states(old, after)
    assert [(state["rank"], state["world_size"], state["steps"]) for state in new] == [
        (rank, after, 12) for rank in range(after)
    ]
    for p in PARAMETERS:
        mean = sum(s["worker"][p.name].double() for s in old) / before
        now = sum(s["worker"][p.name].double() for s in new) / after
        assert (mean - now).abs().max() < 1e-6
        assert torch.equal(owner_of(old, p.name, p.element_count), owner_of(new, p.name, p.element_count))
        assert [s["owner"][p.name][0] for s in new] == [r[0] for r in cut(PARAMETERS, after)[PARAMETERS.index(p)]]


def test_who_joins_starts_with_nothing_and_who_leaves_hands_over() -> None:
    old = states(2)
    grown = merge_ddp_states(old, 3)
    assert not grown[2]["worker"]["weight"].any()
    assert torch.equal(grown[0]["worker"]["weight"], old[0]["worker"]["weight"] * 1.5)
    shrunk = merge_ddp_states(old, 1)
    assert torch.equal(shrunk[0]["worker"]["weight"], (old[0]["worker"]["weight"] + old[1]["worker"]["weight"]) / 2)


def test_the_same_number_of_ranks_changes_nothing() -> None:
    old = states(3)
    assert merge_ddp_states(old, 3) == old


def test_missing_differing_and_damaged_states_are_refused() -> None:
    old = states(3)
    with pytest.raises(StorageError, match="not all ranks"):
        merge_ddp_states(old[:2], 2)
    with pytest.raises(StorageError, match="not all ranks"):
        merge_ddp_states([], 2)
    with pytest.raises(LayoutMismatchError, match="differ in steps"):
        merge_ddp_states([old[0], old[1], {**old[2], "steps": 13}], 2)
    old[1]["owner"]["weight"][1][0] = torch.inf
    with pytest.raises(StorageError, match="damaged"):
        merge_ddp_states(old, 2)
    with pytest.raises(StorageError, match="no state of compress_ddp"):
        merge_ddp_states([{"format": 1}], 1)


def test_a_step_is_taken_as_a_whole_or_not_at_all() -> None:
    residuals = Residuals(PARAMETERS, [ranges[0] for ranges in cut(PARAMETERS, 2)], torch.device("cpu"))
    residuals.next_worker(0).fill_(1)
    residuals.next_owner(2).fill_(2)
    residuals.discard()
    assert not any(values.any() for values in (*residuals.worker, *residuals.owner))
    residuals.next_worker(2).fill_(3)
    residuals.commit()
    assert not residuals.worker[0].any()
    assert (residuals.worker[2] == 3).all()
    residuals.next_worker(0).fill_(4)
    residuals.commit()
    assert (residuals.worker[2] == 3).all(), "a parameter that the step did not touch keeps its residual"
