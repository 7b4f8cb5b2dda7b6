"""Evidence about parameters that a program averages itself, as local SGD does."""

from typing import Any

import torch
from torch import Tensor

from ciuic.doctor.facts_training import WEIGHTS_REDUCED
from ciuic.doctor.probe.lossscale import NAME_MAX, REDUCTIONS, SITE_MAX
from ciuic.doctor.probe.part import Call, Model, Part, Step
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.probe.spans import Spans
from ciuic.doctor.probe.witness import project

NOTICES_MAX = 4
"""Reductions that are looked at, in a run."""
ELEMENTS_MIN = 8


class Averages(Part):
    """Follows one parameter of each round of reductions from before the call to its next use."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._spans: Spans | None = None
        self._models = 0
        self._seen = 0
        self._open: tuple[Tensor, dict[str, Any]] | None = None

    def collective_begin(self, call: Call) -> None:
        if self._open is not None or self._seen >= NOTICES_MAX or call.name not in REDUCTIONS or len(call.ranks) < 2:
            return
        if torch._C._current_graph_task_id() != -1 or call.operation not in ("", "SUM"):
            return
        if self._spans is None or len(self.probe.models) != self._models:
            self._models = len(self.probe.models)
            self._spans = Spans(self.probe.models, of_gradients=False)
        for tensor in call.tensors:
            hit = self._spans.find(tensor)
            parameter = None if hit is None else dict(hit[0].parameters()).get(hit[1])
            if hit is None or parameter is None or parameter.numel() < ELEMENTS_MIN:
                continue
            before = project(parameter)
            if before is not None:
                facts = {"before": before, "parameter": hit[1][-NAME_MAX:], "site": call.site[:SITE_MAX]}
                self._open = parameter, facts | {"ranks": list(call.ranks)}
                return

    def forward_begin(self, model: Model, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self._open is not None:
            self._tell()

    def before_step(self, step: Step) -> None:
        if self._open is not None:
            self._tell()

    def _tell(self) -> None:
        if self._open is None:
            return
        (parameter, facts), self._open = self._open, None
        after = project(parameter)
        if after is not None:
            self._seen += 1
            self.probe.note(WEIGHTS_REDUCED, number=self._seen, after=after, **facts)
