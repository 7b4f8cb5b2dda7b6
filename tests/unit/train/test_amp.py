import pytest
import torch
from torch import nn

from ciuic.train.amp import autocast, make_scaler, scaled_step

CPU = torch.device("cpu")


@pytest.mark.parametrize(("mode", "kind"), [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_matrix_products_run_in_the_modes_type(mode: str, kind: torch.dtype) -> None:
    with autocast(mode, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == kind


def test_only_fp16_scales_the_loss() -> None:
    assert not make_scaler("off", CPU).is_enabled()
    assert not make_scaler("bf16", CPU).is_enabled()
    assert make_scaler("fp16", CPU).is_enabled()


@pytest.mark.parametrize("mode", ["off", "bf16", "fp16"])
def test_gradients_are_unscaled_before_they_are_clipped(mode: str) -> None:
    """SGD with rate 1 moves a weight by its clipped gradient: by exactly the clip, whatever the scale of the loss."""
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = make_scaler(mode, CPU)
    scaler.scale(weight * 10.0).backward()
    assert scaled_step(optimizer, scaler, 2.0, [weight]) is True
    assert weight.item() == pytest.approx(-2.0, rel=1e-5)


def test_small_gradient_is_not_clipped() -> None:
    weight = nn.Parameter(torch.zeros(()))
    scaler = make_scaler("fp16", CPU)
    scaler.scale(weight * 0.5).backward()
    scaled_step(torch.optim.SGD([weight], lr=1.0), scaler, 2.0, [weight])
    assert weight.item() == -0.5


def test_clip_of_zero_clips_nothing() -> None:
    weight = nn.Parameter(torch.zeros(()))
    (weight * 10.0).backward()
    scaled_step(torch.optim.SGD([weight], lr=1.0), make_scaler("off", CPU), 0.0, [weight])
    assert weight.item() == -10.0


def test_overflow_leaves_the_step_out_and_lowers_the_scale() -> None:
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = make_scaler("fp16", CPU)
    before = scaler.get_scale()
    (scaler.scale(weight * 1.0) * float("inf")).backward()
    assert scaled_step(optimizer, scaler, 1.0, [weight]) is False
    assert weight.item() == 0.0
    assert scaler.get_scale() < before
