"""Replaces torch's functions by ones that also tell the probe, and puts them back."""

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """A stack of replaced attributes."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def around(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace owner.name by make(what it was); nothing happens when there is no such attribute."""
        current = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name, None)
        if current is None or not callable(current):
            return
        new = functools.wraps(current)(make(current))
        setattr(owner, name, new)
        self._undo.append(functools.partial(_restore, owner, name, new, current))

    def handle(self, handle: Any) -> None:
        """A hook that torch gave a handle for."""
        self._undo.append(handle.remove)

    def undo(self) -> None:
        """As it was before; what somebody else has replaced since stays."""
        while self._undo:
            self._undo.pop()()


def _restore(owner: Any, name: str, ours: Any, original: Any) -> None:
    if (vars(owner) if isinstance(owner, type) else owner.__dict__).get(name) is ours:
        setattr(owner, name, original)
