import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import DataError
from ciuic.train.samples import ExampleEncoder
from ciuic.train.streaming import StreamedSamples, first_texts
from ciuic.train.tokenizer import ByteTokenizer


class Shard:
    """A stream that counts how often it was opened and how many examples it gave."""

    def __init__(self, name: str, length: int) -> None:
        self.name, self.length = name, length
        self.opened = self.read = 0

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self._from(0)

    def skip(self, n: int) -> "Skipped":
        return Skipped(self, n)

    def _from(self, start: int) -> Iterator[Mapping[str, Any]]:
        self.opened += 1
        for number in range(start, self.length):
            self.read += 1
            yield {"text": f"{self.name}{number}"}


class Skipped:
    def __init__(self, shard: Shard, start: int) -> None:
        self._shard, self._start = shard, start

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self._shard._from(self._start)

    def skip(self, n: int) -> "Skipped":
        return Skipped(self._shard, self._start + n)


def stream(*lengths: int, chunk: int = 4, reserved: int = 0) -> tuple[StreamedSamples, list[Shard]]:
    shards = [Shard(chr(97 + number), length) for number, length in enumerate(lengths)]
    encode = ExampleEncoder(ByteTokenizer(), 8)
    return StreamedSamples(shards, "text", encode, reserved=reserved, chunk_samples=chunk), shards


def text(samples: StreamedSamples, number: int) -> str:
    sample = samples[number]
    return bytes(sample["input_ids"][sample["attention_mask"] == 1].tolist()).decode()


def test_samples_go_round_the_shards_in_chunks() -> None:
    samples, _ = stream(100, 100, chunk=2)
    assert [text(samples, number) for number in range(8)] == ["a0", "a1", "b0", "b1", "a2", "a3", "b2", "b3"]


@given(
    lengths=st.lists(st.integers(3, 20), min_size=1, max_size=4),
    chunk=st.integers(1, 5),
    reserved=st.integers(0, 2),
    numbers=st.lists(st.integers(0, 300), max_size=30),
)
def test_any_order_of_reading_gives_what_the_address_says(
    lengths: list[int], chunk: int, reserved: int, numbers: list[int]
) -> None:
    samples, shards = stream(*lengths, chunk=chunk, reserved=reserved)
    for number in numbers:
        chunk_number, inside = divmod(number, chunk)
        shard = chunk_number % len(lengths)
        offset = chunk_number // len(lengths) * chunk + inside
        hidden = reserved if shard == 0 else 0
        expected = hidden + offset % (lengths[shard] - hidden)
        assert text(samples, number) == f"{shards[shard].name}{expected}"


def test_reading_in_order_reads_every_shard_once() -> None:
    samples, shards = stream(48, 48)
    for number in range(96):
        samples[number]
    assert [(shard.opened, shard.read) for shard in shards] == [(1, 48), (1, 48)]


def test_a_gap_is_read_over_without_opening_again() -> None:
    samples, shards = stream(100)
    samples[0], samples[50]
    assert shards[0].opened == 1


def test_a_jump_back_opens_again_and_skips() -> None:
    samples, shards = stream(100)
    samples[90]
    read = shards[0].read
    assert text(samples, 40) == "a40"
    assert shards[0].opened == 2
    assert shards[0].read == read + 1


def test_the_same_sample_twice_is_the_same() -> None:
    samples, _ = stream(10)
    assert text(samples, 3) == text(samples, 3)


def test_a_shard_that_ends_begins_again_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    samples, _ = stream(5)
    with caplog.at_level(logging.INFO, logger="ciuic.train"):
        assert [text(samples, number) for number in range(3, 9)] == ["a3", "a4", "a0", "a1", "a2", "a3"]
    assert [record.getMessage() for record in caplog.records] == ["shard 0 of the data set begins again: epoch 2"]


def test_a_lease_far_beyond_the_end_is_found() -> None:
    samples, _ = stream(7)
    assert text(samples, 700 + 3) == "a3"
    assert text(stream(7)[0], 7) == "a0"


def test_held_out_examples_are_never_given_out() -> None:
    samples, _ = stream(10, reserved=3)
    seen = {text(samples, number) for number in range(50)}
    assert seen == {f"a{number}" for number in range(3, 10)}


@pytest.mark.parametrize(("length", "reserved"), [(0, 0), (3, 3), (2, 3)])
def test_shard_with_nothing_to_train_on_is_an_error(length: int, reserved: int) -> None:
    samples, _ = stream(length, reserved=reserved)
    with pytest.raises(DataError, match="nothing to train on"):
        samples[0]


def test_negative_number_is_refused() -> None:
    with pytest.raises(IndexError):
        stream(5)[0][-1]


def test_first_texts_stop_at_the_count_or_at_the_end() -> None:
    shard = Shard("a", 3)
    assert first_texts(shard, "text", 2) == ["a0", "a1"]
    assert first_texts(shard, "text", 5) == ["a0", "a1", "a2"]
    assert first_texts([{"text": None}], "text", 1) == [""]
