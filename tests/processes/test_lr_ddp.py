"""The learning rate is the same on every rank, with any number of ranks, and after any change of their number."""

import json
from pathlib import Path
from typing import Any

import pytest
from lr_ranks import EPOCHS, PEAK, STEPS, train_on

from ciuic.train.schedule import lr_factor

MODES = ("samples", "steps", "epochs")
PER_EPOCH = STEPS // EPOCHS


def expected(step: int) -> float:
    return PEAK * lr_factor(step / STEPS, 1 / EPOCHS)


def test_ranks_have_equal_rates_in_worlds_of_one_two_and_three(tmp_path: Path) -> None:
    told = {ranks: train_on(ranks, tmp_path, [(mode, None, STEPS) for mode in MODES]) for ranks in (1, 2, 3)}
    for number, mode in enumerate(MODES):
        step_of = (lambda step: step // PER_EPOCH * PER_EPOCH) if mode == "epochs" else int
        every = [rates for world in told.values() for rates, _, _ in world[number]]
        assert len(every) == 6
        assert every == [[expected(step_of(step)) for step in range(STEPS)]] * 6, mode
        for world in told.values():  # so the same gradient had the same effect
            for _, _, parameters in world[number]:
                assert parameters == pytest.approx(told[1][number][0][2], abs=1e-6)


def test_resume_with_another_number_of_ranks_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    rates: list[float] = []
    state: dict[str, Any] | None = None
    for ranks, stop in ((2, 7), (1, 9), (3, STEPS)):
        (told,) = train_on(ranks, tmp_path, [("samples", state, stop)])
        assert all(other[:2] == told[0][:2] for other in told)
        rates += told[0][0]
        state = json.loads(json.dumps(told[0][1]))
    assert rates == [expected(step) for step in range(STEPS)]
    assert state is not None
    assert state["epochs"] == [EPOCHS, 1]
