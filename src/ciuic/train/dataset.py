"""From a job to its data: the default corpus, text files, or a Hugging Face data set, with a held-out part."""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset, Subset

from ciuic.errors import DataError
from ciuic.job import Job
from ciuic.train.corpus import (
    Document,
    corpus_digest,
    find_files,
    is_held_out,
    stdlib_documents,
    text_documents,
    update_digest,
)
from ciuic.train.samples import (
    ExampleEncoder,
    ExampleSamples,
    Sample,
    TokenSamples,
    evenly,
    split_rows,
    texts_digest,
)
from ciuic.train.streaming import StreamedSamples, first_texts
from ciuic.train.token_store import TokenParts, TokenSink, build_cached, build_in_memory, token_dtype
from ciuic.train.tokenizer import Tokenizer, load_tokenizer

_ENCODE_TOGETHER = 64
_LARGEST_FRACTION = 0.5


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a job trains on and is judged by."""

    train: Dataset[Sample]
    """Samples by number: `train[i]`."""
    train_samples: int | None
    """How many there are; None for a stream."""
    held_out: Dataset[Sample] | None
    """At most `train.evaluate_samples` samples that are never trained on; None when nothing is held out."""
    vocab_size: int
    tokenizer: str
    digest: str
    """SHA-256 (hex): equal on two nodes that read the same text (of a Hugging Face data set: the same size and
    the same texts in a few places)."""


def load_data(job: Job) -> TrainingData:
    """Read, tokenise and split the data of a job. Raises DataError when it is missing, unreadable or too small."""
    tokenizer = load_tokenizer(job.data.tokenizer)
    if job.data.hf is not None:
        return _load_stream(job, tokenizer) if job.data.streaming else _load_table(job, tokenizer)
    parts = _load_text(job, tokenizer) if job.data.path is not None else _load_corpus(job, tokenizer)
    train = TokenSamples(parts.train, job.data.sequence_length)
    if len(train) == 0:
        raise DataError(
            "the data set is too small",
            cause=f"it has {len(parts.train)} tokens to train on, one sample needs {job.data.sequence_length + 1}",
            next="give more data or a smaller data.sequence_length",
        )
    held_out = TokenSamples(parts.held_out, job.data.sequence_length)
    return TrainingData(
        train=train,
        train_samples=len(train),
        held_out=evenly(held_out, job.train.evaluate_samples) if len(held_out) else None,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.name,
        digest=parts.digest,
    )


def _load_corpus(job: Job, tokenizer: Tokenizer) -> TokenParts:
    build = functools.partial(_fill_sinks, stdlib_documents, tokenizer, job)
    if tokenizer.name == "byte":
        return build_in_memory(build, token_dtype(tokenizer.vocab_size))
    key = ["stdlib", corpus_digest(), *_encoding_key(job, tokenizer)]
    return build_cached(key, build, token_dtype(tokenizer.vocab_size))


def _load_text(job: Job, tokenizer: Tokenizer) -> TokenParts:
    patterns = [job.data.path] if isinstance(job.data.path, str) else list(job.data.path or [])
    files = find_files(patterns)
    build = functools.partial(_fill_sinks, lambda: text_documents(files), tokenizer, job)
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return build_cached(["text", facts, *_encoding_key(job, tokenizer)], build, token_dtype(tokenizer.vocab_size))


def _encoding_key(job: Job, tokenizer: Tokenizer) -> list[object]:
    return [tokenizer.identity, job.data.held_out, job.data.sequence_length]


def _fill_sinks(
    documents: Callable[[], Iterable[Document]], tokenizer: Tokenizer, job: Job, train: TokenSink, held_out: TokenSink
) -> str:
    """Write the tokens of all documents to the sinks; returns the digest of the texts.

    Where the data are so few that no sample was held out, twice the fraction is tried, up to one half.
    """
    fraction = job.data.held_out
    while True:
        digest = hashlib.sha256()
        batches = _batched(_digesting(documents(), digest))
        for batch in batches:
            for document, tokens in zip(batch, tokenizer.encode([d.text for d in batch], end=True), strict=True):
                (held_out if is_held_out(document.key, fraction) else train).append(tokens)
        if fraction == 0 or held_out.count > job.data.sequence_length:
            return digest.hexdigest()
        if fraction >= _LARGEST_FRACTION:
            raise DataError(
                "the data set is too small to hold a part out",
                cause=f"half of its documents have {held_out.count} tokens, "
                f"one sample needs {job.data.sequence_length + 1}",
                next="give more data, a smaller data.sequence_length, or data.held_out = 0",
            )
        fraction = min(2 * fraction, _LARGEST_FRACTION)
        train.restart()
        held_out.restart()


def _batched(documents: Iterable[Document]) -> Iterable[list[Document]]:
    remaining = iter(documents)
    while batch := list(itertools.islice(remaining, _ENCODE_TOGETHER)):
        yield batch


def _digesting(documents: Iterable[Document], digest: "hashlib._Hash") -> Iterable[Document]:
    for document in documents:
        update_digest(digest, document)
        yield document


def _load_table(job: Job, tokenizer: Tokenizer) -> TrainingData:
    from ciuic.train.hub_data import open_table  # loads pandas and pyarrow, which most jobs do without

    table = open_table(job.data)
    if len(table) < 2:
        raise DataError(
            f"the data set {job.data.hf} is too small", cause=f"split {job.data.split} has {len(table)} rows"
        )
    samples = ExampleSamples(table, job.data.text_field, ExampleEncoder(tokenizer, job.data.sequence_length))
    train_rows, held_out_rows = split_rows(len(table), job.data.held_out)
    held_out = Subset(samples, held_out_rows.tolist())
    probes = np.linspace(0, len(table) - 1, num=min(len(table), 16)).astype(int).tolist()
    texts = [str(table[number][job.data.text_field] or "") for number in probes]
    return TrainingData(
        train=_Rows(samples, train_rows),
        train_samples=len(train_rows),
        held_out=evenly(held_out, job.train.evaluate_samples) if len(held_out) else None,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.name,
        digest=texts_digest(["table", len(table)], texts),
    )


class _Rows(Dataset[Sample]):
    """Some rows of a data set; the row numbers stay a NumPy array, 8 bytes each."""

    def __init__(self, samples: ExampleSamples, rows: np.ndarray) -> None:
        self._samples = samples
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[int(self._rows[index])]


def _load_stream(job: Job, tokenizer: Tokenizer) -> TrainingData:
    from ciuic.train.hub_data import open_stream  # as above

    shards = open_stream(job.data)
    encode = ExampleEncoder(tokenizer, job.data.sequence_length)
    reserved = job.train.evaluate_samples if job.data.held_out > 0 else 0
    texts = first_texts(shards[0], job.data.text_field, max(reserved, 1))
    held_out = ExampleSamples([{job.data.text_field: text} for text in texts[:reserved]], job.data.text_field, encode)
    if not texts or len(texts) < reserved:
        raise DataError(
            f"the data set {job.data.hf} is too small",
            cause=f"its first shard has {len(texts)} examples, {reserved} are needed to evaluate",
            next="use a larger data set or a smaller train.evaluate_samples",
        )
    return TrainingData(
        train=StreamedSamples(shards, job.data.text_field, encode, reserved=reserved),
        train_samples=None,
        held_out=held_out if reserved else None,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.name,
        digest=texts_digest(["stream", len(shards)], texts),
    )
