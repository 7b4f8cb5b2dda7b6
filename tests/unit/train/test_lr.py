"""DistributedCosineLR in one process: what drives it, what does not change it, what it saves, what it refuses."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LRScheduler

from ciuic.errors import TrainingLoopError, UsageError
from ciuic.job import Job, parse_job
from ciuic.torch import DistributedCosineLR
from ciuic.train.current import current_run, set_current_run
from ciuic.train.schedule import lr_factor

PEAK = 0.5


def make(kind: str = "adamw", **options: Any) -> torch.optim.Optimizer:
    weights = [nn.Parameter(torch.ones(3))]
    if kind == "sgd":
        return torch.optim.SGD(weights, lr=PEAK, **options)
    return torch.optim.AdamW(weights, lr=PEAK, **options)


def train_step(optimizer: torch.optim.Optimizer) -> float:
    """One optimizer step; the rate that it used."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.ones_like(weight)
    optimizer.step()
    return float(optimizer.param_groups[0]["lr"])


class FakeRun:
    """A run of which only the progress matters."""

    progress = 0.0
    job: Job | None = None


@pytest.fixture
def run() -> Iterator[FakeRun]:
    fake = FakeRun()
    set_current_run(fake)
    yield fake
    set_current_run(None)


# ---- verbatim, as in torch: one call per epoch


def test_the_two_lines_of_the_seed_follow_a_warmup_and_a_cosine_over_the_epochs() -> None:
    optimizer = make()
    scheduler = DistributedCosineLR(optimizer, warmup_epochs=5, total_epochs=100)
    used = []
    for _ in range(100):
        used += [train_step(optimizer), train_step(optimizer)]
        scheduler.step()
    assert used[::2] == used[1::2] == [PEAK * lr_factor(epoch / 100, 0.05) for epoch in range(100)]
    assert isinstance(scheduler, LRScheduler)
    assert scheduler.get_last_lr() == [pytest.approx(PEAK * 0.1)]
    assert scheduler.epoch == 100.0


def test_first_epoch_is_not_wasted_at_a_rate_of_zero() -> None:
    optimizer = make()
    DistributedCosineLR(optimizer)
    assert train_step(optimizer) == PEAK * 0.05


def test_call_per_optimizer_step_without_their_number_is_refused_as_soon_as_it_is_clear() -> None:
    optimizer = make()
    scheduler = DistributedCosineLR(optimizer, warmup_epochs=1, total_epochs=10)
    for _ in range(10):
        train_step(optimizer)
        scheduler.step()
    train_step(optimizer)
    with pytest.raises(TrainingLoopError, match="steps_per_epoch=len"):
        scheduler.step()


def test_epochs_beyond_the_end_stay_at_the_floor() -> None:
    optimizer = make()
    scheduler = DistributedCosineLR(optimizer, 0, 2, min_lr_ratio=0.25)
    for _ in range(4):
        train_step(optimizer), train_step(optimizer)
        scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(PEAK * 0.25)]


# ---- by optimizer steps or samples: the calls do not matter


def no_call(scheduler: DistributedCosineLR, micro_batch: int) -> None:
    pass


def call_per_micro_batch(scheduler: DistributedCosineLR, micro_batch: int) -> None:
    scheduler.step()


def call_per_epoch(scheduler: DistributedCosineLR, micro_batch: int) -> None:
    if micro_batch % 12 == 11:
        scheduler.step()


@pytest.mark.parametrize("call", [no_call, call_per_micro_batch, call_per_epoch])
@pytest.mark.parametrize("options", [{"steps_per_epoch": 4}, {"samples_per_epoch": 24, "batch_size": 6}])
def test_only_optimizer_steps_count_under_accumulation(
    call: Callable[[DistributedCosineLR, int], None], options: dict[str, int]
) -> None:
    optimizer = make()
    scheduler = DistributedCosineLR(optimizer, 1, 5, **options)
    used = []
    for micro_batch in range(60):
        if micro_batch % 3 == 2:
            used.append(train_step(optimizer))
        call(scheduler, micro_batch)
    assert used == [PEAK * lr_factor(step / 20, 0.2) for step in range(20)]


def test_step_that_a_scaler_leaves_out_does_not_count() -> None:
    optimizer, scaler = make(), GradScaler("cpu")
    scheduler = DistributedCosineLR(optimizer, 0, 1, steps_per_epoch=10)
    (weight,) = optimizer.param_groups[0]["params"]
    for factor in (float("inf"), 1.0):
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scheduler.epoch == 0.1


@given(
    parts=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7)), min_size=1, max_size=4),
    epochs=st.integers(1, 50),
)
def test_position_depends_on_the_samples_only_however_they_were_batched_and_resumed(
    parts: list[tuple[int, int]], epochs: int
) -> None:
    """Each part of the training is a process of its own, with its own batch size and its number of steps."""
    state: dict[str, Any] | None = None
    samples = 0
    for batch_size, steps in parts:
        optimizer = make("sgd")
        scheduler = DistributedCosineLR(optimizer, 0, epochs, samples_per_epoch=35, batch_size=batch_size)
        if state is not None:
            scheduler.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            train_step(optimizer)
        samples += batch_size * steps
        state = scheduler.state_dict()
    assert scheduler.epoch == samples / 35
    assert scheduler.get_lr() == [PEAK * lr_factor(samples / (35 * epochs), 0.0)]


# ---- by the progress of a run


def test_run_of_the_process_is_found_and_followed(run: FakeRun) -> None:
    optimizer = make()
    scheduler = DistributedCosineLR(optimizer, warmup_epochs=5, total_epochs=100)
    for progress in (0.0, 0.03, 0.05, 0.5, 1.0):
        run.progress = progress
        assert train_step(optimizer) == pytest.approx(PEAK * lr_factor(progress, 0.05))
    assert scheduler.epoch == 100.0


def test_schedule_made_before_the_run_is_prepared_follows_it_too() -> None:
    optimizer = make()
    DistributedCosineLR(optimizer, 0, 10, steps_per_epoch=1)
    fake = FakeRun()
    set_current_run(fake)
    train_step(optimizer)
    fake.progress = 0.6
    assert train_step(optimizer) == PEAK * lr_factor(0.6, 0.0)
    set_current_run(None)


def test_run_that_is_gone_is_not_followed() -> None:
    set_current_run(FakeRun())
    assert current_run() is None


def test_progress_of_a_callable_comes_before_everything(run: FakeRun) -> None:
    run.progress = 0.9
    optimizer = make()
    DistributedCosineLR(optimizer, 0, 10, progress=lambda: 0.0)
    assert train_step(optimizer) == PEAK


@pytest.mark.parametrize("wrong", [float("nan"), "half", None])
def test_progress_that_is_no_number_is_refused(wrong: Any) -> None:
    with pytest.raises(TrainingLoopError, match="not a number from 0 to 1"):
        DistributedCosineLR(make(), progress=lambda: wrong)


def test_nodes_at_equal_progress_have_equal_rates_whatever_they_did_before(run: FakeRun) -> None:
    steady, fast = make(), make()
    DistributedCosineLR(steady, 20, 100, run=run)
    DistributedCosineLR(fast, 20, 100, run=run)
    for version in range(30):
        run.progress = version / 30
        used = [train_step(steady), train_step(steady)]
        used += [train_step(fast) for _ in range(5)]
        assert len(set(used)) == 1


# ---- empty moments


def test_late_joiner_ramps_over_ten_steps(run: FakeRun) -> None:
    run.progress = 0.5
    optimizer = make()
    DistributedCosineLR(optimizer, 0, 100)
    full = PEAK * lr_factor(0.5, 0.0)
    used = [train_step(optimizer) for _ in range(12)]
    assert used == pytest.approx([full * min(1.0, (step + 1) / 10) for step in range(12)])


def test_ramp_comes_again_when_the_moments_were_thrown_away_and_not_when_they_were_loaded(run: FakeRun) -> None:
    run.progress = 0.5
    optimizer = make()
    DistributedCosineLR(optimizer, 0, 100)
    for _ in range(11):
        full = train_step(optimizer)
    optimizer.state.clear()
    assert [train_step(optimizer) for _ in range(11)] == pytest.approx([full * min(10, s + 1) / 10 for s in range(11)])

    resumed = make()
    DistributedCosineLR(resumed, 0, 100)
    resumed.load_state_dict(optimizer.state_dict())
    assert train_step(resumed) == full


def test_plain_sgd_has_no_moments_to_ramp_for(run: FakeRun) -> None:
    run.progress = 0.5
    plain, with_momentum = make("sgd"), make("sgd", momentum=0.9)
    DistributedCosineLR(plain, 0, 100)
    DistributedCosineLR(with_momentum, 0, 100)
    assert train_step(plain) == pytest.approx(10 * train_step(with_momentum))


def test_gradient_mode_has_no_ramp_because_its_moments_are_in_the_ledger(run: FakeRun) -> None:
    run.progress = 0.5
    run.job = parse_job({"sync": {"send": "gradient"}})
    optimizer = make()
    DistributedCosineLR(optimizer, 0, 100)
    assert train_step(optimizer) == PEAK * lr_factor(0.5, 0.0)


# ---- batch size


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), (None, 1.0)])
def test_rate_follows_the_batch_size_by_the_rule(rule: Any, factor: float) -> None:
    optimizer = make()
    scheduler = DistributedCosineLR(optimizer, 0, 10, batch_scaling=rule, base_batch_size=8, batch_size=8)
    assert train_step(optimizer) == PEAK
    scheduler.batch_size = 32
    assert train_step(optimizer) == PEAK * factor
    with pytest.raises(UsageError, match="batch_size is 0"):
        scheduler.batch_size = 0


# ---- groups, tensors, other schedulers


def test_groups_keep_their_ratio_and_a_tensor_rate_is_changed_in_place() -> None:
    rate = torch.tensor(0.1)
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.2, rate)]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    scheduler = DistributedCosineLR(optimizer, 0, 4)
    for _ in range(2):
        train_step(optimizer)
        scheduler.step()
    assert optimizer.param_groups[1]["lr"] is rate
    assert float(rate) == pytest.approx(0.1 * 0.55)
    assert [float(lr) for lr in scheduler.get_last_lr()] == pytest.approx([0.2 * 0.55, 0.1 * 0.55])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.4})
    train_step(optimizer)
    assert optimizer.param_groups[2]["lr"] == pytest.approx(0.4 * 0.55)


@pytest.mark.parametrize("options", [{}, {"steps_per_epoch": 2}])
def test_factors_of_a_chained_scheduler_are_kept_and_survive_a_resume(options: dict[str, int]) -> None:
    def build() -> tuple[torch.optim.Optimizer, ChainedScheduler]:
        optimizer = make()
        parts = [DistributedCosineLR(optimizer, 2, 10, **options), ExponentialLR(optimizer, 0.5)]
        return optimizer, ChainedScheduler(parts, optimizer=optimizer)

    optimizer, chained = build()
    for epoch in range(6):
        if epoch == 3:
            saved = optimizer.state_dict(), chained.state_dict()
            optimizer, chained = build()
            chained.load_state_dict(saved[1])
            optimizer.load_state_dict(saved[0])
        expected = PEAK * lr_factor(epoch / 10, 0.2) * 0.5**epoch
        assert train_step(optimizer) == pytest.approx(expected)
        train_step(optimizer)
        chained.step()


def test_newer_schedule_of_an_optimizer_takes_over() -> None:
    optimizer = make()
    old = DistributedCosineLR(optimizer, 0, 2, steps_per_epoch=1)
    for _ in range(2):
        train_step(optimizer)
    DistributedCosineLR(optimizer, 0, 100, steps_per_epoch=1)
    assert train_step(optimizer) == PEAK
    assert train_step(optimizer) > 0.99 * PEAK
    assert old.epoch == 2.0


# ---- saving


def test_resumed_training_has_the_rates_of_the_uninterrupted_one_bit_for_bit() -> None:
    def build() -> tuple[torch.optim.Optimizer, DistributedCosineLR]:
        optimizer = make()
        return optimizer, DistributedCosineLR(optimizer, 1, 7, steps_per_epoch=3)

    optimizer, scheduler = build()
    whole = [train_step(optimizer) for _ in range(21)]
    optimizer, scheduler = build()
    parts = []
    for stop in (5, 6, 13, 21):
        parts += [train_step(optimizer) for _ in range(stop - len(parts))]
        saved = optimizer.state_dict(), scheduler.state_dict()
        optimizer, scheduler = build()
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
    assert parts == whole


def test_state_is_where_the_training_is_and_nothing_else(run: FakeRun) -> None:
    run.progress = 0.1 + 0.2
    scheduler = DistributedCosineLR(make(), 5, 100)
    state = scheduler.state_dict()
    assert set(state) == {"epochs", "last_epoch"}
    assert all(number < 2**53 for number in state["epochs"])


@pytest.mark.parametrize("state", [{}, {"last_epoch": 3}, {"epochs": [1, 0], "last_epoch": 0}, {"epochs": 1.5}])
def test_state_of_another_scheduler_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="not the state of a DistributedCosineLR"):
        DistributedCosineLR(make()).load_state_dict(state)


# ---- wrong arguments


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"warmup_epochs": 6, "total_epochs": 5}, "does not fit"),
        ({"total_epochs": 0}, "does not fit"),
        ({"total_epochs": float("inf")}, "total_epochs is inf"),
        ({"warmup_epochs": "5"}, "warmup_epochs is '5'"),
        ({"steps_per_epoch": 0}, "steps_per_epoch is 0"),
        ({"steps_per_epoch": 2.5}, "steps_per_epoch is 2.5"),
        ({"steps_per_epoch": 5, "samples_per_epoch": 5, "batch_size": 1}, "both given"),
        ({"samples_per_epoch": 100}, "needs batch_size"),
        ({"batch_scaling": "linear"}, "needs batch_size and base_batch_size"),
        ({"batch_scaling": "cubic", "batch_size": 1, "base_batch_size": 1}, "batch_scaling is 'cubic'"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio is 1.5"),
        ({"min_lr_ratio": "low"}, "min_lr_ratio is 'low'"),
        ({"progress": 0.5}, "must be callable"),
        ({"run": "mine"}, "has no progress"),
        ({"steps_per_epochs": 5}, "no option steps_per_epochs"),
    ],
)
def test_values_that_cannot_work_are_refused_with_their_name(options: dict[str, Any], said: str) -> None:
    optimizer = make()
    with pytest.raises(UsageError, match=said):
        DistributedCosineLR(optimizer, **options)
    assert optimizer.param_groups[0]["lr"] == PEAK


def test_what_is_no_torch_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="not Linear"):
        DistributedCosineLR(nn.Linear(1, 1))  # ty: ignore[invalid-argument-type]
