"""D3: buffers that differ where they should be equal."""

from collections.abc import Iterable, Iterator

from ciuic.doctor.case import Asked, Case, Round, Rule
from ciuic.doctor.facts import BUFFERS, GRADIENTS, PARAMETERS
from ciuic.doctor.facts_model import AVERAGES, EVALUATED, EXCHANGE, FLOW, MODE, MODEL
from ciuic.doctor.finding import Blind, Finding
from ciuic.doctor.record import Notice
from ciuic.doctor.rules.drill import Drill, drill, follow
from ciuic.doctor.rules.memory import listed
from ciuic.doctor.rules.unsynchronised import BACKWARDS

ROUNDS = 2
NAMES_MAX = 8
SEARCHES_MAX = 4
WHEN = {
    EVALUATED: "when an evaluation began",
    BUFFERS: "in a training forward pass",
    AVERAGES: "(a copy of the weights), though the weights are equal,",
}


class Buffers(Rule):
    """In training forward passes, and when an evaluation begins."""

    def __init__(self) -> None:
        self._rounds = 0
        self._searches = self._copies = 0
        self._evaluated: dict[tuple[int, int], dict[int, bytes]] = {}
        self._synced: dict[int, bool] = {}
        self._is_synchronous = self._is_over = False

    def notice(self, case: Case, notice: Notice) -> Iterable[Finding | Blind]:
        """An evaluation begins on one rank."""
        facts = notice.facts
        if notice.kind == MODEL:
            self._synced[int(facts.get("index", 0))] = bool(facts.get("forward_sync_buffers"))
        if notice.kind != EVALUATED:
            return ()
        model, count = int(facts.get("model", 0)), int(facts.get("count", 0))
        known = self._evaluated.setdefault((model, count), {})
        known[notice.rank] = bytes(facts.get("buffers", b""))
        if len(known) < len(case.present()) or len(known) < 2 or len(set(known.values())) == 1:
            return ()
        if not self._synced.get(model, False) and self._is_synchronous and self._searches < SEARCHES_MAX:
            self._search(
                case, Round(optimizer=-1 - model, step=count, began_s=0.0), tuple(known), EVALUATED, notice.step
            )
        return ()

    def round(self, case: Case, round: Round) -> Iterable[Finding | Blind]:
        """Right after DDP's broadcast, or buffers that forward passes use."""
        if len({value[BACKWARDS] for value in round.values(FLOW).values()}) > 1:
            self._is_over = True  # the ranks are not at the same step
        if self._is_over:
            return ()
        gradients = round.values(GRADIENTS)
        modes = set(round.values(MODE).values())
        equal = len(gradients) > 1 and len(set(map(bytes, gradients.values()))) == 1
        if equal and ("ddp" in modes or round.values(EXCHANGE)):
            self._is_synchronous = True
        for ranks in round.groups():
            values = {rank: bytes(value) for rank, value in round.values(BUFFERS).items() if rank in ranks}
            if len(set(values.values())) < 2:
                continue
            self._rounds += 1
            if self._rounds >= ROUNDS and self._is_synchronous and self._searches < SEARCHES_MAX:
                self._search(case, round, tuple(values), BUFFERS, round.step)
        self._averages(case, round)
        return ()

    def _averages(self, case: Case, round_: Round) -> None:
        """Copies that differ while the models they are of are equal."""
        values = round_.values(AVERAGES)
        equal = len(set(map(bytes, round_.values(PARAMETERS).values()))) == 1
        if len(set(map(bytes, values.values()))) < 2 or not equal or not self._is_synchronous:
            self._copies = 0
            return
        self._copies += 1
        if self._copies >= ROUNDS and self._searches < SEARCHES_MAX:
            self._search(case, round_, tuple(values), AVERAGES, round_.step)

    def answered(self, case: Case, asked: Asked) -> Iterable[Finding | Blind]:
        """One level further."""
        yield from follow(case, self, asked)

    def _search(self, case: Case, round_: Round, ranks: tuple[int, ...], of: str, step: int) -> None:
        self._searches += 1

        def found(case: Case, search: Drill) -> Iterator[Finding]:
            names = list(search.leaves)
            if not names:
                return
            when = WHEN[of]
            cause = (
                f"{listed(names)} differ between ranks {when} at step {max(step, 1)}: what the model gives depends "
                "on the rank"
            )
            evidence: dict[str, float | int | str] = {"differing_buffers": len(names)}
            modules = tuple(names[:NAMES_MAX])
            yield Finding(
                code="CIUIC-D3", cause=cause, step=max(step, 1), modules=modules, evidence=evidence, confidence=0.8
            )

        drill(case, self, Drill(of=of, round=round_, ranks=ranks, found=found))
