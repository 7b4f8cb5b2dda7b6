"""The charts of report.html, as plain data for plotly's JavaScript. Text and grid get their colours from the page."""

import math
from typing import Any

from ciuic.lab.plots import COMPUTE, DDP, EXPOSED, OTHER, SNAPSHOTS, UPDATES, node_colours, segments
from ciuic.lab.report import DemoReport
from ciuic.units import format_bytes

Chart = dict[str, Any]
_ALARM = "#d9483b"
_TIME_AXIS: Chart = {"title": {"text": "seconds since the run began"}, "rangemode": "tozero", "ticksuffix": " s"}


def make_charts(report: DemoReport) -> dict[str, Chart]:
    """By the id of the element each is drawn into: {"data": traces, "layout": layout}."""
    return {
        "chart-loss": _loss(report),
        "chart-bytes": _bytes(report),
        "chart-time": _time(report),
        "chart-recovery": _recovery(report),
    }


def _layout(**more: Any) -> Chart:
    return {"margin": {"l": 48, "r": 18, "t": 26, "b": 42}, "showlegend": False, **more}


def _kill_marks(report: DemoReport) -> Chart:
    kill = report.killed
    if kill is None:
        return {}
    lines = [(kill.at_s, f"kill -9 {kill.node_id}", _ALARM, "right")]
    shapes: list[Chart] = []
    if report.rejoined_after_s is not None:
        back_s = kill.at_s + report.rejoined_after_s
        lines.append((back_s, f"merged again, +{report.rejoined_after_s:.1f} s", COMPUTE, "left"))
        band = {"type": "rect", "x0": kill.at_s, "x1": back_s, "fillcolor": _ALARM, "opacity": 0.08}
        shapes.append({**band, "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0}, "layer": "below"})
    notes: list[Chart] = []
    for at_s, text, colour, side in lines:
        line = {"color": colour, "width": 1.5}
        shapes.append({"type": "line", "x0": at_s, "x1": at_s, "yref": "paper", "y0": 0, "y1": 1, "line": line})
        note = {"x": at_s, "y": 1, "yref": "paper", "text": text, "showarrow": False, "xanchor": side}
        notes.append({**note, "yanchor": "bottom", "font": {"color": colour, "size": 12}})
    return {"shapes": shapes, "annotations": notes}


def _loss(report: DemoReport) -> Chart:
    points = sorted(report.losses, key=lambda point: (point.version, point.time_s))
    trace = {
        "x": [p.time_s for p in points],
        "y": [p.loss for p in points],
        "customdata": [[p.version, p.node_id] for p in points],
        "mode": "lines+markers",
        "line": {"color": UPDATES, "width": 2.5},
        "marker": {"size": 6},
        "hovertemplate": "%{y:.3f} at version %{customdata[0]}<br>evaluated by %{customdata[1]}<extra></extra>",
    }
    axes = {
        "xaxis": _TIME_AXIS,
        "yaxis": {"title": {"text": "nats per byte"}, "rangemode": "tozero"},
    }
    return {"data": [trace], "layout": _layout(**axes, **_kill_marks(report))}


def _bytes(report: DemoReport) -> Chart:
    rows = [
        ("snapshots (rejoining)", float(report.snapshot_wire_bytes), SNAPSHOTS, ""),
        ("Ciuic updates", float(report.update_wire_bytes), UPDATES, f", 1/{report.times_less:.0f} of DDP"),
        ("DDP, fp32 ring", report.ddp_fp32_ring_bytes, DDP, ""),
    ]
    values = [max(1.0, value) for _, value, _, _ in rows]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [name for name, _, _, _ in rows],
        "x": values,
        "marker": {"color": [colour for _, _, colour, _ in rows]},
        "text": [f" {format_bytes(value)}{more} " for _, value, _, more in rows],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    ends = [math.log10(min(values)) - 0.5, math.log10(max(values)) + 1.4]
    scale = {"type": "log", "dtick": 1, "exponentformat": "SI", "ticksuffix": "B", "range": ends}
    return {"data": [trace], "layout": _layout(xaxis=scale, yaxis={"showgrid": False}, bargap=0.4)}


def _time(report: DemoReport) -> Chart:
    nodes = list(reversed(report.nodes))
    parts = (
        ("compute", COMPUTE, [node.compute_s for node in nodes]),
        ("exposed communication", EXPOSED, [node.communication_s for node in nodes]),
        ("other", OTHER, [node.other_s for node in nodes]),
    )
    traces: list[Chart] = []
    for name, colour, seconds in parts:
        shares = [100 * s / max(node.wall_s, 1e-9) for s, node in zip(seconds, nodes, strict=True)]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [node.location for node in nodes],
                "x": shares,
                "customdata": seconds,
                "marker": {"color": colour},
                "text": [f"{share:.0f} %" if share >= 6 else "" for share in shares],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "hovertemplate": f"%{{y}}: {name} %{{x:.1f}} % (%{{customdata:.1f}} s)<extra></extra>",
            }
        )
    layout = _layout(
        barmode="stack",
        bargap=0.4,
        showlegend=True,
        legend={"orientation": "h", "y": -0.14, "x": 0, "traceorder": "normal"},
        xaxis={"range": [0, 100], "ticksuffix": " %"},
        yaxis={"showgrid": False},
    )
    return {"data": traces, "layout": layout}


def _recovery(report: DemoReport) -> Chart:
    colours = node_colours(report)
    traces: list[Chart] = []
    for number, node in enumerate(report.nodes):
        colour = colours[node.node_id]
        line = {"color": colour, "width": max(2.0, 6.5 - 2.2 * number), "shape": "hv"}
        for seconds, versions in segments(report.versions.get(node.node_id, [])):
            trace = {"x": seconds, "y": versions, "mode": "lines", "line": line, "name": node.location}
            traces.append({**trace, "hovertemplate": "version %{y}<extra>%{fullData.name}</extra>"})
        merges = [merge for merge in report.merges if node.node_id in merge.nodes]
        traces.append(
            {
                "x": [merge.time_s for merge in merges],
                "y": [node.location] * len(merges),
                "customdata": [merge.version for merge in merges],
                "yaxis": "y2",
                "mode": "markers",
                "marker": {"symbol": "line-ns", "size": 11, "line": {"color": colour, "width": 1.6}},
                "hovertemplate": f"push of {node.location} merged into version %{{customdata}}<extra></extra>",
            }
        )
    locations = [node.location for node in reversed(report.nodes)]
    layout = _layout(
        xaxis={**_TIME_AXIS, "anchor": "y2"},
        yaxis={"title": {"text": "version"}, "domain": [0.3, 1], "rangemode": "tozero"},
        yaxis2={"domain": [0, 0.24], "categoryorder": "array", "categoryarray": locations, "showgrid": False},
        **_kill_marks(report),
    )
    return {"data": traces, "layout": layout}
