"""Brings the probe into this process: by `ciuic doctor run` (through sitecustomize), `watch`, or by hand."""

import atexit
import os
import sys
from types import TracebackType
from typing import Any

from ciuic.doctor.environment import ADDRESS, EVERY, EVERY_DEFAULT, TOKEN
from ciuic.doctor.facts import LEFT_IN
from ciuic.doctor.probe.calls import Calls
from ciuic.doctor.probe.compiled import has_compiled
from ciuic.doctor.probe.courier import Courier
from ciuic.doctor.probe.here import HERE
from ciuic.doctor.probe.hooks import hook_model, install
from ciuic.doctor.probe.later import attach_later
from ciuic.doctor.probe.part import Model, Part
from ciuic.doctor.probe.parts import all_parts
from ciuic.doctor.probe.patches import Patches
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.record import PROBE_FAILED


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
        if self not in HERE:
            return
        HERE.remove(self)
        atexit.unregister(self.close)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook
        self.patches.undo()
        if not self.probe.step and has_compiled():
            error = "torch.compile was used and no step of an optimizer was seen: a compiled step cannot be looked at"
            self.probe.note(PROBE_FAILED, part="hooks", event="step", error=error)
        left_in = self.probe.enter("end")  # not `other`: an error ended it there, even one that somebody caught
        self.probe.courier.close(self._how, **{LEFT_IN: left_in, **self.probe.gather("ends")})

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
    found = Attached(probe, patches)
    HERE.append(found)
    return found


def attach_from_environment() -> None:
    """What sitecustomize calls once torch is imported.

    A rank of torchrun is attached at once. Any other process is attached when it shows that it trains: it joins a
    process group, or an optimizer makes its first step.
    """
    host, _, port = os.environ.get(ADDRESS, "").rpartition(":")
    if not host or not port.isdecimal():
        return
    token, every = os.environ.get(TOKEN, ""), int(os.environ.get(EVERY, "") or EVERY_DEFAULT)

    def start(rank: int, world: int) -> None:
        attach((host, int(port)), token, rank=rank, world=world, every=every)

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        attach_later(start)
