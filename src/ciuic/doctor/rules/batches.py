"""Class H, what is read: order of epochs, the same data on several ranks, data after a checkpoint, workers."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from ciuic.doctor.case import Case, Round, Rule
from ciuic.doctor.facts import PARAMETERS
from ciuic.doctor.facts_data import FEED, FEED_BYTES, LOADER, PEERS, RESUMED_AT, SAME_ORDER, SHARED_MEMORY
from ciuic.doctor.facts_model import EXCHANGE, MODE
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.record import Notice
from ciuic.doctor.rules.gathered import Gathered, Together, ranks_text

NUMBERS_HELD = 64
SAME_MIN = 3
"""Batches in a row."""
SHARE, SHARE_MODEL = 0.9, 0.3
"""Of the batches that were compared; a model may be called more than once for each batch."""
TOLERANCE, TOLERANCE_SHARE = 2, 0.1
"""Batches by which a resumed run may be off: a scaler's skipped steps, a loader that reads ahead."""
_WORKER = re.compile(
    r"DataLoader worker .*(killed by signal|exited unexpectedly)|unable to open shared memory|bus error", re.IGNORECASE
)
_SIGNAL = re.compile(r"killed by signal: ([\w ]+)")
Numbers = dict[int, dict[int, bytes]]


class Batches(Rule):
    """H1, H2, H4, H5 and H9."""

    def __init__(self) -> None:
        self._notices = Gathered()
        self._numbers: dict[int, Numbers] = {}
        """By source and number of the batch: the digest of each rank."""
        self._is_told = False
        self._params_equal: bool | None = None
        self._exchanges = False
        self._first: tuple[int, int] | None = None
        """Step and batches so far of the first sample."""
        self._per_step = 0
        self._resumed: list[Together] = []
        self._workers: dict[int, int] = {}
        """By rank: workers of the loader that training uses, of a stream."""

    def notice(self, case: Case, notice: Notice) -> Iterable[Finding]:
        """Keep it."""
        if notice.kind in (SAME_ORDER, RESUMED_AT, SHARED_MEMORY):
            self._notices.add(notice.kind, notice)
        elif notice.kind == LOADER and notice.facts.get("stream") and int(notice.facts.get("workers", 0)) > 1:
            self._workers[notice.rank] = int(notice.facts["workers"])
        return ()

    def round(self, case: Case, round: Round) -> Iterable[Finding]:
        """Compare the newest batches."""
        if round.optimizer:
            return ()
        feeds = round.values(FEED)
        for rank, sources in feeds.items():
            for source, count, digests in sources:
                self._add(int(source), rank, int(count), bytes(digests))
        self._learn(round, feeds)
        found = [*self._after_checkpoint(), *self._repeated()]
        if not self._is_told and self._is_data_parallel(round):
            found += self._same_data(round)
        return found

    def tick(self, case: Case, now_s: float) -> Iterable[Finding]:
        """What all ranks have told."""
        yield from self._judge(case, now_s, force=False)

    def end(self, case: Case) -> Iterable[Finding]:
        """What some have told."""
        yield from self._judge(case, 0.0, force=True)

    def left(self, case: Case, rank: int, how: str) -> Iterable[Finding]:
        """Did a worker of its loader end it?"""
        if not _WORKER.search(how):
            return
        signal = _SIGNAL.search(how)
        by = f" by {signal[1].strip()}" if signal else ""
        bye = case.byes.get(rank)
        yield Finding(
            code="CIUIC-H5",
            cause=f"a data worker of rank {rank} died{by}: {how[:160]}",
            step=(bye.step if bye is not None else 0) + 1,
            ranks=(rank,),
            evidence={"error": how[:200]},
            confidence=0.95,
        )

    # ---- the same data -----------------------------------------------------------------------------------------------

    def _add(self, source: int, rank: int, count: int, digests: bytes) -> None:
        known = self._numbers.setdefault(source, {})
        parts = [digests[at : at + FEED_BYTES] for at in range(0, len(digests), FEED_BYTES)]
        for at, part in enumerate(parts):
            known.setdefault(count - len(parts) + 1 + at, {})[rank] = part
        while len(known) > NUMBERS_HELD:
            known.pop(next(iter(known)))

    def _learn(self, round_: Round, feeds: dict[int, Any]) -> None:
        if self._params_equal is None and len(round_.values(PARAMETERS)) > 1:
            self._params_equal = len(set(map(bytes, round_.values(PARAMETERS).values()))) == 1
        self._exchanges |= any(value[0] or value[2] for value in round_.values(EXCHANGE).values())
        counts = [count for sources in feeds.values() for source, count, _ in sources if source == 0]
        if counts and self._first is None:
            self._first = round_.step, min(counts)
        elif counts and self._first is not None and round_.step > self._first[0]:
            # the first step may come after batches that a resumed run leaves out
            self._per_step = max(1, round((min(counts) - self._first[1]) / (round_.step - self._first[0])))

    def _is_data_parallel(self, round_: Round) -> bool:
        modes = set(round_.values(MODE).values())
        if modes & {"ddp", "sharded", "ledger", "local"}:
            return True
        return bool(self._params_equal and self._exchanges)

    def _same_data(self, round_: Round) -> Iterator[Finding]:
        peers = next(iter(round_.values(PEERS).values()), None)
        ranks = set(round_.records) if peers is None else set(round_.records) & set(peers)
        if len(ranks) < 2:
            return
        loader = self._compared(0, ranks)
        models = [each for source in self._numbers if source for each in [self._compared(source, ranks)] if each]
        same = _same(loader, SHARE) if loader else set()
        if loader and models:
            same &= set().union(*(_same(each, SHARE_MODEL) for each in models))
        elif models:
            same = set().union(*(_same(each, SHARE) for each in models))
        if len(same) < 2:
            return
        numbers = loader or models[0]
        constant = (
            len({digest for by_rank in numbers.values() for rank, digest in by_rank.items() if rank in same}) == 1
        )
        self._is_told = True
        yield _same_finding(round_, tuple(sorted(same)), len(numbers), len(ranks), constant=constant)

    def _repeated(self) -> Iterator[Finding]:
        """Does a batch come once from each worker?"""
        again: dict[int, int] = {}
        for rank, workers in self._workers.items():
            digests = {n: by[rank] for n, by in self._numbers.get(0, {}).items() if rank in by}
            near = range(1, workers)
            equal = [n for n in digests if any(digests.get(n - back) == digests[n] for back in near)]
            if len(equal) >= SAME_MIN and len(set(digests.values())) >= SAME_MIN and len(equal) >= len(digests) / 3:
                again[rank] = workers
        if not again:
            return
        ranks = tuple(sorted(again)) if len(again) < len(self._workers) else ()
        workers = max(again.values())
        for rank in again:
            del self._workers[rank]
        yield Finding(
            code="CIUIC-H9",
            cause=f"every batch of {ranks_text(ranks)} comes {workers} times: each of the {workers} workers of its "
            "loader reads the whole stream",
            step=1,
            ranks=ranks,
            evidence={"workers": workers},
            confidence=0.9,
        )

    def _compared(self, source: int, ranks: set[int]) -> Numbers:
        """Batches that all of these ranks have told."""
        known = self._numbers.get(source, {})
        return {n: {r: by[r] for r in ranks} for n, by in known.items() if ranks <= set(by)}

    # ---- orders, checkpoints, memory --------------------------------------------------------------------------------

    def _judge(self, case: Case, now_s: float, *, force: bool) -> Iterator[Finding]:
        for together in self._notices.ready(case, now_s, force=force):
            if together.key == SAME_ORDER:
                yield _same_order(case, together)
            elif together.key == SHARED_MEMORY:
                yield _memory(case, together)
            else:
                self._resumed.append(together)
        yield from self._after_checkpoint()

    def _after_checkpoint(self) -> Iterator[Finding]:
        for together in self._resumed if self._per_step else ():
            found = _resumed(together, self._per_step)
            if found is not None:
                yield found
        if self._per_step:
            self._resumed = []


def _same(numbers: Numbers, share: float) -> set[int]:
    """Ranks that often read what another one reads."""
    counts: dict[int, int] = {}
    for by_rank in numbers.values():
        for rank, digest in by_rank.items():
            if any(other != rank and digest == theirs for other, theirs in by_rank.items()):
                counts[rank] = counts.get(rank, 0) + 1
    return {rank for rank, count in counts.items() if count >= SAME_MIN and count >= share * len(numbers)}


def _same_finding(round_: Round, same: tuple[int, ...], count: int, of: int, *, constant: bool) -> Finding:
    ranks = () if len(same) == of else same
    if constant:
        return Finding(
            code="CIUIC-H2",
            cause=f"{ranks_text(ranks)} read one and the same batch all the time, {count} times so far",
            step=1,
            ranks=ranks,
            evidence={"equal_batches": count},
            confidence=0.4,
            severity=Severity.NOTE,
        )
    return Finding(
        code="CIUIC-H2",
        cause=f"{ranks_text(ranks)} read the same data: {count} batches in a row were equal up to step {round_.step}",
        step=1,
        ranks=ranks,
        evidence={"equal_batches": count},
        confidence=0.95,
    )


def _same_order(case: Case, together: Together) -> Finding:
    facts = together.any
    ranks = together.ranks(case)
    if facts.get("how") == "epoch":
        cause = (
            f"an epoch began in the order of the one before: the epoch of {facts['sampler']} is still {facts['epoch']}"
        )
    else:
        cause = (
            "an epoch began with the batches of the one before although the sampler shuffles: "
            "its random numbers start again"
        )
    return Finding(
        code="CIUIC-H1",
        cause=f"{cause} ({ranks_text(ranks)}, {facts['batches']} batches each)",
        step=together.step + 1,
        ranks=ranks,
        evidence={"batches_per_epoch": int(facts["batches"]), "epoch": int(facts["epoch"])},
        fix=""
        if facts.get("how") == "epoch"
        else "make the generator once, before the first epoch, and do not seed it again",
        confidence=0.95 if facts.get("how") == "epoch" else 0.85,
    )


def _memory(case: Case, together: Together) -> Finding:
    facts = together.any
    mib = 1 << 20
    return Finding(
        code="CIUIC-H5",
        cause=f"batches of {facts['workers']} data workers may need {facts['wanted'] / mib:.0f} MiB of shared memory "
        f"and "
        f"{facts['free'] / mib:.0f} MiB are free ({ranks_text(together.ranks(case))})",
        step=max(1, together.step),
        ranks=together.ranks(case),
        evidence={"free_bytes": int(facts["free"]), "wanted_bytes": int(facts["wanted"])},
        confidence=0.6,
        severity=Severity.WARNING,
    )


def _resumed(together: Together, per_step: int) -> Finding | None:
    facts = together.any
    length, epoch, position = int(facts["length"]), int(facts["epoch"]), int(facts["position"])
    saved_epoch = int(facts["saved_epoch"])
    if saved_epoch >= 0 and epoch - saved_epoch in (0, 1):
        return None  # it counts epochs itself, perhaps with another number of ranks
    expected = int(facts["steps"]) * per_step
    offset = epoch * length + position - expected
    if abs(offset) <= max(TOLERANCE, per_step, TOLERANCE_SHARE * length):
        return None
    # another epoch may be right when the number of ranks, and so the length of an epoch, was another one
    is_plain = epoch in (0, expected // length)
    what = f"reads {-offset} batches again" if offset < 0 else f"leaves {offset} batches out"
    where = f"epoch {epoch}, batch {position + 1}"
    cause = (
        f"the resumed run {what}: the checkpoint has {facts['steps']} steps of {per_step} batches, epochs have "
        f"{length}, "
        f"so the next is batch {expected % length + 1} of epoch {expected // length}; it began with {where}"
    )
    return Finding(
        code="CIUIC-H4",
        cause=cause,
        step=1,
        evidence={"steps_saved": int(facts["steps"]), "batches_per_epoch": length, "batches_off": offset},
        confidence=0.8 if is_plain else 0.4,
        severity=None if is_plain else Severity.NOTE,
    )
