import json
from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from ciuic.errors import DataError
from ciuic.job import Job, parse_job
from ciuic.train.dataset import TrainingData, load_data


@pytest.fixture(autouse=True)
def private_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when the library is imported, so also:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf-cache")
    monkeypatch.setenv("CIUIC_HOME", str(tmp_path / "home"))


def job(train: dict[str, object] | None = None, **data: object) -> Job:
    return parse_job({"data": {"sequence_length": 16, **data}, "train": train or {}})


def texts(samples: object) -> list[str]:
    found = []
    for number in range(len(samples)):
        sample = samples[number]
        found.append(bytes(sample["input_ids"][sample["labels"] != -100].tolist()).decode())
    return found


@pytest.fixture
def rows() -> list[str]:
    return [f"row {number:03}" for number in range(100)]


@pytest.fixture
def jsonl(tmp_path: Path, rows: list[str]) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row, "other": 1}) + "\n" for row in rows))
    return path


# ---- the default corpus and text files -----------------------------------------------------------------------------


def test_default_corpus_is_split_by_file_and_the_same_twice() -> None:
    data, again = load_data(job()), load_data(job())
    assert isinstance(data, TrainingData)
    assert data.train_samples == len(data.train) > 100_000
    assert len(data.held_out) == 64
    assert data.vocab_size == 256
    assert data.digest == again.digest
    assert texts(data.held_out) == texts(again.held_out)


def test_no_held_out_part_when_none_is_asked_for() -> None:
    data = load_data(job(held_out=0.0))
    assert data.held_out is None


def test_text_files_are_read_by_byte_and_cached(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"file {number:02} " + "abcdefgh " * 40)
    data = load_data(job(path=f"{tmp_path}/*.txt", held_out=0.2))
    assert list((tmp_path / "home" / "cache" / "tokens").iterdir())
    again = load_data(job(path=[f"{tmp_path}/*.txt"], held_out=0.2))
    assert (data.digest, len(data.train)) == (again.digest, len(again.train))
    (tmp_path / "00.txt").write_text("changed, so the cache must not be used again")
    assert load_data(job(path=f"{tmp_path}/*.txt", held_out=0.2)).digest != data.digest


def test_no_document_is_in_both_parts(tmp_path: Path) -> None:
    names = [f"document{number:03}" for number in range(200)]
    for name in names:
        (tmp_path / f"{name}.txt").write_text(f"<{name}>" * 20)
    data = load_data(job({"evaluate_samples": 100_000}, path=f"{tmp_path}/*.txt", held_out=0.1))
    train, held_out = ("".join(texts(part)) for part in (data.train, data.held_out))
    in_train, in_held_out = ({name for name in names if f"<{name}>" in part} for part in (train, held_out))
    assert in_train.isdisjoint(in_held_out)
    assert len(in_held_out) > 5


def test_equal_files_in_other_folders_have_the_same_digest(tmp_path: Path) -> None:
    digests = set()
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        for number in range(30):
            (tmp_path / folder / f"{number:02}.txt").write_text(f"{number} " * 200)
        digests.add(load_data(job(path=f"{tmp_path / folder}/*.txt")).digest)
    assert len(digests) == 1


def test_one_small_file_still_has_something_held_out(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(f"line {number}\n\n" for number in range(2000)))
    data = load_data(job(path=str(tmp_path / "one.txt")))
    assert len(data.held_out) >= 1
    assert len(data.train) > 100


def test_too_little_text_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("ten bytes.")
    with pytest.raises(DataError, match="too small to hold a part out"):
        load_data(job(path=str(tmp_path / "one.txt")))
    with pytest.raises(DataError, match="one sample needs 17"):
        load_data(job(path=str(tmp_path / "one.txt"), held_out=0.0))


def test_text_with_a_tokenizer_has_its_vocabulary(tmp_path: Path) -> None:
    backend = Backend(WordLevel({"[UNK]": 0, "spam": 1, "eggs": 700}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("spam eggs " * (number + 20))
    data = load_data(job(path=f"{tmp_path}/*.txt", tokenizer=str(tmp_path), held_out=0.2))
    assert data.vocab_size == 701
    assert set(data.train[0]["input_ids"].tolist()) == {1, 700}


def test_default_corpus_with_a_tokenizer_is_cached(tmp_path: Path) -> None:
    backend = Backend(WordLevel({"[UNK]": 0, "def": 1, "self": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    first = load_data(job(tokenizer=str(tmp_path)))
    assert first.train_samples > 10_000
    assert load_data(job(tokenizer=str(tmp_path))).train_samples == first.train_samples
    assert first.digest == load_data(job()).digest  # the text is the same, whatever the tokens


# ---- Hugging Face data sets ----------------------------------------------------------------------------------------


def test_jsonl_rows_become_samples_once_each(jsonl: Path, rows: list[str]) -> None:
    data = load_data(job(hf=str(jsonl), held_out=0.1))
    train, held_out = texts(data.train), texts(data.held_out)
    assert len(held_out) == 10
    assert sorted([*train, *held_out]) == rows


def test_parquet_file_and_saved_folder_give_the_same(tmp_path: Path, jsonl: Path, rows: list[str]) -> None:
    table = datasets.Dataset.from_dict({"text": rows})
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "both")
    expected = load_data(job(hf=str(jsonl)))
    for name in ("rows.parquet", "saved", "both"):
        data = load_data(job(hf=str(tmp_path / name)))
        assert texts(data.train) == texts(expected.train)
        assert data.digest == expected.digest


def test_folder_of_files_is_a_data_set(tmp_path: Path, rows: list[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    datasets.Dataset.from_dict({"text": rows}).to_parquet(folder / "train.parquet")
    assert load_data(job(hf=str(folder))).train_samples == 98


def test_part_of_a_split_can_be_chosen(jsonl: Path) -> None:
    assert load_data(job(hf=str(jsonl), split="train[:50%]", held_out=0.0)).train_samples == 50


def test_other_column_is_read_and_a_missing_one_named(jsonl: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'txt'.*did you mean data\.text_field = 'text'"):
        load_data(job(hf=str(jsonl), text_field="txt"))
    assert texts(load_data(job(hf=str(jsonl), text_field="other", held_out=0.0)).train)[0] == "1\n"


def test_missing_split_is_named(jsonl: Path) -> None:
    with pytest.raises(DataError, match="split nothere"):
        load_data(job(hf=str(jsonl), split="nothere"))


def test_hub_that_cannot_be_reached_is_a_clear_error() -> None:
    with pytest.raises(DataError, match="there is no file or folder of that name here"):
        load_data(job(hf="nobody/nothing"))
    with pytest.raises(DataError, match="cannot be loaded"):
        load_data(job({"samples": 10}, hf="nobody/nothing", streaming=True))


def test_unknown_kind_of_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.xyz").write_text("text")
    with pytest.raises(DataError, match="kind of file that is not known"):
        load_data(job(hf=str(tmp_path / "rows.xyz")))


def test_damaged_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 this is not parquet")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_data(job(hf=str(tmp_path / "rows.parquet")))


def streamed(path: Path, **data: object) -> Job:
    return job({"samples": 1000, "evaluate_samples": 5}, hf=str(path), streaming=True, **data)


def test_streamed_rows_are_addressed_by_number(jsonl: Path, rows: list[str]) -> None:
    data = load_data(streamed(jsonl))
    assert data.train_samples is None
    assert texts(data.held_out) == rows[:5]
    sample = data.train[20]
    assert bytes(sample["input_ids"][sample["labels"] != -100].tolist()).decode() == rows[25]
    seen = {bytes(data.train[n]["input_ids"][:7].tolist()).decode() for n in range(300)}
    assert seen == set(rows[5:])


def test_streamed_shards_of_a_folder_are_interleaved(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for shard in range(3):
        datasets.Dataset.from_dict({"text": [f"s{shard} {number:03}" for number in range(200)]}).to_parquet(
            folder / f"train-{shard:05}-of-00003.parquet"
        )
    data = load_data(streamed(folder, held_out=0.0))
    assert data.held_out is None
    firsts = [bytes(data.train[number]["input_ids"][:6].tolist()).decode() for number in (0, 63, 64, 128, 192)]
    assert firsts == ["s0 000", "s0 063", "s1 000", "s2 000", "s0 064"]


def test_stream_too_short_to_evaluate_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"text": "only one"}\n')
    with pytest.raises(DataError, match="first shard has 1 examples, 5 are needed"):
        load_data(streamed(tmp_path / "few.jsonl"))


def test_stream_without_the_column_is_a_clear_error(jsonl: Path) -> None:
    with pytest.raises(DataError, match="no column 'body'"):
        load_data(streamed(jsonl, text_field="body"))
