"""What begins a message, and which form costs less."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import ProtocolError
from ciuic.train.ddp.reduce import is_finite
from ciuic.train.ddp.wire import Head, LinkSpeed, choose_form, head_bytes, pack_head, read_head

TAG = b"abcdefg"


@given(st.booleans(), st.lists(st.booleans(), min_size=1, max_size=40))
def test_head_comes_back(finite: bool, used: list[bool]) -> None:
    message = pack_head(TAG, Head(finite=finite, used=np.array(used)))
    assert len(message) == head_bytes(len(used)) == 8 + (len(used) + 7) // 8
    back = read_head(torch.cat([message, torch.ones(3, dtype=torch.uint8)]), TAG, len(used), sender=1)
    assert back.finite == finite
    assert back.used.tolist() == used


def test_another_bucket_or_a_torn_flag_is_refused_with_the_sender() -> None:
    message = pack_head(TAG, Head(finite=True, used=np.ones(3, bool)))
    with pytest.raises(ProtocolError, match="rank 2 sent another bucket or step"):
        read_head(message, b"abcdefh", 3, sender=2)
    message[7] = 9
    with pytest.raises(ProtocolError):
        read_head(message, TAG, 3, sender=2)


def test_form_follows_latency_and_rate() -> None:
    """1 Gbit/s and 150 ms: three ranks with 10M parameters gather, with 1000M they need two phases."""
    far = LinkSpeed(latency_s=0.150, bytes_per_s=125e6)
    assert choose_form(10_000_000 // 8, 3, far) == "all-gather"
    assert choose_form(1_000_000_000 // 8, 3, far) == "two-phase"
    near = LinkSpeed(latency_s=1e-4, bytes_per_s=1e9)
    assert choose_form(10_000_000 // 8, 3, near) == "two-phase"
    assert choose_form(10**9, 2, near) == "all-gather"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 1e18], True),
        ([1e25, 1.0], True),
        ([1e35], False),
        ([float("inf")], False),
        ([float("nan")], False),
        ([], True),
    ],
)
def test_values_that_a_sum_would_overflow_are_not_finite(values: list[float], expected: bool) -> None:
    assert is_finite(torch.tensor(values)) is expected
