"""The codecs by name."""

import difflib

from ciuic.codec.scalar import Bf16Codec, IntegerCodec, NoneCodec, OneBitCodec, ScalarCodec
from ciuic.codec.top_k import TopKCodec
from ciuic.codec.two_bit import TwoBitCodec
from ciuic.errors import CodecUnavailableError

_CODECS: dict[str, ScalarCodec] = {
    "none": NoneCodec(),
    "bf16": Bf16Codec(),
    "int8": IntegerCodec(levels=127, bits=8, max_block=256),
    "int4": IntegerCodec(levels=7, bits=4, max_block=256),
    "2-bit": TwoBitCodec(),
    "1-bit": OneBitCodec(),
    "topk": TopKCodec(),
}
CODEC_NAMES = tuple(_CODECS)
"""The position is the codec's number in kernel.c."""


def scalar_codec(name: str) -> ScalarCodec:
    """The codec of that name. Raises CodecUnavailableError: full precision is never used silently instead."""
    try:
        return _CODECS[name]
    except KeyError:
        near = difflib.get_close_matches(name.lower(), CODEC_NAMES, n=1, cutoff=0.6)
        raise CodecUnavailableError(
            f"there is no codec {name!r}" + (f"; did you mean {near[0]}?" if near else ""),
            cause=f"known codecs: {', '.join(CODEC_NAMES)}",
            next="choose one of them",
        ) from None
