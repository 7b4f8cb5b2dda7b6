"""The picture of `ciuic bench sync`: utilisation as bars, held-out loss over time, one row per rate."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {
    "none": "#9aa1ae",
    "ours": "#2f7ed8",
    "ours-even": "#8fbcec",
    "ours-async": "#12a594",
    "ours-gradient": "#3a8f3a",
    "ours-fragments": "#6a5acd",
    "ddp-fp32": "#d9483b",
    "ddp-fp16": "#e08a00",
    "ddp-bf16": "#b455b6",
}
_MUTED = "#667085"


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draw it."""
    rates = result["rates"]
    figure = Figure(figsize=(12, 0.6 + 4 * len(rates)), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rates), 2, squeeze=False, width_ratios=(1, 1.6))
    for row, (rate, modes) in zip(axes, rates.items(), strict=True):
        _bars(row[0], rate, modes)
        _lines(row[1], rate, modes)
    figure.suptitle(f"Three sites, {result['parameters'] / 1e6:.1f} M parameters, links are emulated", color=_MUTED)
    figure.savefig(path)
    return path


def _bars(axes: Axes, rate: str, modes: dict[str, dict[str, Any]]) -> None:
    shown = {mode: numbers["utilisation"] for mode, numbers in modes.items() if numbers["utilisation"] is not None}
    bars = axes.bar(list(shown), list(shown.values()), color=[COLOURS[mode] for mode in shown])
    axes.bar_label(bars, fmt="%.3f", color=_MUTED)
    axes.set_ylim(0, 1.15)
    axes.set_title(f"utilisation at {rate}/s", loc="left")
    _clean(axes)


def _lines(axes: Axes, rate: str, modes: dict[str, dict[str, Any]]) -> None:
    for mode, numbers in modes.items():
        times, values = zip(*numbers["loss_over_s"], strict=True)
        axes.plot(times, values, color=COLOURS[mode], label=mode, linewidth=2)
    axes.set_title(f"held-out loss of site us at {rate}/s", loc="left")
    axes.set_xlabel("seconds of training", color=_MUTED)
    axes.set_ylim(top=4.5)
    axes.legend(frameon=False)
    _clean(axes)


def _clean(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_MUTED)
