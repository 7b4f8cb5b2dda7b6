import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ciuic.train.samples import ExampleEncoder, ExampleSamples, TokenSamples, evenly, split_rows
from ciuic.train.tokenizer import ByteTokenizer


@given(count=st.integers(0, 300), length=st.integers(1, 40))
def test_every_token_but_the_first_is_predicted_exactly_once(count: int, length: int) -> None:
    samples = TokenSamples(np.arange(count, dtype=np.uint16), length)
    predicted = [int(token) for number in range(len(samples)) for token in samples[number]["labels"][1:]]
    assert predicted == list(range(1, len(samples) * length + 1))
    assert count - 1 - len(predicted) < length  # only an incomplete window is left over


def test_window_has_one_token_more_than_the_sequence() -> None:
    sample = TokenSamples(np.arange(100, dtype=np.uint8), 8)[2]
    assert sample["input_ids"].tolist() == list(range(16, 25))
    assert torch.equal(sample["input_ids"], sample["labels"])
    assert sample["input_ids"].dtype == torch.int64


def test_sample_beyond_the_end_ends_an_iteration() -> None:
    samples = TokenSamples(np.arange(17, dtype=np.uint8), 8)
    assert len(list(samples)) == 2
    with pytest.raises(IndexError):
        samples[-1]


def test_read_only_memory_is_not_written_to() -> None:
    tokens = np.frombuffer(bytes(range(50)), dtype=np.uint8)
    sample = TokenSamples(tokens, 8)[0]
    sample["input_ids"] += 1
    assert tokens[0] == 0
    assert sample["labels"][0] == 0


def test_batches_have_the_shape_of_the_model() -> None:
    batch = next(iter(DataLoader(TokenSamples(np.arange(100, dtype=np.uint8), 8), batch_size=4)))
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 9)


def test_text_is_padded_with_masked_positions() -> None:
    sample = ExampleEncoder(ByteTokenizer(), 6)("abc")
    assert sample["input_ids"].tolist() == [97, 98, 99, 0, 0, 0]
    assert sample["labels"].tolist() == [97, 98, 99, -100, -100, -100]
    assert sample["attention_mask"].tolist() == [1, 1, 1, 0, 0, 0]


def test_text_is_cut_to_the_sequence() -> None:
    sample = ExampleEncoder(ByteTokenizer(), 4)("abcdefgh")
    assert sample["labels"].tolist() == [97, 98, 99, 100]
    assert sample["attention_mask"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("text", ["", "a"])
def test_text_without_anything_to_predict_still_gives_a_loss(text: str) -> None:
    sample = ExampleEncoder(ByteTokenizer(), 4)(text)
    assert int((sample["labels"][1:] != -100).sum()) == 1


def test_row_without_text_is_an_empty_text() -> None:
    samples = ExampleSamples([{"text": None}, {"text": "hello"}], "text", ExampleEncoder(ByteTokenizer(), 5))
    assert samples[0]["attention_mask"].tolist() == [1, 1, 0, 0, 0]
    assert bytes(samples[1]["input_ids"].tolist()) == b"hello"


@given(count=st.integers(2, 500), fraction=st.floats(0, 0.99))
def test_rows_are_split_without_loss_or_overlap(count: int, fraction: float) -> None:
    train, held_out = split_rows(count, fraction)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(count))
    assert len(train) >= 1
    assert (len(held_out) >= 1) == (fraction > 0)


def test_split_is_spread_and_always_the_same() -> None:
    train, held_out = split_rows(1000, 0.02)
    assert len(held_out) == 20
    assert held_out.max() - held_out.min() > 500
    assert np.array_equal(split_rows(1000, 0.02)[1], held_out)
    assert len(train) == 980


def test_evaluation_samples_are_spread_evenly() -> None:
    samples = TokenSamples(np.arange(801, dtype=np.uint16), 8)
    chosen = evenly(samples, 4)
    assert [int(chosen[number]["input_ids"][0]) for number in range(4)] == [0, 200, 400, 600]
    assert len(evenly(samples, 1000)) == 100
