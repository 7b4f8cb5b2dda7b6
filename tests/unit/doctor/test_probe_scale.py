import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler as schedulers
from torch.utils.checkpoint import checkpoint

from ciuic.doctor.facts_training import (
    CLIP,
    EARLY_CLIP,
    FORM,
    PARTIAL_CLIP,
    PASSES,
    RATES,
    SCALED_STEP,
    SCALER,
    SCHEDULE,
    SKIPPED,
    STRAY,
    WITNESS,
)
from ciuic.doctor.probe.averages import Averages
from ciuic.doctor.probe.hooks import hook_model, install
from ciuic.doctor.probe.lossgraph import Form, read_form
from ciuic.doctor.probe.lossscale import LossScale
from ciuic.doctor.probe.part import Model, Part
from ciuic.doctor.probe.precision import Precision
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.probe.schedules import Schedules, planned_steps
from ciuic.doctor.probe.spans import Spans
from ciuic.doctor.probe.witness import project
from ciuic.doctor.record import Facts, Notice, Record

LOGITS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1, -100, -100])


class Mailbox:
    """In the courier's place: keeps what a rank would have sent."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.notices: list[Notice] = []

    def send(self, message: Any) -> None:
        (self.records if isinstance(message, Record) else self.notices).append(message)

    @property
    def facts(self) -> list[Facts]:
        return [record.facts for record in self.records]


class _Hooked(Part):
    patches: Any

    def model_found(self, model: Model) -> None:
        hook_model(self.probe, model, self.patches)


@pytest.fixture
def mailbox() -> Any:
    torch.set_num_threads(1)
    box = Mailbox()
    probe = Probe(box, rank=0, world=1)  # ty: ignore[invalid-argument-type]
    patches = install(probe)
    hooked = _Hooked(probe)
    hooked.patches = patches
    for part in (hooked, LossScale(probe), Averages(probe), Precision(probe), Schedules(probe)):
        probe.add(part)
    yield box
    patches.undo()
    gc.collect()
    assert not [notice for notice in box.notices if notice.kind == "probe_failed"]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def _loss(model: nn.Module, **options: Any) -> Tensor:
    return functional.cross_entropy(model(torch.randn(8, 6)), LABELS, **options)


def _logits() -> Tensor:
    return LOGITS.clone().requires_grad_()


def _masked(logits: Tensor) -> Tensor:
    mask = (LABELS != -100).float()
    return (functional.cross_entropy(logits, LABELS, reduction="none") * mask).sum() / mask.sum()


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], str, int, float]] = {
    "mean": (lambda x: functional.cross_entropy(x, LABELS), "mean", 6, 1.0),
    "divided": (lambda x: functional.cross_entropy(x, LABELS) / 4, "mean", 6, 0.25),
    "times": (lambda x: functional.cross_entropy(x, LABELS) * 0.25, "mean", 6, 0.25),
    "smoothed": (lambda x: functional.cross_entropy(x, LABELS, label_smoothing=0.1), "mean", 6, 0.9),
    "summed": (lambda x: functional.cross_entropy(x, LABELS, reduction="sum") / 64, "sum", 0, 1 / 64),
    "masked": (_masked, "sum", 0, 1 / 6),
    "weighted": (lambda x: functional.cross_entropy(x, LABELS, weight=torch.ones(4)), "mean", 6, 1.0),
    "squares": (lambda x: functional.mse_loss(x, LOGITS) / 2, "mean", 0, 0.5),
    "unknown": (lambda x: x.norm(), "", 0, 1.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_graph_of_a_loss_tells_how_it_was_made(name: str):
    make, reduction, labels, product = LOSSES[name]
    form = read_form(make(_logits()), safe_from=0)
    assert (form.reduction, form.product) == (reduction, pytest.approx(product))
    if labels:
        assert form.labels == labels


@pytest.mark.parametrize(
    ("make", "divided"),
    [
        (lambda loss: loss, 0),
        (lambda loss: loss / 2, 1),
        (lambda loss: loss / 2 / 2, 2),
        (lambda loss: (loss + loss.detach()) / 2 / 2, 1),  # the mean of two terms, divided once
        (lambda loss: 0.5 * loss / 2, 1),  # a half by habit
        (lambda loss: loss * 0.7, -1),
    ],
)
def test_divisions_by_the_number_of_micro_batches_are_counted(make: Callable[[Tensor], Tensor], divided: int):
    form = read_form(make(functional.cross_entropy(_logits(), LABELS)), safe_from=0)
    assert form.divided(2) == divided


def test_a_sum_is_not_judged_by_its_divisions():
    assert Form(reduction="sum").divided(2) == -1


def test_nodes_from_inside_a_checkpoint_are_not_opened():
    runs = []

    def inside(x: Tensor) -> Tensor:
        runs.append(1)
        return functional.cross_entropy(x, LABELS)

    loss = checkpoint(inside, _logits(), use_reentrant=False)
    form = read_form(loss / 2, safe_from=torch.autograd._get_sequence_nr() - 1)
    assert (form.reduction, len(runs)) == ("", 1)
    assert form.others == (0.5,)


def test_accumulation_is_counted_with_its_divisions(mailbox: Mailbox):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(4):
            (_loss(model) / 4).backward()
        optimizer.step()
    assert [facts[PASSES] for facts in mailbox.facts] == [4, 8, 12]
    micro, product, reduction, labels, divided = mailbox.facts[1][FORM][:5]
    assert (micro, product, reduction, labels, divided) == (4, 0.25, "mean", 24, 1)


def test_two_losses_of_different_lines_are_no_accumulation(mailbox: Mailbox):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        _loss(model).backward()
        _loss(model).backward()
        optimizer.step()
    assert mailbox.facts[2][FORM][0] == 1


def test_several_losses_of_one_forward_pass_are_no_accumulation(mailbox: Mailbox):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        output = model(torch.randn(8, 6))
        for column in range(3):
            output[:, column].mean().backward(retain_graph=True)
        optimizer.step()
    assert mailbox.facts[2][FORM][0] == 1


def test_the_witness_tells_clipping_from_other_factors(mailbox: Mailbox):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        _loss(model).backward()
        for parameter in model.parameters():
            parameter.grad *= 2
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    _, before, after, expected, kind = mailbox.facts[2][WITNESS]
    one, two = (torch.frombuffer(bytearray(packed), dtype=torch.float32) for packed in (before, after))
    assert torch.allclose(two / one, torch.full((4,), 2 * expected), rtol=1e-4)
    assert (expected < 0.1, kind) == (True, "plain")
    assert mailbox.facts[2][CLIP][0] == 1


@pytest.mark.parametrize("unscale", [True, False])
def test_clipping_scaled_gradients_is_seen(mailbox: Mailbox, unscale: bool):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(_loss(model)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert mailbox.facts[2].get(EARLY_CLIP) == (None if unscale else [3, 1024.0])
    assert mailbox.facts[2][SCALER] == [1024.0, 0, 0]


@pytest.mark.parametrize("clears", ["", "zero_grad", "none"])
def test_clips_that_a_further_pass_comes_after_are_counted(mailbox: Mailbox, clears: str):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(4):
            (_loss(model) / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if clears == "zero_grad":
                optimizer.zero_grad(set_to_none=False)
            elif clears == "none":
                for parameter in model.parameters():
                    parameter.grad = None
        optimizer.step()
    assert mailbox.facts[2].get(PARTIAL_CLIP) == (None if clears else 3)


def _two_optimizers(mailbox: Mailbox, second: str) -> list[Any]:
    """SCALED_STEP of the second one; in its first step it is not known yet."""
    model = _model()
    first, head = (torch.optim.SGD(part.parameters(), 1e-6) for part in (model[0], model[2]))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        first.zero_grad()
        head.zero_grad()
        scaler.scale(_loss(model)).backward()
        if second == "not scaled":
            head.zero_grad()
            _loss(model).backward()
        scaler.step(first)
        if second == "unscaled":
            scaler.unscale_(head)
        elif second == "by hand":
            for parameter in model[2].parameters():
                parameter.grad.div_(1024.0)
        if second == "scaler":
            scaler.step(head)
        else:
            head.step()
        scaler.update()
    return [record.facts.get(SCALED_STEP) for record in mailbox.records if record.optimizer == 1]


def test_an_optimizer_that_steps_beside_the_scaler_is_told(mailbox: Mailbox):
    assert _two_optimizers(mailbox, "bare") == [None, [1, 1024.0], [2, 1024.0]]


@pytest.mark.parametrize("second", ["scaler", "unscaled", "by hand", "not scaled"])
def test_an_optimizer_whose_gradients_were_unscaled_is_not(mailbox: Mailbox, second: str):
    assert _two_optimizers(mailbox, second) == [None, None, None]


def test_a_loss_that_is_not_finite_is_told_with_its_input_and_the_skip(mailbox: Mailbox):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 6)
        if step > 1:
            x[0, 0] = float("nan")
        scaler.scale(functional.cross_entropy(model(x), LABELS)).backward()
        scaler.step(optimizer)
        scaler.update()
    kinds = [notice.kind for notice in mailbox.notices]
    assert kinds.count(SKIPPED) == kinds.count("loss_not_finite") == 3
    assert mailbox.notices[0].facts["input"] == "0"
    assert "gradient_not_finite" in kinds


def test_scheduler_steps_are_counted_by_what_happens_between_them(mailbox: Mailbox):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = schedulers.CosineAnnealingLR(optimizer, T_max=10)
    for _ in range(4):
        optimizer.zero_grad()
        _loss(model).backward()
        optimizer.step()
        schedule.step()
        schedule.step()
    name, steps, last, planned, between, in_a_row, early, prepared = mailbox.facts[3][SCHEDULE]
    assert (name, steps, last, planned, between, in_a_row, early, prepared) == (
        "CosineAnnealingLR",
        6,
        6,
        10,
        0,
        3,
        0,
        0,
    )
    assert mailbox.facts[0][RATES] == [0.1]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_scheduler_steps_between_micro_batches_are_counted(mailbox: Mailbox):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(3):
            (_loss(model) / 3).backward()
            schedule.step()
        optimizer.step()
    assert mailbox.facts[3][SCHEDULE][4:7] == [8, 0, 3]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scheduler_on_an_optimizer_that_never_steps_is_told(mailbox: Mailbox):
    model = _model()
    schedule = schedulers.StepLR(torch.optim.SGD(model.parameters(), 0.1), 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        _loss(model).backward()
        optimizer.step()
        schedule.step()
    assert mailbox.facts[3][STRAY] == ["StepLR", 3, "SGD", "stranger"]


@pytest.mark.parametrize("anew", [False, True])
def test_a_scheduler_left_on_an_optimizer_that_was_replaced_is_told(mailbox: Mailbox, anew: bool):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = schedulers.StepLR(optimizer, 5)
    for step in range(24):
        if step == 4:
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            schedule = schedulers.StepLR(optimizer, 5) if anew else schedule
        optimizer.zero_grad()
        _loss(model).backward()
        optimizer.step()
        schedule.step()
    told = [facts[STRAY] for facts in mailbox.facts if STRAY in facts]
    assert told[:1] == ([] if anew else [["StepLR", 15, "SGD", "left"]])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_winding_a_schedule_forward_before_the_run_is_not_early(mailbox: Mailbox):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(7):
        schedule.step()
    for _ in range(3):
        optimizer.zero_grad()
        _loss(model).backward()
        optimizer.step()
        schedule.step()
    assert mailbox.facts[2][SCHEDULE][4:7] == [0, 0, 0]


def _warm_up(step: int, total_steps: int) -> float:
    return step / total_steps


def test_planned_steps_are_read_from_every_kind_of_schedule():
    optimizer = torch.optim.SGD(_model().parameters(), 0.1)
    total_steps = 30
    assert planned_steps(schedulers.CosineAnnealingLR(optimizer, 20)) == 20
    assert planned_steps(schedulers.OneCycleLR(optimizer, 0.1, total_steps=40)) == 40
    assert planned_steps(schedulers.LambdaLR(optimizer, partial(_warm_up, total_steps=50))) == 50
    assert planned_steps(schedulers.LambdaLR(optimizer, lambda step: step / total_steps)) == 30
    assert planned_steps(schedulers.StepLR(optimizer, 3)) == 0
    parts = [schedulers.LinearLR(optimizer, total_iters=5), schedulers.CosineAnnealingLR(optimizer, 20)]
    assert planned_steps(schedulers.SequentialLR(optimizer, parts, [5])) == 25


def test_memory_that_gradients_share_is_found_by_any_view_of_it():
    model = nn.Linear(4, 3)
    model(torch.ones(1, 4)).sum().backward()
    spans = Spans([Model(index=0, module=model)])
    gradient = model.weight.grad
    assert gradient is not None
    assert [
        hit[1] if (hit := spans.find(view)) else None for view in (gradient, gradient[1:], gradient.view(-1)[:2])
    ] == ["weight"] * 3
    assert spans.find(gradient.clone()) is None
    assert spans.find(model.weight) is None


def test_projections_are_linear_and_none_for_what_cannot_be_followed():
    values = torch.randn(40)
    one, three = (torch.frombuffer(bytearray(project(values * k) or b""), dtype=torch.float32) for k in (1, 3))
    assert torch.allclose(three, 3 * one, rtol=1e-5)
    assert project(None) is None
    assert project(torch.zeros(8)) is None
    assert project(torch.full((8,), float("nan"))) is None
    assert project(torch.arange(8)) is None
