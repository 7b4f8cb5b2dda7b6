"""Wrappers whose group holds one rank: is it meant that nobody is averaged with anybody?"""

from collections.abc import Iterable

from ciuic.doctor.case import Case, Round, Rule
from ciuic.doctor.facts import GRADIENTS, PARAMETERS
from ciuic.doctor.facts_model import ALONE
from ciuic.doctor.finding import Finding, Severity

STEPS = 16
"""Ranks that began equal and have exchanged nothing for so many steps were meant to train one model."""


class Alone(Rule):
    """A5 by a group of one rank."""

    def __init__(self) -> None:
        self._began_equal: dict[int, bool] = {}
        self._is_over: set[int] = set()

    def round(self, case: Case, round: Round) -> Iterable[Finding]:
        """Ranks of such wrappers that have exchanged anything are tensor-parallel, or average in a way of their own."""
        calls, at = round.values(ALONE), round.optimizer
        if at in self._is_over or len(calls) < max(2, len(round.records)):
            return
        parameters, gradients = set(round.values(PARAMETERS).values()), set(round.values(GRADIENTS).values())
        self._began_equal.setdefault(at, len(parameters) == 1 and round.step == 1)
        if not self._began_equal[at] or any(calls.values()) or len(gradients) < len(calls):
            self._is_over.add(at)
            return
        if round.step < STEPS or len(parameters) < len(calls):
            return
        self._is_over.add(at)
        yield Finding(
            code="CIUIC-A5",
            cause="the process group of each DistributedDataParallel holds one rank alone: "
            f"{len(calls)} ranks began with equal parameters and have exchanged nothing in "
            f"{round.step} steps, each trains a model of its own",
            step=1,
            evidence={"steps": round.step, "ranks_in_group": 1},
            confidence=0.75,
            severity=Severity.WARNING,
            fix="give DistributedDataParallel the group of all ranks that share the model, or no process_group at all",
        )
