"""The picture of `ciuic bench codec`."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {"compress": "#1f4e79", "decode": "#5b9bd5", "accumulate": "#a9c8e8"}


def draw(result: dict[str, Any], path: Path) -> Path:
    """Left: codecs; right: 1-bit by back end and DeepSpeed's operations. The line at 1 is memcpy."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[5, 3])
    _codecs(left, result)
    _back_ends(right, result)
    for axes in (left, right):
        axes.axhline(1, color="black", linewidth=1)
        axes.set_ylabel("speed over memcpy")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return path


def _codecs(axes: Axes, result: dict[str, Any]) -> None:
    names = [row["name"] for row in result["codecs"]]
    for offset, (what, colour) in enumerate(COLOURS.items()):
        heights = [row[what]["over_memcpy"] for row in result["codecs"]]
        axes.bar([i + 0.27 * (offset - 1) for i in range(len(names))], heights, 0.26, label=what, color=colour)
    axes.set_xticks(range(len(names)), names)
    axes.set_title(f"codecs, {result['back_end']}, one thread")
    axes.legend(frameon=False)


def _back_ends(axes: Axes, result: dict[str, Any]) -> None:
    heights = {name: numbers["over_memcpy"] for name, numbers in result["one_bit"].items()}
    heights["DeepSpeed's\noperations"] = result["others"]["DeepSpeed's 1-bit compress"]["over_memcpy"]
    bars = axes.bar(list(heights), list(heights.values()), color=COLOURS["compress"])
    axes.bar_label(bars, fmt="%.2f", label_type="center", color="white")
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title("1-bit compress with feedback")
