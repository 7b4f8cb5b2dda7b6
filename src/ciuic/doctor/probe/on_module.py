"""Hooks on a program's own modules, which it may save, copy, trace and transform: they must not be in the way."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch


class OnModule:
    """A hook that is not taken along: where the module is pickled or copied, one that does nothing takes its place, and
    that one needs no Ciuic to be read again."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        """What torch calls."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """`nullcontext.__exit__` takes any arguments and gives None."""
        return getattr, (contextlib.nullcontext(), "__exit__")


class AroundHook:
    """A communication hook with something before it. DDP looks at its name and its signature, and pickles it."""

    def __init__(self, hook: Callable[..., Any], before: Callable[[Any], None]) -> None:
        functools.update_wrapper(self, hook)
        self._hook, self._before = hook, before

    def __call__(self, state: Any, bucket: Any) -> Any:
        """What DDP calls."""
        self._before(bucket)
        return self._hook(state, bucket)

    def __reduce__(self) -> tuple[Any, ...]:
        """The program's own."""
        return functools.partial, (self._hook,)
