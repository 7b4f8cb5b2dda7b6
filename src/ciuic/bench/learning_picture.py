"""learning.png: held-out loss over bytes sent, one point per setting."""

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from ciuic.units import format_bytes

INK, MUTED, GRID = "#1d2430", "#667085", "#e6e8ee"
COLOURS = {"ddp": "#7a6f5d", "muon": "#b455b6", "gradient": "#e08a00", "other": "#2f7ed8"}
NAME_WIDTH, NAME_HEIGHT = 0.3, 0.04
"""Room for a name, in fractions of a panel."""
TITLES = {"": "Dense model", "-moe": "Mixture of experts"}


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel per model that was measured."""
    tuned = [line for line in result["settings"] if line["loss"] is not None and not line["name"].startswith("fixed-")]
    panels = {suffix: [line for line in tuned if line["name"].endswith("-moe") == bool(suffix)] for suffix in TITLES}
    panels = {suffix: lines for suffix, lines in panels.items() if lines}
    figure = Figure(figsize=(7.5 * max(1, len(panels)), 6), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for number, (suffix, lines) in enumerate(panels.items()):
        _draw_panel(figure.add_subplot(1, len(panels), number + 1), TITLES[suffix], lines)
    figure.savefig(path)


def _draw_panel(axes: Axes, title: str, lines: list[dict[str, Any]]) -> None:
    axes.set_title(title, loc="left", size=14, weight="bold", color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_xscale("log")
    axes.scatter(
        [line["sent_bytes"] for line in lines], [line["loss"] for line in lines], s=42, zorder=3,
        c=[COLOURS[_family(_short(line))] for line in lines],
    )  # fmt: skip
    axes.margins(x=0.3, y=0.1)
    for line, (across, up) in zip(lines, _places(axes, lines), strict=True):
        colour = COLOURS[_family(_short(line))]
        axes.annotate(
            f"{_short(line)} {line['loss']:.3f}", (line["sent_bytes"], line["loss"]), (across + 0.02, up),
            textcoords="axes fraction", size=9, color=colour, va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6},
        )  # fmt: skip
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bytes up and down, all nodes, whole run (logarithmic)", color=MUTED)
    axes.set_ylabel("held-out loss, nats per byte", color=MUTED)
    axes.set_axisbelow(True)
    axes.grid(color=GRID)


def _places(axes: Axes, lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Where each name goes, in fractions of the panel: at its point, or as far above it as others need."""
    taken: list[tuple[float, float]] = []
    left, right = (math.log10(edge) for edge in axes.get_xlim())
    bottom, top = axes.get_ylim()
    for line in lines:
        across = (math.log10(line["sent_bytes"]) - left) / (right - left)
        up = (line["loss"] - bottom) / (top - bottom)
        while any(abs(across - x) < NAME_WIDTH and abs(up - y) < NAME_HEIGHT for x, y in taken):
            up += NAME_HEIGHT / 4
        taken.append((across, up))
    return taken


def _short(line: dict[str, Any]) -> str:
    return line["name"].removesuffix("-moe")


def _family(name: str) -> str:
    if name.startswith("muon"):
        return "muon"
    if name.startswith(("gradient", "onebit-adam")):
        return "gradient"
    return "ddp" if name == "ddp" else "other"
