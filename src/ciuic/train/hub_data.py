"""Opening Hugging Face data sets: a file, a folder, or a hub id with an optional configuration after a colon."""

import difflib
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetsError

from ciuic.errors import DataError
from ciuic.job import DataSection
from ciuic.train.streaming import MAX_SHARDS, Stream

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
_SAVED = ("state.json", "dataset_dict.json")
"""One of them is in a folder written by `save_to_disk`."""


def open_table(data: DataSection) -> datasets.Dataset:
    """The job's split as a table with random access. Raises DataError when it does not load."""
    table = _load(data, streaming=False)
    if not isinstance(table, datasets.Dataset):
        raise DataError(f"the data set {data.hf} is not a table", cause=f"it is a {type(table).__name__}")
    _check_field(data, table.column_names)
    return table.select_columns([data.text_field])


def open_stream(data: DataSection) -> list[Stream]:
    """The job's split as streams, one per shard. Raises DataError when it does not open."""
    stream = _load(data, streaming=True)
    if isinstance(stream, datasets.Dataset):
        stream = stream.to_iterable_dataset()
    if not isinstance(stream, datasets.IterableDataset):
        raise DataError(f"the data set {data.hf} cannot be streamed", cause=f"it is a {type(stream).__name__}")
    columns = stream.column_names
    if columns is None:  # only known after looking at an example
        columns = list(next(iter(stream.take(1)), {}))
    _check_field(data, columns)
    stream = stream.select_columns([data.text_field])
    count = min(stream.num_shards, MAX_SHARDS)
    return [stream.shard(num_shards=count, index=index) for index in range(count)]


def _load(data: DataSection, *, streaming: bool) -> Any:
    datasets.disable_progress_bars()
    name = str(data.hf)
    path = Path(name).expanduser()
    try:
        if path.is_file():
            builder = _BUILDERS.get(path.suffix)
            if builder is None:
                raise DataError(
                    f"data.hf names {name}, a kind of file that is not known",
                    next=f"use one of {', '.join(_BUILDERS)}, or data.path for plain text",
                )
            return datasets.load_dataset(builder, data_files=str(path), split=data.split, streaming=streaming)
        if any((path / name).is_file() for name in _SAVED):
            saved = datasets.load_from_disk(str(path))
            return saved[data.split] if isinstance(saved, datasets.DatasetDict) else saved
        repository, _, configuration = (str(path), "", "") if path.is_dir() else name.partition(":")
        return datasets.load_dataset(repository, configuration or None, split=data.split, streaming=streaming)
    except (DatasetsError, OSError, ValueError, KeyError) as error:
        found = "" if path.exists() else "there is no file or folder of that name here; "
        raise DataError(
            f"the data set {name} (split {data.split}) cannot be loaded",
            cause=f"{found}{' '.join(str(error).split())[:300]}",
            next="check data.hf and data.split, and that this node reaches the hub",
        ) from error


def _check_field(data: DataSection, columns: list[str]) -> None:
    if data.text_field in columns:
        return
    near = difflib.get_close_matches(data.text_field, columns, n=1)
    raise DataError(
        f"the data set {data.hf} has no column {data.text_field!r}",
        cause=f"its columns are {', '.join(columns)}",
        next=f"did you mean data.text_field = {near[0]!r}?" if near else "set data.text_field to one of them",
    )
