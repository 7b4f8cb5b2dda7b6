"""One section of a fragment on a torch device, by plain torch operations; see `ciuic.codec.scalar` for the formats."""

from collections.abc import Callable

import torch
from torch import Tensor

from ciuic.codec.bf16 import BF16_MAX
from ciuic.codec.blocks import BlockTable, Span, cut_spans
from ciuic.codec.scalar import Bf16Codec, IntegerCodec, NoneCodec, OneBitCodec
from ciuic.codec.section import Keys, Section
from ciuic.codec.top_k import TopKCodec
from ciuic.codec.two_bit import INNER, MIDDLE, OUTER, SCALE_LIMIT, TwoBitCodec
from ciuic.errors import CodecUnavailableError
from ciuic.train.torch_bits import (
    as_bytes,
    as_values,
    pack_bits,
    pack_indices,
    pack_twos,
    to_bf16,
    to_bf16_up,
    uniform_noise,
    unpack_bits,
    unpack_indices,
    unpack_twos,
)

HOST_SPAN, DEVICE_SPAN = 1 << 17, 1 << 24
"""Elements worked on at once: inside the cache of a processor; enough for a GPU, whose launches cost more."""


class TorchBlocks:
    """A block table with its lengths on the device."""

    def __init__(self, table: BlockTable, device: torch.device) -> None:
        self.count, self.elements, self.uniform = table.block_count, table.element_count, table.uniform_length
        self.longest = int(table.lengths.max(initial=0))
        self.lengths = torch.from_numpy(table.lengths).to(device)
        self.starts = torch.from_numpy(table.starts).to(device)
        self.kept = torch.from_numpy(table.kept).to(device)
        self.kept_count = int(table.kept.sum())
        self.most_kept = int(table.kept.max(initial=0))

    def reduce(self, values: Tensor, how: str) -> Tensor:
        """[n] values reduced over each block ("sum" or "max"), [blocks]."""
        if self.uniform:
            rows = values.view(-1, self.uniform)
            return rows.sum(dim=1) if how == "sum" else rows.amax(dim=1)
        return segments(values, how, self.lengths)

    def apply(self, operation: Callable[[Tensor, Tensor], Tensor], values: Tensor, per_block: Tensor) -> Tensor:
        """operation(value, the number of its block), [n]."""
        if self.uniform:
            return operation(values.view(-1, self.uniform), per_block[:, None]).view(-1)
        return operation(values, torch.repeat_interleave(per_block, self.lengths, output_size=self.elements))


class TorchSection:
    """Encodes and decodes the spans of a section; `ranges` says where they lie in the fragment's vector."""

    def __init__(self, section: Section, device: torch.device) -> None:
        self._section = section
        self._scalar = section.codec
        self.dithers = section.codec.dithers
        self._spans = cut_spans(section.blocks, HOST_SPAN if device.type == "cpu" else DEVICE_SPAN)
        self._blocks = [TorchBlocks(span.blocks, device) for span in self._spans]
        self.ranges = [(section.start + span.start, section.start + span.stop) for span in self._spans]

    def encode(self, number: int, values: Tensor, payload: Tensor, keys: Keys | None) -> None:
        """Values [n] of span `number` into the fragment's payload; with keys by stochastic rounding."""
        span, blocks = self._spans[number], self._blocks[number]
        noise = None if keys is None else uniform_noise(span.start, len(values), keys, values.device)
        for stream, part in zip(self._streams(span, payload), self._encode(values, blocks, noise), strict=True):
            stream.copy_(part)

    def decode(self, number: int, payload: Tensor) -> Tensor:
        """The values [n] of span `number` of the fragment's payload."""
        return self._decode(self._streams(self._spans[number], payload), self._blocks[number])

    def _streams(self, span: Span, payload: Tensor) -> tuple[Tensor, ...]:
        section = self._section
        begins = section.codec.sizes(span.start, span.first_block, span.kept_start)
        own = section.codec.sizes(span.blocks.element_count, span.blocks.block_count, int(span.blocks.kept.sum()))
        streams, at = [], section.payload_start
        for begin, length, whole in zip(begins, own, section.sizes, strict=True):
            streams.append(payload[at + begin : at + begin + length])
            at += whole
        return tuple(streams)

    def _encode(self, values: Tensor, blocks: TorchBlocks, noise: Tensor | None) -> tuple[Tensor, ...]:
        match self._scalar:
            case NoneCodec():
                return (as_bytes(values),)
            case Bf16Codec():
                return (as_bytes(to_bf16(values)),)
            case OneBitCodec():
                means = torch.clamp(blocks.reduce(values.abs().double(), "sum") / blocks.lengths, max=BF16_MAX)
                return pack_bits(values >= 0), as_bytes(to_bf16(means.float()))
            case IntegerCodec() as scalar:
                return _encode_integers(values, blocks, scalar, noise)
            case TwoBitCodec():
                return _encode_two_bit(values, blocks)
            case TopKCodec():
                return _encode_top_k(values, blocks)
        raise CodecUnavailableError(f"{type(self._scalar).__name__} has no torch back end", next="choose another codec")

    def _decode(self, streams: tuple[Tensor, ...], blocks: TorchBlocks) -> Tensor:
        match self._scalar:
            case NoneCodec():
                return as_values(streams[0], torch.float32)
            case Bf16Codec():
                return as_values(streams[0], torch.bfloat16).float()
            case TopKCodec():
                return _decode_top_k(streams, blocks)
        scales = as_values(streams[1], torch.bfloat16).float()
        match self._scalar:
            case OneBitCodec():
                positive = unpack_bits(streams[0], blocks.elements)
                return blocks.apply(lambda bit, scale: torch.where(bit, scale, -scale), positive, scales)
            case TwoBitCodec():
                levels = torch.tensor([-INNER, INNER, -OUTER, OUTER], device=scales.device)
                values = levels[unpack_twos(streams[0], blocks.elements).int()]
            case IntegerCodec(bits=8):
                values = streams[0].view(torch.int8).float()
            case _:
                halves = torch.stack([streams[0] & 15, streams[0] >> 4], dim=1).reshape(-1)[: blocks.elements]
                values = (halves.view(torch.int8) - 8).float()
        return blocks.apply(torch.mul, values, scales)


def segments(values: Tensor, how: str, lengths: Tensor) -> Tensor:
    """[n] values reduced over consecutive segments."""
    return torch.segment_reduce(values, how, lengths=lengths, unsafe=True)  # ty: ignore[missing-attribute]


def _encode_integers(
    values: Tensor, blocks: TorchBlocks, scalar: IntegerCodec, noise: Tensor | None
) -> tuple[Tensor, ...]:
    largest = blocks.reduce(values.abs(), "max")
    wanted = torch.clamp(largest / scalar.levels, max=float(scalar.scale_limit()))
    scale_bits = to_bf16(wanted) if noise is None else to_bf16_up(wanted)
    scales = scale_bits.float()
    quotient = blocks.apply(torch.div, values, torch.where(scales > 0, scales, torch.ones_like(scales)))
    rounded = torch.round(quotient) if noise is None else torch.floor(quotient + noise)
    codes = torch.clamp(rounded, -scalar.levels, scalar.levels).to(torch.int8)
    if scalar.bits == 8:
        return codes.view(torch.uint8), as_bytes(scale_bits)
    shifted = (codes + 8).view(torch.uint8)
    if len(shifted) % 2:
        shifted = torch.cat([shifted, shifted.new_full((1,), 8)])
    return shifted[0::2] | (shifted[1::2] << 4), as_bytes(scale_bits)


def _encode_two_bit(values: Tensor, blocks: TorchBlocks) -> tuple[Tensor, ...]:
    sizes = values.abs()
    exact = sizes.double()
    mean_square = blocks.reduce(exact * exact, "sum") / blocks.lengths
    rms = to_bf16(torch.clamp(mean_square.sqrt(), max=BF16_MAX).float()).float()
    outside = blocks.apply(torch.gt, sizes, rms * MIDDLE)
    over = INNER * blocks.reduce(exact.masked_fill(outside, 0), "sum")
    over += OUTER * blocks.reduce(exact.masked_fill(~outside, 0), "sum")
    count = blocks.reduce(outside.double(), "sum")
    under = INNER * INNER * (blocks.lengths - count) + OUTER * OUTER * count
    scale_bits = to_bf16(torch.clamp(over / under, max=float(SCALE_LIMIT)).float())
    codes = (values >= 0).to(torch.uint8) | (outside.to(torch.uint8) << 1)
    return pack_twos(codes), as_bytes(scale_bits)


def _encode_top_k(values: Tensor, blocks: TorchBlocks) -> tuple[Tensor, ...]:
    if not blocks.count:
        return (values.new_empty(0, dtype=torch.uint8),) * 3
    rows, places = _largest_of_each(values, blocks)
    chosen = values[blocks.starts[rows] + places]
    exact = chosen.abs().double()
    high = exact * blocks.kept[rows] > segments(exact, "sum", blocks.kept)[rows]
    scales = []
    for members in (~high, high):
        count = segments(members.double(), "sum", blocks.kept).clamp(min=1)
        scales.append(segments(exact.masked_fill(~members, 0), "sum", blocks.kept) / count)
    means = torch.clamp(torch.stack(scales, dim=1), max=BF16_MAX).float().reshape(-1)
    codes = (chosen >= 0).to(torch.uint8) | (high.to(torch.uint8) << 1)
    return pack_indices(places), pack_twos(codes), as_bytes(to_bf16(means))


def _largest_of_each(values: Tensor, blocks: TorchBlocks) -> tuple[Tensor, Tensor]:
    """Block and index inside the block of what is kept, in storage order."""
    sizes = values.abs().view(torch.int32).long() << 12
    place = torch.arange(blocks.longest, device=values.device)
    if blocks.uniform:
        keys = sizes.view(-1, blocks.uniform)
    else:
        keys = sizes.new_full((blocks.count, blocks.longest), -4096)
        keys[place < blocks.lengths[:, None]] = sizes
    keys = keys + (4095 - place)  # all keys of a block differ
    top = torch.topk(keys, blocks.most_kept, dim=1).values
    kept = torch.arange(blocks.most_kept, device=values.device) < blocks.kept[:, None]
    places = torch.where(kept, 4095 - (top & 4095), 4096).sort(dim=1).values
    rows = torch.repeat_interleave(
        torch.arange(blocks.count, device=values.device), blocks.kept, output_size=blocks.kept_count
    )
    return rows, places[kept]


def _decode_top_k(streams: tuple[Tensor, ...], blocks: TorchBlocks) -> Tensor:
    out = torch.zeros(blocks.elements, device=streams[0].device)
    if not blocks.count:
        return out
    device = out.device
    rows = torch.repeat_interleave(torch.arange(blocks.count, device=device), blocks.kept)
    places = unpack_indices(streams[0], blocks.kept_count)
    order = rows << 13 | places
    before = torch.cat([order.new_full((1,), -1), torch.cummax(order, dim=0).values[:-1]])
    sound = (order > before) & (places < blocks.lengths[rows])
    codes = unpack_twos(streams[1], blocks.kept_count).long()
    levels = as_values(streams[2], torch.bfloat16).float()[2 * rows + (codes >> 1)]
    values = torch.where(codes & 1 == 1, levels, -levels)
    out[(blocks.starts[rows] + places)[sound]] = values[sound]
    return out
