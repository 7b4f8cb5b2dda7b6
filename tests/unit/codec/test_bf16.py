import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ciuic.codec.bf16 import BF16_MAX, bf16_decode, bf16_encode

FINITE = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=50)


@given(values=FINITE)
def test_rounding_is_that_of_torch_up_to_the_largest_number(values: list[float]) -> None:
    array = np.array(values, np.float32)
    expected = torch.from_numpy(np.clip(array, -BF16_MAX, BF16_MAX)).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(bf16_encode(array), expected)


def test_every_pattern_survives_decoding_and_encoding() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bf16_decode(bits)
    finite = np.isfinite(values)
    assert np.array_equal(bf16_encode(values[finite]), bits[finite])


def test_what_would_round_to_infinity_becomes_the_largest_number() -> None:
    top = np.array([3.4028234e38, -3.4028234e38, BF16_MAX], np.float32)
    assert bf16_decode(bf16_encode(top)).tolist() == [BF16_MAX, -BF16_MAX, BF16_MAX]
