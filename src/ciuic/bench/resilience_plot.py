"""The picture of `ciuic bench resilience`: how long every step took, and what happened when."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {"us": "#2f7ed8", "eu": "#12a594", "ap": "#d9483b"}
_MUTED = "#667085"


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draw it."""
    figure = Figure(figsize=(12, 4.6), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, points in result["steps"].items():
        if points:
            times, lengths = zip(*points, strict=True)
            axes.plot(times, lengths, ".", markersize=4, color=COLOURS.get(name, _MUTED), label=name)
    top = max((length for points in result["steps"].values() for _, length in points), default=1.0) * 1.4
    axes.set_ylim(0, top)
    for row, (at_s, what) in enumerate(result["marks"]):
        axes.axvline(at_s, color=_MUTED, linewidth=0.8, linestyle=":")
        axes.text(at_s, top * (0.97 - 0.06 * (row % 3)), f" {what}", color=_MUTED, fontsize=8, va="top")
    axes.set_title("seconds per step of each site; links are emulated", loc="left")
    axes.set_xlabel("seconds of training", color=_MUTED)
    axes.legend(frameon=False, loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
    return path
