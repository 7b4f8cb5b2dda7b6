"""Curves over the steps of a run, one for each rank: loss, learning rate, loss scale. Inline SVG."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from ciuic.doctor.report.axes import Axis, axis_of, number_text
from ciuic.doctor.report.history import Curve

WIDTH, HEIGHT = 520, 236
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 24, 34
POINTS_MAX = 600
"""Of one curve: of longer ones some points are drawn."""
DOTS_MAX = 30
COLOURS = 8
"""Classes k0 to k7 of the page's style; more curves are grey."""
GREY_MAX = 56


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve."""

    name: str
    points: Curve
    dashed: bool = False
    colour: int = 0
    """Below COLOURS; others are grey and have no name in the legend."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something at a step."""

    step: int
    text: str = ""
    is_skip: bool = False
    """Drawn at the foot of the chart."""


def chart(title: str, note: str, lines: Sequence[Line], marks: Iterable[Mark] = (), *, base: float = 0.0) -> str:
    """A card with heading, legend, picture and what the picture says in words; `base` of a logarithmic scale."""
    lines = [line for line in lines if line.points]
    x = axis_of((step for line in lines for step, _ in line.points), begin=LEFT, end=WIDTH - RIGHT)
    y = axis_of((value for line in lines for _, value in line.points), begin=HEIGHT - BOTTOM, end=TOP, base=base)
    drawn = "".join(_line(line, x, y) for line in sorted(lines, key=lambda line: line.colour < COLOURS))
    words = "; ".join(_words(line) for line in lines if line.colour < COLOURS)
    svg = (
        f'<svg class="curves" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(f"{title}. {words}")}">{_grid(x, y)}{_marks(marks, x)}{drawn}</svg>'
    )
    names = legend((line.name, line.colour) for line in lines if line.colour < COLOURS)
    return (
        f'<div class="card plot"><h3>{escape(title)}</h3><p class="small">{escape(note)}</p>'
        f'{names}<div class="wide">{svg}</div></div>'
    )


def legend(names: Iterable[tuple[str, int]]) -> str:
    """Names with the colour of each."""
    items = "".join(f'<li><span class="swatch k{colour}"></span>{escape(name)}</li>' for name, colour in names)
    return f'<ul class="legend">{items}</ul>'


def by_rank(curves: Mapping[int, Curve], first: Sequence[int] = ()) -> list[Line]:
    """A line for each rank; the ranks in `first` get colours before the others."""
    order = [rank for rank in first if rank in curves] + [rank for rank in sorted(curves) if rank not in first]
    chosen = sorted(order[:COLOURS])
    rest = order[COLOURS : COLOURS + GREY_MAX]
    coloured = [Line(name=f"rank {rank}", points=curves[rank], colour=at) for at, rank in enumerate(chosen)]
    return coloured + [Line(name=f"rank {rank}", points=curves[rank], colour=COLOURS) for rank in rest]


def alike(curves: Mapping[int, Curve], name: str, colour: int) -> list[Line]:
    """One line for ranks with the same curve; ranks with another one have lines of their own, dashed."""
    groups: dict[tuple[tuple[float, float], ...], list[int]] = {}
    for rank, curve in sorted(curves.items()):
        shared = dict(curve)
        known = next((key for key in groups if all(shared.get(step, value) == value for step, value in key)), None)
        groups.setdefault(known or tuple(curve), []).append(rank)
    lines = []
    for at, (points, ranks) in enumerate(groups.items()):
        who = (
            ""
            if len(groups) == 1
            else f"{name and ', '}rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:6]))}"
        )
        text = f"{name}{who}" or "all ranks"
        lines.append(Line(name=text, points=list(points), dashed=at > 0, colour=(colour + at) % COLOURS))
    return lines[:COLOURS]


def merged(lines: Iterable[Line]) -> list[Line]:
    """Lines that lie on each other become one with both names."""
    found: dict[tuple[tuple[float, float], ...], Line] = {}
    for line in lines:
        known = found.get(tuple(line.points))
        name = line.name if known is None else f"{known.name}, {line.name}"
        first = known or replace(line, colour=len(found) % COLOURS)
        found[tuple(line.points)] = replace(first, name=name)
    return list(found.values())[:COLOURS]


def _line(line: Line, x: Axis, y: Axis) -> str:
    stride = -(-len(line.points) // POINTS_MAX)
    points = [*line.points[:-1:stride], line.points[-1]] if stride > 1 else line.points
    places = [(x.at(step), y.at(value)) for step, value in points]
    path = "M" + "L".join(f"{left},{top}" for left, top in places)
    kind = f"k{line.colour}" if line.colour < COLOURS else "grey"
    dots = (
        "".join(f'<circle cx="{left}" cy="{top}" r="2.6"/>' for left, top in places) if len(places) <= DOTS_MAX else ""
    )
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    return f'<g class="{kind}"><title>{escape(_words(line))}</title><path class="curve" d="{path}"{dash}/>{dots}</g>'


def _grid(x: Axis, y: Axis) -> str:
    parts = []
    for value in y.ticks():
        top = y.at(value)
        parts.append(f'<path class="rule" d="M{LEFT},{top}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{top + 4}">{number_text(value)}</text>')
    foot = HEIGHT - BOTTOM + 17
    whole = [value for value in x.ticks(7) if value == round(value)]
    parts += [f'<text class="tick mid" x="{x.at(value)}" y="{foot}">{value:.0f}</text>' for value in whole]
    parts.append(f'<text class="tick end" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}">step</text>')
    return "".join(parts)


def _marks(marks: Iterable[Mark], x: Axis) -> str:
    parts, taken = [], -1e9
    for mark in sorted(marks, key=lambda mark: mark.step):
        if mark.step > x.high:
            continue
        left = x.at(mark.step)
        if mark.is_skip:
            foot = HEIGHT - BOTTOM
            parts.append(
                f'<path class="skip" d="M{left},{foot - 9}l4,8h-8z"><title>step {mark.step} skipped</title></path>'
            )
            continue
        parts.append(f'<path class="found" d="M{left},{TOP - 4}V{HEIGHT - BOTTOM}"/>')
        if left - taken > 46:  # else it would lie on the last one
            kind, at = ("end", left - 3) if left > WIDTH - 60 else ("", left + 3)
            parts.append(f'<text class="tick found {kind}" x="{at}" y="{TOP - 8}">{escape(mark.text)}</text>')
            taken = left
    return "".join(parts)


def _words(line: Line) -> str:
    (first, begin), (last, end) = line.points[0], line.points[-1]
    return f"{line.name}: {number_text(begin)} at step {first:.0f}, {number_text(end)} at step {last:.0f}"
