"""A streamed Hugging Face data set addressed by sample number, so that leases of numbers work for it too.

Sample i is in chunk c = i // chunk_samples, which belongs to shard c % shards; its offset in the shard is
(c // shards) * chunk_samples + i % chunk_samples. All nodes compute the same, nothing is stored or permuted. A shard
that ends begins again.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

from torch.utils.data import Dataset

from ciuic.errors import DataError
from ciuic.train.samples import ExampleEncoder, Sample

CHUNK_SAMPLES = 64
MAX_SHARDS = 64
"""A data set of more files is read as this many shards of several files each, to keep few of them open."""

_log = logging.getLogger("ciuic.train")


class Stream(Protocol):
    """What is used of `datasets.IterableDataset`."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...

    def skip(self, n: int) -> Self:
        """The same stream without its first n examples."""


class StreamedSamples(Dataset[Sample]):
    """Samples of a stream by number, without a length. Reading in order reads each shard once.

    `reserved` examples at the start of the first shard are never given out: they are the held-out part.
    """

    def __init__(
        self,
        shards: Sequence[Stream],
        text_field: str,
        encode: ExampleEncoder,
        *,
        reserved: int = 0,
        chunk_samples: int = CHUNK_SAMPLES,
    ) -> None:
        self._cursors = [
            _Cursor(shard, name=number, reserved=reserved if number == 0 else 0) for number, shard in enumerate(shards)
        ]
        self._text_field = text_field
        self._encode = encode
        self._chunk_samples = chunk_samples

    def __getitem__(self, index: int) -> Sample:
        shard, offset = self.locate(index)
        return self._encode(str(self._cursors[shard].example(offset)[self._text_field] or ""))

    def locate(self, number: int) -> tuple[int, int]:
        """Shard and offset of a sample, before a shard's end makes the offset begin again."""
        if number < 0:
            raise IndexError(f"sample {number} of a stream")
        chunk, inside = divmod(number, self._chunk_samples)
        round_, shard = divmod(chunk, len(self._cursors))
        return shard, round_ * self._chunk_samples + inside


class _Cursor:
    """Reads one shard forward and stays open between examples; a jump back opens it again and skips."""

    def __init__(self, stream: Stream, *, name: int, reserved: int) -> None:
        self._stream = stream
        self._name = name
        self._reserved = reserved
        self._iterator: Iterator[Mapping[str, Any]] | None = None
        self._position = self._opened_at = 0
        self._length: int | None = None
        self._epoch = 0

    def example(self, offset: int) -> Mapping[str, Any]:
        """The example at `offset` behind the reserved ones. Raises DataError when the shard has no others."""
        found = self._read(self._reserved + self._wrapped(offset))
        if found is None:  # the end came first, so the length is known now
            found = self._read(self._reserved + self._wrapped(offset))
        if found is None:
            raise DataError(
                f"shard {self._name} of the data set became shorter while it was read",
                next="keep the data set unchanged while a run reads it",
            )
        return found

    def _wrapped(self, offset: int) -> int:
        if self._length is None:
            return offset
        usable = self._length - self._reserved
        if usable <= 0:
            raise DataError(
                f"shard {self._name} of the data set has nothing to train on",
                cause=f"it holds {self._length} examples and {self._reserved} of them are held out",
                next="use a larger data set, fewer shards or a smaller train.evaluate_samples",
            )
        epoch, inside = divmod(offset, usable)
        if epoch > self._epoch:
            self._epoch = epoch
            _log.info("shard %d of the data set begins again: epoch %d", self._name, epoch + 1)
        return inside

    def _read(self, position: int) -> Mapping[str, Any] | None:
        if self._iterator is None or position < self._position:
            self._open(position)
        for example in self._iterator or ():
            self._position += 1
            if self._position > position:
                return example
        self._ended()
        return None

    def _open(self, position: int) -> None:
        self._iterator = iter(self._stream.skip(position) if position else self._stream)
        self._position = self._opened_at = position

    def _ended(self) -> None:
        """Learn the shard's length. A skip to the end or beyond hides it, then the shard is counted from its start."""
        hidden = self._opened_at > 0 and self._position == self._opened_at
        self._length = sum(1 for _ in self._stream) if hidden else self._position
        self._iterator = None


def first_texts(stream: Iterable[Mapping[str, Any]], text_field: str, count: int) -> list[str]:
    """The texts of the first `count` examples, fewer when there are fewer."""
    texts: list[str] = []
    for example in stream:
        if len(texts) == count:
            break
        texts.append(str(example[text_field] or ""))
    return texts
