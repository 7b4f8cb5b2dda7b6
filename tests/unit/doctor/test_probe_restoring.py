import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ciuic.doctor.probe.checkpoint import look, tensor_key
from ciuic.doctor.probe.loads import changed, common_prefix, load_of
from ciuic.doctor.probe.progress import Progress
from ciuic.doctor.probe.ties import Ties


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight


def _trained(steps: int) -> tuple[nn.Module, Any, Any]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for _ in range(steps):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_a_checkpoint_is_read_by_its_form(tmp_path: Path):
    model, optimizer, scheduler = _trained(3)
    scaler = {"scale": 8.0, "growth_factor": 2.0, "_growth_tracker": 1}
    parts = {"state_dict": model.state_dict(), "optimizers": [optimizer.state_dict()], "lr": scheduler.state_dict()}
    file = look(tmp_path / "c.pt", {**parts, "amp": scaler, "global_step": 3})
    assert (file.name, file.steps, file.last_epochs, file.scales) == ("c.pt", 3, [3], [8.0])
    assert [saved.has_state for saved in file.optimizers] == [True]
    assert tensor_key(model.weight) in file.tensors
    assert not look("w.pt", model.state_dict()).is_training_state


def test_strange_files_are_no_checkpoints():
    for what in (None, [1, 2], {"a": {"b": {"c": {"d": {"e": 1}}}}}, {1: 2}, torch.zeros(3), "text"):
        assert not look(object(), what).is_training_state


@pytest.mark.parametrize(
    ("unexpected", "missing", "prefix", "count"),
    [
        (["module.a.w", "module.b"], ["a.w", "b"], "module.", 2),
        (["a.w"], ["model.a.w"], "-model.", 1),
        (["_orig_mod.module.a.w"], ["a.w"], "_orig_mod.module.", 1),
        (["head.weight"], ["fc.weight"], "", 0),
        ([], ["a"], "", 0),
    ],
)
def test_a_common_prefix(unexpected: list[str], missing: list[str], prefix: str, count: int):
    assert common_prefix(unexpected, missing) == (prefix, count)


def test_a_write_after_the_load_is_seen_and_a_cast_is_not():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    load = load_of(model, copy.deepcopy(model.state_dict()), None)
    assert (load.given, load.own, load.used) == (4, 4, 4)
    assert changed(load, own) == ([], 4)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    assert changed(load, own) == (["0.weight"], 4)
    model.bfloat16()
    assert changed(load, own) == ([], 0)


def test_a_load_that_assigns_breaks_a_tie_and_tying_again_repairs_it():
    model, ties = Tied(), Ties()
    state = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    ties.before_load(model)
    model.load_state_dict(state, assign=True)
    ties.after_load(model)
    assert ties.now(model) == ("tokens.weight", "head.weight", "load")
    model.head.weight = model.tokens.weight
    assert ties.now(model) is None


def test_a_copied_tie_is_seen_by_its_values():
    model = Tied()
    assert Ties().now(model) is None
    model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())
    assert Ties().now(model) == ("tokens.weight", "head.weight", "values")
    model.head.weight.requires_grad_(False)
    assert Ties().now(model) is None


def test_layers_that_begin_alike_are_no_tie():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert Ties().now(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)) is None


def test_progress_counts_only_when_training_goes_on():
    model, optimizer, _ = _trained(5)
    progress = Progress()
    progress.read({"model": model.state_dict(), "step": 9, "epoch": 2})
    assert progress.steps == -1, "weights alone begin a new training"
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(optimizer.state_dict())
    progress.loaded(again)
    assert (progress.steps, progress.epoch) == (9, 2)
