"""The picture of `ciuic bench links`: share of the link, one group of bars per loss."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BARS = {
    "push": ("push, warm", "#2f7ed8"),
    "bbr": ("one BBR stream", "#12a594"),
    "cubic": ("one CUBIC stream", "#d9483b"),
}
_MUTED = "#667085"


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draw it."""
    figure = Figure(figsize=(8, 4), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    losses = list(result["losses"])
    for number, (key, (label, colour)) in enumerate(BARS.items()):
        places = [place + 0.27 * (number - 1) for place in range(len(losses))]
        bars = axes.bar(places, [result["losses"][loss][key] for loss in losses], 0.25, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", color=_MUTED)
    axes.set_xticks(range(len(losses)), [f"{loss} % loss" for loss in losses])
    axes.set_ylim(0, 1.2)
    title = f"share of a link of {result['mbit_per_s']:g} Mbit/s with {1000 * result['round_trip_s']:g} ms round trip"
    axes.set_title(f"{title}, {result['size_mb']:g} MB", loc="left")
    axes.legend(frameon=False, loc="upper right", ncols=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_MUTED)
    figure.savefig(path)
    return path
