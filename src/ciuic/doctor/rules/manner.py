"""Do ranks that train one model compute it alike: modes, settings, autocast, the way from the logits to the loss?"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ciuic.doctor.case import Asked, Case, Round, Rule, odd_ones
from ciuic.doctor.facts import PARAMETERS
from ciuic.doctor.facts_model import EXCHANGE, LEFT_IN_EVALUATION, MANNER, MODE, TRAINING
from ciuic.doctor.facts_training import FORM
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.rules.gathered import ranks_text

ROUNDS_SURE = 2
"""Samples in which ranks must differ."""
ROUNDS_FORM = 3
CLOSE = 0.02
"""Relative: weights that are closer are equal."""
SETTLED = 1e-3
"""Relative: a factor that changes more from sample to sample is computed, not written."""
NAMES_MAX = 4


class Manner(Rule):
    """D6, D7 and E5."""

    def __init__(self) -> None:
        self._apart: dict[tuple[int, tuple[int, ...]], int] = {}
        """By model and ranks: samples in a row in which they differed."""
        self._evaluating, self._since = 0, 0
        """Samples in a row in which all ranks trained in evaluation mode, and the first of them."""
        self._forms: dict[tuple[int, ...], list[dict[int, tuple[str, float]]]] = {}

    def round(self, case: Case, round: Round) -> Iterable[Finding]:
        """Compare ranks that have the same modules."""
        if round.optimizer:
            return
        yield from self._left(round)
        if not _is_data_parallel(round):
            return
        for (model, ranks), digests in _alike(round).items():
            differ = len(set(digests.values())) > 1
            apart = self._apart[model, ranks] = self._apart.get((model, ranks), 0) + 1 if differ else 0
            if apart == ROUNDS_SURE:
                case.ask(self, MANNER, ranks, facts={"model": model}, about=(round.step, digests))
        for ranks in round.groups():
            yield from self._losses(round, ranks)

    def _left(self, round_: Round) -> Iterable[Finding]:
        """All ranks alike: one that differs is D6."""
        values = round_.values(LEFT_IN_EVALUATION)
        self._evaluating = self._evaluating + 1 if values and len(values) == len(round_.records) else 0
        if self._evaluating == 1:
            self._since = round_.step
        if self._evaluating != ROUNDS_SURE:
            return
        yield Finding(
            code="CIUIC-D7",
            cause="the model trained in training mode before, and trains in evaluation mode since step "
            f"{self._since} at "
            f"the latest: {max(values.values())} dropout and normalisation modules do nothing of what they do in "
            "training",
            step=max(1, self._since),
            evidence={"modules": max(values.values())},
            confidence=0.85,
        )

    def answered(self, case: Case, asked: Asked) -> Iterable[Finding]:
        """Name the first modules that differ."""
        step, digests = asked.about
        told = {rank: facts for rank, facts in asked.answers.items() if facts}
        odd = odd_ones({rank: bytes(digest) for rank, digest in digests.items()})
        others = tuple(rank for rank in digests if rank not in odd)
        if len(odd) == len(others) and _all_train(told, odd) and not _all_train(told, others):
            odd = others  # of as many ranks those that do not train
        other = next((rank for rank in told if rank not in odd), None)
        mine = next((rank for rank in odd if rank in told), None)
        if mine is None or other is None:
            return
        found = _difference(told[mine], told[other])
        if found is None:
            return
        what, modules = found
        yield Finding(
            code="CIUIC-D6",
            cause=f"{ranks_text(odd)} computes the model in another way than rank {other}: {what}",
            step=max(1, step),
            ranks=odd,
            modules=modules,
            evidence={"differing_modules": len(modules)},
            confidence=0.95,
        )

    # ---- losses ----------------------------------------------------------------------------------------------------

    def _losses(self, round_: Round, ranks: Sequence[int]) -> Iterable[Finding]:
        forms = {rank: round_.records[rank].facts.get(FORM) for rank in ranks}
        if any(form is None or not form[2] for form in forms.values()) or len({f[0] for f in forms.values() if f}) > 1:
            return
        made = {rank: (str(form[2]), float(form[1])) for rank, form in forms.items() if form is not None}
        seen = self._forms.setdefault(tuple(ranks), [])
        if _are_equal(made) or _weigh_labels_alike(forms) or (seen and not _are_settled(seen[-1], made)):
            seen.clear()
            return
        seen.append(made)
        if len(seen) < ROUNDS_FORM:
            return
        odd = odd_ones({rank: (kind, round(product, 4)) for rank, (kind, product) in made.items()})
        usual = next(rank for rank in ranks if rank not in odd)
        told = f"{_made(made[odd[0]])} on rank {odd[0]}, {_made(made[usual])} on rank {usual}"
        is_zero = made[odd[0]][1] == 0
        yield Finding(
            code="CIUIC-E5",
            cause=f"{ranks_text(odd)} makes its loss in another way than the others: {told}",
            step=max(1, round_.step),
            ranks=odd,
            evidence={f"factor_rank_{rank}": round(product, 6) for rank, (_, product) in list(made.items())[:8]},
            confidence=0.93,
            severity=Severity.CRITICAL if is_zero else None,
        )


def _is_data_parallel(round_: Round) -> bool:
    modes = set(round_.values(MODE).values())
    if modes and modes <= {"ddp", "sharded", "ledger", "local"}:
        return True
    parameters = set(map(bytes, round_.values(PARAMETERS).values()))
    return len(parameters) == 1 and any(value[0] or value[2] for value in round_.values(EXCHANGE).values())


def _alike(round_: Round) -> dict[tuple[int, tuple[int, ...]], dict[int, bytes]]:
    """Digests by rank, of each model and the ranks that hold the same one: replicas, and all that share out a model."""
    is_sharded = set(round_.values(MODE).values()) == {"sharded"}
    groups = [tuple(sorted(round_.records))] if is_sharded else round_.groups()
    told = round_.values(MANNER)
    found: dict[tuple[int, tuple[int, ...]], dict[int, bytes]] = {}
    for group in groups:
        by_structure: dict[tuple[int, bytes], dict[int, bytes]] = {}
        for rank in group:
            for index, structure, digest in told.get(rank, ()):
                by_structure.setdefault((int(index), bytes(structure)), {})[rank] = bytes(digest)
        found |= {(index, tuple(digests)): digests for (index, _), digests in by_structure.items()}
    return found


def _all_train(told: Mapping[int, Any], ranks: Sequence[int]) -> bool:
    """Whether all modules of these ranks are in training mode."""
    return all(rank in told and all(mode == TRAINING for _, mode in told[rank]["modules"].values()) for rank in ranks)


def _difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, tuple[str, ...]] | None:
    """What differs first, in words, and the modules in which."""
    if mine["context"] != other["context"]:
        return f"{mine['context']} there, {other['context']} here", ()
    own, theirs = mine["modules"], other["modules"]
    paths = [path for path in own if path in theirs and own[path] != theirs[path]]
    if not paths:
        return None
    settings = [path for path in paths if own[path][0] != theirs[path][0]]
    if settings:
        first = settings[0]
        more = f" and {len(settings) - 1} more" if len(settings) > 1 else ""
        return f"{first} is {_settings(own[first][0], theirs[first][0])}{more}", tuple(settings[:NAMES_MAX])
    first = paths[0]
    if first == "" and len(paths) == len(own):
        return f"the whole model is in {own[first][1]} mode, not in {theirs[first][1]} mode", ()
    named = tuple(path for path in paths if path)[:NAMES_MAX]
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{first or 'the model'}{more} is in {own[first][1]} mode, not in {theirs[first][1]} mode", named


def _settings(mine: str, other: str) -> str:
    """`BatchNorm1d(momentum=0.5), not BatchNorm1d(momentum=0.1)`."""

    def only(text: str, known: str) -> str:
        name, _, inside = text.partition("(")
        own = [part for part in inside.removesuffix(")").split(", ") if part not in known]
        return f"{name}({', '.join(own)})"

    return f"{only(mine, other)}, not {only(other, mine)}"


def _are_equal(made: Mapping[int, tuple[str, float]]) -> bool:
    products = [product for _, product in made.values()]
    return len({kind for kind, _ in made.values()}) == 1 and max(products) - min(products) <= CLOSE * max(products)


def _are_settled(before: Mapping[int, tuple[str, float]], now: Mapping[int, tuple[str, float]]) -> bool:
    return all(
        rank in before and before[rank][0] == kind and abs(before[rank][1] - product) <= SETTLED * abs(product)
        for rank, (kind, product) in now.items()
    )


def _weigh_labels_alike(forms: Mapping[int, Any]) -> bool:
    """Factors that make up for another number of labels are right; of sums they are such numbers, which E2 judges."""
    if all(form[2] == "sum" for form in forms.values()):
        return True
    if not all(form[3] and form[2] == "mean" for form in forms.values()):
        return False
    weights = [form[1] / form[3] for form in forms.values()]
    return max(weights) - min(weights) <= CLOSE * max(weights)


def _made(made: tuple[str, float]) -> str:
    kind, product = made
    return f"a {kind} times {product:.4g}"
