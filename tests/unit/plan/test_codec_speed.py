"""Measuring the codecs of this machine."""

from ciuic.codec import CODEC_NAMES
from ciuic.plan.codec_speed import measure_codec_speeds


def test_every_codec_is_measured_once() -> None:
    found = measure_codec_speeds(1 << 16)
    assert set(found.by_name) == set(CODEC_NAMES)
    assert all(1e6 < speed.encode_bytes_per_s < 1e12 for speed in found.by_name.values())
    assert measure_codec_speeds(1 << 16) is found
