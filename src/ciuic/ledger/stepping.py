"""The step of `gradient` mode: how hub and nodes move their equal bases by a decoded mean gradient. Pure, fp32.

    adam     m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g g
             base = (1 - lr wd) base - lr / (1-b1^t)  m / (sqrt(v) / sqrt(1-b2^t) + eps)         AdamW, arXiv 1711.05101
    frozen   g is the mean momentum m itself;  base = (1 - lr wd) base - lr m / d                1-bit Adam, 2102.02888
             where d = max(sqrt(v / (1-b2^t)) + eps, 1e-5) was kept at the step that ended `adam`

Only elementwise operations that IEEE 754 rounds once each (no fused multiply-add, no reductions), so every machine gets
the same bits and replicas stay identical without ever exchanging them. Buffers are averaged: base = base - decoded.
"""

import math
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ciuic.errors import ProtocolError
from ciuic.ledger.entry import StepFacts
from ciuic.ledger.layout import Layout, StepRule

Float = NDArray[np.float32]
BLOCK = 1 << 16
"""Elements per turn: everything of a turn stays in the processor's cache."""
FLOOR = np.float32(1e-5)
"""Least frozen denominator: a coordinate that had no gradient so far must not take a giant step later."""


@dataclass(frozen=True, kw_only=True)
class StepState:
    """Moments [element_count]; in phase `frozen` `second` holds the denominators."""

    first: Float
    second: Float


@dataclass(frozen=True, kw_only=True)
class _Span:
    start: int
    stop: int
    lr_scale: float
    weight_decay: float


class Stepper:
    """The step over one fragment."""

    def __init__(self, layout: Layout, fragment: int) -> None:
        """Raises ProtocolError when the layout has no rule."""
        if layout.step is None:
            raise ProtocolError("this layout has no step rule", next="start the run again with the same version")
        self.rule: StepRule = layout.step
        shape = layout.fragment_shape(fragment)
        self.element_count, self.buffer_start = shape.element_count, shape.coded_count + shape.small_count
        self._spans = _spans(layout, fragment)

    def start(self) -> StepState:
        """Before the first step."""
        count = self.element_count
        return StepState(first=np.zeros(count, np.float32), second=np.zeros(count, np.float32))

    def momentum(self, gradient: Float, state: StepState) -> Float:
        """This node's momentum after `gradient`, as phase `frozen` sends it; buffers stay as they are."""
        b1 = self.rule.beta1
        moved = gradient * np.float32(1 - b1)
        moved += state.first * np.float32(b1)
        moved[self.buffer_start :] = gradient[self.buffer_start :]
        return moved

    def apply(
        self, base: Float, mean: Float, state: StepState, facts: StepFacts, version: int
    ) -> tuple[Float, StepState]:
        """(next base, next state) of the entry that makes `version`; the arguments are not changed."""
        moved, first, second = base.copy(), state.first.copy(), state.second.copy()
        for span in self._spans:
            for start in range(span.start, span.stop, BLOCK):
                part = slice(start, min(span.stop, start + BLOCK))
                self._move(moved[part], mean[part], (first[part], second[part]), facts, span, version)
        moved[self.buffer_start :] -= mean[self.buffer_start :]
        return moved, StepState(first=first, second=second)

    def _move(
        self,
        base: Float,
        mean: Float,
        moments: tuple[Float, Float],
        facts: StepFacts,
        span: _Span,
        version: int,
    ) -> None:
        first, second = moments
        rate = facts.lr * span.lr_scale
        if facts.phase == "frozen":
            first[:] = mean
            update = first / second
            update *= np.float32(rate)
        else:
            update = self._adam(mean, first, second, version)
            update *= np.float32(rate / (1 - power(self.rule.beta1, version)))
            if facts.next_phase == "frozen":
                second[:] = np.maximum(self._denominator(second, version), FLOOR)
        if span.weight_decay:
            base *= np.float32(1 - rate * span.weight_decay)
        base -= update

    def _adam(self, mean: Float, first: Float, second: Float, version: int) -> Float:
        rule = self.rule
        first *= np.float32(rule.beta1)
        first += mean * np.float32(1 - rule.beta1)
        second *= np.float32(rule.beta2)
        square = mean * mean
        square *= np.float32(1 - rule.beta2)
        second += square
        return first / self._denominator(second, version)

    def _denominator(self, second: Float, version: int) -> Float:
        root = np.sqrt(second)
        root /= np.float32(math.sqrt(1 - power(self.rule.beta2, version)))
        root += np.float32(self.rule.eps)
        return root


def power(base: float, exponent: int) -> float:
    """base to a whole number >= 0 by multiplications only: C's pow may differ between machines in the last bit."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def dither_seed(who: str, sequence: int, fragment: int) -> int:
    """Seed of the stochastic rounding of one push or entry: different everywhere, the same in every replay."""
    return xxhash.xxh3_64_intdigest(f"{who}/{sequence}/{fragment}".encode())


def _spans(layout: Layout, fragment: int) -> list[_Span]:
    """Runs of parameters with the same rate and decay."""
    spans: list[_Span] = []
    place = 0
    for tensor in layout.of_fragment(fragment):
        stop = place + tensor.element_count
        last = spans[-1] if spans else None
        if tensor.section == "buffer":
            break  # they come last
        same = last is not None and (last.lr_scale, last.weight_decay) == (tensor.lr_scale, tensor.weight_decay)
        start = spans.pop().start if same else place
        spans.append(_Span(start=start, stop=stop, lr_scale=tensor.lr_scale, weight_decay=tensor.weight_decay))
        place = stop
    return spans
