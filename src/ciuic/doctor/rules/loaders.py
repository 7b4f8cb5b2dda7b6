"""Class H, how data are shared out: loaders of the ranks side by side."""

from collections.abc import Iterable, Iterator
from typing import Any

from ciuic.doctor.case import Case, Round, Rule, odd_ones
from ciuic.doctor.facts_data import EPOCH, LOADER, LOADER_ENDS
from ciuic.doctor.facts_waiting import UNEVEN
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.record import Beat, Notice
from ciuic.doctor.rules.gathered import Gathered, Together, ranks_text

CONSEQUENCES = ("CIUIC-J1", "CIUIC-J2", "CIUIC-J3", "CIUIC-J7")
ROUNDS_APART = 2
SETTINGS = {
    "shuffle": "shuffling",
    "seed": "seed of the sampler",
    "drop_last": "drop_last",
    "samples": "number of samples",
}


class Loaders(Rule):
    """H3, H6 and H8."""

    def __init__(self) -> None:
        self._notices = Gathered()
        self._is_joined = False
        self._lengths: dict[int, int] = {}
        """By rank, when they differ: batches of a pass."""
        self._ended: dict[int, tuple[int, int]] = {}
        """By rank: batches of its last pass that ended, and the step."""
        self._uneven: Finding | None = None
        self._epochs_apart = 0

    def notice(self, case: Case, notice: Notice) -> Iterable[Finding]:
        """Keep it."""
        if notice.kind == LOADER:
            self._notices.add((LOADER, notice.facts.get("number")), notice)
        elif notice.kind == LOADER_ENDS:
            self._notices.add((LOADER_ENDS, notice.facts.get("number"), notice.facts.get("pass")), notice)
            self._ended[notice.rank] = int(notice.facts.get("batches", 0)), notice.step
        return ()

    def beat(self, case: Case, beat: Beat) -> Iterable[Finding]:
        """Does the program use Join?"""
        self._is_joined |= bool(beat.facts.get(UNEVEN))
        return ()

    def round(self, case: Case, round: Round) -> Iterable[Finding]:
        """Are all in the same epoch?"""
        epochs = round.values(EPOCH)
        if round.optimizer or len(epochs) < 2 or len(set(epochs.values())) == 1 or self._lengths:
            return
        self._epochs_apart += 1
        if self._epochs_apart == ROUNDS_APART:
            odd = odd_ones(epochs)
            yield Finding(
                code="CIUIC-H8",
                cause=f"the sampler of {ranks_text(odd)} is at epoch {epochs[odd[0]]} where the others are at another "
                f"one: orders differ, shares overlap",
                step=1,
                ranks=odd,
                evidence={f"epoch_rank_{rank}": epoch for rank, epoch in list(epochs.items())[:8]},
                fix="call sampler.set_epoch(epoch) on all ranks",
                confidence=0.96,  # one that stays where it is gives CIUIC-H1 as well
            )

    def tick(self, case: Case, now_s: float) -> Iterable[Finding]:
        """What all ranks have told."""
        yield from self._judge(case, now_s, force=False)

    def end(self, case: Case) -> Iterable[Finding]:
        """What some have told."""
        yield from self._judge(case, 0.0, force=True)

    def _judge(self, case: Case, now_s: float, *, force: bool) -> Iterator[Finding]:
        for together in self._notices.ready(case, now_s, force=force):
            if len(together.facts) < 2:
                continue
            if together.key[0] == LOADER_ENDS:  # ty: ignore[not-subscriptable]
                yield from self._lengths_of(together, {rank: int(f["batches"]) for rank, f in together.facts.items()})
                continue
            whole = len(together.facts) == case.world
            yield from _shares(together, whole=whole)
            yield from _settings(together)
            yield from self._lengths_of(together, {rank: int(f["length"]) for rank, f in together.facts.items()})
        yield from self._consequence(case)

    def _lengths_of(self, together: Together, lengths: dict[int, int]) -> Iterator[Finding]:
        if -1 in lengths.values() or len(set(lengths.values())) == 1 or self._uneven is not None:
            return
        self._lengths = lengths
        short = tuple(rank for rank, length in lengths.items() if length < max(lengths.values()))
        told = ", ".join(f"{length} on rank {rank}" for rank, length in sorted(lengths.items())[:6])
        self._uneven = Finding(
            code="CIUIC-H6",
            cause=f"the ranks have another number of batches in an epoch: {told}",
            step=max(1, together.step),
            ranks=short,
            evidence={f"batches_rank_{rank}": length for rank, length in sorted(lengths.items())[:8]},
            confidence=0.5,
            severity=Severity.NOTE,
        )
        yield self._uneven

    def _consequence(self, case: Case) -> Iterator[Finding]:
        """The run came to harm at the end of a short pass: that was it."""
        uneven = self._uneven
        if uneven is None or uneven.severity is None or self._is_joined or not case.has(*CONSEQUENCES):
            return
        ended = {rank: self._ended[rank][1] for rank in uneven.ranks if rank in self._ended}
        for rank in uneven.ranks:
            bye, length = case.byes.get(rank), self._lengths.get(rank, 0)
            if bye is not None and bye.how == "end" and bye.step and length and not bye.step % length:
                ended.setdefault(rank, bye.step)  # it left after whole passes
        if not ended:
            return
        step = min(ended.values())
        harm = min(f.step for f in case.findings.values() if f.code in CONSEQUENCES)
        if harm + 1 < step:
            return
        cause = f"{uneven.cause}; {ranks_text(tuple(ended))} came to the end while the others went on"
        self._uneven = Finding(
            code="CIUIC-H6",
            cause=cause,
            step=max(1, min(step, harm)),
            ranks=tuple(ended),
            evidence=uneven.evidence,
            confidence=0.92,
        )
        yield self._uneven


def _shares(together: Together, *, whole: bool) -> Iterator[Finding]:
    """Is every sample in somebody's share?"""
    facts = {rank: f for rank, f in together.facts.items() if f.get("split")}
    if len(facts) < 2:
        return
    count = max(int(f["replicas"]) for f in facts.values())
    places = {int(f["place"]) for f in facts.values()}
    evidence: dict[str, float | int | str] = {"shares": count, "shares_read": len(places)}
    if any(f.get("sharded") for f in facts.values()) and count > 1:
        yield Finding(
            code="CIUIC-H3",
            cause=f"the stream is one rank's share already, and is shared out to {count} once more: "
            f"1 sample of {count} is read",
            step=1,
            evidence=evidence,
            confidence=0.9,
        )
    elif whole and len(facts) == len(together.facts) and len(places) == 1 < count:
        yield Finding(
            code="CIUIC-H2",
            cause=f"all ranks read the same data: the sampler of each takes share {places.pop()} of {count}",
            step=1,
            evidence=evidence,
            fix="leave num_replicas and rank away, or give each rank its own rank",
            confidence=0.93,
        )
    elif whole and len(facts) == len(together.facts) and len(places) < count:
        yield Finding(
            code="CIUIC-H3",
            cause=f"the sampler shares the data out to {count} ranks and only {len(places)} of the shares are read",
            step=1,
            evidence=evidence,
            fix="leave num_replicas and rank away, or give each rank its own rank and the number of ranks",
            confidence=0.9,
        )
    elif len(places) > 1 and count > 1:
        yield from _other_data(facts, count, evidence)


def _other_data(
    facts: dict[int, dict[str, Any]], count: int, evidence: dict[str, float | int | str]
) -> Iterator[Finding]:
    """The data sets themselves are different ones, and the sampler reads only its share of each."""
    held = {rank: f.get("contents") or {} for rank, f in facts.items()}
    names = set.intersection(*(set(each) for each in held.values()))
    if not names or any(len({bytes(each[name][0]) for each in held.values()}) < len(held) for name in names):
        return
    drawn = all(each[name][1] for each in held.values() for name in names)
    yield Finding(
        code="CIUIC-H3",
        cause=f"the data set is another one on each rank ({', '.join(sorted(names))} differ), and the sampler reads "
        f"1 sample of {count} of it: the others are never read",
        step=1,
        evidence=evidence,
        confidence=0.6 if drawn else 0.92,
        severity=Severity.NOTE if drawn else None,
    )


def _settings(together: Together) -> Iterator[Finding]:
    """Shares of one order fit together; shares of different orders overlap."""
    facts = {rank: f for rank, f in together.facts.items() if f.get("split") == "index"}
    if len(facts) < 2:
        return
    for name, words in SETTINGS.items():
        values = {rank: f.get(name) for rank, f in facts.items()}
        if len(set(values.values())) == 1 or (name == "seed" and not any(f["shuffle"] for f in facts.values())):
            continue
        odd = odd_ones(values)
        told = ", ".join(f"{value} on rank {rank}" for rank, value in sorted(values.items())[:4])
        yield Finding(
            code="CIUIC-H8",
            cause=f"{ranks_text(odd)} has another {words} than the others ({told}): "
            f"shares overlap, and samples are left out",
            step=1,
            ranks=odd,
            evidence={f"{name}_rank_{rank}": str(value) for rank, value in sorted(values.items())[:8]},
            confidence=0.95,
        )
        return
