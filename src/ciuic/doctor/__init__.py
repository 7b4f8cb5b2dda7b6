"""The doctor: why does my distributed run misbehave?

Three places. `probe` lives in every rank: it hooks torch, keeps counters, takes digests and sends small records; it is
the only one that imports torch. `collector` is one process (`ciuic doctor run`, or one that `watch` starts): it gets
the records of all ranks and lets the `rules` look at them. `catalogue` says what each code means. A finding has one
code; `incidents` folds what follows from something else under its cause.
"""

import importlib
from typing import Any

_LATER = {
    "HfCallback": "ciuic.doctor.probe.hf",
    "LightningCallback": "ciuic.doctor.probe.lightning_callback",
    "ReplaySettings": "ciuic.doctor.loss.records",
    "replay": "ciuic.doctor.probe.replaying",
    "watch": "ciuic.doctor.probe.watching",
    "watch_accelerator": "ciuic.doctor.probe.accelerator",
}
"""Names that need torch or a framework, and where they are: imported when they are used first."""

__all__ = ["HfCallback", "LightningCallback", "ReplaySettings", "replay", "watch", "watch_accelerator"]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
