"""Many copies of one small model, one per node, trained together: every parameter has a leading axis of nodes.

One flat fp32 vector per node holds its copy in the order of the ledger's layout, so what a node pushes is its row.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ciuic.ledger.layout import Layout
from ciuic.train.state import ModelState

Weights = Mapping[str, Tensor]
"""Name -> [nodes, *shape]."""
LossFunction = Callable[[Weights, Tensor], Tensor]
"""(weights, tokens [nodes, batch, length + 1]) -> mean loss of each node [nodes]."""


class Stack:
    """`nodes` copies of a model. `theta` and `gradient` are fp32 [nodes, element count]."""

    def __init__(self, model: nn.Module, loss: LossFunction, nodes: int) -> None:
        """All copies start from the weights of `model`."""
        state = ModelState(model, torch.device("cpu"))
        self.layout: Layout = state.layout
        self.initial: NDArray[np.float32] = np.array(state.theta, np.float32)
        self.theta = torch.from_numpy(self.initial).repeat(nodes, 1)
        self.gradient = torch.zeros_like(self.theta)
        self._loss = loss
        self._weights, self._gradients = self._views(self.theta), self._views(self.gradient)
        self._trained = [t.name for t in self.layout.of_fragment(0) if t.trainable]
        for name in self._trained:
            self._weights[name].requires_grad_()

    @property
    def nodes(self) -> int:
        return len(self.theta)

    def weight(self, name: str) -> Tensor:
        """One tensor of all nodes [nodes, *shape], sharing memory with `theta`, outside of autograd."""
        return self._weights[name].detach()

    def weight_gradient(self, name: str) -> Tensor:
        """Its gradient [nodes, *shape], sharing memory with `gradient`."""
        return self._gradients[name]

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        views, place = {}, 0
        for tensor in self.layout.of_fragment(0):
            part = flat[:, place : place + tensor.element_count]
            views[tensor.name] = part.view(len(flat), *tensor.shape)
            place += tensor.element_count
        return views

    def backward(self, tokens: Tensor) -> None:
        """The gradient of each node's mean loss on its own tokens [nodes, batch, length + 1] into `gradient`."""
        total = self._loss(self._weights, tokens).sum()
        found = torch.autograd.grad(total, [self._weights[name] for name in self._trained])
        torch._foreach_copy_([self._gradients[name] for name in self._trained], list(found))

    def clip(self, largest_norm: float) -> None:
        """Scale each node's gradient down to this norm, as torch.nn.utils.clip_grad_norm_ does."""
        norms = self.gradient.norm(dim=1, keepdim=True)
        self.gradient *= (largest_norm / (norms + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def evaluate(self, values: NDArray[np.float32], windows: Tensor) -> float:
        """Mean loss of one vector of weights [element count] on windows [count, length + 1]."""
        weights = self._views(torch.from_numpy(values)[None])
        losses = [self._loss(weights, part[None]) * len(part) for part in windows.split(64)]
        return float(torch.stack(losses).sum() / len(windows))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """[nodes, tokens, in] by [nodes, out, in] -> [nodes, tokens, out]."""
    return torch.bmm(x, weight.transpose(1, 2))


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """Tokens [nodes, n] from tables [nodes, vocabulary, width] -> [nodes, n, width]."""
    nodes, vocabulary, width = table.shape
    offsets = torch.arange(nodes).view(-1, 1) * vocabulary
    return nn.functional.embedding(tokens + offsets, table.reshape(nodes * vocabulary, width))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of each node: logits [nodes, n, vocabulary], targets [nodes, n] -> [nodes]."""
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(len(logits), -1).mean(dim=1)
