"""The rules: one module per class of faults. Each looks at the evidence of all ranks, none of them imports torch."""

from ciuic.doctor.case import Rule
from ciuic.doctor.rules.alone import Alone
from ciuic.doctor.rules.batches import Batches
from ciuic.doctor.rules.buffers import Buffers
from ciuic.doctor.rules.calls import CallOrder
from ciuic.doctor.rules.cuts import Cuts
from ciuic.doctor.rules.departures import Departures
from ciuic.doctor.rules.gradients import Gradients
from ciuic.doctor.rules.hang import Hang
from ciuic.doctor.rules.launch import Launch
from ciuic.doctor.rules.loaders import Loaders
from ciuic.doctor.rules.losses import Losses
from ciuic.doctor.rules.manner import Manner
from ciuic.doctor.rules.numbers import Numbers
from ciuic.doctor.rules.ownership import Ownership
from ciuic.doctor.rules.replicas import Replicas
from ciuic.doctor.rules.restored import Restored
from ciuic.doctor.rules.saving import Saving
from ciuic.doctor.rules.scale import Scale
from ciuic.doctor.rules.schedule import Schedule
from ciuic.doctor.rules.sight import Sight
from ciuic.doctor.rules.stragglers import Stragglers


def all_rules() -> list[Rule]:
    """A new set, without memory."""
    return [
        Replicas(),
        Alone(),
        Buffers(),
        Ownership(),
        Gradients(),
        Cuts(),
        Manner(),
        Losses(),
        Scale(),
        Numbers(),
        Schedule(),
        CallOrder(),
        Departures(),
        Hang(),
        Stragglers(),
        Saving(),
        Batches(),
        Loaders(),
        Restored(),
        Launch(),
        Sight(),
    ]
