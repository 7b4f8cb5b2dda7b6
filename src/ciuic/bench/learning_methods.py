"""What happens after the gradients of a step: plain DDP, rounds of pseudo-gradients, or an exchange at every step."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ciuic.bench.learning_ledger import Ledger
from ciuic.bench.learning_optim import Inner
from ciuic.bench.learning_stack import Stack
from ciuic.ledger.entry import StepFacts

Float = NDArray[np.float32]


class Method(Protocol):
    """Moves the weights of a stack whose gradients are computed and clipped."""

    @property
    def base(self) -> Float:
        """What is evaluated: the weights all nodes agree on [n]."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Up and down, all nodes, so far."""
        ...

    def step(self, number: int, factor: float) -> None:
        """After the gradients of step `number`, at `factor` times the learning rate."""
        ...


class PlainDdp:
    """One copy on the batches of all nodes: its gradient is the exact mean. Bytes by formula: fp32 up and down."""

    def __init__(self, stack: Stack, inner: Inner, nodes: int) -> None:
        self._stack, self._inner, self._nodes = stack, inner, nodes
        self._steps = 0

    @property
    def base(self) -> Float:
        return self._stack.theta[0].numpy()

    @property
    def sent_bytes(self) -> int:
        return plain_bytes(self._stack, self._nodes, self._steps)

    def step(self, number: int, factor: float) -> None:
        self._inner.step(factor)
        self._steps += 1


def plain_bytes(stack: Stack, nodes: int, steps: int) -> int:
    """What DDP sends in fp32, up and down, for so many steps."""
    return 8 * stack.layout.parameter_count * nodes * steps


class ThroughLedger:
    """What all methods with a ledger know of it."""

    _ledger: Ledger

    @property
    def base(self) -> Float:
        return self._ledger.base

    @property
    def sent_bytes(self) -> int:
        return self._ledger.sent_bytes


class Rounds(ThroughLedger):
    """Every node trains by itself; every `interval` steps a round of pseudo-gradients through the ledger."""

    def __init__(self, stack: Stack, inner: Inner, ledger: Ledger, interval: int, tokens: int) -> None:
        """`tokens` of one node in one step."""
        self._stack, self._inner, self._ledger, self._interval = stack, inner, ledger, interval
        self._tokens = tokens * interval

    def step(self, number: int, factor: float) -> None:
        self._inner.step(factor)
        if (number + 1) % self._interval == 0:
            self._ledger.round(self._stack.theta.numpy(), self._tokens)


class EveryStep(ThroughLedger):
    """The gradient of every step through the ledger, and the same AdamW on hub and nodes."""

    def __init__(self, stack: Stack, ledger: Ledger, lr: float, *, tokens: int, freeze_after: int = 0) -> None:
        """`freeze_after`: so many steps, then the second moment is frozen (1-bit Adam); 0: never."""
        self._stack, self._ledger, self._lr = stack, ledger, lr
        self._tokens, self._freeze_after = tokens, freeze_after

    def step(self, number: int, factor: float) -> None:
        freeze = bool(self._freeze_after) and number + 1 >= self._freeze_after
        facts = StepFacts(lr=self._lr * factor, phase=self._ledger.hub.phase, next_phase="frozen" if freeze else "adam")
        self._ledger.step(self._stack.gradient.numpy(), self._stack.theta.numpy(), self._tokens, facts)
