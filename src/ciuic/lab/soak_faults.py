"""The faults of a soak, done to a lab and healed again."""

import contextlib
import resource
import sys
from collections.abc import Callable
from dataclasses import replace

import psutil

from ciuic.errors import CiuicError, RunFailedError
from ciuic.lab.lab import Lab
from ciuic.lab.soak_plan import NEWCOMER, PlannedFault
from ciuic.lab.switch_sites import HUB

DRAIN_S = 90.0
SLOWER = 20.0
MORE_DELAY_S = 0.2
Heal = Callable[[], object]


def strike(lab: Lab, fault: PlannedFault) -> tuple[Heal, str]:
    """Do it: how it is healed, and a note. Raises RunFailedError when a process does not do what it must."""
    kind, place = fault.kind, fault.place
    if kind == "join":
        return _nothing, _come_or_go(lab)
    if kind == "worker-kill":
        return _nothing, f"{lab.kill_workers(place)} killed"
    if kind == "cut":
        return _link(lab, place, is_cut=True), ""
    if kind == "slow":
        return _slow(lab, place), ""
    if kind == "disk-full":
        return (_full_disk(lab), "") if sys.platform == "linux" else (_nothing, "not on this system")
    return _process(lab, kind, place), ""


def _process(lab: Lab, kind: str, place: str) -> Heal:
    if kind == "hub-kill":
        lab.kill(HUB)
        return lab.start_hub
    if kind == "stop":
        lab.suspend(place)
        return lambda: lab.resume(place)
    if kind == "kill":
        lab.kill(place)
    elif kind == "restart":
        lab.kill_agent(place)
    else:
        _drain(lab, place)
    return lambda: lab.start_node(place)


def _nothing() -> None:
    """It has healed by itself."""


def _come_or_go(lab: Lab) -> str:
    if lab.runs(NEWCOMER):
        _drain(lab, NEWCOMER)
        return "it leaves"
    lab.start_node(NEWCOMER, fresh=True)
    return "it comes"


def _drain(lab: Lab, place: str) -> None:
    code = lab.drain(place, DRAIN_S)
    if code != 0:
        said = "did not end" if code is None else f"ended with exit code {code}"
        raise RunFailedError(
            "a node that is told to leave does so", cause=f"{place} {said}", next=f"read {lab.log(place)}"
        )


def _link(lab: Lab, place: str, *, is_cut: bool) -> Heal:
    pair = frozenset({HUB, place})
    before = lab.network.paths[pair]
    lab.network.set_path(HUB, place, replace(before, is_cut=is_cut))
    return lambda: lab.network.set_path(HUB, place, before)


def _slow(lab: Lab, place: str) -> Heal:
    network, pair = lab.network, frozenset({HUB, place})
    link, path = network.links[place], network.paths[pair]
    network.set_link(place, link.up_bits_per_s / SLOWER, link.down_bits_per_s / SLOWER)
    network.set_path(HUB, place, replace(path, delay_s=path.delay_s + MORE_DELAY_S))

    def heal() -> None:
        network.set_link(place, link.up_bits_per_s, link.down_bits_per_s)
        network.set_path(HUB, place, path)

    return heal


def _full_disk(lab: Lab) -> Heal:
    """No file of the hub may become larger than one byte (RLIMIT_FSIZE, as if the disk were full)."""
    process = lab.process(HUB)
    if process is None:
        return _nothing
    before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, before[1]))

    def heal() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)

    return heal


def heal_all(lab: Lab, places: tuple[str, ...]) -> None:
    """Whatever was going on: links as in the profile, everything awake, hub and nodes there."""
    for place in places:
        with contextlib.suppress(CiuicError, psutil.Error):
            lab.network.set_path(HUB, place, lab.network.first_paths[frozenset({HUB, place})])
        if lab.runs(place):
            lab.resume(place)
        else:
            lab.start_node(place)
