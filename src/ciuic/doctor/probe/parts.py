"""All parts of the probe, in the order in which they get events."""

from ciuic.doctor.probe.part import Part
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.probe.replicas import Replicas


def all_parts(probe: Probe) -> list[Part]:
    """One of each."""
    return [Replicas(probe)]
