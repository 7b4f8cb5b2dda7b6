"""What a replay sends and measures."""

import math
import struct

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor.probe.parcel import pack, unpack
from ciuic.doctor.probe.recorder import measure
from ciuic.errors import FrameError, UsageError

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5) | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            | st.tuples(inner, inner)
        ),
        max_leaves=8,
    )
)
def test_what_is_packed_comes_back(batch):
    assert repr(unpack(pack(batch), CPU)) == repr(batch)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_come_back_bit_for_bit_in_memory_of_their_own(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    back = unpack(pack({"x": (tensor, np.arange(3))}), CPU)["x"]
    assert back[0].dtype == dtype
    assert torch.equal(back[0], tensor)
    assert back[0].data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert back[1].tolist() == [0, 1, 2]


def test_what_cannot_be_sent_is_named():
    with pytest.raises(UsageError, match="Generator"):
        pack((torch.Generator(),))


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        msgspec.msgpack.encode(["tensor", "float32", [4], b"1234", True, False]),
        msgspec.msgpack.encode(["tensor", "nothing", [1], b"1", True, False]),
        msgspec.msgpack.encode(["dict"]),
    ],
)
def test_a_damaged_batch_is_an_error(body):
    with pytest.raises(FrameError):
        unpack(body, CPU)


@pytest.mark.parametrize("size", [1, 63, 64, 1000, (1 << 20) + 77])
def test_a_sketch_tells_how_far_tensors_are_apart(size):
    source = torch.Generator().manual_seed(size)
    one = torch.randn(size, generator=source)
    apart = 1e-4 * torch.randn(size, generator=source)
    (length, a), (_, b) = measure(one), measure(one + apart)
    assert length == pytest.approx(float(one.double().norm()))
    difference = math.sqrt(
        sum((x - y) ** 2 for x, y in zip(struct.unpack("<64d", a), struct.unpack("<64d", b), strict=True))
    )
    assert difference == pytest.approx(float(apart.norm()), rel=0.4)
