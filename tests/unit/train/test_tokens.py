import torch

from ciuic.train.tokens import count_tokens


def test_masked_labels_are_not_counted() -> None:
    labels = torch.tensor([[1, 2, -100], [3, -100, -100]])
    assert count_tokens({"input_ids": torch.zeros(2, 3), "labels": labels}) == 3


def test_input_ids_count_without_labels() -> None:
    assert count_tokens({"input_ids": torch.zeros(4, 7)}) == 28


def test_other_batches_count_their_samples() -> None:
    assert count_tokens((torch.zeros(5, 3, 3), torch.zeros(5))) == 5
    assert count_tokens({"image": torch.zeros(6, 2)}) == 6
    assert count_tokens([{"x": [torch.zeros(2, 2)]}]) == 2
    assert count_tokens(torch.zeros(9)) == 9


def test_a_scalar_is_one_and_no_tensor_is_nothing() -> None:
    assert count_tokens(torch.tensor(3.0)) == 1
    assert count_tokens({"name": "text", "number": 3}) == 0
