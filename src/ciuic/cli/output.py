"""What commands print: tables and lines for people, or (with --json) nothing but JSON on stdout."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ciuic.errors import CiuicError, error_to_dict, render_error

if TYPE_CHECKING:
    from rich.table import Table

JsonOption = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table before it is drawn."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    empty: str = "nothing here yet"
    """What is printed instead of a table without rows."""


def print_json(value: Any) -> None:
    """One JSON document on stdout; `value` may hold messages."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_line(text: str) -> None:
    """One line on stdout, at once: it may be read through a pipe by something that waits for it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_note(text: str) -> None:
    """One line for the person on stderr, beside what is piped on."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Name and value, one pair per line, in two columns."""
    pairs = list(facts)
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print_line(f"{name.ljust(width)}  {value}".rstrip())


def print_grid(grid: Grid) -> None:
    """A table: drawn in a terminal, aligned plain text (never cut) elsewhere."""
    if not grid.rows:
        print_line(grid.empty)
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(rich_table(grid))
    else:
        for line in plain_table(grid):
            print_line(line)


def plain_table(grid: Grid) -> list[str]:
    """The lines of a table as aligned text."""
    rows: list[Sequence[str]] = [grid.columns, *grid.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(grid.columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def rich_table(grid: Grid) -> "Table":
    """The same for a terminal. Cells are plain text, never markup: they hold names from other machines."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(*grid.columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in grid.rows:
        table.add_row(*[Text(clean(cell), overflow="fold") for cell in row])
    return table


def clean(text: str) -> str:
    """`text` without control characters: a log line from another machine must not steer this terminal."""
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_error(error: CiuicError, *, as_json: bool) -> None:
    """An error where it belongs: three lines on stderr, or {"error": ...} on stdout."""
    if as_json:
        sys.stdout.write(json.dumps({"error": error_to_dict(error)}) + "\n")
        sys.stdout.flush()
        return
    lines = render_error(error)
    if _has_colour(sys.stderr):
        label, _, rest = lines.partition(":")
        lines = f"\x1b[1;31m{label}\x1b[0m:{rest}"
    print_note(lines)


def _has_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
