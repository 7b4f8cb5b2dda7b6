"""The jobs of the ledger's program: one for each case. No torch here."""

from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[1] / "ledger_worker.py"
BATCH = 16
NODES = ("a", "b", "c")
EVENTS = ("elastic_join", "kill_and_return")
"""Variants in which nodes come and go."""
SYNC: dict[str, dict[str, Any]] = {
    "async": {"policy": "async", "interval": 4, "max_staleness": 50},
    "one_bit": {"compression": "1-bit"},
    "int4": {"compression": "int4"},
    "top_k": {"compression": {"up": "topk", "down": "int4"}},
    "pseudo_gradient": {"interval": 4, "overlap": "auto", "compression": "auto", "deadline": "auto"},
    "gradient": {"send": "gradient", "interval": 1, "overlap": "auto", "compression": "int8"},
    "streamed": {"fragments": 2, "interval": 4, "overlap": True},
    "elastic_join": {"deadline": "auto", "min_fraction": 0.5},
    "kill_and_return": {"deadline": "auto", "min_fraction": 0.5},
    "always_behind": {"policy": "async", "interval": 1, "max_staleness": 1000},
    "residual_grows": {"compression": "1-bit"},
}


def job(case: str, is_fault: bool, *, steps: int, case_file: Path) -> dict[str, Any]:
    """What is submitted. There are more samples than the steps need: nodes take as many as they can train."""
    more = 600 if is_fault else 160 if case in EVENTS else 60
    sync = {"interval": 1, "compression": "int8", "overlap": False, "deadline": "30 s", "min_fraction": 1.0}
    return {
        "name": f"zoo-{case}".replace("_", "-"),
        "model": {"command": ["python", str(PROGRAM), str(case_file)]},
        "nodes": {"min": 2},
        "sync": sync | SYNC.get(case, {}),
        "train": {"samples": (steps + more) * BATCH * 2},
        "fault": {"grace": "2 s"},
    }
