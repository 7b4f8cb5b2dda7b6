"""Optimizers that take the place of others: built anew for the same parameters, after a thaw or a resume."""

from torch.optim import Optimizer

OVERLAP = 0.5
"""Of the earlier one's parameters, that the heir must have."""
STEPS = 3
"""In a row that the heir makes while the earlier one makes none. Two that share parameters on purpose take turns."""


class Heirs:
    """By the order of attempts alone, so that all ranks come to the same at the same step."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._alone: dict[int, int] = {}

    def found(self, optimizers: list[Optimizer], index: int) -> None:
        """A new optimizer: whose parameters has it?"""
        own = _parameters(optimizers[index])
        for at, earlier in enumerate(optimizers[:index]):
            theirs = _parameters(earlier)
            if theirs and len(theirs & own) >= OVERLAP * len(theirs):
                self._of[index] = at
                return

    def forget(self, index: int) -> None:
        """The optimizer that had this index is no more."""
        self._of = {heir: earlier for heir, earlier in self._of.items() if index not in (heir, earlier)}
        self._alone.pop(index, None)

    def of(self, index: int) -> int | None:
        """The optimizer whose parameters this one has, too."""
        return self._of.get(index)

    def steps(self, index: int) -> int | None:
        """An attempt; the index that this optimizer has from now on, when it is another one."""
        for heir, earlier in self._of.items():
            if earlier == index:
                self._alone[heir] = 0
        if index not in self._of:
            return None
        self._alone[index] = self._alone.get(index, 0) + 1
        if self._alone[index] < STEPS:
            return None
        del self._alone[index]
        return self._of.pop(index)


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
