"""How many bytes a payload has, by formula: models of any size, nothing allocated."""

from ciuic.codec import FragmentShape

VALUE_BITS: dict[str, int] = {"none": 32, "bf16": 16, "int8": 8, "int4": 4, "2-bit": 2, "1-bit": 1}
"""Bits per coded element, without scales."""
_BLOCK: dict[str, int] = {"int8": 256, "int4": 256, "2-bit": 256, "1-bit": 4096}
_SCALE_BYTES = 2
_TOPK_KEPT, _TOPK_BLOCK, _TOPK_BITS = 64, 4096, 14
"""Top-k keeps 64 of 4096: 12 bits of place and 2 of value each."""


def payload_bytes(codec: str, shape: FragmentShape) -> int:
    """Bytes of one push or entry; equal to `FragmentCodec(codec, shape).payload_bytes`, for top-k within 2 %."""
    full = shape.small_count * (4 if codec == "none" else 2) + 4 * shape.buffer_count
    if codec == "topk":
        blocks = _block_count(shape, _TOPK_BLOCK)
        kept = min(shape.coded_count, blocks * _TOPK_KEPT)
        return (kept * _TOPK_BITS + 7) // 8 + _SCALE_BYTES * blocks + full
    values = (shape.coded_count * VALUE_BITS[codec] + 7) // 8
    return values + _SCALE_BYTES * _block_count(shape, _BLOCK.get(codec)) + full


def bits_per_parameter(codec: str, shape: FragmentShape) -> float:
    """Payload bits per element of the fragment."""
    return 8 * payload_bytes(codec, shape) / max(1, shape.element_count)


def _block_count(shape: FragmentShape, block: int | None) -> int:
    if block is None:
        return 0
    return sum(count * -(-length // block) for count, length in shape.rows)
