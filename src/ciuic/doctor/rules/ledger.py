"""Class M: what is wrong in a ledger run, from what its nodes report to the hub. Pure; the hub asks again and again."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ciuic.doctor.finding import Finding

WINDOW = 20
"""Reports and pushes of each node that are looked at."""
LEAST_LOSSES = 8
LOSS_SHARE = 0.3
LOSS_DEVIATIONS = 4.0
TO_DEVIATION = 1.4826
"""Median absolute deviation -> standard deviation, of a normal distribution."""
LEAST_PUSHES = 12
GROWTH, LONG = 2.0, 2.0
LAG_LEAST, LAG_FACTOR, LAG_SHARE = 4, 3, 0.9
MISMATCHES_LEAST = 2
"""Reports in a row: one may have been written while the base moved."""


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """One node, as far as it matters here; sequences have the newest last and at most WINDOW."""

    node: str
    is_training: bool = True
    losses: Sequence[float] = ()
    """Of its latest reports."""
    residuals: Sequence[float] = ()
    """Of its latest pushes: the length of the residual over that of what was to be pushed."""
    lags: Sequence[int] = ()
    """Versions that its base was behind the hub's, of its latest reports."""
    mismatches: int = 0
    """Latest reports in a row in which its base had another digest than the hub's."""
    base: tuple[int, str, str] = (0, "", "")
    """Of the last of these: version, digest of the node, digest of the hub."""
    bad_bases: int = 0
    """How often its worker ended because an entry came out different."""


@dataclass(frozen=True, kw_only=True)
class LedgerView:
    """A run."""

    version: int
    nodes: Sequence[NodeView]
    duplicated: int = 0
    lost: int = 0


def judge(view: LedgerView) -> list[Finding]:
    """What is wrong now; a finding's first module is the node."""
    training = [node for node in view.nodes if node.is_training]
    found = _samples(view)
    for node in view.nodes:
        found += _base(view, node)
    for node in training:
        others = [other for other in training if other is not node]
        found += [*_residual(view, node), *_lag(view, node, others)]
    return found + _loss(view, training)


def _base(view: LedgerView, node: NodeView) -> list[Finding]:
    version, here, there = node.base
    if node.is_training and node.mismatches >= MISMATCHES_LEAST:
        cause = f"the base of node {node.node} at version {version} is {here[:12]}, the hub's is {there[:12]}"
        return [Finding(code="CIUIC-M1", cause=cause, step=version, modules=(node.node,), confidence=0.95)]
    if not node.bad_bases:
        return []
    times = "once" if node.bad_bases == 1 else f"{node.bad_bases} times"
    cause = f"the base of node {node.node} came out different from the hub's {times}; its worker was started again"
    evidence: dict[str, float | int | str] = {"times": node.bad_bases}
    return [Finding(code="CIUIC-M1", cause=cause, step=view.version, modules=(node.node,), evidence=evidence)]


def _residual(view: LedgerView, node: NodeView) -> list[Finding]:
    values = [value for value in node.residuals if value >= 0]
    if len(values) < LEAST_PUSHES:
        return []
    third = len(values) // 3
    first, middle, last = (median(values[at : at + third]) for at in (0, third, len(values) - third))
    if not (last > LONG and middle > GROWTH * first and last > GROWTH * middle):
        return []
    cause = (
        f"the residual of node {node.node} grows: {first:.2g}, then {middle:.2g}, then {last:.2g} times the length of "
        "a push"
    )
    return [Finding(code="CIUIC-M2", cause=cause, step=view.version, modules=(node.node,), confidence=0.8)]


def _lag(view: LedgerView, node: NodeView, others: Sequence[NodeView]) -> list[Finding]:
    if len(node.lags) < WINDOW or not others:
        return []
    usual = [median(other.lags) for other in others if other.lags]
    others_lag = median(usual) if usual else 0.0
    least = max(LAG_LEAST, LAG_FACTOR * others_lag)
    if sum(lag >= least for lag in node.lags) < LAG_SHARE * len(node.lags):
        return []
    cause = (
        f"node {node.node} is {median(node.lags):.0f} versions behind the hub all the time, the others {others_lag:.0f}"
    )
    return [Finding(code="CIUIC-M3", cause=cause, step=view.version, modules=(node.node,), confidence=0.85)]


def _loss(view: LedgerView, training: Sequence[NodeView]) -> list[Finding]:
    known = [node for node in training if len(node.losses) >= LEAST_LOSSES]
    if len(known) < 2:
        return []
    middles = {node.node: median(node.losses) for node in known}
    spread = median([_deviation(node.losses) for node in known])
    found = []
    for node in known:
        others = [value for name, value in middles.items() if name != node.node]
        usual, mine = median(others), middles[node.node]
        if abs(mine - usual) <= max(LOSS_SHARE * abs(usual), LOSS_DEVIATIONS * spread):
            continue
        if len(known) > 2 and _is_between(mine, others):
            continue
        cause = f"the loss of node {node.node} is {mine:.3g}, that of the others {usual:.3g}"
        if len(known) == 2:  # which of two is right cannot be known: the one with the higher loss is told
            if mine < usual:
                continue
            cause = f"the loss of node {node.node} is {mine:.3g}, that of the other node {usual:.3g}"
        evidence: dict[str, float | int | str] = {"loss": mine, "others": usual, "deviation": spread}
        found.append(
            Finding(
                code="CIUIC-M4", cause=cause, step=view.version, modules=(node.node,), evidence=evidence, confidence=0.8
            )
        )
    return found


def _deviation(values: Sequence[float]) -> float:
    middle = median(values)
    return TO_DEVIATION * median([abs(value - middle) for value in values])


def _is_between(value: float, others: Sequence[float]) -> bool:
    return min(others) <= value <= max(others)


def _samples(view: LedgerView) -> list[Finding]:
    if not (view.duplicated or view.lost):
        return []
    cause = f"{view.duplicated} samples were trained twice, {view.lost} are lost"
    evidence: dict[str, float | int | str] = {"twice": view.duplicated, "lost": view.lost}
    return [Finding(code="CIUIC-M5", cause=cause, step=view.version, evidence=evidence, confidence=0.95)]
