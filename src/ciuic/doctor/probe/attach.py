"""Brings the probe into this process: by `ciuic doctor run` (through sitecustomize), `watch`, or by hand."""

import atexit
import os
import sys
from types import TracebackType
from typing import Any

from ciuic.doctor.probe.calls import Calls
from ciuic.doctor.probe.courier import Courier
from ciuic.doctor.probe.hooks import hook_model, install
from ciuic.doctor.probe.part import Model, Part
from ciuic.doctor.probe.parts import all_parts
from ciuic.doctor.probe.patches import Patches
from ciuic.doctor.probe.probe import Probe

ADDRESS, TOKEN, EVERY = "CIUIC_DOCTOR", "CIUIC_DOCTOR_TOKEN", "CIUIC_DOCTOR_EVERY"
"""Environment of a rank under `ciuic doctor run`: host:port of the collector, its token, steps from sample to sample."""


class _Models(Part):
    """Hooks the forward passes of what is found."""

    patches: Patches

    def model_found(self, model: Model) -> None:
        hook_model(self.probe, model, self.patches)


class Attached:
    """The probe at work; `close` takes all hooks away again."""

    def __init__(self, probe: Probe, patches: Patches) -> None:
        self.probe, self.patches = probe, patches
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self.close)
        self._how = "end"

    def close(self) -> None:
        """Last words to the collector; torch is as it was."""
        atexit.unregister(self.close)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook
        self.patches.undo()
        self.probe.enter("end")
        self.probe.courier.close(self._how, **self.probe.gather("ends"))

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        self._how = f"{kind.__name__}: {error}".splitlines()[0][:300]
        self._hook(kind, error, trace)


def attach(address: tuple[str, int], token: str, *, rank: int, world: int, every: int = 10) -> Attached:
    """Start to watch this process. The collector need not be there yet, or ever."""
    courier = Courier(address, token, rank=rank, world=world)
    probe = Probe(courier, rank=rank, world=world, every=every)
    patches = install(probe)
    models = _Models(probe)
    models.patches = patches
    probe.add(models)
    for part in all_parts(probe):
        probe.add(part)
    Calls(probe, patches)
    courier.start(probe)
    return Attached(probe, patches)


def attach_from_environment() -> Attached | None:
    """What sitecustomize calls once torch is imported; None outside a rank of `ciuic doctor run`."""
    host, _, port = os.environ.get(ADDRESS, "").rpartition(":")
    if not host or not port.isdecimal():
        return None
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    token, every = os.environ.get(TOKEN, ""), int(os.environ.get(EVERY, "10"))
    return attach((host, int(port)), token, rank=rank, world=world, every=every)
