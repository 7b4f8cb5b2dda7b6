"""All parts of the probe, in the order in which they get events."""

import os

from ciuic.doctor.environment import REPLAY
from ciuic.doctor.probe.averages import Averages
from ciuic.doctor.probe.cuts import Cuts
from ciuic.doctor.probe.feeding import Feeding
from ciuic.doctor.probe.first_batch import FirstBatch
from ciuic.doctor.probe.flow import Flow
from ciuic.doctor.probe.launched import Launched
from ciuic.doctor.probe.lossscale import LossScale
from ciuic.doctor.probe.manner import Manner
from ciuic.doctor.probe.movement import Movement
from ciuic.doctor.probe.outside import Outside
from ciuic.doctor.probe.ownership import Ownership
from ciuic.doctor.probe.part import Part
from ciuic.doctor.probe.precision import Precision
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.probe.registered import Registered
from ciuic.doctor.probe.replicas import Replicas
from ciuic.doctor.probe.restoring import Restoring
from ciuic.doctor.probe.schedules import Schedules
from ciuic.doctor.probe.stale import Stale
from ciuic.doctor.probe.thrown import Thrown
from ciuic.doctor.probe.timers import Timers
from ciuic.doctor.probe.watchdog import Watchdog


def all_parts(probe: Probe) -> list[Part]:
    """One of each; under `ciuic doctor loss` only the one that replays."""
    if os.environ.get(REPLAY):
        return [FirstBatch(probe)]
    model = [kind(probe) for kind in (Flow, Registered, Ownership, Stale, Thrown, Cuts, Outside, Movement, Averages)]
    return [
        Replicas(probe),
        *model,
        LossScale(probe),
        Manner(probe),
        Precision(probe),
        Schedules(probe),
        Watchdog(probe),
        Timers(probe),
        Feeding(probe),
        Restoring(probe),
        Launched(probe),
    ]
