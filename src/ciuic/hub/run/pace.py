"""Steps per push of each node, in proportion to its measured speed, so that nobody waits and all work counts. Pure."""

from collections.abc import Mapping
from math import floor

SAME = 1.1
"""Nodes whose step times differ by less than this factor keep the run's interval."""
SLACK = 0.02
"""A step more is made when it would end this share of the round too late."""
DEVIATION_COST = 0.25
"""Weight of a mean interval other than the wanted one, against time spent waiting."""


def balanced_intervals(interval: int, step_s: Mapping[str, float]) -> dict[str, int]:
    """Inner steps per push by node, so that all rounds last about as long and the mean stays near `interval`.

    `step_s`: measured seconds per step; nodes with 0 (unknown) get the run's interval. The round is a whole number of
    steps of the slowest node; the number is the one that wastes least.
    """
    known = {node: seconds for node, seconds in step_s.items() if seconds > 0}
    plain = dict.fromkeys(step_s, interval)
    if len(known) < 2 or max(known.values()) < SAME * min(known.values()):
        return plain
    slowest_s = max(known.values())
    ideal = interval * len(known) / sum(1 / seconds for seconds in known.values()) / slowest_s
    best = min({max(1, floor(ideal) + k) for k in (-1, 0, 1, 2)}, key=lambda k: _cost(k * slowest_s, interval, known))
    return plain | _steps(best * slowest_s, known)


def _steps(round_s: float, step_s: Mapping[str, float]) -> dict[str, int]:
    return {node: max(1, floor(round_s / seconds + SLACK)) for node, seconds in step_s.items()}


def _cost(round_s: float, interval: int, step_s: Mapping[str, float]) -> float:
    """Share of the nodes' time spent waiting, plus what another mean interval costs."""
    steps = _steps(round_s, step_s)
    longest_s = max(steps[node] * step_s[node] for node in steps)
    busy = sum(steps[node] * step_s[node] for node in steps) / (len(steps) * longest_s)
    return (1 - busy) + DEVIATION_COST * abs(sum(steps.values()) / (len(steps) * interval) - 1)
