"""The codec benchmark on a small vector: its names, its formulas and its picture. Speeds are not judged here."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from ciuic.bench import codec
from ciuic.bench.codec_others import DeepSpeedOneBit, torch_top_k_of_blocks
from ciuic.codec import CODEC_NAMES
from ciuic.errors import UsageError


@pytest.fixture(scope="module")
def result() -> dict[str, object]:
    threads = torch.get_num_threads()
    found = codec.measure(argparse.Namespace(elements=1 << 16, rounds=1))
    torch.set_num_threads(threads)
    return json.loads(json.dumps(found))


def test_every_number_a_person_looks_for_is_at_the_top_level(result: dict[str, float]) -> None:
    names = {*codec.TARGETS, "topk_compress_over_torch_topk_global"}
    names |= {f"onebit_compress_over_memcpy_{name}" for name in codec.back_ends()}
    names -= {"onebit_compress_over_memcpy_portable"} - set(result)
    assert all(result[name] > 0 for name in names)


def test_bits_per_parameter_are_those_of_the_formula(result: dict[str, dict[str, dict[str, float]]]) -> None:
    bits = result["bits_per_parameter"]
    assert set(bits) == set(CODEC_NAMES)
    assert all(found["measured"] == pytest.approx(found["formula"], rel=0.001) for found in bits.values())


def test_tables_and_picture_show_it(result: dict[str, object], tmp_path: Path) -> None:
    lines = [line for table in codec.tables(result) for line in table.lines()]
    assert any("topk_compress_over_torch_topk" in line for line in lines)
    assert codec.picture(result, tmp_path).stat().st_size > 10_000


def test_too_small_a_vector_is_refused() -> None:
    with pytest.raises(UsageError):
        codec.measure(argparse.Namespace(elements=1000, rounds=1))


def test_the_operations_of_others_do_what_they_are_named_after() -> None:
    values = torch.tensor([1.0, -2.0, 3.0, -4.0, 1.0, 1.0, 1.0, -1.0])
    other = DeepSpeedOneBit(8)
    other.compress(values)
    assert torch.equal(other.decode().sign(), values.sign())
    assert torch.allclose(other.decode() + other._error, values)
    assert torch_top_k_of_blocks(values, 4, 1)[0].flatten().tolist() in ([-4.0, 1.0], [-4.0, -1.0])
