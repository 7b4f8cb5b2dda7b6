"""Facts for tests of the automatic choice."""

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import strategies as st

from ciuic.codec import CODEC_NAMES, FragmentShape
from ciuic.plan.choice import FREE_CODECS
from ciuic.plan.facts import CodecSpeed, CodecSpeeds, Facts, Link, NodeFacts, Wishes

SPEEDS = CodecSpeeds(
    by_name={
        "none": CodecSpeed(encode_bytes_per_s=5e9, decode_bytes_per_s=8e9),
        "bf16": CodecSpeed(encode_bytes_per_s=4e9, decode_bytes_per_s=6e9),
        "int8": CodecSpeed(encode_bytes_per_s=3.4e9, decode_bytes_per_s=5e9),
        "int4": CodecSpeed(encode_bytes_per_s=3.2e9, decode_bytes_per_s=5e9),
        "2-bit": CodecSpeed(encode_bytes_per_s=3.1e9, decode_bytes_per_s=5e9),
        "1-bit": CodecSpeed(encode_bytes_per_s=3.0e9, decode_bytes_per_s=5e9),
    }
)
KNOWN = tuple(name for name in FREE_CODECS if name in CODEC_NAMES)
FIVE_MILLION = FragmentShape(rows=((1, 4_980_000),), small_count=20_000, buffer_count=0)


def nodes_at(bits_per_s: float, rtt_s: float = 0.15, step_s: float | None = 0.6, count: int = 3) -> list[NodeFacts]:
    """Nodes with equal links."""
    return [
        NodeFacts(node=f"n{i}", up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s, rtt_s=rtt_s, step_s=step_s)
        for i in range(count)
    ]


def facts_at(
    bits_per_s: float, rtt_s: float = 0.15, *, step_s: float = 0.6, shape: FragmentShape = FIVE_MILLION
) -> Facts:
    """Three nodes with equal links and the native codecs."""
    link = Link(up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s, rtt_s=rtt_s)
    return Facts(shape=shape, nodes=3, link=link, step_s=step_s, speeds=SPEEDS)


def slower_link(facts: Facts, factor: float) -> Facts:
    """The same with both rates divided."""
    link = replace(
        facts.link,
        up_bits_per_s=facts.link.up_bits_per_s / factor,
        down_bits_per_s=facts.link.down_bits_per_s / factor,
    )
    return replace(facts, link=link)


def with_speeds(facts: Facts, by_name: Mapping[str, CodecSpeed]) -> Facts:
    return replace(facts, speeds=CodecSpeeds(by_name=by_name))


def faster_codecs(facts: Facts, factor: float) -> Facts:
    """The same with all codecs faster."""
    quick = {
        name: CodecSpeed(
            encode_bytes_per_s=factor * speed.encode_bytes_per_s, decode_bytes_per_s=factor * speed.decode_bytes_per_s
        )
        for name, speed in facts.speeds.by_name.items()
    }
    return with_speeds(facts, quick)


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers between 10**low and 10**high, evenly over the powers."""
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


@st.composite
def speeds(draw: st.DrawFn) -> dict[str, CodecSpeed]:
    """Codecs of any speed; fewer bits never cost less time."""
    found, encode, decode = {}, draw(powers(7, 11)), draw(powers(7, 11))
    for name in FREE_CODECS:
        found[name] = CodecSpeed(encode_bytes_per_s=encode, decode_bytes_per_s=decode)
        encode, decode = encode * draw(st.floats(0.2, 1)), decode * draw(st.floats(0.2, 1))
    return found


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    """Links from modems to data centres, models from thousands to a hundred billion elements."""
    rows = st.tuples(st.integers(1, 1000), st.integers(1, 100_000_000))
    shape = FragmentShape(
        rows=tuple(draw(st.lists(rows, min_size=1, max_size=3))),
        small_count=draw(st.integers(0, 1_000_000)),
        buffer_count=draw(st.integers(0, 10_000)),
    )
    link = Link(
        up_bits_per_s=draw(powers(4, 11)),
        down_bits_per_s=draw(powers(4, 11)),
        rtt_s=draw(st.one_of(st.just(0.0), powers(-4, 0))),
    )
    return Facts(
        shape=shape,
        nodes=draw(st.integers(1, 64)),
        link=link,
        step_s=draw(powers(-3, 2)),
        speeds=CodecSpeeds(by_name=draw(speeds())),
    )


def any_wishes() -> st.SearchStrategy[Wishes]:
    codec = st.sampled_from(("auto", "auto", *KNOWN))
    return st.builds(
        Wishes,
        codec_up=codec,
        codec_down=codec,
        interval=st.one_of(st.just("auto"), st.integers(1, 2000)),
        overlap=st.sampled_from(("auto", True, False)),
    )
