import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from ciuic.errors import DataError
from ciuic.train.tokenizer import ByteTokenizer, load_tokenizer

WORDS = {"[UNK]": 0, "</s>": 1, "hello": 2, "world": 5}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when the library is imported, so also:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def backend() -> Backend:
    backend = Backend(WordLevel(WORDS, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    return backend


@pytest.fixture
def folder(tmp_path: Path, backend: Backend) -> Path:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_byte_tokenizer_gives_every_byte_its_own_number() -> None:
    tokenizer = load_tokenizer("byte")
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.vocab_size == 256
    assert tokenizer.encode([b"\x00\xffz"], end=True)[0].tolist() == [0, 255, 122]


def test_saved_folder_is_read_with_its_ending_token(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    rows = tokenizer.encode([b"hello world", b"world stranger"])
    assert [row.tolist() for row in rows] == [[2, 5], [5, 0]]
    assert tokenizer.encode([b"hello"], end=True)[0].tolist() == [2, 1]
    assert tokenizer.filler == 1


def test_vocabulary_counts_up_to_the_largest_number(folder: Path) -> None:
    assert load_tokenizer(str(folder)).vocab_size == 6  # not 4: the numbers have a gap


def test_bare_tokenizer_file_is_enough(tmp_path: Path, backend: Backend) -> None:
    backend.save(str(tmp_path / "tokenizer.json"))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(str(name))
        assert tokenizer.encode([b"hello world"], end=True)[0].tolist() == [2, 5]


def test_text_that_is_not_utf8_is_read_with_replacements(folder: Path) -> None:
    assert load_tokenizer(str(folder)).encode([b"hello \xff\xfe world"])[0].tolist() == [2, 0, 5]


def test_nothing_to_encode_is_nothing(folder: Path) -> None:
    assert load_tokenizer(str(folder)).encode([]) == []


def test_identity_follows_the_content_not_the_folder(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    folder.rename(copy)
    identity = load_tokenizer(str(copy)).identity
    file = copy / "tokenizer.json"
    content = json.loads(file.read_text())
    copy.rename(folder)
    assert load_tokenizer(str(folder)).identity == identity
    content["model"]["vocab"]["new"] = 6
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(folder)).identity != identity


def test_missing_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder of that name"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="nobody/nothing cannot be loaded"):
        load_tokenizer("nobody/nothing")


def test_folder_without_a_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is a folder of that name"):
        load_tokenizer(str(tmp_path))
