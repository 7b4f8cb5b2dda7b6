"""The model as this node builds it: how many parameters, and a digest of their names, shapes and order.

It is built on the meta device, which takes no memory; a function that cannot do that is called again for real.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ciuic.doctor.preflight.records import Layout
from ciuic.errors import UsageError

LIMIT_S = 300.0
MOST_LINES = 100_000


def build_layout(where: str) -> dict[str, object]:
    """{"layout": ..., "lines": one text per tensor}. Raises UsageError, and whatever the function raises."""
    function = find_function(where)
    try:
        with torch.device("meta"):
            model = _checked(function(), where)
    except UsageError:
        raise
    except Exception:  # noqa: BLE001 - not every model can be built on meta: what counts is the attempt below
        model = _checked(function(), where)
    lines = list(_lines(model))
    layout = describe(model, lines)
    return {
        "layout": {name: getattr(layout, name) for name in layout.__struct_fields__},
        "lines": lines[:MOST_LINES],
    }


def find_function(where: str) -> Callable[[], Any]:
    """The function of `FILE.py:NAME` or `module:NAME`. Raises UsageError."""
    source, _, name = where.rpartition(":")
    if not source or not name.isidentifier():
        raise UsageError(f"{where!r} names no function", next="write --count FILE.py:FUNCTION or module:FUNCTION")
    if source.endswith(".py"):
        path = Path(source).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise UsageError(f"there is no file {source}", next="give the path from the present folder")
        sys.path.insert(0, str(path.parent))  # as `python FILE.py` does
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        module = importlib.import_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{source} has no function {name!r}", next="name a function without parameters")
    return function


def _checked(model: Any, where: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UsageError(f"{where} returned a {type(model).__name__}", next="return the torch.nn.Module")
    return model


def _lines(model: nn.Module) -> Iterator[str]:
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            frozen = "" if tensor.requires_grad or kind == "buffer" else " frozen"
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            yield f"{kind} {name} {shape} {str(tensor.dtype).removeprefix('torch.')}{frozen}"


def describe(model: nn.Module, lines: list[str]) -> Layout:
    """Counts and digest; tied parameters count once."""
    parameters, buffers = list(model.parameters()), list(model.buffers())
    return Layout(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        tensors=len(parameters),
        buffers=len(buffers),
        digest=hashlib.sha256("\n".join(lines).encode()).hexdigest(),
    )
