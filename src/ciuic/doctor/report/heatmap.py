"""Ghost gradients as a picture: modules down, sampled steps across, the colour says how far a module moved.

Cells of one colour are one path and signs of one kind one text element, so a map of 256 modules stays small.
"""

import base64
import json
from collections.abc import Iterator
from html import escape

from ciuic.doctor.facts import MOVED_FLAGS
from ciuic.doctor.report.grid import GRAD_BYTE, MOVED_BYTE, Cell, Grid, moved_log10

CELL_H, GAP = 16, 1
CELLS_W, CELL_W_MIN, CELL_W_MAX = 800, 8, 48
"""Pixels for all cells of a row; least and greatest width of one."""
LABEL_W, TOP = 250, 26
LABEL_CHARACTERS = 36
LOWEST, CLASSES = -7.0, 14
"""Colours h0 to h13 of the page's style: half a decade each from 1e-7 of the parameters' length to 1."""
SIGNS = {32: "!", 1: "N", 2: "0", 4: "×", 8: "r", 16: "f"}
"""By flag, the most important first: a cell shows one."""
SIGN_WORDS = {
    32: "gets a gradient, no optimizer owns it",
    1: "gradient is None",
    2: "gradient is exactly zero",
    4: "has a gradient, did not move",
    8: "learning rate 0",
    16: "frozen",
}


def heat_map(grid: Grid) -> str:
    """A card: what colours and signs mean, the picture, a line that reads the cell under the pointer, a table."""
    name = f"map-{grid.optimizer}"
    title = f"Optimizer {grid.optimizer}: {len(grid.modules)} modules, {_steps_words(grid)}"
    width = LABEL_W + _cell_w(grid) * len(grid.steps) + 14
    height = TOP + CELL_H * len(grid.modules) + 8
    svg = (
        f'<svg class="heat" id="{name}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(f"How far each module moved. {_summary(grid)}")}">'
        f"{_background(grid)}{_colours(grid)}{_apart(grid)}{_signs(grid)}{_labels(grid)}</svg>"
    )
    return (
        f'<div class="card"><h3>{escape(title)}</h3>{_key(grid)}<div class="wide tall">{svg}</div>'
        f'<p class="readout" id="{name}-readout" aria-live="polite">{escape(_summary(grid))}</p>{_table(grid)}'
        f'<script type="application/json" class="cells" data-for="{name}">{_data(grid)}</script></div>'
    )


def colour_class(byte: int) -> int:
    """Which of the CLASSES colours a movement has; -1: it did not move."""
    value = moved_log10(byte)
    return -1 if value is None else min(CLASSES - 1, max(0, int((value - LOWEST) * 2)))


def sign_of(cell: Cell) -> int:
    """The flag that a cell shows; 0: none."""
    shown = (bit for bit in SIGNS if cell.flags & bit)
    return next((bit for bit in shown if bit != 16 or not cell.moved), 0)


def _cell_w(grid: Grid) -> int:
    return max(CELL_W_MIN, min(CELL_W_MAX, CELLS_W // len(grid.steps)))


def _places(grid: Grid) -> Iterator[tuple[int, int, Cell]]:
    for row in range(len(grid.modules)):
        for column in range(len(grid.steps)):
            cell = grid.at(row, column)
            if cell is not None:
                yield row, column, cell


def _background(grid: Grid) -> str:
    """Hatched where nothing moved or nothing is known."""
    hatch = (
        '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path class="hatch" d="M0,0V6"/></pattern>'
    )
    width, height = _cell_w(grid) * len(grid.steps), CELL_H * len(grid.modules)
    return f'<defs>{hatch}</defs><rect x="{LABEL_W}" y="{TOP}" width="{width}" height="{height}" fill="url(#hatch)"/>'


def _colours(grid: Grid) -> str:
    paths: dict[int, list[str]] = {}
    for row, column, cell in _places(grid):
        colour = colour_class(cell.moved)
        if colour >= 0:
            paths.setdefault(colour, []).append(_box(grid, row, column))
    return "".join(f'<path class="h{colour}" d="{"".join(boxes)}"/>' for colour, boxes in sorted(paths.items()))


def _apart(grid: Grid) -> str:
    boxes = "".join(_box(grid, row, column, inset=1) for row, column in sorted(grid.apart))
    return f'<path class="apart" d="{boxes}"/>' if boxes else ""


def _box(grid: Grid, row: int, column: int, *, inset: int = 0) -> str:
    width, height = _cell_w(grid) - GAP - 2 * inset, CELL_H - GAP - 2 * inset
    left, top = LABEL_W + column * _cell_w(grid) + inset, TOP + row * CELL_H + inset
    return f"M{left},{top}h{width}v{height}h-{width}z"


def _signs(grid: Grid) -> str:
    """A sign where it begins, and a stroke as long as it holds."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    strokes: list[str] = []
    for row in range(len(grid.modules)):
        for sign, first, last in _runs(grid, row):
            left, top = LABEL_W + first * _cell_w(grid), TOP + row * CELL_H
            xs, ys = found.setdefault(sign, ([], []))
            xs.append(left + _cell_w(grid) / 2)
            ys.append(top + CELL_H / 2 + 4)
            if last > first:
                until = LABEL_W + (last + 1) * _cell_w(grid) - 4
                strokes.append(f"M{left + _cell_w(grid) / 2 + 7},{top + CELL_H / 2}H{until}")
    stroke = "".join(strokes)
    lines = f'<path class="halo" d="{stroke}"/><path class="stroke" d="{stroke}"/>' if stroke else ""
    return lines + "".join(_texts(SIGNS[sign], xs, ys) for sign, (xs, ys) in found.items())


def _texts(sign: str, xs: list[float], ys: list[float]) -> str:
    each = "".join(f'<tspan x="{x:g}" y="{y:g}">{escape(sign)}</tspan>' for x, y in zip(xs, ys, strict=True))
    return f'<text class="sign">{each}</text>'


def _runs(grid: Grid, row: int) -> Iterator[tuple[int, int, int]]:
    """(sign, first column, last column) of equal signs beside each other."""
    signs = [sign_of(cell) if (cell := grid.at(row, column)) else 0 for column in range(len(grid.steps))]
    first = 0
    for column in range(1, len(signs) + 1):
        if column == len(signs) or signs[column] != signs[first]:
            if signs[first]:
                yield signs[first], first, column - 1
            first = column


def _labels(grid: Grid) -> str:
    parts = []
    for row, module in enumerate(grid.modules):
        full = module or "(the model itself)"
        shown = full if len(full) <= LABEL_CHARACTERS else f"…{full[1 - LABEL_CHARACTERS :]}"
        top = TOP + row * CELL_H + CELL_H / 2 + 4
        parts.append(
            f'<text class="tick end" x="{LABEL_W - 8}" y="{top}"><title>{escape(full)}</title>{escape(shown)}</text>'
        )
    stride = max(1, -(-44 // _cell_w(grid)))
    for column in range(0, len(grid.steps), stride):
        left = LABEL_W + column * _cell_w(grid) + _cell_w(grid) / 2
        parts.append(f'<text class="tick mid" x="{left}" y="{TOP - 8}">{grid.steps[column]}</text>')
    parts.append(f'<text class="tick end" x="{LABEL_W - 8}" y="{TOP - 8}">module \\ step</text>')
    return "".join(parts)


def _key(grid: Grid) -> str:
    """Colours and signs in words."""
    boxes = "".join(f'<path class="h{number}" d="M{number * 20},0h20v12h-20z"/>' for number in range(CLASSES))
    texts = "".join(
        f'<text class="tick {kind}" x="{left}" y="26">{text}</text>'
        for left, text, kind in ((0, "1e-7", ""), (120, "1e-4", "mid"), (200, "1e-2", "mid"), (280, "1", "end"))
    )
    scale = (
        '<svg width="281" height="30" viewBox="0 0 281 30" role="img" '
        'aria-label="Colours from 1e-7, dark, to 1, bright">'
        f"{boxes}{texts}</svg>"
    )
    used = {bit for _, _, cell in _places(grid) for bit in SIGNS if cell.flags & bit}
    signs = "".join(
        f'<li><b class="key">{SIGNS[bit]}</b>{escape(SIGN_WORDS[bit])}</li>' for bit in SIGNS if bit in used
    )
    apart = '<li><b class="key apart"></b>ranks moved differently</li>' if grid.apart else ""
    return (
        '<p class="small">Length of a step divided by the length of the parameters it moved, logarithmic. '
        "Hatched: did not move. A sign counts when it holds for any parameter of the module.</p>"
        f'<div class="key">{scale}<ul class="legend">{signs}{apart}</ul></div>'
    )


def _steps_words(grid: Grid) -> str:
    first, last = grid.steps[0], grid.steps[-1]
    return f"steps {first} to {last}" if last > first else f"step {first}"


def _summary(grid: Grid) -> str:
    """What a person would see at first glance."""
    ghosts = len({row for row, _, cell in _places(grid) if cell.flags & (1 | 2 | 4 | 32)})
    apart = len({row for row, _ in grid.apart})
    parts = [f"{ghosts} of {len(grid.modules)} modules have a missing, zero or ghost gradient at some step"]
    parts.append(f"{apart} moved differently on different ranks" if apart else "ranks moved alike")
    if not grid.apart and len(grid.cells) < 2:
        parts.pop()
    return "; ".join(parts) + "."


def _table(grid: Grid) -> str:
    """The same in words, of modules with a sign or a difference."""
    rows = []
    for row, module in enumerate(grid.modules):
        said = list(_row_words(grid, row))
        if said:
            name, words = escape(module or "(the model itself)"), escape("; ".join(said))
            rows.append(f"<tr><td><code>{name}</code></td><td>{words}</td></tr>")
    if not rows:
        return ""
    body = f"<table><thead><tr><th>module</th><th>what is seen</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<details><summary>The signs in words, {len(rows)} modules</summary>{body}</details>"


def _row_words(grid: Grid, row: int) -> Iterator[str]:
    for bit in SIGNS:
        held = [grid.steps[c] for c in range(len(grid.steps)) if (cell := grid.at(row, c)) and cell.flags & bit]
        if held:
            yield f"{SIGN_WORDS[bit]}: {_span(held, grid)}"
    apart = [grid.steps[column] for at, column in sorted(grid.apart) if at == row]
    if apart:
        yield f"ranks moved differently: {_span(apart, grid)}"


def _span(steps: list[int], grid: Grid) -> str:
    if len(steps) == len(grid.steps):
        return "at all sampled steps"
    return f"at step {steps[0]}" if len(steps) == 1 else f"at {len(steps)} sampled steps from {steps[0]} to {steps[-1]}"


def _data(grid: Grid) -> str:
    """For the line that reads a cell: bytes by rank, row by row."""
    size = len(grid.modules) * len(grid.steps)
    ranks = {}
    for rank, cells in sorted(grid.cells.items()):
        planes = [bytearray(size) for _ in range(3)]
        for (row, column), cell in cells.items():
            at = row * len(grid.steps) + column
            planes[0][at], planes[1][at], planes[2][at] = cell.moved, cell.grad, cell.flags
        ranks[rank] = [base64.b64encode(plane).decode() for plane in planes]
    body = {
        "modules": list(grid.modules),
        "steps": list(grid.steps),
        "ranks": ranks,
        "flags": {bit: SIGN_WORDS.get(bit, text) for bit, text in MOVED_FLAGS.items()},
        "moved": MOVED_BYTE,
        "grad": GRAD_BYTE,
        "left": LABEL_W,
        "top": TOP,
        "cell": [_cell_w(grid), CELL_H],
    }
    return json.dumps(body).replace("<", "\\u003c")
