"""What each rank did when, where steps were, and when findings came. Inline SVG."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from html import escape

from ciuic.doctor.finding import Incident
from ciuic.doctor.incidents import severity_of
from ciuic.doctor.report.axes import Axis, seconds_text
from ciuic.doctor.report.curves import legend
from ciuic.doctor.report.history import History, Sign

WIDTH, LEFT, RIGHT, TOP, LANE, BAR = 1060, 76, 130, 40, 30, 18
LANES_MAX = 48
"""More ranks are left out: those of findings come first."""
COLUMNS_MAX = 900
"""Bars of one lane; more signs of life are thinned out."""
PHASES = {
    "data": 0,
    "forward": 1,
    "backward": 2,
    "step": 3,
    "collective": 4,
    "save": 5,
    "load": 6,
    "start": 7,
    "other": 8,
}
"""By phase the colour: classes p0 to p8 of the page's style; p9 for an end."""


def timeline(history: History, incidents: Sequence[Incident]) -> str:
    """A card; empty when there was no sign of life."""
    lanes = _lanes(history, incidents)
    if not lanes:
        return ""
    x = Axis(low=0.0, high=max(history.ended_s - history.began_s, 1e-3), begin=LEFT, end=WIDTH - RIGHT)
    foot = TOP + LANE * len(lanes)
    drawn = "".join(_lane(history, rank, TOP + LANE * at, x) for at, rank in enumerate(lanes))
    svg = (
        f'<svg class="timeline" width="{WIDTH}" height="{foot + 30}" viewBox="0 0 {WIDTH} {foot + 30}" role="img" '
        f'aria-label="{escape(_words(history, lanes, incidents))}">'
        f"{_time_axis(x, foot)}{drawn}{_findings(history, incidents, x, foot)}</svg>"
    )
    seen = {sign.phase for rank in lanes for sign in history.signs[rank]}
    names = [(phase, colour) for phase, colour in PHASES.items() if phase in seen]
    key = legend(names).replace('class="swatch k', 'class="swatch p')
    return f'<div class="card">{_note(history, lanes)}{key}<div class="wide">{svg}</div></div>'


def _lanes(history: History, incidents: Iterable[Incident]) -> list[int]:
    named = [rank for incident in incidents for rank in incident.cause.ranks if history.signs.get(rank)]
    others = [rank for rank in sorted(history.signs) if history.signs[rank]]
    return sorted(list(dict.fromkeys(named + others))[:LANES_MAX])


def _lane(history: History, rank: int, top: int, x: Axis) -> str:
    middle = top + LANE / 2 + 4
    parts = [f'<text class="tick end" x="{LEFT - 8}" y="{middle}">rank {rank}</text>']
    signs = history.signs[rank]
    stride = -(-len(signs) // COLUMNS_MAX)
    last_s = 0.0
    for at in range(0, len(signs), stride):
        sign = signs[at]
        until_s = sign.time_s - history.began_s
        since_s = max(last_s, 0.0)
        began_s = max(since_s, until_s - sign.phase_s)
        if began_s > since_s:  # what was before this phase nobody has said
            parts.append(_bar(since_s, began_s, top, x, "between", "several phases"))
        text = f"rank {rank}, step {sign.step}: {sign.phase} for {seconds_text(sign.phase_s)}"
        parts.append(_bar(began_s, until_s, top, x, f"p{PHASES.get(sign.phase, 9)}", text))
        last_s = until_s
    parts += _step_numbers(signs, history.began_s, top, x)
    time_s, how = history.ends.get(rank, (signs[-1].time_s, ""))
    end = x.at(time_s - history.began_s)
    words = {"end": f"ended, step {history.steps.get(rank, 0)}", "": f"cut, step {history.steps.get(rank, 0)}"}.get(
        how, how
    )
    kind = "tick" if how == "end" else "tick found"
    shown = words if len(words) <= 16 else f"{words[:15]}…"
    parts.append(
        f'<text class="{kind}" x="{end + 5}" y="{middle}"><title>{escape(words)}</title>{escape(shown)}</text>'
    )
    return "".join(parts)


def _bar(began_s: float, until_s: float, top: int, x: Axis, kind: str, text: str) -> str:
    left, right = x.at(began_s), x.at(until_s)
    width = max(0.6, round(right - left, 1))
    title = f"<title>{escape(text)}</title>"
    return (
        f'<rect class="{kind}" x="{left}" y="{top + (LANE - BAR) // 2}" width="{width}" height="{BAR}">{title}</rect>'
    )


def _step_numbers(signs: Sequence[Sign], began_s: float, top: int, x: Axis) -> list[str]:
    """About five along a lane."""
    parts = []
    times = [sign.time_s - began_s for sign in signs]
    for share in (0.2, 0.4, 0.6, 0.8):
        at = bisect_right(times, x.high * share) - 1
        if at >= 0 and signs[at].step and times[at] < 0.94 * times[-1]:
            left = x.at(times[at])
            parts.append(f'<text class="sign mid small" x="{left}" y="{top + LANE / 2 + 4}">{signs[at].step}</text>')
    return parts


def _time_axis(x: Axis, foot: int) -> str:
    parts = []
    for value in x.ticks(7):
        left = x.at(value)
        parts.append(f'<path class="rule" d="M{left},{TOP}V{foot}"/>')
        parts.append(f'<text class="tick mid" x="{left}" y="{foot + 18}">{seconds_text(value)}</text>')
    return "".join(parts)


def _findings(history: History, incidents: Sequence[Incident], x: Axis, foot: int) -> str:
    """Lines at the moments at which the doctor knew."""
    parts, taken = [], {0: -1e9, 1: -1e9}
    for incident in sorted(incidents, key=lambda incident: incident.cause.found_s):
        finding = incident.cause
        if not finding.found_s:
            continue
        left = x.at(finding.found_s - history.began_s)
        title = f"<title>{escape(f'{finding.code} was found, {severity_of(finding).value}: {finding.cause}')}</title>"
        parts.append(f'<path class="found" d="M{left},{TOP - 4}V{foot}">{title}</path>')
        row = next((row for row, end in taken.items() if left - end > 34), None)
        if row is not None:
            taken[row] = left
            name = finding.code.removeprefix("CIUIC-")
            parts.append(f'<text class="tick found mid" x="{left}" y="{TOP - 10 - 14 * row}">{name}{title}</text>')
    return "".join(parts)


def _note(history: History, lanes: Sequence[int]) -> str:
    text = "What the training thread did at each sign of life (twice a second); numbers are steps, red lines findings."
    left_out = len(history.signs) - len(lanes)
    if left_out:
        text += f" {left_out} more ranks are not drawn."
    for rank, shift_s in sorted(history.shifts_s.items())[:4]:
        way = "ahead" if shift_s < 0 else "behind"
        text += f" The clock of rank {rank} is {abs(shift_s):.0f} s {way}; its lane was moved."
    return f'<p class="small">{escape(text)}</p>'


def _words(history: History, lanes: Sequence[int], incidents: Sequence[Incident]) -> str:
    ranks = "; ".join(
        f"rank {rank} came to step {history.steps.get(rank, 0)}, {history.ends.get(rank, (0.0, 'cut'))[1]}"
        for rank in lanes[:8]
    )
    found = "; ".join(
        f"{incident.cause.code} found after {seconds_text(max(0.0, incident.cause.found_s - history.began_s))}"
        for incident in incidents
        if incident.cause.found_s
    )
    return f"Timeline of {seconds_text(history.ended_s - history.began_s)}. {ranks}. {found}"
