"""report.html: what was found, as one file that needs no network. The verdict comes first, pictures after it."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

import structlog

from ciuic.doctor.catalogue import CLASSES, code_of
from ciuic.doctor.evidence import read_findings
from ciuic.doctor.finding import Blind, Finding, Incident, Severity
from ciuic.doctor.incidents import severity_of
from ciuic.doctor.report.axes import seconds_text
from ciuic.doctor.report.curves import Line, Mark, alike, by_rank, chart, merged
from ciuic.doctor.report.grid import make_grids
from ciuic.doctor.report.heatmap import heat_map
from ciuic.doctor.report.history import History, read_history
from ciuic.doctor.report.text import evidence_text, ranks_text, where
from ciuic.doctor.report.timeline import timeline
from ciuic.errors import StorageError

PAGE = "report.html"
GRIDS_MAX = 4
COST_AFTER_S = 30.0
"""The share of samples is told of longer runs: the first steps are all sampled, which says nothing about the rest."""
BLIND = "could not look: this is not the same as healthy"


def write_page(folder: Path, to: Path | None = None) -> Path:
    """Write the page of a doctor's folder; where it is. Raises NotFoundError and StorageError as `read_findings`."""
    incidents, blind = read_findings(folder)
    path = to or folder / PAGE
    text = render_page(incidents, blind, read_history(folder), name=folder.name)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written", cause=str(error), next="another --to FILE") from error
    return path


def render_page(incidents: Sequence[Incident], blind: Sequence[Blind], history: History, *, name: str = "") -> str:
    """The whole page. All text of the evidence is escaped."""
    here = files("ciuic.doctor.report")
    wrong = [incident for incident in incidents if severity_of(incident.cause) is not Severity.NOTE]
    notes = [incident for incident in incidents if severity_of(incident.cause) is Severity.NOTE]
    sections = (
        _head(incidents, history, name),
        _section("What is wrong", "".join(_incident(incident) for incident in wrong)),
        _section("Worth knowing", "".join(_incident(incident) for incident in notes)),
        _section("What could not be looked at", _blind(blind)),
        _facts(incidents, history),
        _section("Ranks over time", timeline(history, wrong)),
        _section("Did each module move as its gradients ask?", _maps(history)),
        _section("Loss, learning rate, loss scale", _curves(wrong, history)),
        _foot(name),
    )
    body = "\n".join(section for section in sections if section)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Ciuic doctor: {escape(_title(incidents))}</title>
<link rel="icon" href="data:,">
<style>{here.joinpath("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
{body}
</main>
<script>{here.joinpath("page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def _title(incidents: Sequence[Incident]) -> str:
    return f"{incidents[0].cause.code} {code_of(incidents[0].cause.code).title}" if incidents else "nothing found"


def _head(incidents: Sequence[Incident], history: History, name: str) -> str:
    looked = f"{len(history.hosts)} of {history.world} ranks looked at" if history.world else "no rank was seen"
    kicker = f"Ciuic doctor{f', {name}' if name else ''}: {looked}"
    if not incidents:
        if not history.hosts:
            return _header("warning", "nothing to look at", kicker, "The doctor has seen no rank.")
        return _header("good", "nothing found", kicker, "Nothing found.")
    finding = incidents[0].cause
    severity = severity_of(finding).value
    if severity_of(finding) is Severity.NOTE:
        return _header("good", "no alarm", kicker, "Nothing is wrong that the doctor can see; see the notes.")
    title = code_of(finding.code).title
    return _header(severity, f"{severity} {finding.code}", kicker, f"{title[0].upper()}{title[1:]}.")


def _header(kind: str, seal: str, kicker: str, title: str) -> str:
    seal = f'<span class="seal {kind}">{escape(seal)}</span>'
    return f'<header><p class="kicker">{seal}{escape(kicker)}</p><h1>{escape(title)}</h1></header>'


def _facts(incidents: Sequence[Incident], history: History) -> str:
    if not history.hosts:
        return ""
    counts = dict.fromkeys(Severity, 0)
    for incident in incidents:
        counts[severity_of(incident.cause)] += 1
    words = [f"{counts[each]} {each.value}" for each in reversed(Severity) if counts[each]]
    steps = sorted(set(history.steps.values()))
    shown = [
        (", ".join(words) or "0", "incidents"),
        (f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0] if steps else 0), "steps by rank"),
        (seconds_text(history.ended_s - history.began_s), "from the first sign of life to the last"),
    ]
    if (share := _cost_share(history)) is not None:
        shown.append((f"{share:.2%}", "of the ranks' time spent on samples"))
    cards = (
        f'<div class="card fact"><div class="value">{escape(value)}</div><div class="name">{escape(text)}</div></div>'
        for value, text in shown
    )
    return f'<section class="facts top">{"".join(cards)}</section>'


def _cost_share(history: History) -> float | None:
    shares = []
    for rank, signs in history.signs.items():
        lasted_s = signs[-1].time_s - signs[0].time_s if signs else 0.0
        if lasted_s > COST_AFTER_S and rank in history.cost_s:
            shares.append(history.cost_s[rank] / lasted_s)
    return max(shares, default=None)


def _incident(incident: Incident) -> str:
    finding = incident.cause
    code = code_of(finding.code)
    severity = severity_of(finding).value
    rows = [("cause", finding.cause, ""), ("where", where(finding), "")]
    if finding.evidence:
        rows.append(("evidence", evidence_text(finding), ""))
    rows += [("fix", finding.fix or code.fix, "fix"), ("sure", f"{finding.confidence:.0%}", "")]
    cells = "".join(f'<dt>{name}</dt><dd class="{kind}">{escape(text)}</dd>' for name, text, kind in rows)
    seal = f'<span class="seal {severity}">{severity} {escape(finding.code)}</span>'
    return (
        f'<article class="card finding {severity}"><h3>{seal}'
        f"{escape(code.title)}</h3><dl>{cells}</dl>{_collateral(incident)}{_explained(finding)}</article>"
    )


def _collateral(incident: Incident) -> str:
    if not incident.collateral:
        return ""
    items = "".join(
        f"<li>{escape(other.code)} {escape(code_of(other.code).title)}: {escape(other.cause)} "
        f'<span class="small">({escape(where(other))})</span></li>'
        for other in incident.collateral
    )
    count = len(incident.collateral)
    summary = f"What follows from it: {count} more finding{'s' if count > 1 else ''}"
    return f"<details><summary>{summary}</summary><ul>{items}</ul></details>"


def _explained(finding: Finding) -> str:
    code = code_of(finding.code)
    letter = code.code.removeprefix("CIUIC-")[0]
    parts = "".join(
        f"<h4>{title}</h4>{_markdown(text)}"
        for title, text in (
            ("What it means", code.meaning),
            ("How it is detected", code.detection),
            ("How to fix", f"{code.fix}\n\n{code.fixes}"),
        )
    )
    summary = f"What {escape(code.code)} means (class {letter}: {escape(CLASSES[letter])})"
    return f"<details><summary>{summary}</summary>{parts}</details>"


def _markdown(text: str) -> str:
    """Paragraphs, blocks of code and `code`: all that the catalogue uses."""
    parts = []
    for number, piece in enumerate(text.split("```")):
        if number % 2:
            parts.append(f"<pre><code>{escape(piece.partition(chr(10))[2].rstrip())}</code></pre>")
            continue
        for paragraph in filter(None, (each.strip() for each in piece.split("\n\n"))):
            words = [f"<code>{each}</code>" if at % 2 else each for at, each in enumerate(escape(paragraph).split("`"))]
            parts.append(f"<p>{''.join(words)}</p>")
    return "".join(parts)


def _blind(blind: Sequence[Blind]) -> str:
    if not blind:
        return ""
    items = ""
    for each in blind:
        who = f" on {ranks_text(each.ranks)}" if each.ranks else ""
        items += f"<li>{escape(f'{each.what}{who}: {each.why}')}</li>"
    return f'<div class="card"><p class="small">{BLIND}</p><ul>{items}</ul></div>'


def _maps(history: History) -> str:
    grids = make_grids(history)
    more = (
        f'<p class="small">{len(grids) - GRIDS_MAX} more optimizers are not drawn.</p>'
        if len(grids) > GRIDS_MAX
        else ""
    )
    return "".join(heat_map(grid) for grid in grids[:GRIDS_MAX]) + more


def _curves(incidents: Sequence[Incident], history: History) -> str:
    named = list(dict.fromkeys(rank for incident in incidents for rank in incident.cause.ranks))
    marks = [
        Mark(step=incident.cause.step, text=incident.cause.code.removeprefix("CIUIC-"))
        for incident in incidents
        if incident.cause.step > 0
    ]
    cards = []
    if history.losses:
        note = "Each rank's own, before any average, at sampled steps."
        note += "".join(
            f" Rank {rank}: {_not_finite(steps)}." for rank, steps in sorted(history.not_finite.items())[:4]
        )
        cards.append(chart("Loss of each rank", note, by_rank(history.losses, named), marks))
    lines: list[Line] = []
    for (optimizer, group), curves in sorted(history.rates.items()):
        name = f"optimizer {optimizer} group {group}" if len(history.rates) > 1 else ""
        lines += alike(curves, name, len(lines))
    if lines:
        cards.append(
            chart("Learning rate", "Of each group; ranks that differ have lines of their own.", merged(lines), marks)
        )
    if history.scales:
        skips = {step for steps in history.skipped.values() for step in steps}
        note = f"Logarithmic. Triangles: steps that the scaler left out ({len(skips)} seen)."
        scale_marks = [*marks, *(Mark(step=step, is_skip=True) for step in sorted(skips))]
        cards.append(chart("Loss scale", note, alike(history.scales, "", 0), scale_marks, base=2.0))
    return f'<div class="charts">{"".join(cards)}</div>' if cards else ""


def _not_finite(steps: Sequence[int]) -> str:
    return f"not finite at {len(steps)} sampled step{'s' if len(steps) > 1 else ''} from step {steps[0]} on"


def _foot(name: str) -> str:
    again = f"<code>ciuic doctor report {escape(name or 'FOLDER')} --html</code>"
    return (
        f"<footer><p>Made from evidence.ndjson and findings.json beside this file; {again} makes it again. "
        "<code>ciuic doctor explain CODE</code> says more about a code.</p></footer>"
    )


def try_to_write(folder: Path) -> Path | None:
    """For the end of a run; None when there is no page."""
    try:
        return write_page(folder)
    except Exception:  # noqa: BLE001 - a page that cannot be drawn must not hide what was found
        structlog.get_logger().exception("report.html was not written")
        return None
