"""The demo as one picture (demo.png): loss, bytes, where time went, recovery."""

from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from ciuic.lab.report import DemoReport, VersionPoint
from ciuic.units import format_bytes

NODE_COLOURS = ("#2f7ed8", "#e08a00", "#13a07a", "#b455b6", "#7a6f5d", "#c8453b")
COMPUTE, EXPOSED, OTHER = "#13a07a", "#d9483b", "#b9bec9"
DDP, UPDATES, SNAPSHOTS = "#9aa1ae", "#2f7ed8", "#8fbcec"
_INK, _MUTED, _GRID, _ALARM = "#1d2430", "#667085", "#e6e8ee", "#d9483b"


def node_colours(report: DemoReport) -> dict[str, str]:
    """One colour per node, the same in every chart."""
    return {node.node_id: NODE_COLOURS[number % len(NODE_COLOURS)] for number, node in enumerate(report.nodes)}


def draw_png(report: DemoReport, path: Path) -> None:
    """Draw demo.png (1760 x 1160 pixels)."""
    layout = ConstrainedLayoutEngine(w_pad=0.22, h_pad=0.2, rect=(0.005, 0.02, 0.99, 0.88))
    figure = Figure(figsize=(16, 10.55), dpi=110, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.2, 1))
    _draw_loss(figure.add_subplot(grid[0, 0]), report)
    _draw_bytes(figure.add_subplot(grid[0, 1]), report)
    _draw_recovery(figure.add_subplot(grid[1, 0]), report)
    _draw_time(figure.add_subplot(grid[1, 1]), report)
    _draw_title(figure, report)
    figure.savefig(path)


def _draw_title(figure: Figure, report: DemoReport) -> None:
    mark, colour = ("all checks hold", COMPUTE) if report.holds else ("NOT all checks hold", _ALARM)
    figure.text(0.018, 0.962, f"Ciuic demo: {mark}", size=21, weight="bold", color=colour, va="center")
    figure.text(0.018, 0.918, report.verdict, size=12.5, color=_INK, va="center", wrap=True)
    facts = (
        f"{report.model}, {report.parameters:,} parameters; links are emulated (profile {report.profile}), "
        f"everything else is real; seed {report.seed}; ciuic {report.ciuic_version}; {report.created_at}"
    )
    figure.text(0.018, 0.014, facts, size=10, color=_MUTED, va="center")


def _style(axes: Axes, title: str, *, grid: Literal["x", "y"]) -> None:
    axes.set_title(title, loc="left", size=14, weight="bold", color=_INK, pad=14)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c3c8d2")
    axes.tick_params(colors=_MUTED, labelsize=11)
    axes.xaxis.label.set(color=_MUTED, size=11)
    axes.yaxis.label.set(color=_MUTED, size=11)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=_GRID, linewidth=1)


def _mark_kill(axes: Axes, report: DemoReport) -> None:
    """A band from the kill to the first merged push after it, with words above the chart."""
    kill = report.killed
    if kill is None:
        return
    axes.axvline(kill.at_s, color=_ALARM, linewidth=1.4)
    _label(axes, kill.at_s, f"kill -9 {kill.node_id} ", _ALARM, "right")
    if report.rejoined_after_s is not None:
        back_s = kill.at_s + report.rejoined_after_s
        axes.axvspan(kill.at_s, back_s, color=_ALARM, alpha=0.07, linewidth=0)
        axes.axvline(back_s, color=COMPUTE, linewidth=1.4)
        _label(axes, back_s, f" merged again, +{report.rejoined_after_s:.1f} s", COMPUTE, "left")


def _label(axes: Axes, time_s: float, text: str, colour: str, side: Literal["left", "right"]) -> None:
    """Words above the chart at a time."""
    axes.text(time_s, 1.005, text, color=colour, ha=side, va="bottom", size=10, transform=axes.get_xaxis_transform())


def _draw_loss(axes: Axes, report: DemoReport) -> None:
    _style(axes, "Held-out loss", grid="y")
    points = sorted(report.losses, key=lambda point: (point.version, point.time_s))
    axes.plot(
        [p.time_s for p in points],
        [p.loss for p in points],
        color=UPDATES,
        linewidth=2.6,
        marker="o",
        markersize=5,
        clip_on=False,
    )
    if points:
        first, last = points[0], points[-1]
        axes.annotate(f"{first.loss:.2f}", (first.time_s, first.loss), (8, 2), textcoords="offset points", size=12)
        axes.annotate(
            f"{last.loss:.2f}", (last.time_s, last.loss), (0, 10), textcoords="offset points", size=12,
            weight="bold", ha="right",
        )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the run began")
    axes.set_ylabel("nats per byte")
    _mark_kill(axes, report)


def _draw_bytes(axes: Axes, report: DemoReport) -> None:
    _style(axes, "Bytes on the links (logarithmic)", grid="x")
    rows = [
        ("snapshots\n(rejoining)", float(report.snapshot_wire_bytes), SNAPSHOTS),
        ("Ciuic updates\n(pushes, entries)", float(report.update_wire_bytes), UPDATES),
        ("DDP, fp32 ring\n(same steps)", report.ddp_fp32_ring_bytes, DDP),
    ]
    values = [max(1.0, value) for _, value, _ in rows]
    axes.barh([name for name, _, _ in rows], values, color=[colour for _, _, colour in rows], height=0.58)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 4, max(values) * 12)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value).replace(".0", "")))
    axes.xaxis.set_minor_formatter(NullFormatter())
    for row, value in enumerate(values):
        text = f"  {format_bytes(value)}"
        if row == 1:
            text += f"\n  1/{report.times_less:.0f} of DDP"
        axes.text(value, row, text, va="center", size=12, color=_INK, weight="bold" if row == 1 else "normal")
    axes.tick_params(axis="y", colors=_INK, length=0)
    axes.spines["left"].set_visible(False)


def _draw_time(axes: Axes, report: DemoReport) -> None:
    _style(axes, "Where the time of each node went", grid="x")
    names = [node.location for node in report.nodes]
    left = [0.0] * len(names)
    parts = (
        ("compute", COMPUTE, [node.compute_s for node in report.nodes]),
        ("exposed communication", EXPOSED, [node.communication_s for node in report.nodes]),
        ("other (data, evaluation)", OTHER, [node.other_s for node in report.nodes]),
    )
    for label, colour, seconds in parts:
        shares = [100 * s / max(node.wall_s, 1e-9) for s, node in zip(seconds, report.nodes, strict=True)]
        axes.barh(names, shares, left=left, color=colour, height=0.55, label=label)
        for row, share in enumerate(shares):
            if share >= 6:
                dark = colour == OTHER
                axes.text(
                    left[row] + share / 2, row, f"{share:.0f} %", ha="center", va="center", size=11,
                    color=_INK if dark else "white",
                )  # fmt: skip
            left[row] += share
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.tick_params(axis="y", colors=_INK, length=0)
    axes.spines["left"].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=3, frameon=False, fontsize=11)


def segments(points: list[VersionPoint]) -> list[tuple[list[float], list[int]]]:
    """The version line of one node, cut where the node was gone: (seconds, versions) per piece."""
    pieces: list[tuple[list[float], list[int]]] = []
    is_open = False
    for point in points:
        if point.version is None:
            is_open = False
            continue
        if not is_open:
            pieces.append(([], []))
            is_open = True
        pieces[-1][0].append(point.time_s)
        pieces[-1][1].append(point.version)
    return pieces


def _draw_recovery(axes: Axes, report: DemoReport) -> None:
    _style(axes, "Recovery: version of each node, and its merged pushes", grid="y")
    top = max((merge.version for merge in report.merges), default=1)
    colours = node_colours(report)
    for number, node in enumerate(report.nodes):
        colour = colours[node.node_id]
        width = 6.5 - 2.2 * number
        for seconds, versions in segments(report.versions.get(node.node_id, [])):
            axes.step(seconds, versions, where="post", color=colour, linewidth=max(1.6, width), alpha=0.9)
        lane = -top * (0.09 + 0.075 * number)
        times = [merge.time_s for merge in report.merges if node.node_id in merge.nodes]
        axes.plot(times, [lane] * len(times), "|", color=colour, markersize=10, markeredgewidth=1.6)
        axes.plot([], [], color=colour, linewidth=4, label=node.location)
    axes.set_xlim(left=0)
    axes.set_ylim(-top * (0.13 + 0.075 * len(report.nodes)), top * 1.04)
    axes.axhline(0, color="#c3c8d2", linewidth=1)
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
    axes.set_xlabel("seconds since the run began")
    axes.set_ylabel("version")
    axes.legend(loc="upper left", frameon=False, fontsize=11)
    _mark_kill(axes, report)
