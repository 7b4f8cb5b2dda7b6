"""Faults of class M: what can be wrong in a ledger run that no look into one worker shows."""

from zoo.fault import Fault

FAULTS = (
    Fault(
        id="base_differs",
        title="a bit of node 1's base flips in memory",
        letter="M",
        codes=("CIUIC-M1",),
        rank=1,
    ),
    Fault(
        id="residual_grows",
        title="a weight of node 1 runs away, faster than its codec can tell",
        letter="M",
        codes=("CIUIC-M2",),
        rank=1,
    ),
    Fault(
        id="always_behind",
        title="steps of node 1 last a hundred times longer, and nobody waits for it",
        letter="M",
        codes=("CIUIC-M3",),
        rank=1,
        kind="slow",
    ),
    Fault(
        id="other_data",
        title="labels of node 1 are drawn by lot",
        letter="M",
        codes=("CIUIC-M4",),
        rank=1,
    ),
)
