"""Do parameters move as their gradients ask? At most 1024 elements of each parameter are looked at, on sampled "
"steps."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ciuic.doctor.facts import MODULES_MAX, MOVEMENT, to_byte
from ciuic.doctor.facts_model import STILL, STILL_OTHER, STILL_RATE, STILL_ROUNDING, ZERO_GRADIENT
from ciuic.doctor.probe.named import named_parameters
from ciuic.doctor.probe.namesake import Names
from ciuic.doctor.probe.part import Part, Step

ELEMENTS_MAX = 1024
PARAMETERS_MAX = 2048
RANKS_MAX = 8
MOVED_SHARE = 0.02
"""Of the elements with a gradient: fewer moved ones are as good as none."""
NEGLIGIBLE = 1e-5
"""A gradient so much smaller than the largest (root of the mean square) is rounding noise: a bias before BatchNorm."""
LOW = (torch.bfloat16, torch.float16)
MANY = 0.5
"""Share of parameters of low precision that must stand still before it is called rounding: some always do."""


@dataclass(kw_only=True)
class _Sample:
    """One parameter around one step."""

    name: str
    parameter: Tensor
    rate: float
    before: Tensor
    gradient: Tensor | None = None
    """None: not there, or the parameter is frozen."""
    is_zero: bool = False
    gradient_length: float = 0.0
    """Of the sample."""
    length: float = 0.0
    """Of the sample before the step."""
    moved: float = 0.0
    moved_share: float = 1.0
    """Of the elements with a gradient; looked at only where there is a doubt."""

    @property
    def gradient_rms(self) -> float:
        """Root of the mean square."""
        return self.gradient_length / math.sqrt(max(1, self.before.numel()))

    @property
    def scale(self) -> float:
        """From the sample's length to the parameter's."""
        local = self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter
        return math.sqrt(local.numel() / max(1, self.before.numel()))


class Movement(Part):
    """STILL, names of what stands still or has gradient zero, and the movement notice."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._names = Names(probe)
        self._samples: dict[int, list[_Sample]] = {}
        self._modules: dict[int, list[str]] = {}
        self._rates: dict[int, dict[int, float]] = {}
        self._named: dict[int, dict[str, bool]] = {}
        """By optimizer: names of its models' parameters, and whether they are trainable."""

    def before_step(self, step: Step) -> None:
        """Of sampled steps."""
        if not step.due:
            return
        named = named_parameters(step.optimizer, self.probe.models)
        names = {id(parameter): name for name, parameter in named.items()}
        self._named[step.index] = {name: parameter.requires_grad for name, parameter in named.items()}
        samples = []
        for group in step.optimizer.param_groups:
            rate = _number(group.get("lr", math.nan))
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if parameter.requires_grad and parameter.is_floating_point() and name is not None:
                    samples.append(
                        _Sample(name=name, parameter=parameter, rate=rate, before=_sample(parameter).clone())
                    )
        self._samples[step.index] = samples[:PARAMETERS_MAX]
        if not step.closure:
            self._gradients(samples)

    def after_step(self, step: Step) -> None:
        """What has moved."""
        samples = self._samples.pop(step.index, None)
        if samples is None or not step.due:
            return
        if step.closure:
            self._gradients(samples)
        self._names.tell(step, ZERO_GRADIENT, [sample.name for sample in samples if sample.is_zero])
        if step.taken:
            _measure(samples)
            self._still(step, samples)
            self._picture(step, samples)

    def _gradients(self, samples: list[_Sample]) -> None:
        there = [s for s in samples if s.parameter.grad is not None and s.parameter.grad.layout is torch.strided]
        parts = [_sample(sample.parameter.grad).float() for sample in there if sample.parameter.grad is not None]
        for sample, part, length in zip(there, parts, _lengths(parts), strict=True):
            sample.gradient, sample.gradient_length = part, length
            gradient = sample.parameter.grad
            if length == 0 and gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                sample.is_zero = not bool(local.any())

    def _still(self, step: Step, samples: list[_Sample]) -> None:
        active = [s for s in samples if s.gradient is not None and not s.is_zero and s.gradient.numel()]
        if not active or all(sample.rate == 0 for sample in active):
            return
        largest = max(sample.gradient_rms for sample in active)
        found: dict[str, list[_Sample]] = {STILL_RATE: [], STILL_ROUNDING: [], STILL_OTHER: []}
        last = self._rates.get(step.index, {})
        for sample in active:
            if sample.moved_share >= MOVED_SHARE or (
                sample.rate != 0 and sample.rate > last.get(id(sample.parameter), 0.0) * 1.0001
            ):
                continue  # it moves, or its rate still grows
            if sample.rate == 0:
                found[STILL_RATE].append(sample)
            elif sample.gradient_rms >= NEGLIGIBLE * largest or sample.parameter.dtype in (
                torch.bfloat16,
                torch.float16,
            ):
                found[STILL_ROUNDING if _rounds(sample) else STILL_OTHER].append(sample)
        self._rates[step.index] = {id(sample.parameter): sample.rate for sample in active}
        if len(found[STILL_ROUNDING]) < MANY * len(active):
            found[STILL_ROUNDING] = []
        if any(found.values()):
            step.facts[STILL] = [len(found[what]) for what in (STILL_RATE, STILL_ROUNDING, STILL_OTHER)]
        for what, those in found.items():
            facts: dict[str, Any] = {}
            if those:
                first = those[0]
                dtype = str(first.parameter.dtype).removeprefix("torch.")
                facts = {"rate": first.rate, "dtype": dtype, "spacing": _spacing(first), "of": len(active)}
            self._names.tell(step, what, [sample.name for sample in those], **facts)

    def _picture(self, step: Step, samples: list[_Sample]) -> None:
        if self.probe.rank >= RANKS_MAX:
            return
        rows: dict[str, list[_Sample]] = {}
        for sample in samples:
            rows.setdefault(sample.name.rpartition(".")[0], []).append(sample)
        frozen = {name.rpartition(".")[0] for name, trainable in self._named[step.index].items() if not trainable}
        modules = self._modules_shown(step, rows, frozen)
        moved, grads, flags = bytearray(), bytearray(), bytearray()
        for module in modules:
            row = rows.get(module, [])
            length = math.sqrt(sum((s.scale * s.length) ** 2 for s in row))
            movement = math.sqrt(sum((s.scale * s.moved) ** 2 for s in row))
            gradient = math.sqrt(sum((s.scale * s.gradient_length) ** 2 for s in row))
            moved.append(_log_byte(movement / length if length else movement, middle=200, steps=16))
            grads.append(_log_byte(gradient, middle=128, steps=12))
            bare = 1 * any(s.gradient is None for s in row) | 2 * any(s.is_zero for s in row)
            flags.append(bare | _stands(row) | 16 * (module in frozen))
        facts: dict[str, Any] = {"optimizer": step.index, "step": step.number}
        if self._modules.get(step.index) != modules:
            self._modules[step.index] = modules
            facts["modules"] = [module[:200] for module in modules]
        self.probe.note(MOVEMENT, **facts, moved=bytes(moved), grads=bytes(grads), flags=bytes(flags))

    def _modules_shown(self, step: Step, rows: dict[str, list[_Sample]], frozen: set[str]) -> list[str]:
        """In the model's order; when they are too many, those that train come before frozen ones."""
        paths = [name.rpartition(".")[0] for name in self._named[step.index]]
        known = list(dict.fromkeys([path for path in paths if path in rows or path in frozen] + list(rows)))
        if len(known) <= MODULES_MAX:
            return known
        kept = {
            *list(rows)[:MODULES_MAX],
            *[path for path in known if path not in rows][: max(0, MODULES_MAX - len(rows))],
        }
        return [path for path in known if path in kept]


def _sample(tensor: Tensor) -> Tensor:
    """At most ELEMENTS_MAX elements, spread evenly; a view."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // ELEMENTS_MAX))]


def _measure(samples: list[_Sample]) -> None:
    """Lengths of parameters and of their movement."""
    before = [sample.before.float() for sample in samples]
    after = [_sample(sample.parameter).float() for sample in samples]
    moved = torch._foreach_sub(after, before) if samples else []
    lengths = zip(samples, moved, _lengths(list(moved)), _lengths(before), strict=True)
    for sample, difference, distance, length in lengths:
        sample.moved, sample.length = distance, length
        if sample.gradient is not None and (distance == 0 or sample.parameter.dtype in LOW):
            active = sample.gradient != 0
            sample.moved_share = float((difference[active] != 0).float().mean()) if bool(active.any()) else 1.0


def _lengths(tensors: list[Tensor]) -> list[float]:
    if not tensors:
        return []
    return torch.stack([length.cpu() for length in torch._foreach_norm(tensors)]).tolist()


def _stands(row: list[_Sample]) -> int:
    flags = 8 if any(sample.rate == 0 for sample in row) else 0
    still = any(s.gradient is not None and not s.is_zero and s.moved == 0 and s.gradient.numel() for s in row)
    return flags | 4 * still


def _rounds(sample: _Sample) -> bool:
    """Whether an update of the size of the learning rate, or of rate times gradient, is lost between two numbers."""
    update = max(abs(sample.rate), abs(sample.rate) * sample.gradient_rms)
    if sample.parameter.dtype in LOW:
        return True
    return min(abs(sample.rate), abs(sample.rate) * sample.gradient_rms) < _spacing(sample) or update < _spacing(sample)


def _spacing(sample: _Sample) -> float:
    """Half the distance between two neighbouring numbers of the parameter's type, at its usual size."""
    return _rms(sample.before) * torch.finfo(sample.parameter.dtype).eps / 2


def _rms(values: Tensor | None) -> float:
    return 0.0 if values is None or not values.numel() else float(values.float().norm()) / math.sqrt(values.numel())


def _log_byte(value: float, *, middle: int, steps: int) -> int:
    return to_byte(math.log10(value), middle=middle, steps=steps) if value > 0 and math.isfinite(value) else 0


def _number(value: Any) -> float:
    return float(value.item()) if isinstance(value, Tensor) else float(value)
