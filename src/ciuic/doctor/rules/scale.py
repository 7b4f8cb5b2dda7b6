"""Class E: the scale of loss and gradients. The invariant: every label has the same weight in the step's gradient."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ciuic.doctor.case import Case, Round, Rule
from ciuic.doctor.facts_model import MODE
from ciuic.doctor.facts_training import FORM, LOSS, REDUCED, WEIGHTS_REDUCED
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.rules.gains import Gain, gain_of, mean_gain, uncounted
from ciuic.doctor.rules.gathered import ranks_text

CLOSE = 0.02
"""Relative: a gain this close to a number is that number."""
ROUNDS_SURE = 2
"""Samples in which a wrong gain must be seen."""
ROUNDS_STRANGE = 3
"""Samples in a row in which a gain that is neither a mean's nor a sum's must be the same."""
SAMPLES_IMBALANCE = 5
"""Samples of the labels' weights; between them every step counts at the start of a run."""
SAMPLES_MANY = 10
"""After so many it is enough that the most labels of one rank are fewer than the least of the others."""
IMBALANCE, APART = 2.0, 1.2
"""On average a label of one rank weighs so many times another's, and its most labels are so much fewer than the least
of the others: never the other way round, as it would be by chance."""


@dataclass(kw_only=True)
class _Labels:
    """By how many labels a rank's loss was divided."""

    low: float = float("inf")
    high: float = 0.0
    total: float = 0.0
    samples: int = 0

    @property
    def mean(self) -> float:
        return self.total / max(1, self.samples)

    def add(self, form: Sequence[Any]) -> None:
        divisors = form[5:7]
        if len(divisors) == 2:
            self.low, self.high = min(self.low, divisors[0]), max(self.high, divisors[1])
            self.total, self.samples = self.total + sum(divisors) / 2, self.samples + 1


class Scale(Rule):
    """Counts samples by optimizer and ranks, so that one odd step is no finding."""

    def __init__(self) -> None:
        self._averages: dict[tuple[tuple[int, ...], int], dict[int, Any]] = {}
        self._seen: dict[tuple[str, int, tuple[int, ...]], int] = {}
        self._since: dict[tuple[str, int, tuple[int, ...]], int] = {}
        self._weights: dict[tuple[int, tuple[int, ...]], dict[int, _Labels]] = {}
        self._uncounted_by: dict[tuple[int, tuple[int, ...]], tuple[tuple[int, ...], int, int]] = {}
        """Ranks that did not count at the last sample, since which step, in how many samples."""
        self._gains: dict[tuple[int, tuple[int, ...]], list[float]] = {}

    def round(self, case: Case, round: Round) -> Iterable[Finding]:
        groups = round.groups() or [(rank,) for rank in round.records if case.world == 1]
        for ranks in groups:
            gain = gain_of(round, ranks)
            is_sum = yield from self._reductions(round, ranks, gain)
            yield from self._micro_batches(round, ranks, gain, is_sum=is_sum)
            yield from self._labels(round, ranks)
            yield from self._uncounted(round, ranks)

    def notice(self, case: Case, notice: Any) -> Iterable[Finding]:
        if notice.kind != WEIGHTS_REDUCED:
            return
        ranks = tuple(notice.facts["ranks"])
        heard = self._averages.setdefault((ranks, notice.facts["number"]), {})
        heard[notice.rank] = notice
        if len(heard) < len(ranks) or len({each.facts["parameter"] for each in heard.values()}) != 1:
            return
        before = [heard[rank].facts["before"] for rank in ranks]
        gain = mean_gain(before, [heard[rank].facts["after"] for rank in ranks])
        if gain is None or not _is(gain, len(ranks)):
            return
        name, site = notice.facts["parameter"], notice.facts["site"]
        yield Finding(
            code="CIUIC-E4",
            cause=f"the weights of {len(ranks)} ranks are summed in {site} and never divided: "
            f"{name} is {gain:.3g} times the mean of what they had",
            step=max(1, notice.step),
            modules=(name,),
            evidence={"gain": round(gain, 4), "ranks": len(ranks), "site": site},
            fix="divide by the number of ranks after the all_reduce: p.div_(world_size)",
            confidence=0.95,
        )

    # ---- reductions ------------------------------------------------------------------------------------------------

    def _reductions(self, round_: Round, ranks: Sequence[int], gain: Gain | None) -> Iterable[Finding]:
        """Yields findings; its value is whether the step has a sum over the ranks in place of their mean."""
        count = len(ranks)
        if gain is None or count == 1:
            return False
        reduced = round_.records[ranks[0]].facts.get(REDUCED)
        is_sum = _is(gain.value, count)
        if gain.is_managed or (reduced is not None and reduced[4]):
            if is_sum and self._sure("E3", round_, ranks):
                yield self._twice(round_, ranks, reduced, gain)
            elif reduced is not None and reduced[4] and _is(gain.value, 1.0) and self._sure("E3", round_, ranks):
                yield self._for_nothing(round_, ranks, reduced)
            return is_sum
        if is_sum and not self._is_meant(round_, ranks) and self._sure("E4", round_, ranks):
            yield self._sum(round_, ranks, reduced, gain)
        elif not is_sum and self._is_strange(round_, ranks, gain):
            yield self._divisor(round_, ranks, reduced, gain)
        return is_sum

    def _is_strange(self, round_: Round, ranks: Sequence[int], gain: Gain) -> bool:
        """Neither a mean nor a sum, by one and the same number in ROUNDS_STRANGE samples: nothing that is computed."""
        form = round_.records[ranks[0]].facts.get(FORM)
        if form is None or form[2] != "mean" or not _is(float(form[0] * form[1]), 1.0):
            return False  # a factor may make up for it
        seen = self._gains.setdefault((round_.optimizer, tuple(ranks)), [])
        if _is(gain.value, 1.0) or (seen and not _is(gain.value, seen[-1])):
            seen.clear()
        if not _is(gain.value, 1.0):
            seen.append(gain.value)
        self._sure("E4", round_, ranks)
        return len(seen) >= ROUNDS_STRANGE

    def _divisor(self, round_: Round, ranks: Sequence[int], reduced: list | None, gain: Gain) -> Finding:
        where = f" in {reduced[3]}" if reduced else ""
        divisor = len(ranks) / gain.value
        return Finding(
            code="CIUIC-E4",
            cause=f"gradients are summed over {len(ranks)} ranks{where} and divided by {divisor:.4g}: they are "
            f"{gain.value:.3g} times the mean, as if the learning rate were",
            step=self._first("E4", round_, ranks),
            modules=(reduced[2],) if reduced else (),
            evidence={"gain": round(gain.value, 4), "ranks": len(ranks)} | ({"site": reduced[3]} if reduced else {}),
            fix=f"divide by the number of ranks, {len(ranks)}: dist.get_world_size(group)",
            confidence=0.8,
            severity=Severity.WARNING,
        )

    def _twice(self, round_: Round, ranks: Sequence[int], reduced: list | None, gain: Gain) -> Finding:
        count = len(ranks)
        where = f" by {reduced[0]} calls in {reduced[3]}" if reduced else ""
        return Finding(
            code="CIUIC-E3",
            cause=f"gradients that DDP has averaged over {count} ranks are reduced once more{where}: "
            f"they are {gain.value:.3g} times too large, as if the learning rate were",
            step=self._first("E3", round_, ranks),
            modules=(reduced[2],) if reduced else (),
            evidence={"gain": round(gain.value, 4), "ranks": count} | ({"site": reduced[3]} if reduced else {}),
            confidence=0.95 if reduced else 0.85,
        )

    def _for_nothing(self, round_: Round, ranks: Sequence[int], reduced: list) -> Finding:
        return Finding(
            code="CIUIC-E3",
            cause=f"gradients that DDP has averaged are averaged once more by {reduced[0]} calls in {reduced[3]}: "
            "the numbers stay right, every gradient is sent twice",
            step=round_.step,
            modules=(reduced[2],),
            evidence={"gain": 1.0, "site": reduced[3]},
            confidence=0.5,
            severity=Severity.NOTE,
        )

    def _sum(self, round_: Round, ranks: Sequence[int], reduced: list | None, gain: Gain) -> Finding:
        form = round_.records[ranks[0]].facts.get(FORM)
        known = form is not None and form[2] == "mean"
        by_hook = round_.records[ranks[0]].facts.get(MODE) == "ddp"
        where = " by DDP's communication hook" if by_hook else f" in {reduced[3]}" if reduced else ""
        return Finding(
            code="CIUIC-E4",
            cause=f"gradients are summed over {len(ranks)} ranks{where} and never divided: they are "
            f"{gain.value:.3g} times the mean, as if the learning rate were",
            step=self._first("E4", round_, ranks),
            modules=(reduced[2],) if reduced else (),
            evidence={"gain": round(gain.value, 4), "ranks": len(ranks)} | ({"site": reduced[3]} if reduced else {}),
            fix="divide what the hook returns by the number of ranks" if by_hook else "",
            confidence=0.95 if known else 0.6,
            severity=None if known else Severity.WARNING,
        )

    def _is_meant(self, round_: Round, ranks: Sequence[int]) -> bool:
        """A sum over the ranks is right for a loss that is a sum, or was divided by their number already."""
        form = round_.records[ranks[0]].facts.get(FORM)
        if form is None:
            return False
        micro, product, reduction = form[:3]
        if reduction == "sum":
            return True
        share = 1.0 / len(ranks)
        return _is(product * micro, share) or (micro == 1 and _is(product, share))

    # ---- micro-batches -----------------------------------------------------------------------------------------------

    def _micro_batches(
        self, round_: Round, ranks: Sequence[int], gain: Gain | None, *, is_sum: bool
    ) -> Iterable[Finding]:
        given = [round_.records[rank].facts.get(FORM) for rank in ranks]
        forms = {(form[0], form[4]) for form in given if form is not None}
        if gain is None or None in given or len(forms) != 1:
            return
        micro, divided = forms.pop()
        if micro < 2 or divided < 0:
            return
        by_hand = gain.value / (len(ranks) if is_sum and not gain.is_managed else 1.0)
        times = divided + _is(by_hand, 1.0 / micro)
        if times == 1 or not (_is(by_hand, 1.0) or times > divided) or not self._sure("E1", round_, ranks):
            return
        text = "never divided" if times == 0 else "divided twice"
        factor = float(micro) if times == 0 else 1.0 / micro
        yield Finding(
            code="CIUIC-E1",
            cause=f"{micro} micro-batches make one step and their loss is {text} by {micro}: "
            f"gradients are {factor:.3g} times those of one large batch",
            step=self._first("E1", round_, ranks),
            evidence={"micro_batches": micro, "times_divided": int(times), "gain": round(gain.value, 4)},
            fix=f"loss = loss / {micro}" if times == 0 else f"divide by {micro} once: remove one of the two divisions",
            confidence=0.9,
        )

    # ---- ranks -------------------------------------------------------------------------------------------------------

    def _uncounted(self, round_: Round, ranks: Sequence[int]) -> Iterable[Finding]:
        """Ranks whose gradients are not in what all ranks get, in several samples in a row."""
        key = round_.optimizer, tuple(ranks)
        now = uncounted(round_, ranks)
        before, since, count = self._uncounted_by.get(key, ((), 0, 0))
        count, since = (count + 1, since) if now and now == before else (1, round_.step)
        self._uncounted_by[key] = now, since, count
        if not now or count < ROUNDS_STRANGE:
            return
        others = tuple(rank for rank in ranks if rank not in now)
        those = f"of {ranks_text(others)} alone" if len(others) == 1 else f"of the others without {ranks_text(now)}"
        yield Finding(
            code="CIUIC-A8",
            cause=f"the gradients that all ranks use are those {those}: what {ranks_text(now)} computed is lost",
            step=since,
            ranks=now,
            evidence={"samples": count, "ranks_that_count": len(others)},
            confidence=0.85,
        )

    # ---- labels ------------------------------------------------------------------------------------------------------

    def _labels(self, round_: Round, ranks: Sequence[int]) -> Iterable[Finding]:
        forms = {rank: round_.records[rank].facts.get(FORM) for rank in ranks}
        weights = {rank: _weight(form) for rank, form in forms.items() if form is not None}
        if any(round_.records[rank].facts.get(LOSS) == 0 for rank in ranks):
            return  # a rank without any label: E6
        if len(ranks) < 2 or len(weights) < len(ranks) or any(weight <= 0 for weight in weights.values()):
            return
        heaviest = max(weights, key=lambda rank: weights[rank])
        seen = self._weights.setdefault((round_.optimizer, tuple(ranks)), {})
        for rank, form in forms.items():
            seen.setdefault(rank, _Labels()).add(form or [])
        self._sure("E2", round_, ranks)
        others = min(labels.low for rank, labels in seen.items() if rank != heaviest)
        mean = max(labels.mean for labels in seen.values()) / max(1e-9, seen[heaviest].mean)
        samples = seen[heaviest].samples
        apart = APART if samples < SAMPLES_MANY else 1.0
        if samples < SAMPLES_IMBALANCE or mean < IMBALANCE or others <= apart * seen[heaviest].high:
            return
        is_known = all(form is not None and form[3] for form in forms.values())
        told = f" ({_counts({rank: labels.mean for rank, labels in seen.items()})})" if is_known else ""
        yield Finding(
            code="CIUIC-E2",
            cause=f"rank {heaviest} has fewer labels that count than the others{told}, and each rank's loss is a mean "
            f"over its own: one of its labels weighs {mean:.3g} times as much in the gradient",
            step=self._first("E2", round_, ranks),
            ranks=(heaviest,),
            evidence={"weight_ratio": round(mean, 3)}
            | {f"labels_rank_{rank}": round(labels.mean, 1) for rank, labels in list(seen.items())[:8]},
            confidence=0.9,
        )

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _sure(self, what: str, round_: Round, ranks: Sequence[int]) -> bool:
        key = what, round_.optimizer, tuple(ranks)
        self._seen[key] = self._seen.get(key, 0) + 1
        self._since[key] = min(round_.step, self._since.get(key, round_.step))
        return self._seen[key] >= ROUNDS_SURE

    def _first(self, what: str, round_: Round, ranks: Sequence[int]) -> int:
        return self._since.get((what, round_.optimizer, tuple(ranks)), round_.step)


def _weight(form: list) -> float:
    """Of one label in the rank's gradient; 0: not known."""
    micro, product, reduction, labels = form[:4]
    if reduction == "mean" and labels:
        return product * micro / labels
    if reduction == "sum" and 0 < product < 1 and _is_whole(1.0 / product):
        return product
    return 0.0


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) < 1e-4 * value


def _is(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= CLOSE * abs(wanted)


def _counts(labels: dict[int, float]) -> str:
    shown = [f"{value:.0f} on rank {rank}" for rank, value in list(labels.items())[:4]]
    return ", ".join(shown) + (", ..." if len(labels) > len(shown) else "")
