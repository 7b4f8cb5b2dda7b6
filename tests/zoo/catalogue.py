"""The zoo as data: all faults, all programs, and the reported cases that are not here, with the reason.

Ciuic's own ledger is the program `ledger`. What is no fault of it: an optimizer of another model, which `prepare`
refuses; a node that is killed, without which the others go on; a learning rate of a node's own, which a joiner's own
warm-up has as well.
"""

from zoo import faults_gradients, faults_ledger, faults_state, faults_time, faults_waiting
from zoo.fault import Fault, Program
from zoo.programs_list import PROGRAMS as _PROGRAMS

FAULTS: dict[str, Fault] = {
    fault.id: fault
    for room in (faults_gradients, faults_state, faults_time, faults_waiting, faults_ledger)
    for fault in room.FAULTS
}
PROGRAMS: dict[str, Program] = {program.name: program for program in _PROGRAMS}

REPORTED = tuple(
    f"{letter}{number}"
    for letter, count in zip("ABCDEFGHIJKL", (8, 4, 3, 6, 4, 4, 4, 5, 4, 6, 3, 1), strict=True)
    for number in range(1, count + 1)
)
"""The cases that people reported: 52."""

SKIPPED = {
    "A5": "torch 2.13 reduces what only an early micro-batch used: the ranks' parameters stay equal, bit for bit. "
    "The pattern is a clean variant, `early_piece_only` of tiny_gpt",
    "B3": "which parameters the user meant to train is nowhere in the program: the optimizer owns the model's own "
    "parameters, all of them trainable",
    "G4": "a schedule that depends on the number of processes is a valid schedule in each run; only two runs of "
    "different size, side by side, show that it was not meant",
}
"""By case id: why no fault of the zoo has its mechanism."""


def pairs(*, clean: bool) -> list[tuple[str, str]]:
    """All (program, variant) that are clean, or all (program, fault)."""
    return [(p.name, case) for p in PROGRAMS.values() for case in (p.variants if clean else p.faults)]
