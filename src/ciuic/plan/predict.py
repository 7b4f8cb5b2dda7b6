"""How long a round takes with given settings, and from which link on compression would lose."""

from dataclasses import dataclass
from math import inf, log, log2

from ciuic.plan.facts import Auto, CodecSpeed, CodecSpeeds, Facts
from ciuic.plan.frontier import LOSS_PER_LOG_TIME, loss_cost, overlap_cost
from ciuic.plan.wire import payload_bytes

HANDLING_BYTES_PER_S = 1e9
"""Assumed: what a node does per push and per entry besides the codec (gather, feedback, digest, scatter), fp32 bytes
per second."""
INITIAL_WINDOW_BYTES = 10 * 1460
"""A TCP connection that was idle starts again from here and doubles each round trip (RFC 6928, RFC 5681)."""
ROOM = 1.25
"""Overlap counts on flights this much longer than the formula says: measured runs lie 1.08 to 1.92 below formulas of
this kind (diloco-measured, four GPUs over shaped TCP)."""
WAIT_SHARE = 0.03
"""Of the time, up to which waiting for the entry costs less than merging it a step late (0.38 x 0.03 against about
0.011)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is chosen."""

    codec_up: str
    codec_down: str
    interval: int
    """Inner steps per push."""
    gradients: bool = False
    """Gradients are sent, not the movement of several steps."""

    @property
    def codecs(self) -> str:
        """For people."""
        same = self.codec_up == self.codec_down
        return self.codec_up if same else f"{self.codec_up} up, {self.codec_down} down"


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of a setting, predicted. Seconds of one node, the slowest."""

    up_bytes: int
    down_bytes: int
    compute_s: float
    """The inner steps."""
    codec_s: float
    """Encoding and decoding, on the node and on the hub."""
    transfer_s: float
    """Bytes at the link's rate, both ways."""
    latency_s: float
    """One round trip, and the start of idle connections."""
    on_thread_s: float
    """Part of the codec's time in which the node does not train, and handling."""
    flight_s: float
    """From the end of packing to the arrival of the entry."""
    is_overlapped: bool
    exposed_s: float
    """Time per round in which the node does not train."""
    loss_cost: float
    """Expected loss above DDP after equal tokens."""

    @property
    def round_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def exposed_share(self) -> float:
        """Of the round: 1 - utilisation."""
        return self.exposed_s / self.round_s

    @property
    def loss_at_equal_time(self) -> float:
        """Expected loss above DDP on an infinitely fast link after equal time: what is minimised."""
        return self.loss_cost + LOSS_PER_LOG_TIME * log(self.round_s / self.compute_s)


def predict(facts: Facts, setting: Setting, overlap: bool | Auto = "auto") -> Round:
    """One round. `overlap` auto: wait while that costs little, else train on."""
    compute_s = setting.interval * facts.step_s
    up_bytes = payload_bytes(setting.codec_up, facts.shape)
    down_bytes = payload_bytes(setting.codec_down, facts.shape)
    link = facts.link
    transfer_s = 8 * (up_bytes / link.up_bits_per_s + down_bytes / link.down_bits_per_s)
    latency_s = link.rtt_s + start_up_s(up_bytes, link.up_bits_per_s, link.rtt_s)
    latency_s += start_up_s(down_bytes, link.down_bits_per_s, link.rtt_s)
    node_s, hub_s = _codec_times(facts, setting)
    on_thread_s = node_s + 2 * _full_bytes(facts) / HANDLING_BYTES_PER_S
    flight_s = transfer_s + latency_s + hub_s
    if setting.gradients:
        waits, loss = True, 0.0  # 4-bit gradients: no loss found (2.101 and 2.123 with fp32, three seeds and one)
    else:
        waits = flight_s <= WAIT_SHARE * (compute_s + flight_s) if overlap == "auto" else not overlap
        loss = loss_cost(setting.codec_up, setting.codec_down, setting.interval)
    return Round(
        up_bytes=up_bytes,
        down_bytes=down_bytes,
        compute_s=compute_s,
        codec_s=node_s + hub_s,
        transfer_s=transfer_s,
        latency_s=latency_s,
        on_thread_s=on_thread_s,
        flight_s=flight_s,
        is_overlapped=not waits,
        exposed_s=on_thread_s + (flight_s if waits else max(0.0, ROOM * flight_s - compute_s)),
        loss_cost=loss if waits else loss + overlap_cost(setting.interval, ROOM * flight_s / compute_s),
    )


def _codec_times(facts: Facts, setting: Setting) -> tuple[float, float]:
    """Seconds on the node (packs, merges) and on the hub (decodes all pushes, packs the entry)."""
    full_bytes = _full_bytes(facts)
    up, down = facts.speeds.of(setting.codec_up), facts.speeds.of(setting.codec_down)
    node_s = full_bytes * (1 / up.encode_bytes_per_s + 1 / down.decode_bytes_per_s)
    return node_s, full_bytes * (facts.nodes / up.decode_bytes_per_s + 1 / down.encode_bytes_per_s)


def _full_bytes(facts: Facts) -> int:
    return 4 * facts.shape.element_count


def start_up_s(size_bytes: float, bits_per_s: float, rtt_s: float) -> float:
    """What slow start adds to `size_bytes` at the link's rate.

    The first window leaves at once. After u bytes the window is INITIAL_WINDOW_BYTES + u, so a further byte takes
    max(8 / rate, rtt / (window ln 2)) seconds; this is the integral over these bytes, less their time at the rate.
    """
    full_window = bits_per_s / 8 * rtt_s / log(2)
    last = min(size_bytes, full_window - INITIAL_WINDOW_BYTES)
    if last <= INITIAL_WINDOW_BYTES:
        return 0.0
    return _ramp_s(last, rtt_s) - 8 * (last - INITIAL_WINDOW_BYTES) / bits_per_s


def latency_floor_s(size_bytes: float, rtt_s: float) -> float:
    """Least time of a push and its entry of `size_bytes` each on any link with this round trip."""
    return rtt_s + 2 * _ramp_s(max(size_bytes, INITIAL_WINDOW_BYTES), rtt_s)


def _ramp_s(size_bytes: float, rtt_s: float) -> float:
    """One round trip per doubling of the window."""
    return rtt_s * log2((INITIAL_WINDOW_BYTES + size_bytes) / (2 * INITIAL_WINDOW_BYTES))


def break_even_bits_per_s(nodes: int, speeds: CodecSpeeds, codec: str, against: str = "none") -> float:
    """The link rate (each way) below which `codec` makes a round through the hub shorter than `against` does.

    Without overlap a round takes 2 b n / rate for the transfers (b bytes per element, n elements) and, per codec, 4 n
    (1 / encode + 1 / decode) on the node and 4 n (nodes / decode + 1 / encode) on the hub. Setting both equal gives the
    rate. inf: the codec wins on every link; 0: it never does. The same reasoning for a ring:
    `ring_break_even_bits_per_s`.
    """
    saved_bits = 2 * (BITS[against] - BITS[codec])
    added_s = _seconds_per_element(speeds.of(codec), nodes) - _seconds_per_element(speeds.of(against), nodes)
    return _rate(saved_bits, added_s)


def ring_break_even_bits_per_s(
    nodes: int, speed: CodecSpeed, codec: str, against: str = "none", reduce_bytes_per_s: float | None = None
) -> float:
    """The same for a two-phase all-reduce between equals, against a ring that needs no codec.

    It pays below 2 (N-1)/N (b - b_codec) / (4 [(1 + 1/N) / Rc + 1/Rr + 1/Ru]), b in bits per element: every node
    compresses its vector and its part of the mean (Rc), reduces what it receives (Rr, by default as fast as decoding)
    and decodes the whole (Ru).
    """
    saved_bits = 2 * (nodes - 1) / nodes * (BITS[against] - BITS[codec])
    decode = speed.decode_bytes_per_s
    added_s = 4 * ((1 + 1 / nodes) / speed.encode_bytes_per_s + 1 / (reduce_bytes_per_s or decode) + 1 / decode)
    return _rate(saved_bits, added_s)


BITS: dict[str, float] = {
    "none": 32,
    "bf16": 16,
    "int8": 8 + 16 / 256,
    "int4": 4 + 16 / 256,
    "2-bit": 2 + 16 / 256,
    "1-bit": 1 + 16 / 4096,
    "topk": 64 / 4096 * 14 + 16 / 4096,
}
"""Bits per element with scales, in large tensors."""


def _seconds_per_element(speed: CodecSpeed, nodes: int) -> float:
    return 4 * (2 / speed.encode_bytes_per_s + (1 + nodes) / speed.decode_bytes_per_s)


def _rate(saved_bits: float, added_s: float) -> float:
    if saved_bits <= 0:
        return inf if added_s < 0 else 0.0
    return saved_bits / added_s if added_s > 0 else inf
