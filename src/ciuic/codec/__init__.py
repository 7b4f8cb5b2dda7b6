"""Codecs: how a vector of fp32 numbers becomes few bytes, and exactly which numbers come back.

The numpy face, over the native kernel where there is one; `ciuic.train.torch_codec` decodes the same bytes to the same
bits on any torch device.
"""

from ciuic.codec.names import CODEC_NAMES
from ciuic.codec.payload import FragmentCodec, FragmentShape
from ciuic.codec.vectors import NumpyVectors, Vectors

__all__ = ["CODEC_NAMES", "FragmentCodec", "FragmentShape", "NumpyVectors", "Vectors"]
