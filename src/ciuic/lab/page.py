"""report.html: the demo's report as one file that needs no network."""

import json
import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path

from plotly.offline import get_plotlyjs

from ciuic.lab.charts import make_charts
from ciuic.lab.plots import node_colours
from ciuic.lab.report import Check, DemoReport, NodeReport, StoryLine
from ciuic.units import format_bytes, format_count, format_duration, format_rate

_LOUD = ("demo.killed", "demo.restarted", "demo.rejoined")
_MAX_STORY_LINES = 60
_QUIET = ("round.closed", "run.evaluated", "run.waiting", "token.created")
"""Too many for the table, or said by another line."""
_CHARTS = (
    ("chart-loss", "Held-out loss", "The same text on every node, never trained on; evaluated on the shared base."),
    (
        "chart-bytes",
        "Bytes on the links, logarithmic",
        "TCP payload counted by the relays, both directions of all nodes, beside what DDP would have sent for as many "
        "steps: 2 (N-1)/N x 4 bytes per parameter, step and node.",
    ),
    (
        "chart-recovery",
        "Recovery",
        "Above: the version of each node's base (equal lines lie on each other). Below: its merged pushes.",
    ),
    (
        "chart-time",
        "Where the time went",
        "Exposed communication: the training thread waited for the hub, or packed and unpacked updates itself.",
    ),
)
_EMULATED = (
    "The links: rate, delay, jitter and the cost of a new connection, by a relay in user space. No packet loss.",
    "The three continents: all processes run on this machine and share its cores.",
    "The claimed hardware: what an operator would type. Ciuic shows it beside what it measured.",
)
_REAL = (
    "The hub, the agents and the workers: separate processes that speak mutual TLS through the relays.",
    "The training: PyTorch, the DeepSeek-V3 architecture, and text that every machine has (Python's standard library).",
    "The kill: kill -9 of the agent and the worker of one node, then a new start with the identity it had.",
    "The bytes, the losses, the digests and the times: counted and measured in this run.",
)


def write_page(report: DemoReport, path: Path) -> None:
    """Write report.html (about 5 MB, most of it plotly's JavaScript from the installed package)."""
    path.write_text(render_page(report), encoding="utf-8")


def render_page(report: DemoReport) -> str:
    """The whole page. All text of the report is escaped."""
    here = files("ciuic.lab")
    charts = json.dumps(make_charts(report)).replace("<", "\\u003c")
    body = "\n".join(
        (
            _head(report),
            _facts(report),
            _section("What must hold, and what was measured", _checks(report.checks)),
            _section("Charts", _chart_cards()),
            _section("Nodes: claimed, emulated, measured", _nodes(report)),
            _section("What happened", _story(report.story)),
            _section("What is emulated here and what is real", _honesty()),
            _section("Do it again", _again(report)),
        )
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Ciuic demo: {"all checks hold" if report.holds else "not all checks hold"}</title>
<link rel="icon" href="data:,">
<style>{here.joinpath("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="charts">{charts}</script>
<script>{get_plotlyjs()}</script>
<script>{here.joinpath("page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _text(text: str) -> str:
    """Escaped, and names like ap-southeast stay on one line."""
    return re.sub(r"\S*\w-\w\S*", r'<span class="nowrap">\g<0></span>', escape(text))


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def _head(report: DemoReport) -> str:
    kind, text = ("good", "all checks hold") if report.holds else ("bad", "not all checks hold")
    facts = f"Ciuic {report.ciuic_version} demo, {report.created_at.replace('T', ' ').replace('Z', ' UTC')}"
    return (
        f'<header><p class="kicker"><span class="seal {kind}">{text}</span>{escape(facts)}</p>'
        f"<h1>{_text(report.verdict)}</h1></header>"
    )


def _facts(report: DemoReport) -> str:
    back_s = report.rejoined_after_s
    shown = (
        (f"{report.loss_first:.2f} → {report.loss_last:.2f}", "held-out loss, nats per byte"),
        (f"1/{report.times_less:.0f}", f"of DDP's bytes: {format_bytes(report.update_wire_bytes)}"),
        (f"{100 * report.exposed_comm_share:.1f} %", "of training time lost to communication"),
        ("not seen" if back_s is None else format_duration(back_s), "from kill -9 to the next merged push"),
    )
    cards = (
        f'<div class="card fact"><div class="value">{escape(value)}</div><div class="name">{escape(name)}</div></div>'
        for value, name in shown
    )
    return f'<div class="facts">{"".join(cards)}</div>'


def _table(head: Iterable[tuple[str, str]], rows: Iterable[str]) -> str:
    """`head`: (class, text) per column; `rows`: finished <tr> elements."""
    cells = "".join(f'<th class="{kind}">{escape(text)}</th>' for kind, text in head)
    return (
        f'<div class="card scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _checks(checks: Iterable[Check]) -> str:
    rows = (
        f'<tr class="{"good" if check.holds else "bad"}"><td class="mark">{"✓" if check.holds else "✗"}</td>'
        f"<td>{escape(check.name)}</td><td>{_text(check.measured)}</td>"
        f'<td class="muted">{escape(check.bar)}</td></tr>'
        for check in checks
    )
    return _table((("", ""), ("", "what"), ("", "measured"), ("", "bar")), rows)


def _chart_cards() -> str:
    cards = (
        f'<div class="card plot"><h3>{escape(title)}</h3><p class="small">{escape(note)}</p>'
        f'<div class="chart" id="{name}"></div></div>'
        for name, title, note in _CHARTS
    )
    missing = "<noscript><p>The charts need JavaScript; demo.png beside this file shows them too.</p></noscript>"
    return f'{missing}<div class="charts">{"".join(cards)}</div>'


def _nodes(report: DemoReport) -> str:
    colours = node_colours(report)
    head = (
        ("", "node"), ("", "claimed"), ("", "emulated link"), ("", "measured through it"), ("number", "steps"),
        ("number", "tokens/s"), ("number", "pushes merged"), ("number", "updates"), ("number", "longest stall"),
    )  # fmt: skip
    return _table(head, (_node_row(node, colours[node.node_id]) for node in report.nodes))


def _node_row(node: NodeReport, colour: str) -> str:
    link = node.emulated
    emulated = [format_rate(link["up_bits_per_s"]), f"{format_duration(link['round_trip_s'])} round trip"]
    names = [] if node.node_id == node.location else [node.node_id]
    if node.incarnations > 1:
        names.append(f"{node.incarnations} incarnations")
    merged = [
        str(node.pushes_merged),
        f"{node.pushes_merged_before_kill} before, {node.pushes_merged_after_kill} after",
    ]
    columns = (
        _lines(_claims(node.claimed)),
        _lines(emulated),
        _lines(_measured(node.measured)),
        f"{node.steps:,}",
        format_count(node.tokens / max(node.wall_s, 1e-9)),
        _lines(merged),
        format_bytes(node.wire_bytes.get("updates", 0)),
        format_duration(node.longest_stall_s),
    )
    kinds = ["nowrap"] * 3 + ["number"] * 5
    return (
        f'<tr><td class="nowrap"><span class="dot" style="background:{colour}"></span>'
        f"{_lines([node.location, *names])}</td>"
        + "".join(f'<td class="{kind}">{text}</td>' for kind, text in zip(kinds, columns, strict=True))
        + "</tr>"
    )


def _lines(texts: list[str]) -> str:
    """The first one large, the others small below it."""
    first, *others = texts
    return escape(first) + "".join(f'<br><span class="small">{escape(text)}</span>' for text in others)


def _claims(claimed: dict[str, float]) -> list[str]:
    texts = [f"{claimed['gpu']:g} GPUs"] if "gpu" in claimed else []
    if "bandwidth_gbit_s" in claimed:
        texts.append(f"{claimed['bandwidth_gbit_s']:g} Gbit/s")
    return texts or ["nothing"]


def _measured(found: dict[str, float]) -> list[str]:
    texts = []
    if "up_bits_per_s" in found and "down_bits_per_s" in found:
        texts.append(f"{format_rate(found['up_bits_per_s'])} up, {format_rate(found['down_bits_per_s'])} down")
    if "rtt_s" in found:
        texts.append(f"{format_duration(found['rtt_s'])} round trip")
    if "cpu_count" in found:
        texts.append(f"{found.get('gpu_count', 0):.0f} GPUs, {found['cpu_count']:.0f} shared cores")
    return texts or ["not yet"]


def _story(story: list[StoryLine]) -> str:
    shown = [line for line in story if line.kind not in _QUIET]
    lines = sorted(shown, key=lambda line: line.time_s)
    left_out = max(0, len(lines) - _MAX_STORY_LINES)
    rows = (
        f'<tr class="{"loud" if line.kind in _LOUD else ""}"><td class="number">{line.time_s:.1f} s</td>'
        f'<td class="nowrap muted">{escape(line.kind)}</td><td>{escape(line.text)}</td></tr>'
        for line in lines[:_MAX_STORY_LINES]
    )
    note = f'<p class="small">{left_out} more in report.json.</p>' if left_out else ""
    head = (("number", "since the run began"), ("", "event"), ("wide", ""))
    return _table(head, rows) + note


def _honesty() -> str:
    def card(title: str, lines: Iterable[str]) -> str:
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        return f'<div class="card"><h3>{title}</h3><ul>{items}</ul></div>'

    return f'<div class="two">{card("Emulated", _EMULATED)}{card("Real", _REAL)}</div>'


def _again(report: DemoReport) -> str:
    command = f"ciuic demo --seed {report.seed}" + (" --quick" if report.quick else "")
    machine = "; ".join(f"{name}: {value}" for name, value in report.machine.items())
    return (
        f'<div class="card"><pre><code>{escape(command)}</code></pre></div>'
        f"<footer><p>{escape(report.model)}, {report.parameters:,} parameters; "
        f"{format_duration(report.demo_s)} in all, {format_duration(report.run_s)} of training; seed {report.seed}. "
        f"This machine: {escape(machine)}.</p>"
        "<p>Beside this file: report.json (all numbers), demo.png, logs/ (every process).</p></footer>"
    )
