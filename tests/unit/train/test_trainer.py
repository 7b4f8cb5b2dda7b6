import logging
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from support.local_run import LocalRun
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from ciuic.errors import ModelError
from ciuic.job import Job, parse_job
from ciuic.train import trainer
from ciuic.train.models import build_model
from ciuic.train.schedule import lr_factor
from ciuic.train.trainer import resolve_entry, split_batch, train

torch.set_num_threads(1)


def job(text: Path, *, train: dict[str, object] | None = None, **optim: object) -> Job:
    optim = {"batch_size": 4, "lr": 4e-3, **optim}
    data = {"path": str(text), "sequence_length": 32, "held_out": 0.1}
    return parse_job({"data": data, "optim": optim, "train": {"evaluate_samples": 8, **(train or {})}})


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CIUIC_HOME", str(tmp_path / "home"))
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the {n % 7} quick brown foxes jump over {n % 5} lazy dogs\n\n" for n in range(2000)))
    return path


def test_held_out_loss_falls(text: Path) -> None:
    run = LocalRun(job(text), total_steps=60)
    train(run)
    assert run.evaluate is not None
    last, samples = run.evaluate()
    untrained = build_model(run.job, 256, run.job.train.seed)
    run.model.load_state_dict(untrained.state_dict())
    first, _ = run.evaluate()
    assert samples == 8
    assert first == pytest.approx(5.5, abs=0.3)
    assert last < 0.5 * first


def test_rate_follows_the_runs_progress_with_a_warmup(text: Path) -> None:
    run = LocalRun(job(text, warmup=0.5, min_lr_ratio=0.3), total_steps=20)
    train(run)
    expected = [4e-3 * lr_factor(step / 20, 0.5, 0.3) for step in range(20)]
    assert run.rates == pytest.approx(expected)
    assert run.rates[0] > 0.0
    assert run.rates[10] == pytest.approx(4e-3)


def test_node_that_joins_under_way_ramps_up_at_the_rate_of_the_others(text: Path) -> None:
    run = LocalRun(job(text, warmup=0.0, schedule="constant"), total_steps=40)
    run.steps = 20
    run._leased = lambda loader: islice(loader, 20)  # ty: ignore[invalid-assignment]
    used: list[float] = []
    prepare = run.prepare

    def watching(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, **more: str) -> object:
        optimizer.register_step_pre_hook(lambda used_by, *_: used.append(used_by.param_groups[0]["lr"]))
        return prepare(model, optimizer, loader, **more)

    run.prepare = watching  # ty: ignore[invalid-assignment]
    train(run)
    assert used[:10] == pytest.approx([4e-3 * (step + 1) / 10 for step in range(10)])
    assert used[10:] == pytest.approx([4e-3] * 10)


def test_muon_inside_trains_matrices_and_experts_at_a_rate_of_their_own(text: Path) -> None:
    run = LocalRun(job(text, optimizer="muon", lr=2e-3), total_steps=40)
    train(run)
    assert run.evaluate is not None
    assert run.evaluate()[0] < 3.5


def test_accumulation_steps_once_per_leased_batch(text: Path) -> None:
    run = LocalRun(job(text, batch_size=2, gradient_accumulation=3), total_steps=4)
    seen = []
    forward = nn.Module.__call__

    def counted(module: nn.Module, *args: object, **kwargs: object) -> object:
        if "labels" in kwargs:
            seen.append(len(kwargs["labels"]))
        return forward(module, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "__call__", counted)
        train(run)
    assert run.batches == [6, 6, 6, 6]
    assert seen == [2] * 12
    assert run.steps == 4


def test_accumulated_gradient_equals_that_of_the_whole_batch(text: Path) -> None:
    """Also when the parts differ in how much they predict."""
    states = []
    for size, parts in ((6, 1), (2, 3)):
        run = LocalRun(job(text, batch_size=size, gradient_accumulation=parts, expert_bias_rate=0.0), total_steps=3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "_leased", lambda loader: masked(loader, 3))
            train(run)
        states.append(run.model.state_dict())
    worst = max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0])
    assert worst < 2e-4


def masked(loader: DataLoader, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    for number, batch in enumerate(loader):
        if number == steps:
            return
        batch["labels"][0, 4:] = -100
        yield batch


def test_expert_biases_move_in_training_and_stand_still_when_switched_off(text: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    moved, still = LocalRun(job(text), 3), LocalRun(job(text, expert_bias_rate=0.0), 3)
    train(moved)
    train(still)
    assert moved.model.state_dict()[name].abs().max() == pytest.approx(0.003)
    assert still.model.state_dict()[name].count_nonzero() == 0


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_mixed_precision_trains(text: Path, mode: str) -> None:
    run = LocalRun(job(text, amp=mode), total_steps=12)
    train(run)
    assert run.evaluate is not None
    assert run.evaluate()[0] < 5.4
    assert run.steps == 12  # a step that fp16 leaves out while it finds its scale is made again


def test_overflow_of_fp16_costs_no_sample(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "make_scaler", lambda mode, device: GradScaler(device.type, init_scale=2.0**24))
    run = LocalRun(job(text, amp="fp16"), total_steps=3)
    train(run)
    assert run.batches == [4, 4, 4]
    assert run.steps == 3


def test_loss_that_is_not_finite_costs_its_batch_and_not_the_scale(
    text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = GradScaler("cpu", init_scale=256.0)
    monkeypatch.setattr(trainer, "make_scaler", lambda mode, device: scaler)
    scale, batch = scaler.scale, 0

    def poisoned(loss: torch.Tensor) -> torch.Tensor:
        return scale(loss * float("nan") if batch == 1 else loss)

    def counted(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
        nonlocal batch
        for batch, samples in enumerate(islice(loader, 3)):  # noqa: B007 - read by `poisoned`
            yield samples

    monkeypatch.setattr(scaler, "scale", poisoned)
    run = LocalRun(job(text, amp="fp16"), total_steps=3)
    monkeypatch.setattr(run, "_leased", counted)
    with caplog.at_level(logging.WARNING, logger="ciuic.train"):
        train(run)
    assert run.steps == 2
    assert scaler.get_scale() == 128.0
    assert [r.getMessage() for r in caplog.records] == ["step 2 was left out: its loss or gradient is not finite"]


def test_two_runs_of_one_seed_end_with_the_same_bits(text: Path) -> None:
    first, again = LocalRun(job(text), 5), LocalRun(job(text), 5)
    train(first)
    train(again)
    theirs = again.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in first.model.state_dict().items())


def test_progress_is_logged_as_one_plain_line(
    text: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "PROGRESS_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, logger="ciuic.train"):
        train(LocalRun(job(text), 4))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("model of 732.3k parameters, ")
    assert re.match(r"step 4  loss [45]\.\d{3}  lr \d\.\d\de-04  ", lines[4])
    assert "tokens/s" in lines[4]
    assert lines[4].endswith("100% of the run")


def test_other_ranks_are_silent(text: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "PROGRESS_EVERY_S", 0.0)
    run = LocalRun(job(text), 2)
    run.rank = 1
    with caplog.at_level(logging.INFO, logger="ciuic.train"):
        train(run)
    assert caplog.records == []


def test_batch_is_split_into_parts_of_all_its_tensors() -> None:
    batch = {"input_ids": torch.arange(5), "labels": torch.arange(5) + 10}
    parts = list(split_batch(batch, 2))
    assert [part["labels"].tolist() for part in parts] == [[10, 11], [12, 13], [14]]


def test_entry_is_called_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_training_code.py").write_text("def main(run):\n    run.called = True\nnumber = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = LocalRun(parse_job({"model": {"entry": "own_training_code:main"}}), 1)
    train(run)
    assert run.called is True
    with pytest.raises(ModelError, match="names no function"):
        resolve_entry("own_training_code:number")
    with pytest.raises(ModelError, match="no module named 'nowhere_to_be_found'"):
        resolve_entry("nowhere_to_be_found.train:main")
    del sys.modules["own_training_code"]


def test_error_inside_an_entry_module_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_training_code.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        resolve_entry("broken_training_code:main")


def test_job_that_starts_a_command_has_nothing_for_the_trainer(text: Path) -> None:
    with pytest.raises(ModelError, match="no model for the built-in trainer"):
        train(LocalRun(parse_job({"model": {"command": ["true"]}, "data": {"path": str(text)}}), 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["off", "bf16", "fp16"])
def test_the_same_loop_trains_on_cuda(text: Path, mode: str) -> None:
    run = LocalRun(job(text, amp=mode, gradient_accumulation=2), total_steps=60, device="cuda")
    train(run)
    assert run.evaluate is not None
    assert run.evaluate()[0] < 3.0
    assert next(run.model.parameters()).device.type == "cuda"
