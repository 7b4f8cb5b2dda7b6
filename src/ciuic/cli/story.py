"""The story of a run, from its events: one sentence per line, in order of time, what repeats folded. Nothing prints."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ciuic.cli.output import clean
from ciuic.net.messages import Event
from ciuic.units import format_duration

NOISE = ("round.closed", "snapshot.written", "run.evaluated")
"""What happens all the time; a row of these becomes one line."""

STORY_INDENT = 29
"""Characters before the sentence of a line."""


@dataclass(kw_only=True)
class Fold:
    """A row of noise."""

    events: list[Event] = field(default_factory=list)

    def text(self) -> str:
        """All of it in one sentence."""
        if len(self.events) == 1:
            return self.events[0].text
        parts = [part for part in (self._rounds(), self._losses(), self._snapshots()) if part]
        return "; ".join(parts)

    def _of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def _rounds(self) -> str:
        rounds = self._of("round.closed")
        if not rounds:
            return ""
        versions = sorted({int(event.data.get("version", 0)) for event in rounds})
        name = f"rounds {versions[0]}-{versions[-1]}" if len(versions) > 1 else f"round {versions[0]}"
        fragments = len({event.data.get("fragment", 0) for event in rounds})
        text = f"{name} closed" + (f" in {fragments} fragments" if fragments > 1 else "")
        text += f" in {format_duration(max(0.0, rounds[-1].time - rounds[0].time))}"
        hasty = sum(event.data.get("why") == "deadline" for event in rounds)
        without = Counter(name for event in rounds for name in str(event.data.get("without", "")).split(", ") if name)
        if hasty:
            text += f", {hasty} by deadline"
        if without:
            text += f" (without {', '.join(_times(name, count) for name, count in sorted(without.items()))})"
        return text

    def _losses(self) -> str:
        losses = [event.data["loss"] for event in self._of("run.evaluated") if "loss" in event.data]
        if not losses:
            return ""
        return f"held-out loss {losses[0]:.4f}" + (f" -> {losses[-1]:.4f}" if len(losses) > 1 else "")

    def _snapshots(self) -> str:
        count = len(self._of("snapshot.written"))
        return "" if not count else "1 snapshot written" if count == 1 else f"{count} snapshots written"


def _times(name: str, count: int) -> str:
    return name if count == 1 else f"{name} {count} times"


def story_lines(events: Iterable[Event], *, folds: bool = True) -> Iterator[str]:
    """Lines with times since the first event. `folds`: rows of noise become one line each."""
    began: float | None = None
    fold = Fold()
    for event in events:
        if began is None:
            began = event.time
            yield time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
        if folds and event.kind in NOISE:
            fold.events.append(event)
            continue
        if fold.events:
            yield story_line(fold.events[0].time - began, "", fold.text())
            fold = Fold()
        yield story_line(event.time - began, event.kind, event.text)
    if fold.events and began is not None:
        yield story_line(fold.events[0].time - began, "", fold.text())


def story_line(since_s: float, kind: str, text: str) -> str:
    """`+0:01:15  node.dead  ...`; a folded line has no kind."""
    seconds = max(0.0, since_s)
    clock = f"+{int(seconds // 3600)}:{int(seconds // 60) % 60:02d}:{int(seconds) % 60:02d}"
    return clean(f"{clock:>9}  {kind:<16}  {text}").rstrip()
