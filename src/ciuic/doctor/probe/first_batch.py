"""`ciuic doctor loss` in a rank: at one step, the batch that rank 0 gives to the model is replayed on all."""

import os
import sys
from typing import Any

import msgspec
import torch

from ciuic.doctor.environment import REPLAY
from ciuic.doctor.loss.records import ReplaySettings, Verdict
from ciuic.doctor.probe.part import Model, Part
from ciuic.doctor.probe.replaying import replay
from ciuic.errors import CiuicError

NOTICE = "replayed"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the command asks of the ranks; travels in the environment."""

    step: int
    """The optimizer step before which it is done, from 1."""
    seed: int = 0
    timeout_s: float = 60.0
    share: bool = True


class FirstBatch(Part):
    """Waits for the step, replays, tells the collector the verdict (rank 0), and ends the process."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._order = msgspec.json.decode(os.environ[REPLAY], type=Order)
        self._done = False

    def forward_begin(self, model: Model, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """The model is about to be called by the program; a DDP has broadcast its buffers."""
        if self._done or not torch.is_grad_enabled() or self.probe.step + 1 < self._order.step:
            return
        self._done = True
        settings = ReplaySettings(timeout_s=self._order.timeout_s, share=self._order.share)
        try:
            verdict = replay(model.module, (tuple(inputs), dict(keywords)), seed=self._order.seed, settings=settings)
        except CiuicError as error:
            cause = f"{error.message}: {error.cause}" if error.cause else error.message
            verdict = Verdict(result="unknown", cause=cause, fix=error.next)
        if self.probe.rank == 0:
            self.probe.note(NOTICE, verdict=msgspec.to_builtins(verdict), step=self.probe.step + 1)
        self.probe.courier.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nothing is left to do; as an error of the program it would look like one of its own
