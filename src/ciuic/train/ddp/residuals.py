"""What compression dropped, kept per parameter; a step's changes are all taken or none.

worker residual: what this rank's own message lost. owner residual: what the second rounding lost, for the part of
each parameter that this rank owns. Both are fp32 in units of the unscaled gradient, in the parameter's memory order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ciuic.train.ddp.plan import Parameter


class Residuals:
    """Two copies of each residual: `worker`, `owner` hold the last complete step, `next_*` are being written."""

    def __init__(self, parameters: Sequence[Parameter], owned: Sequence[tuple[int, int]], device: torch.device) -> None:
        counts = [parameter.element_count for parameter in parameters]
        self.owned = list(owned)
        """[parameters] (start, stop) of the part this rank owns."""
        self.worker = [torch.zeros(count, device=device) for count in counts]
        self.owner = [torch.zeros(stop - start, device=device) for start, stop in owned]
        self._next_worker = [torch.empty_like(values) for values in self.worker]
        self._next_owner = [torch.empty_like(values) for values in self.owner]
        self._touched_worker: set[int] = set()
        self._touched_owner: set[int] = set()
        self.owner_is_zero = True
        """Whether the owner residuals are known to be zero (then nothing has to be folded in)."""

    def next_worker(self, parameter: int) -> Tensor:
        """Where the worker residual of the step in progress is written."""
        self._touched_worker.add(parameter)
        return self._next_worker[parameter]

    def next_owner(self, parameter: int) -> Tensor:
        """Where the owner residual of the step in progress is written."""
        self._touched_owner.add(parameter)
        return self._next_owner[parameter]

    def commit(self) -> None:
        """The step was finite on all ranks: what it wrote is true now."""
        for now, new, touched in (
            (self.worker, self._next_worker, self._touched_worker),
            (self.owner, self._next_owner, self._touched_owner),
        ):
            for parameter in touched:
                now[parameter], new[parameter] = new[parameter], now[parameter]
            touched.clear()

    def discard(self) -> None:
        """The step did not count: everything is as before it."""
        self._touched_worker.clear()
        self._touched_owner.clear()
