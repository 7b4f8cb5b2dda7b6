"""The held-out loss: the number by which a run is judged, the same on every node for the same parameters."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ciuic.errors import DataError


@torch.no_grad()
def held_out_loss(
    model: nn.Module, held_out: Dataset[dict[str, torch.Tensor]], batch_size: int, device: torch.device
) -> tuple[float, int]:
    """Mean loss per predicted token over all of `held_out` and the number of samples.

    Samples come in their own order, without mixed precision, and batch means are weighted by their tokens and summed
    in double precision. The model's training or evaluation mode is restored.
    Raises DataError when nothing is predicted.
    """
    total_loss, total_tokens, samples = 0.0, 0, 0
    with _evaluating(model):
        for batch in DataLoader(held_out, batch_size=batch_size):
            on_device = {name: tensor.to(device) for name, tensor in batch.items()}
            # the model shifts the labels by one, so the first label of a sample is never predicted
            tokens = int((on_device["labels"][:, 1:] != -100).sum())
            samples += len(on_device["labels"])
            if tokens:
                total_loss += float(model(**on_device).loss.double()) * tokens
                total_tokens += tokens
    if total_tokens == 0:
        raise DataError("the held-out part has nothing to predict", next="give more data or a larger data.held_out")
    return total_loss / total_tokens, samples


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training
