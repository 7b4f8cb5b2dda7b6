"""Turning bytes into token numbers: one token per byte, or a Hugging Face tokenizer."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import transformers

from ciuic.errors import DataError


class Tokenizer(Protocol):
    """What the data sets need of a tokenizer."""

    @property
    def name(self) -> str:
        """As written in the job."""

    @property
    def identity(self) -> str:
        """Equal for equal tokenizers, whatever the folder they were read from."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token number."""

    @property
    def filler(self) -> int:
        """The token that ends a text; also stands where a text has nothing to learn."""

    def encode(self, texts: Sequence[bytes], *, end: bool = False) -> list[np.ndarray]:
        """Token numbers of each text, without special tokens; with `end`, the ending token where there is one."""


class ByteTokenizer:
    """Every byte is its own token; no vocabulary, no special tokens."""

    name = "byte"
    identity = "byte"
    vocab_size = 256
    filler = ord("\n")

    def encode(self, texts: Sequence[bytes], *, end: bool = False) -> list[np.ndarray]:
        """uint8 arrays that share the memory of `texts`; a text by byte has no ending token."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]


class HubTokenizer:
    """A tokenizer of `transformers`; text that is not UTF-8 is read with replacement characters."""

    def __init__(self, name: str, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self.name = name
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self._end: int | None = tokenizer.eos_token_id
        self.filler = self._end if self._end is not None else 0
        words = "\n".join(f"{number} {word}" for word, number in sorted(vocabulary.items()))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else type(tokenizer).__name__
        self.identity = hashlib.sha256(f"{words}\n{rules}\n{self._end}".encode()).hexdigest()

    def encode(self, texts: Sequence[bytes], *, end: bool = False) -> list[np.ndarray]:
        """int64 arrays."""
        if not texts:
            return []
        decoded = [text.decode("utf-8", errors="replace") for text in texts]
        rows = self._tokenizer(decoded, add_special_tokens=False, verbose=False)["input_ids"]
        ending = [self._end] if end and self._end is not None else []
        return [np.asarray([*row, *ending], dtype=np.int64) for row in rows]


def load_tokenizer(name: str) -> Tokenizer:
    """`byte`, a folder with a tokenizer, a tokenizer.json file, or a hub id. Raises DataError when it does not load."""
    if name == "byte":
        return ByteTokenizer()
    path = Path(name).expanduser()
    try:
        return HubTokenizer(name, _read(name, path))
    except (OSError, ValueError, KeyError, ImportError) as error:
        here = "there is a folder of that name" if path.exists() else "there is no folder of that name"
        raise DataError(
            f"the tokenizer {name} cannot be loaded",
            cause=f"{here}; {' '.join(str(error).split())[:300]}",
            next='set data.tokenizer to "byte", a folder that exists on every node, or a hub id',
        ) from error


def _read(name: str, path: Path) -> transformers.PreTrainedTokenizerBase:
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file() and not (file.parent / "tokenizer_config.json").is_file():
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    source = str(path.parent if path.is_file() else path) if path.exists() else name
    found = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if found is None:
        raise ValueError("transformers knows no tokenizer for it")
    return found
