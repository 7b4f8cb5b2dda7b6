"""One training run of the learning benchmark: a setting, a rate and a seed in, losses and bytes out."""

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ciuic.bench import learning_gpt, learning_moe
from ciuic.bench.learning_data import batch_starts, held_out_windows, load_text, windows
from ciuic.bench.learning_ledger import Ledger, gradient_layout
from ciuic.bench.learning_methods import EveryStep, Method, PlainDdp, Rounds, plain_bytes
from ciuic.bench.learning_optim import Inner, cosine
from ciuic.bench.learning_stack import Stack
from ciuic.errors import NonFiniteError
from ciuic.ledger.outer import OuterOptimizer
from ciuic.train.gradients import freeze_at

CODE_VERSION = 1
"""Part of every key of the cache: raise it when a change moves the numbers."""
NODES, BATCH, HELD_OUT_WINDOWS, CLIP = 4, 4, 384, 1.0
ModelName = Literal["dense", "moe"]
Mode = Literal["ddp", "pseudo_gradient", "gradient", "onebit_adam"]
Optimizer = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is compared: everything but rate and seed."""

    name: str
    model: ModelName = "dense"
    mode: Mode
    codec: str = "none"
    interval: int = 1
    optimizer: Optimizer = "adamw"
    outer_momentum: float = 0.0
    steps: int = 400
    warmup: int = 160


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run. `multiplier`: rate of Muon's matrices over the rate of the rest; 0 with AdamW alone."""

    setting: Setting
    lr: float
    multiplier: float
    seed: int

    def key(self) -> str:
        """Hex digest of all that decides the numbers."""
        setting = asdict(self.setting)
        del setting["name"]
        facts: list[Any] = [setting, self.lr, self.multiplier, self.seed, CODE_VERSION, load_text().digest]
        facts += [freeze_at(self.setting.warmup / self.setting.steps)] if self.setting.mode == "onebit_adam" else []
        sizes = [NODES, BATCH, HELD_OUT_WINDOWS, CLIP, learning_gpt.LENGTH]
        return hashlib.blake2b(json.dumps([facts, sizes], sort_keys=True).encode(), digest_size=12).hexdigest()


def run_trial(trial: Trial) -> dict[str, Any]:
    """Train and return a row: settings, `losses` at a quarter, half, three quarters and the end, `loss`, bytes.

    The losses of a run that has diverged are None.
    """
    began, busy = time.monotonic(), time.process_time()
    setting = trial.setting
    run = _Run(trial)
    losses: list[float | None] = []
    try:
        for step in range(setting.steps):
            run.step(step)
            if (step + 1) % (setting.steps // 4) == 0:
                losses.append(round(run.evaluate(), 4))
    except NonFiniteError:
        losses.append(None)
    losses += [None] * (4 - len(losses))
    plain = plain_bytes(run.stack, NODES, setting.steps)
    sent_bytes = run.method.sent_bytes
    return {
        **asdict(setting),
        "lr": trial.lr,
        "muon_multiplier": trial.multiplier,
        "seed": trial.seed,
        "losses": losses,
        "loss": losses[-1],
        "sent_bytes": sent_bytes,
        "bytes_below_ddp": round(plain / max(1, sent_bytes), 1),
        "took_s": round(time.monotonic() - began, 1),
        "cpu_s": round(time.process_time() - busy, 1),
        "key": trial.key(),
    }


class _Run:
    """State of one trial."""

    def __init__(self, trial: Trial) -> None:
        setting = trial.setting
        self._setting = setting
        family = learning_gpt if setting.model == "dense" else learning_moe
        self.stack = Stack(family.build(trial.seed), family.loss, 1 if setting.mode == "ddp" else NODES)
        self.method = _method(trial, self.stack, family.MATRICES)
        self._length = learning_gpt.LENGTH
        self._starts = batch_starts(trial.seed, (setting.steps, NODES, BATCH), self._length)
        self._held_out = held_out_windows(HELD_OUT_WINDOWS if setting.steps >= 100 else 64, self._length)

    def step(self, number: int) -> None:
        """One step of every node, and an exchange where it is due."""
        tokens = windows(load_text().train, self._starts[number], self._length)
        self.stack.backward(tokens.reshape(self.stack.nodes, -1, self._length + 1))
        self.stack.clip(CLIP)
        self.method.step(number, cosine(number, self._setting.steps, self._setting.warmup))

    def evaluate(self) -> float:
        """Held-out loss of the base. Raises NonFiniteError when it is none."""
        loss = self.stack.evaluate(self.method.base, self._held_out)
        if not math.isfinite(loss):
            raise NonFiniteError("the held-out loss is not finite", cause="this run diverged")
        return loss


def _method(trial: Trial, stack: Stack, matrices: Mapping[str, int]) -> Method:
    setting, tokens = trial.setting, BATCH * learning_gpt.LENGTH
    if setting.mode in ("gradient", "onebit_adam"):
        return _every_step(trial, stack, tokens)
    inner = Inner(stack, trial.lr, muon_multiplier=trial.multiplier, matrices=matrices)
    if setting.mode == "ddp":
        return PlainDdp(stack, inner, NODES)
    outer = OuterOptimizer(lr=1.0, momentum=setting.outer_momentum)
    ledger = Ledger(stack.layout, stack.initial, setting.codec, NODES, outer)
    return Rounds(stack, inner, ledger, setting.interval, tokens)


def _every_step(trial: Trial, stack: Stack, tokens: int) -> EveryStep:
    """Four bits (and more) are rounded by chance, without feedback; 1-bit Adam and coarser codecs have feedback."""
    setting = trial.setting
    frozen = setting.mode == "onebit_adam"
    feedback = frozen or setting.codec in ("1-bit", "2-bit")
    freeze = freeze_at(setting.warmup / setting.steps)
    layout = gradient_layout(stack.layout, feedback=feedback, freeze_at=freeze if frozen else 1.0)
    ledger = Ledger(layout, stack.initial, setting.codec, NODES)
    freeze_after = int(freeze * setting.steps) if frozen else 0
    return EveryStep(stack, ledger, trial.lr, tokens=tokens, freeze_after=freeze_after)
