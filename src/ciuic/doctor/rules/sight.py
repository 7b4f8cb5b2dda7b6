"""What could not be looked at, which is not the same as healthy."""

from collections.abc import Iterable

from ciuic.doctor.case import Case, Round, Rule
from ciuic.doctor.finding import Blind
from ciuic.doctor.record import DROPPED, PROBE_FAILED, Beat, Notice
from ciuic.doctor.rules.memory import listed


class Sight(Rule):
    """Parts of the probe that failed, messages that were lost, ranks that were never heard, steps that cannot be
    compared. Each is told once."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str], set[int]] = {}
        self._errors: dict[tuple[str, str], str] = {}
        self._is_uneven = False
        self._dropped: dict[int, int] = {}
        """By rank: messages that found no room or could not be sent."""

    def notice(self, case: Case, notice: Notice) -> Iterable[Blind]:
        """A part's error has switched it off."""
        if notice.kind == PROBE_FAILED:
            key = str(notice.facts.get("part", "")), str(notice.facts.get("event", ""))
            self._failed.setdefault(key, set()).add(notice.rank)
            self._errors.setdefault(key, str(notice.facts.get("error", "")))
        return ()

    def round(self, case: Case, round: Round) -> Iterable[Blind]:
        """Under Join the ranks' steps of one number are not the same step any more."""
        if round.is_uneven and not self._is_uneven:
            self._is_uneven = True
            why = f"inputs of some ranks ended early (Join), so from step {round.step} on ranks make different steps"
            yield Blind(what="whether ranks agree", why=why)

    def beat(self, case: Case, beat: Beat) -> Iterable[Blind]:
        """A rank counts what it could not send."""
        if beat.facts.get(DROPPED):
            self._dropped[beat.rank] = int(beat.facts[DROPPED])
        return ()

    def end(self, case: Case) -> Iterable[Blind]:
        """All that was switched off, and who was never there."""
        for (part, event), ranks in self._failed.items():
            yield Blind(what=f"{part} ({event})", why=self._errors[part, event], ranks=tuple(sorted(ranks)))
        if self._dropped:
            why = "the line to the doctor was too slow, or broke"
            what = f"{max(self._dropped.values())} messages at most"
            yield Blind(what=what, why=why, ranks=tuple(sorted(self._dropped)))
        if case.lost[0]:
            why = "records of some ranks came so late that newer steps had taken their place"
            yield Blind(what=f"{case.lost[0]} steps that were looked at, the first {case.lost[1]}", why=why)
        missing = [rank for rank in range(case.world) if rank not in case.hellos]
        if missing:
            why = f"{len(case.hellos)} of {case.world} ranks have reported"
            yield Blind(what=f"rank{'s' if len(missing) > 1 else ''} {listed(map(str, missing), at_most=8)}", why=why)
        if not case.hellos:
            yield Blind(what="the program", why="no rank has reported")
