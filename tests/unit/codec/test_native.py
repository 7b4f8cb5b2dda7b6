"""Which back end runs: chosen by the processor, by a wish, or by what is missing."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from codec_cases import native_levels, shape_of

from ciuic.codec import FragmentCodec, native
from ciuic.codec.native import VARIABLE, choose_kernel, default_threads, describe_back_end, load_library
from ciuic.errors import CodecUnavailableError

NATIVE = native_levels()
needs_kernel = pytest.mark.skipif(not NATIVE, reason="no kernel was built")
HERE = Path(native.__file__).parent


@pytest.fixture
def no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if ciuic was installed without a compiler."""
    monkeypatch.setattr(native, "load_library", lambda: load_library(tmp_path))
    return tmp_path


@needs_kernel
def test_the_best_level_is_taken_when_nothing_is_wished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    kernel = choose_kernel()
    assert kernel is not None
    assert kernel.name == NATIVE[-1]
    assert describe_back_end().startswith(f"native {NATIVE[-1]}, up to ")


@needs_kernel
@pytest.mark.parametrize("wish", NATIVE)
def test_a_level_is_taken_when_it_is_wished(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, wish)
    kernel = choose_kernel()
    assert kernel is not None
    assert kernel.name == wish


def test_the_fallback_is_taken_when_it_is_wished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fallback")
    assert choose_kernel() is None
    assert describe_back_end() == "numpy fallback (CIUIC_CODEC=fallback)"


@pytest.mark.parametrize("wish", ["sse9", "AVX2", "numpy"])
def test_an_unknown_wish_is_an_error(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, wish)
    with pytest.raises(CodecUnavailableError, match="not a codec back end"):
        FragmentCodec("1-bit", shape_of((1, 8)))
    assert describe_back_end().startswith("none: ")


@pytest.mark.parametrize("wish", ["native", "portable", "avx512"])
def test_a_wish_that_cannot_be_met_is_an_error_and_never_the_fallback(
    wish: str, no_kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, wish)
    with pytest.raises(CodecUnavailableError, match="not there") as caught:
        FragmentCodec("1-bit", shape_of((1, 8)))
    assert caught.value.code == "CIUIC-106"


@needs_kernel
def test_a_level_this_processor_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def ciuic_best_level(self) -> int:
            return 0

    monkeypatch.setattr(native, "load_library", lambda: (Old(), ""))
    with pytest.raises(CodecUnavailableError, match="no avx2"):
        choose_kernel("avx2")


def test_without_a_kernel_everything_works_and_says_why(no_kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    (no_kernel / "_kernel.txt").write_text("no C compiler was found\n")
    load_library.cache_clear()
    codec = FragmentCodec("1-bit", shape_of((1, 8)))
    assert codec.decode(codec.encode(np.ones(8, np.float32))).tolist() == [1] * 8
    assert describe_back_end() == "numpy fallback (no C compiler was found)"


@needs_kernel
def test_a_library_of_another_source_is_not_used(tmp_path: Path) -> None:
    shutil.copy(HERE / "_kernel.so", tmp_path)
    (tmp_path / "kernel.c").write_text((HERE / "kernel.c").read_text() + "\n/* changed */\n")
    assert load_library(tmp_path) == (None, "it was built from another kernel.c: install ciuic again")


def test_a_damaged_library_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "_kernel.so").write_bytes(b"\x7fELF nonsense")
    library, reason = load_library(tmp_path)
    assert library is None
    assert reason.startswith("it cannot be loaded")


@pytest.mark.parametrize(("limit", "most"), [("1", 1), ("3", 3), ("", 8), ("many", 8)])
def test_threads_obey_the_machine_and_omp_num_threads(limit: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    monkeypatch.setattr(native.os, "sched_getaffinity", lambda _: set(range(64)))
    assert default_threads() == most
