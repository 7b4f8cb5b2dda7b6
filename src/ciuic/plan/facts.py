"""What is known before codec and interval are chosen. Plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import harmonic_mean
from typing import Literal

from ciuic.codec import FragmentShape

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One node as it was measured; None is unknown."""

    node: str
    up_bits_per_s: float | None = None
    down_bits_per_s: float | None = None
    rtt_s: float | None = None
    """Round trip to the hub."""
    step_s: float | None = None
    """Time of one optimizer step."""

    @property
    def has_link(self) -> bool:
        """Whether everything about its link is known."""
        return bool(self.up_bits_per_s and self.down_bits_per_s) and self.rtt_s is not None


@dataclass(frozen=True, kw_only=True)
class HubLink:
    """The hub's own link, which all nodes share."""

    up_bits_per_s: float = inf
    down_bits_per_s: float = inf


@dataclass(frozen=True, kw_only=True)
class CodecSpeed:
    """Bytes of fp32 input (encode) or output (decode) per second of one core."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class CodecSpeeds:
    """How fast each codec is: one machine's numbers, taken for all (nodes pack as fast as the hub, or faster)."""

    by_name: Mapping[str, CodecSpeed]

    def of(self, codec: str) -> CodecSpeed:
        """The speed of a codec; that of the slowest one when it is not known."""
        found = self.by_name.get(codec)
        return found or min(self.by_name.values(), key=lambda speed: speed.encode_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The way that limits a round: the slowest rate in each direction and the longest round trip of all nodes."""

    up_bits_per_s: float
    down_bits_per_s: float
    rtt_s: float
    slowest: str = ""
    """The node with the slowest link, or `the hub`; empty when all are alike."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Enough to predict a round."""

    shape: FragmentShape
    """What is exchanged per interval, all fragments together."""
    nodes: int
    link: Link
    step_s: float
    """The nodes' mean step time (harmonic: the pace at which they advance together)."""
    speeds: CodecSpeeds


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the job fixes; `auto` is free."""

    codec_up: str = "auto"
    codec_down: str = "auto"
    interval: int | Auto = "auto"
    overlap: bool | Auto = "auto"
    gradients: bool = False
    """The gradient of each step is sent: the interval is 1, and every step waits for the mean."""

    @property
    def is_free(self) -> bool:
        """Whether anything is left to choose."""
        return "auto" in (self.codec_up, self.codec_down, self.interval)


def gather_facts(
    shape: FragmentShape, nodes: Sequence[NodeFacts], speeds: CodecSpeeds, hub: HubLink | None = None
) -> Facts | None:
    """The facts of a round; None while no link or no step time is known. Nodes without measurements do not count."""
    linked = [node for node in nodes if node.has_link]
    steps = [node.step_s for node in nodes if node.step_s]
    if not linked or not steps:
        return None
    return Facts(
        shape=shape,
        nodes=len(nodes),
        link=_limiting_link(linked, len(nodes), hub or HubLink()),
        step_s=harmonic_mean(steps),
        speeds=speeds,
    )


def _limiting_link(nodes: Sequence[NodeFacts], count: int, hub: HubLink) -> Link:
    """All nodes transfer at once in the worst case, so each gets its share of the hub's link."""
    ups = [(node.up_bits_per_s or inf, node.node) for node in nodes] + [(hub.down_bits_per_s / count, "the hub")]
    downs = [(node.down_bits_per_s or inf, node.node) for node in nodes] + [(hub.up_bits_per_s / count, "the hub")]
    slowest = min(min(ups), min(downs))
    alike = len({(node.up_bits_per_s, node.down_bits_per_s) for node in nodes}) == 1 and slowest[1] != "the hub"
    return Link(
        up_bits_per_s=min(ups)[0],
        down_bits_per_s=min(downs)[0],
        rtt_s=max(node.rtt_s or 0.0 for node in nodes),
        slowest="" if alike else slowest[1],
    )
