"""What the learning benchmark uses of the ledger: the machines of hub and nodes in one process, frames in between.

Each exchange goes through whole frames, as on a socket, and each node checks the digest of every entry. Bytes are the
sizes of these frames: up once per node and exchange, down once per node and exchange.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from ciuic.bench.learning_optim import BETAS, EPS, WEIGHT_DECAY
from ciuic.codec import NumpyVectors
from ciuic.ledger.aggregate import Aggregator, Facts
from ciuic.ledger.entry import StepFacts, entry_from_frame, push_from_frame
from ciuic.ledger.layout import Layout, StepRule, make_layout
from ciuic.ledger.node import NodeMachine, Place
from ciuic.ledger.outer import OuterOptimizer

RUN = "bench"
Float = NDArray[np.float32]


def gradient_layout(layout: Layout, *, feedback: bool, freeze_at: float) -> Layout:
    """The layout of `gradient` mode: AdamW on hub and nodes, with the numbers of the other modes."""
    tensors = [
        msgspec.structs.replace(tensor, weight_decay=WEIGHT_DECAY) if tensor.trainable else tensor
        for tensor in layout.tensors
    ]
    rule = StepRule(beta1=BETAS[0], beta2=BETAS[1], eps=EPS, feedback=feedback, freeze_at=freeze_at)
    return make_layout(tensors, layout.fragment_count, rule)


class Ledger:
    """One fragment of a run: a hub, nodes, the same codec up and down."""

    def __init__(
        self, layout: Layout, initial: Float, codec: str, nodes: int, outer: OuterOptimizer | None = None
    ) -> None:
        """`layout` decides the mode: pseudo-gradients, or gradients when it has a step rule."""
        self.hub = Aggregator(layout, 0, (codec, codec), outer or OuterOptimizer())
        self.hub.initialize(initial)
        self.nodes = [NodeMachine(layout, NumpyVectors(), codec, _place(number)) for number in range(nodes)]
        for machine in self.nodes:
            machine.load(0, initial, 0)
        self.sent_bytes = 0

    @property
    def base(self) -> Float:
        """What all agree on [n]."""
        return self.hub.base

    def round(self, theta: Float, tokens: int) -> None:
        """Every node pushes its row of theta [nodes, n] as progress, the hub makes an entry, every node merges it.

        Raises NonFiniteError when a node has diverged.
        """
        self._exchange(theta, theta, tokens, None)

    def step(self, gradients: Float, theta: Float, tokens: int, facts: StepFacts) -> None:
        """`gradient` mode: every node pushes its row of `gradients` and its row of theta becomes the new base."""
        self._exchange(gradients, theta, tokens, facts)

    def _exchange(self, pushed: Float, theta: Float, tokens: int, facts: StepFacts | None) -> None:
        pushes = []
        for machine, row in zip(self.nodes, pushed, strict=True):
            machine.lr = facts.lr if facts else 0.0
            machine.stepped(tokens, [])
            frame = machine.push(0, row).to_frame()
            self.sent_bytes += len(frame)
            push = push_from_frame(frame)
            self.hub.check(push)
            pushes.append(push)
        candidate = self.hub.close(pushes, (), Facts(run=RUN, step=facts))
        self.hub.commit(candidate)
        frame = candidate.entry.to_frame()
        for machine, row in zip(self.nodes, theta, strict=True):
            self.sent_bytes += len(frame)
            machine.merge(entry_from_frame(frame), row)


def _place(number: int) -> Place:
    return Place(run=RUN, node=f"node-{number}", incarnation=1)
