"""numpy and torch decode the same bytes to the same bits, and a replica is the same on both."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from codec_cases import (
    KINDS,
    SHAPES,
    encoded_alike,
    fragments,
    garbage,
    same_bits,
    same_or_nan,
    shape_of,
    shapes,
    vector,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic.codec import CODEC_NAMES, FragmentCodec, FragmentShape, NumpyVectors
from ciuic.errors import CodecUnavailableError, ConflictError, FrameError
from ciuic.ledger.aggregate import Aggregator, Facts
from ciuic.ledger.entry import Push, Rejection
from ciuic.ledger.layout import Layout, Tensor, make_layout
from ciuic.ledger.node import NodeMachine, Place
from ciuic.ledger.outer import OuterOptimizer
from ciuic.train.torch_codec import TorchVectors

NAMES = st.sampled_from(CODEC_NAMES)
CPU = TorchVectors(torch.device("cpu"))
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def assert_decoded_alike(vectors: TorchVectors, name: str, shape: FragmentShape) -> None:
    host, other = FragmentCodec(name, shape), vectors.codec(name, shape)
    assert other.payload_bytes == host.payload_bytes
    for kind in KINDS:
        payload = host.encode(vector(kind, shape.element_count))
        assert same_bits(vectors.to_host(other.decode(payload)), host.decode(payload))
    for seed in range(3):
        payload = garbage(host.payload_bytes, seed)
        assert same_or_nan(vectors.to_host(other.decode(payload)), host.decode(payload))


@EVERY_SHAPE
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_both_decode_the_same_bytes_to_the_same_bits(name: str, shape: FragmentShape) -> None:
    assert_decoded_alike(CPU, name, shape)


@given(name=NAMES, case=fragments())
def test_both_decode_any_payload_to_the_same_bits(name: str, case: tuple[FragmentShape, np.ndarray]) -> None:
    shape, values = case
    host, other = FragmentCodec(name, shape), CPU.codec(name, shape)
    payload = host.encode(values)
    assert same_bits(other.decode(payload).numpy(), host.decode(payload))


@given(name=NAMES, shape=shapes(), seed=st.integers(0, 2**32 - 1))
def test_both_decode_garbage_to_the_same_bits(name: str, shape: FragmentShape, seed: int) -> None:
    host, other = FragmentCodec(name, shape), CPU.codec(name, shape)
    payload = garbage(host.payload_bytes, seed)
    assert same_or_nan(other.decode(payload).numpy(), host.decode(payload))


@pytest.mark.parametrize("name", ["int8", "int4", "2-bit", "1-bit", "bf16", "topk"])
def test_every_scale_there_is_decodes_to_the_same_bits(name: str) -> None:
    shape = shape_of((1 << 16, 2))
    host, other = FragmentCodec(name, shape), CPU.codec(name, shape)
    payload = garbage(host.payload_bytes, 1)
    payload[-(2 << 16) :] = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    assert same_or_nan(other.decode(payload).numpy(), host.decode(payload))


@EVERY_SHAPE
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_both_encode_alike_up_to_the_last_bit_of_a_scale(name: str, shape: FragmentShape) -> None:
    for kind in KINDS:
        values = vector(kind, shape.element_count)
        theirs = CPU.codec(name, shape).encode(CPU.from_host(values))
        assert theirs.dtype == np.uint8
        assert encoded_alike(name, shape, FragmentCodec(name, shape).encode(values), theirs)


@given(name=NAMES, case=fragments())
def test_both_encode_anything_alike_and_torch_leaves_its_input_alone(
    name: str, case: tuple[FragmentShape, np.ndarray]
) -> None:
    shape, values = case
    tensor = CPU.from_host(values)
    theirs = CPU.codec(name, shape).encode(tensor)
    assert encoded_alike(name, shape, FragmentCodec(name, shape).encode(values), theirs)
    assert same_bits(tensor.numpy(), values)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_torch_decodes_into_the_vector_it_is_given(name: str) -> None:
    shape = shape_of((3, 300), small=5, buffers=2)
    codec = CPU.codec(name, shape)
    payload = FragmentCodec(name, shape).encode(vector("normal", shape.element_count))
    out = torch.full((shape.element_count,), float("nan"))
    assert codec.decode(payload, out=out) is out
    assert same_bits(out.numpy(), codec.decode(payload).numpy())


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_torch_refuses_a_payload_of_another_size(name: str) -> None:
    codec = CPU.codec(name, shape_of((3, 300), small=5))
    for wrong in (-1, 1):
        with pytest.raises(FrameError, match="the payload has"):
            codec.decode(np.zeros(codec.payload_bytes + wrong, np.uint8))


def test_torch_knows_no_other_codecs_than_numpy() -> None:
    with pytest.raises(CodecUnavailableError):
        CPU.codec("3-bit", shape_of((1, 8)))


@given(name=NAMES, case=fragments(), seed=st.integers(0, 1000))
def test_torch_compresses_with_feedback_as_numpy_does(
    name: str, case: tuple[FragmentShape, np.ndarray], seed: int
) -> None:
    shape, values = case
    minus_d = vector("normal", shape.element_count, seed)
    e = np.clip(values, -1e30, 1e30)
    codec, e_next = CPU.codec(name, shape), torch.full((shape.element_count,), float("nan"))
    payload, bad = codec.compress(CPU.from_host(minus_d), CPU.from_host(e), e_next)
    expected, _ = FragmentCodec(name, shape).compress(minus_d, e, np.empty_like(e))
    assert bad is None
    assert encoded_alike(name, shape, expected, payload)
    assert same_bits(e_next.numpy(), (e - minus_d) - FragmentCodec(name, shape).decode(payload))


@given(name=NAMES, shape=shapes(), place=st.integers(0, 10_000), bad=st.sampled_from([np.inf, np.nan, -3e38]))
def test_torch_names_the_first_value_that_is_not_finite(
    name: str, shape: FragmentShape, place: int, bad: float
) -> None:
    e = np.ones(shape.element_count, np.float32)
    if not len(e):
        return
    e[place % len(e) :: 3] = bad
    zeros = CPU.zeros(len(e))
    assert CPU.codec(name, shape).compress(zeros, CPU.from_host(e), CPU.zeros(len(e)))[1] == place % len(e)


@given(name=NAMES, case=fragments(), weight=st.floats(0, 1, width=32))
def test_torch_accumulates_as_numpy_does(name: str, case: tuple[FragmentShape, np.ndarray], weight: float) -> None:
    shape, values = case
    payload = FragmentCodec(name, shape).encode(values)
    ours = vector("normal", shape.element_count, 5)
    theirs = CPU.from_host(ours)
    FragmentCodec(name, shape).accumulate(payload, np.float32(weight), ours)
    CPU.codec(name, shape).accumulate(payload, np.float32(weight), theirs)
    assert same_bits(theirs.numpy(), ours)


@given(name=st.sampled_from(["int8", "int4", "bf16", "none"]), case=fragments(), seed=st.integers(-(2**70), 2**70))
def test_torch_rounds_stochastically_to_the_same_bytes(
    name: str, case: tuple[FragmentShape, np.ndarray], seed: int
) -> None:
    shape, values = case
    theirs = CPU.codec(name, shape).encode(CPU.from_host(values), dither=seed)
    assert np.array_equal(theirs, FragmentCodec(name, shape).encode(values, dither=seed))


@pytest.mark.parametrize("name", ["2-bit", "1-bit", "topk"])
def test_torch_refuses_stochastic_rounding_where_levels_are_not_evenly_spaced(name: str) -> None:
    with pytest.raises(CodecUnavailableError, match="stochastic"):
        CPU.codec(name, shape_of((1, 8))).encode(CPU.zeros(8), dither=1)


def test_torch_works_span_by_span_on_a_long_vector() -> None:
    shape = shape_of((1, 300_000), (3, 50_001), small=9, buffers=5)
    values = vector("heavy tail", shape.element_count, 1)
    for name in CODEC_NAMES:
        payload = CPU.codec(name, shape).encode(CPU.from_host(values))
        assert encoded_alike(name, shape, FragmentCodec(name, shape).encode(values), payload)
        assert same_bits(CPU.codec(name, shape).decode(payload).numpy(), FragmentCodec(name, shape).decode(payload))


@given(
    count=st.integers(1, 100),
    place=st.integers(0, 99),
    bad=st.sampled_from([np.inf, -np.inf, np.nan, 1.3e30, -3e38]),
    other=st.sampled_from([0.0, 1e30]),
)
def test_both_find_the_same_first_bad_value(count: int, place: int, bad: float, other: float) -> None:
    values = np.full(count, other, np.float32)
    assert CPU.first_non_finite(CPU.from_host(values)) is None
    values[place % count :] = bad
    assert CPU.first_non_finite(CPU.from_host(values)) == place % count == NumpyVectors().first_non_finite(values)


def test_torch_vectors_do_not_share_memory_with_what_they_were_made_from() -> None:
    host = np.ones(3, np.float32)
    taken = CPU.from_host(host)
    copied = CPU.copy(taken)
    host[:] = 2
    taken += 5
    assert copied.tolist() == [1, 1, 1]
    assert taken.tolist() == [6, 6, 6]
    assert CPU.zeros(2).tolist() == [0, 0]


# ---- the node's machine on both back ends


def small_layout() -> Layout:
    return make_layout(
        [
            Tensor(name="embed", shape=(6, 30), dtype="float32", section="coded", row_aligned=True),
            Tensor(name="matrix", shape=(9, 61), dtype="float32", section="coded"),
            Tensor(name="norm", shape=(13,), dtype="float32", section="small"),
            Tensor(name="bias", shape=(3,), dtype="float32", section="buffer", trainable=False),
        ]
    )


class Pair:
    """One hub, and one node whose machine runs twice: on numpy and on torch."""

    def __init__(self, codecs: tuple[str, str], other: TorchVectors) -> None:
        self.layout = small_layout()
        self.hub = Aggregator(self.layout, 0, codecs, OuterOptimizer(lr=0.7, momentum=0.9))
        self.hub.initialize(vector("normal", self.hub.element_count, 7))
        self.faces: list[Any] = [NumpyVectors(), other]
        place = Place(run="r", node="n0", incarnation=1)
        self.machines = [NodeMachine(self.layout, face, codecs[0], place) for face in self.faces]
        self.theta = [machine.load(0, self.hub.base, 0) for machine in self.machines]
        self.sent: Push | None = None

    def step(self, seed: int) -> None:
        move = vector("heavy tail", self.hub.element_count, seed) * np.float32(0.01)
        move[: 30 * (seed % 6)] = 0
        for number, face in enumerate(self.faces):
            self.theta[number] += face.from_host(move)
            self.machines[number].stepped(1, [])

    def push(self) -> None:
        try:
            first, second = (m.push(0, t) for m, t in zip(self.machines, self.theta, strict=True))
        except ConflictError:
            return
        self.sent = first
        # Encoding may differ in the last bit of a scale; then both must use what was sent.
        if not np.array_equal(first.payload, second.payload):
            self._use_payload_of(first.payload)

    def _use_payload_of(self, payload: np.ndarray) -> None:
        replica = self.machines[1].replicas[0]
        flight = replica.in_flight
        if flight is None:
            return
        replica.e += replica._up.decode(flight.payload)
        replica.e -= replica._up.decode(payload)
        replica.in_flight = dataclasses.replace(flight, payload=payload)

    def close(self, *, rejected: bool) -> None:
        """A round closes with a push of another node, and with the waiting one or against it."""
        waits = self.machines[0].replicas[0].in_flight is not None
        pushes = [self._push_of_another_node()]
        rejections: tuple[Rejection, ...] = ()
        if waits and self.sent is not None and rejected:
            rejections = (rejection_of(self.sent),)
        elif waits and self.sent is not None:
            pushes.append(self.sent)
        entry = self.hub.close(pushes, rejections, Facts(run="r"))
        self.hub.commit(entry)
        for machine, theta in zip(self.machines, self.theta, strict=True):
            machine.merge(entry.entry, theta)

    def _push_of_another_node(self) -> Push:
        place = Place(run="r", node="n1", incarnation=1)
        other = NodeMachine(self.layout, NumpyVectors(), next(iter(self.hub.codecs_up)), place)
        theta = other.load(0, self.hub.base, self.hub.version)
        theta += vector("normal", len(theta), self.hub.version)
        other.stepped(3, [])
        return other.push(0, theta)

    def refuse(self) -> None:
        for machine in self.machines:
            machine.replicas[0].reject()

    def check(self) -> None:
        left, right = (machine.replicas[0] for machine in self.machines)
        assert left.digest == right.digest == self.hub.digest
        assert left.version == right.version == self.hub.version
        assert left.progress == right.progress
        for name in ("base", "e", "F"):
            ours, theirs = getattr(left, name), self.faces[1].to_host(getattr(right, name))
            assert np.allclose(ours, theirs, rtol=0, atol=1e-4), name
        assert np.allclose(self.theta[0], self.faces[1].to_host(self.theta[1]), rtol=0, atol=1e-4)


def rejection_of(push: Push) -> Rejection:
    node, incarnation, sequence = push.key
    return Rejection(node=node, incarnation=incarnation, sequence=sequence, reason="stale")


EVENTS = st.lists(
    st.tuples(st.sampled_from(["step", "step", "push", "merge", "rejected", "refuse"]), st.integers(0, 10_000)),
    max_size=25,
)


def play(pair: Pair, events: list[tuple[str, int]]) -> None:
    pair.check()
    for event, seed in events:
        match event:
            case "step":
                pair.step(seed)
            case "push":
                pair.push()
            case "refuse":
                pair.refuse()
            case _:
                pair.close(rejected=event == "rejected")
        pair.check()


@settings(max_examples=60)
@given(up=NAMES, down=NAMES, events=EVENTS)
def test_a_replica_on_torch_has_the_digests_of_a_replica_on_numpy(
    up: str, down: str, events: list[tuple[str, int]]
) -> None:
    play(Pair((up, down), CPU), events)


CYCLE = ["step", "push", "step", "merge", "step", "push", "rejected", "merge", "push", "refuse"]


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_long_run_of_rounds_has_equal_digests(name: str) -> None:
    play(Pair((name, name), CPU), [(event, number) for number, event in enumerate(CYCLE * 5)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_decodes_and_applies_to_the_same_bits() -> None:
    vectors = TorchVectors(torch.device("cuda"))
    for name in CODEC_NAMES:
        for shape in SHAPES.values():
            assert_decoded_alike(vectors, name, shape)
        play(Pair((name, name), vectors), [(event, number) for number, event in enumerate(CYCLE * 5)])
