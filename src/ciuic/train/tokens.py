"""Counting what a batch is worth: the weight of a push is the number of tokens it was trained on."""

from collections.abc import Iterator, Mapping, Sequence

import torch


def count_tokens(batch: object) -> int:
    """Tokens in a batch of any shape a loop may use.

    Labels that are not masked by -100; without `labels` the elements of `input_ids`; without both the first
    dimension of the first tensor found (samples, for models that are not about text); without any tensor 0.
    """
    if isinstance(batch, Mapping):
        labels, input_ids = batch.get("labels"), batch.get("input_ids")
        if isinstance(labels, torch.Tensor):
            return int((labels != -100).sum())
        if isinstance(input_ids, torch.Tensor):
            return input_ids.numel()
    for tensor in _tensors(batch):
        return tensor.shape[0] if tensor.dim() else 1
    return 0


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from _tensors(item)
