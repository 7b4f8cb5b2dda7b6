"""The probe of this process, while it looks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ciuic.doctor.probe.attach import Attached

HERE: list["Attached"] = []
"""At most one; a list because it begins and ends."""


def attached() -> "Attached | None":
    """The probe of this process, when there is one."""
    return HERE[-1] if HERE else None
