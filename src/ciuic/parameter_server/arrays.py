"""Named arrays (numpy, or torch tensors, without torch) as one flat fp32 vector and back, and what a node pulls."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ciuic.codec import FragmentCodec
from ciuic.errors import UsageError
from ciuic.ledger.entry import Entry
from ciuic.ledger.layout import Layout, Tensor, make_layout

Float = NDArray[np.float32]
MINUS_ONE = np.float32(-1)


def host_array(value: Any) -> NDArray[Any]:
    """A numpy array of an array or tensor; of a CPU tensor in fp32 without a copy."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return np.asarray(value.numpy() if str(value.dtype) != "torch.bfloat16" else value.float().numpy())
    return np.asarray(value)


def model_state(source: Any) -> dict[str, Any]:
    """Named parameters of a mapping, a module (`state_dict`) or a node (`get_model_state`). Raises UsageError."""
    if isinstance(source, Mapping):
        return dict(source)
    for name in ("get_model_state", "state_dict"):
        if hasattr(source, name):
            return dict(getattr(source, name)())
    raise UsageError(
        f"{type(source).__name__} has no parameters to serve",
        cause="it is no mapping and has neither get_model_state() nor state_dict()",
        next="give a model, a dict of name to array, or the address of a hub with params=",
    )


def layout_of(params: Mapping[str, Any]) -> Layout:
    """The floating-point arrays, in order of their names; integer buffers are not served. Raises UsageError."""
    tensors = []
    for name, value in sorted(params.items()):
        array = host_array(value)
        if array.dtype.kind == "f":
            tensors.append(Tensor(name=name, shape=tuple(array.shape), dtype="float32", section="coded"))
    if not tensors:
        raise UsageError("there are no floating-point parameters to serve", next="give at least one array")
    return make_layout(tensors)


def flatten(layout: Layout, values: Mapping[str, Any], *, whole: bool) -> Float:
    """One fp32 vector [element_count]; what is missing is zero, unless it must be `whole`. Raises UsageError."""
    known = {tensor.name: tensor for tensor in layout.tensors}
    flat = np.zeros(sum(t.element_count for t in layout.tensors), np.float32)
    strange = [n for n in values if n not in known and host_array(values[n]).dtype.kind == "f"]
    missing = sorted(known.keys() - values.keys()) if whole else []
    if strange or missing:
        raise UsageError(
            f"the update does not fit the parameters: {(strange or missing)[0]}",
            cause=f"{'not served' if strange else 'missing'}: {', '.join((strange or missing)[:5])}",
            next="give arrays under the names of the parameters",
        )
    start = 0
    for tensor in layout.tensors:
        stop = start + tensor.element_count
        if tensor.name in values:
            array = host_array(values[tensor.name])
            if tuple(array.shape) != tensor.shape:
                raise UsageError(
                    f"{tensor.name} has shape {list(array.shape)}, the parameter has {list(tensor.shape)}",
                    next="give the update of each parameter in the parameter's shape",
                )
            flat[start:stop] = array.reshape(-1)
        start = stop
    return flat


def split(layout: Layout, flat: Float) -> dict[str, Float]:
    """Named views of a flat vector."""
    parts, start = {}, 0
    for tensor in layout.tensors:
        parts[tensor.name] = flat[start : start + tensor.element_count].reshape(tensor.shape)
        start += tensor.element_count
    return parts


def write_back(params: Mapping[str, Any], parts: Mapping[str, Float]) -> None:
    """Put values into arrays or tensors, in place."""
    for name, values in parts.items():
        target = params[name]
        if hasattr(target, "detach"):
            target.detach().copy_(target.new_tensor(values))
        else:
            target[...] = values


class Delta(Mapping[str, Float]):
    """The entries between two versions: as a mapping, by how much each parameter went down altogether.

    `apply` subtracts them one by one, as the server did: the same bits. Subtracting the sums differs by rounding.
    """

    def __init__(self, layout: Layout, entries: Sequence[Entry], from_version: int) -> None:
        self.layout, self.entries = layout, tuple(entries)
        self.from_version, self.to_version = from_version, from_version + len(self.entries)

    @property
    def digest(self) -> str:
        """Of the base at `to_version`; empty when there is no entry."""
        return self.entries[-1].header.digest if self.entries else ""

    @cached_property
    def _sums(self) -> dict[str, Float]:
        total = np.zeros(sum(t.element_count for t in self.layout.tensors), np.float32)
        self._subtract_from(total)
        np.negative(total, out=total)
        return split(self.layout, total)

    def _subtract_from(self, flat: Float) -> None:
        shape = self.layout.fragment_shape(0)
        codecs: dict[str, FragmentCodec] = {}
        for entry in self.entries:
            codec = codecs.setdefault(entry.header.codec, FragmentCodec(entry.header.codec, shape))
            codec.accumulate(entry.payload, MINUS_ONE, flat)

    def apply(self, params: Any) -> None:
        """Move parameters (mapping, module, node) from `from_version` to `to_version`, in place. Raises UsageError."""
        state = model_state(params)
        flat = flatten(self.layout, state, whole=True)
        self._subtract_from(flat)
        write_back(state, split(self.layout, flat))

    def __getitem__(self, name: str) -> Float:
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(t.name for t in self.layout.tensors)

    def __len__(self) -> int:
        return len(self.layout.tensors)
