"""`ciuic bench learning`: held-out loss of modes, codecs and intervals, each at a learning rate tuned by the same grid.

Four nodes in one process, through the machines of the ledger; a 364 k-parameter GPT and a tiny DeepSeek-V3 over the
bytes of Python's standard library, 400 steps of 4 x 4 x 64 tokens. Finished runs stay in learning-rows.jsonl, so a
long benchmark can be stopped and goes on where it was.
"""

import argparse
import platform
from pathlib import Path
from typing import Any

from ciuic.bench import Table
from ciuic.bench.learning_data import load_text
from ciuic.bench.learning_page import write_page
from ciuic.bench.learning_picture import draw
from ciuic.bench.learning_plan import Item, choose, quick_items
from ciuic.bench.learning_quadratic import quadratic_errors
from ciuic.bench.learning_results import LIMITS, gaps, order, scores, summary
from ciuic.bench.learning_search import Orders, Row, run_items
from ciuic.errors import UsageError

ROWS_FILE = "learning-rows.jsonl"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--quick", action="store_true", help="a few short runs: shows that it works, no result")
    parser.add_argument("--only", default="", help="names of settings, with * and commas, for example 'onebit-*'")
    parser.add_argument("--seeds", type=int, default=3, help="seeds per setting at its best rate")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one core each")
    parser.add_argument("--page", type=Path, help="a Markdown page whose tables are written anew")
    parser.add_argument("--cached", action="store_true", help="run nothing: show what the folder has")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run what is not in the folder yet. Raises UsageError for options that cannot be."""
    items = _items(options)
    if options.seeds < 1 or options.jobs < 1:
        raise UsageError("--seeds and --jobs must be at least 1", next="leave them out to use the defaults")
    orders = Orders(path=Path(options.folder) / ROWS_FILE, seeds=options.seeds, cached=options.cached)
    rows, rates = run_items(items, orders, options.jobs)
    result = {"quick": options.quick, **report(items, rows, rates)}
    if options.page is not None:
        write_page(options.page, tables(result), _facts(result))
    return result


def _facts(result: dict[str, Any]) -> str:
    return (
        f"{len(result['rows'])} runs; the text has the digest `{result['text_digest']}` (Python "
        f"{platform.python_version()}; other versions have other sources, so the losses move together)."
    )


def _items(options: argparse.Namespace) -> list[Item]:
    patterns = [part.strip() for part in options.only.split(",") if part.strip()]
    items = quick_items() if options.quick else choose(patterns)
    if not items:
        known = ", ".join(item.setting.name for item in choose([]))
        raise UsageError(f"no setting is named {options.only!r}", cause=f"there are {known}", next="correct --only")
    return items


def report(items: list[Item], rows: list[Row], rates: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The JSON document of these rows; a number that was not measured is null."""
    found = scores(items, rows, rates)
    measured = gaps(found)
    with_feedback, naive = quadratic_errors()
    return {
        **measured,
        "within_limits": _within(measured),
        **order(items, found),
        "quadratic_feedback_error": round(with_feedback, 5),
        "quadratic_naive_error": round(naive, 5),
        "bytes_below_ddp": {name: score.bytes_below_ddp for name, score in found.items()},
        "text_digest": load_text().digest,
        "settings": summary(found),
        "rows": rows,
    }


def _within(measured: dict[str, float | None]) -> dict[str, bool | None]:
    """Whether each gap is within its limit, dense and mixture."""
    result: dict[str, bool | None] = {}
    for name, gap in measured.items():
        limit = LIMITS.get(name.removesuffix("_moe"))
        if limit is not None:
            result[name] = None if gap is None else gap <= limit
    return result


def tables(result: dict[str, Any]) -> list[Table]:
    """Settings by loss, and the gaps."""
    return [_settings_table(result), _gap_table(result)]


def _settings_table(result: dict[str, Any]) -> Table:
    rows = []
    short = "Only a few steps, no result. " if result.get("quick") else ""
    for line in result["settings"]:
        rate = f"{line['lr']:g}" + (f" x {line['muon_multiplier']:g}" if line["muon_multiplier"] else "")
        curve = ["diverged" if loss is None else f"{loss:.3f}" for loss in line["curve"]]
        below = f"{line['bytes_below_ddp']:.1f}"
        rows.append((line["name"], *curve, str(line["seeds"]), _digits(line["spread"]), rate, below))
    return Table(
        title=f"{short}Held-out loss (nats per byte), each setting at its best rate",
        columns=("setting", "25 %", "50 %", "75 %", "end", "seeds", "spread", "rate", "bytes below DDP"),
        rows=rows,
        note="Mean over the seeds; spread: largest minus smallest. A rate a x b: AdamW at a, Muon's matrices at a x b.",
    )


def _gap_table(result: dict[str, Any]) -> Table:
    names = [name for name in result if "_minus_" in name and result[name] is not None]
    rows = []
    for name in names:
        limit = LIMITS.get(name.removesuffix("_moe"))
        verdict = {True: "within", False: "above", None: ""}[result["within_limits"].get(name)]
        rows.append((name, _digits(result[name], sign=True), "" if limit is None else f"{limit:g}", verdict))
    rows.append(("quadratic_feedback_error", f"{result['quadratic_feedback_error']:.4f}", "0.01", ""))
    rows.append(("quadratic_naive_error", f"{result['quadratic_naive_error']:.4f}", "", ""))
    holds = {True: "holds", False: "differs", None: "not measured"}[result["ordering_holds"]]
    differs = "".join(f"\n  {line}" for line in result["ordering_differs"])
    note = f"The earlier study's order of {result['ordering_pairs']} clear pairs: {holds}.{differs}"
    return Table(title="Gaps", columns=("gap", "measured", "limit", ""), rows=rows, note=note)


def _digits(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.4f}" if sign else f"{value:.4f}"


def picture(result: dict[str, Any], folder: Path) -> Path:
    """Draw learning.png."""
    path = folder / "learning.png"
    draw(result, path)
    return path
