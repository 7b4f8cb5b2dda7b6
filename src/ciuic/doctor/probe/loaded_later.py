"""Modules that a program may import later than the doctor comes: what to do once they are there."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class WhenLoaded(importlib.abc.MetaPathFinder):
    """Calls `then` with the module: now, when it is there, or right after it was loaded. `remove()` ends the wait."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then
        module = sys.modules.get(name)
        if module is not None:
            then(module)
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Wait no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """It finds nothing itself: the module is loaded as usual, and told when that is done."""
        if fullname != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load, then = spec.loader.exec_module, self._then

            def exec_module(module: ModuleType) -> None:
                load(module)
                then(module)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 - a method of this one loader
        return spec
