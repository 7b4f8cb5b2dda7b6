"""Several optimizers as one: one step, one state, one list of parameter groups, one set of hooks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ciuic.errors import UsageError

ALGORITHM = "algorithm"
"""Key of a parameter group: the class of the optimizer that moves it."""


class CombinedOptimizer(Optimizer):
    """Behaves like one torch optimizer whose groups are those of its parts.

    The parts keep no groups and no state of their own: changing a rate, clearing `state` or loading a state dict here
    is all there is. Step hooks that are registered here run once per step.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        """`parts` must not have made a step. Raises UsageError when there is none."""
        if not parts:
            raise UsageError("an optimizer needs at least one parameter", next="unfreeze what should be trained")
        self._parts = list(parts)
        self._is_complete = False
        for part in parts:
            for group in part.param_groups:
                group[ALGORITHM] = type(part).__name__
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._is_complete = True
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every part; `closure` computes the loss and its gradients once, before all of them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after the beginning: which part would take it?"""
        if self._is_complete:
            raise UsageError(
                "a combined optimizer takes no further parameters",
                cause="it cannot tell which of its parts should move them",
                next="make a new optimizer when the model has all its parameters",
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UsageError for the state of an optimizer that treats other parameters as matrices."""
        theirs = [group.get(ALGORITHM) for group in state_dict.get("param_groups", [])]
        ours = [group[ALGORITHM] for group in self.param_groups]
        if theirs != ours:
            raise UsageError(
                "this optimizer state is of another optimizer",
                cause=f"its groups are {', '.join(map(str, theirs)) or 'none'}; here they are {', '.join(ours)}",
                next="load a state that was saved with the same optimizer and model",
            )
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts, "_is_complete": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also how torch puts loaded groups and state in place."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Give the parts their groups, the same objects, and the one state."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
