"""What a model would exchange, without its memory."""

import msgspec
import pytest

from ciuic.errors import ModelError
from ciuic.job import Job, parse_job
from ciuic.plan.settings import shape_of
from ciuic.train.models import build_model
from ciuic.train.shapes import model_shape
from ciuic.train.tensors import model_layout


def test_the_shape_is_that_of_the_real_model() -> None:
    layout, _ = model_layout(build_model(Job(), 256, seed=0))
    found = model_shape(Job())
    assert found["parameters"] == layout.parameter_count
    assert found["shape"] == msgspec.to_builtins(shape_of(layout))


def test_the_largest_model_is_counted_on_a_small_machine() -> None:
    found = model_shape(parse_job({"model": {"preset": "deepseek-v3"}}))
    assert found["parameters"] > 600e9  # type: ignore[operator]


def test_a_program_of_ones_own_has_no_known_shape() -> None:
    with pytest.raises(ModelError, match="before it runs"):
        model_shape(parse_job({"model": {"command": ["python", "train.py"]}}))


def test_a_folder_without_a_model_is_named() -> None:
    with pytest.raises(ModelError, match="/nowhere/model"):
        model_shape(parse_job({"model": {"from_pretrained": "/nowhere/model"}}))
