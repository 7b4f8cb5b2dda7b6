"""Expected held-out loss of codec and interval above plain data-parallel training (fp32 DDP) after equal tokens.

Measured: a GPT of 364,000 parameters on text by byte, 4 nodes, 400 steps, AdamW inside with the learning rate tuned for
both sides, the same codec up and down with error feedback; DDP reaches 2.142. Three seeds where marked, else one;
differences under 0.015 are noise. `ciuic bench learning` measures it again. Beyond 20 steps the values are
extrapolated, and other models have other gaps: what counts here is the order and the rough size.
"""

from bisect import bisect_right
from math import log2

LONGEST_MEASURED = 20
_PER_DOUBLING = 0.06
"""Loss per doubling of the interval beyond the last measured one (5 to 10 steps: 0.056)."""

_UNCOMPRESSED = {1: 0.020, 2: 0.024, 4: 0.050, 5: 0.067, 8: 0.105, 10: 0.123, 20: 0.165}
"""Interval alone: the rows below less what the codec adds (4-bit against fp32: 0.005 to 0.01; 1-bit: 0.028)."""
_COSTS: dict[str, dict[int, float]] = {
    "none": _UNCOMPRESSED,
    "bf16": {steps: cost + 0.0005 for steps, cost in _UNCOMPRESSED.items()},  # no loss was found; breaks ties
    "int8": {steps: cost + 0.001 for steps, cost in _UNCOMPRESSED.items()},
    "int4": {1: 0.028, 2: 0.032, 4: 0.058, 5: 0.075, 8: 0.115, 10: 0.131, 20: 0.173},  # 2, 4: three seeds
    "2-bit": {1: 0.036, 2: 0.040, 4: 0.059, 5: 0.078, 8: 0.118, 10: 0.135, 20: 0.180},  # 2, 4: three seeds
    "1-bit": {1: 0.142, 2: 0.100, 4: 0.075, 5: 0.095, 8: 0.133, 10: 0.151, 20: 0.195},  # 5: three seeds
    "topk": {1: 0.19, 2: 0.150, 4: 0.130, 5: 0.150, 8: 0.188, 10: 0.206, 20: 0.250},  # up only; 5 measured
}
LOSS_PER_LOG_TIME = 0.38
"""How much the held-out loss falls when training time is multiplied by e (400 to 1200 steps: DDP 2.142 to 1.727, 1-bit
2.237 to 1.814). It makes time lost to communication and loss from compression comparable."""

_FULL_OVERLAP_AT_5 = 0.056
_FULL_OVERLAP_PER_DOUBLING = 0.022
"""An entry merged a whole interval late costs 0.056 at 5 steps and 0.10 at 20; in proportion when less late."""
_FULL_OVERLAP_LEAST = 0.02


def loss_cost(codec_up: str, codec_down: str, interval: int) -> float:
    """Loss above DDP of this codec and interval when every push waits for its entry.

    With two codecs it is the mean of theirs (measured for 1-bit and 4-bit: within 0.01).
    """
    return (_cost(codec_up, interval) + _cost(codec_down, interval)) / 2


def overlap_cost(interval: int, late: float) -> float:
    """Loss of merging entries late; `late`: the delay as a share of the interval, 0..1."""
    full = max(_FULL_OVERLAP_LEAST, _FULL_OVERLAP_AT_5 + _FULL_OVERLAP_PER_DOUBLING * log2(interval / 5))
    return full * min(1.0, late)


def _cost(codec: str, interval: int) -> float:
    """Linear in the logarithm of the interval between the measured ones."""
    rows = _COSTS[codec]
    steps = sorted(rows)
    if interval >= steps[-1]:
        return rows[steps[-1]] + _PER_DOUBLING * log2(interval / steps[-1])
    right = bisect_right(steps, interval)
    low, high = steps[right - 1], steps[right]
    share = log2(interval / low) / log2(high / low)
    return rows[low] + share * (rows[high] - rows[low])
