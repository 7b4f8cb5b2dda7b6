"""Tells names of parameters once, and again when they change: a record has no room for them."""

from collections.abc import Iterable
from typing import Any

from ciuic.doctor.facts_model import NAMES, NAMES_MAX
from ciuic.doctor.probe.part import Step

NAME_CHARACTERS_MAX = 200


class Names:
    """Of one part."""

    def __init__(self, probe: Any) -> None:
        self._probe = probe
        self._told: dict[tuple[int, str], tuple[Any, ...]] = {}

    def tell(self, step: Step, what: str, names: Iterable[str], **facts: Any) -> None:
        """Send a notice NAMES when this is not what was told last; no names at first are no news."""
        names = list(names)
        key = step.index, what
        new = (*names[: NAMES_MAX * 4], len(names))
        if self._told.get(key, (0,)) == new:
            return
        self._told[key] = new
        first = [name[:NAME_CHARACTERS_MAX] for name in names[:NAMES_MAX]]
        self._probe.note(
            NAMES, what=what, names=first, count=len(names), optimizer=step.index, number=step.number, **facts
        )
