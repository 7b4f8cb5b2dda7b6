"""Replaces torch's functions by ones that also tell the probe, and puts them back."""

import functools
from collections.abc import Callable
from typing import Any

HANDLES = 256
"""So many are kept before those that are of no use are sorted out."""


class Patches:
    """A stack of replaced attributes."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._handles: list[Any] = []
        self._full = HANDLES

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
        if len(self._handles) >= self._full:  # of modules that are no more
            self._handles = [each for each in self._handles if getattr(each, "hooks_dict_ref", _there)() is not None]
            self._full = 2 * len(self._handles) + HANDLES
        self._handles.append(handle)

    def undo(self) -> None:
        """As it was before; what somebody else has replaced since stays."""
        while self._handles:
            self._handles.pop().remove()
        while self._undo:
            self._undo.pop()()


def _there() -> object:
    """Of handles that are no hooks of a module's."""
    return _there


def _restore(owner: Any, name: str, ours: Any, original: Any) -> None:
    if (vars(owner) if isinstance(owner, type) else owner.__dict__).get(name) is ours:
        setattr(owner, name, original)
