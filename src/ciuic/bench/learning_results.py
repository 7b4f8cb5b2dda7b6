"""From rows to the numbers a person looks for: means over seeds at each setting's best rate, gaps, bytes, the order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean
from typing import Any

from ciuic.bench.learning_plan import Item
from ciuic.bench.learning_search import Row

GAPS: dict[str, tuple[str, str]] = {
    "onebit_h5_minus_uncompressed": ("onebit-h5", "none-h5"),
    "int4_h5_minus_uncompressed": ("int4-h5", "none-h5"),
    "twobit_h4_minus_ddp": ("twobit-h4", "ddp"),
    "gradient_int4_minus_ddp": ("gradient-int4", "ddp"),
    "onebit_adam_minus_ddp": ("onebit-adam", "ddp"),
    "onebit_h5_minus_ddp_adamw": ("onebit-h5", "ddp"),
    "onebit_h5_minus_ddp_muon": ("muon-onebit-h5", "muon-ddp"),
    "muon_onebit_h5_minus_ddp_adamw": ("muon-onebit-h5", "ddp"),
}
"""Name -> (setting, what it is compared with): differences of mean held-out losses, nats per byte."""
LIMITS: dict[str, float] = {
    "onebit_h5_minus_uncompressed": 0.05,
    "int4_h5_minus_uncompressed": 0.02,
    "twobit_h4_minus_ddp": 0.08,
    "gradient_int4_minus_ddp": 0.01,
    "onebit_adam_minus_ddp": 0.03,
    "muon_onebit_h5_minus_ddp_adamw": 0.0,
}
"""What each gap should not exceed."""
SUFFIXES = ("", "-moe")
ORDER_GAP = 0.03
"""Differences of an earlier study above this must have the same sign here."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One setting at its best rate."""

    name: str
    loss: float
    """Mean of the last held-out losses over the seeds; infinite when one diverged."""
    losses: tuple[float, ...]
    """By seed."""
    curve: tuple[float | None, ...]
    """Mean over the seeds at a quarter, half, three quarters and the end."""
    lr: float
    multiplier: float
    sent_bytes: int
    bytes_below_ddp: float

    @property
    def spread(self) -> float:
        """Largest minus smallest loss of the seeds."""
        return max(self.losses) - min(self.losses) if math.isfinite(self.loss) else math.inf


def scores(items: Sequence[Item], rows: Sequence[Row], rates: dict[str, tuple[float, float]]) -> dict[str, Score]:
    """The settings whose rate is known, by name."""
    found: dict[str, Score] = {}
    for item in items:
        name = item.setting.name
        rate = rates.get(name)
        mine = [row for row in rows if row["name"] == name and (row["lr"], row["muon_multiplier"]) == rate]
        if mine:
            found[name] = _score(name, sorted(mine, key=lambda row: row["seed"]))
    return found


def _score(name: str, rows: list[Row]) -> Score:
    losses = tuple(math.inf if row["loss"] is None else float(row["loss"]) for row in rows)
    columns = zip(*(row["losses"] for row in rows), strict=True)
    return Score(
        name=name,
        loss=mean(losses),
        losses=losses,
        curve=tuple(None if None in column else round(mean(column), 4) for column in columns),
        lr=rows[0]["lr"],
        multiplier=rows[0]["muon_multiplier"],
        sent_bytes=rows[0]["sent_bytes"],
        bytes_below_ddp=rows[0]["bytes_below_ddp"],
    )


def gaps(found: dict[str, Score]) -> dict[str, float | None]:
    """Every gap of GAPS for the dense model and, with the suffix _moe, for the mixture; None: not measured."""
    result: dict[str, float | None] = {}
    for suffix in SUFFIXES:
        for name, pair in GAPS.items():
            setting, reference = (found.get(part + suffix) for part in pair)
            known = setting is not None and reference is not None
            gap = setting.loss - reference.loss if known else math.nan
            result[name + suffix.replace("-", "_")] = round(gap, 4) if math.isfinite(gap) else None
    return result


def order(items: Sequence[Item], found: dict[str, Score]) -> dict[str, Any]:
    """Whether the order of an earlier study holds where its gaps are clear; pairs that differ are named."""
    compared, wrong = 0, []
    known = [item for item in items if item.earlier is not None and item.setting.name in found]
    for left, right in combinations(known, 2):
        before = (left.earlier or 0.0) - (right.earlier or 0.0)
        if left.group != right.group or abs(before) <= ORDER_GAP:
            continue
        compared += 1
        here = found[left.setting.name].loss - found[right.setting.name].loss
        if here * before <= 0:
            wrong.append(f"{left.setting.name} - {right.setting.name}: {before:+.3f} before, {here:+.3f} here")
    return {"ordering_holds": not wrong if compared else None, "ordering_pairs": compared, "ordering_differs": wrong}


def summary(found: dict[str, Score]) -> list[dict[str, Any]]:
    """One JSON-able line per setting, lowest loss first."""
    return [
        {
            "name": score.name,
            "loss": round(score.loss, 4) if math.isfinite(score.loss) else None,
            "seeds": len(score.losses),
            "spread": round(score.spread, 4) if math.isfinite(score.spread) else None,
            "curve": list(score.curve),
            "lr": score.lr,
            "muon_multiplier": score.multiplier,
            "sent_bytes": score.sent_bytes,
            "bytes_below_ddp": score.bytes_below_ddp,
        }
        for score in sorted(found.values(), key=lambda score: score.loss)
    ]
