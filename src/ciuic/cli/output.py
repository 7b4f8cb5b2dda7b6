"""What commands print: tables and lines for people, or (with --json) nothing but JSON on stdout."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ciuic.errors import CiuicError, error_to_dict, render_error

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

JsonOption = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]

ERROR_INDENT = len("cause: ")

WHOLE_CHARACTERS = 12
"""A cell up to this length is a name or a quantity: it is broken at a blank only when nothing else helps."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table before it is drawn."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    empty: str = "nothing here yet"
    """What is printed instead of a table without rows."""
    minor: tuple[str, ...] = ()
    """Columns that a terminal leaves out, in this order, when it is too narrow for all."""

    def without(self, title: str) -> "Grid":
        """The same without one column."""
        kept = [at for at, column in enumerate(self.columns) if column != title]
        return replace(
            self,
            columns=tuple(self.columns[at] for at in kept),
            rows=[tuple(row[at] for at in kept) for row in self.rows],
        )


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
        print_hanging(f"{name.ljust(width)}  {value}".rstrip(), width + 2)


def print_hanging(text: str, indent: int) -> None:
    """One line; what a terminal has no room for goes on below, `indent` columns in."""
    print_line(hanging(text, indent, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text)


def hanging(text: str, indent: int, width: int) -> str:
    """`text` in lines of at most `width`, broken at blanks; a word that is longer stays whole, so it can be copied."""
    if len(text) <= width or width < 2 * indent:
        return text
    head, rest = text[:indent], text[indent:]
    lines = textwrap.wrap(rest, width - indent, break_long_words=False, break_on_hyphens=False)
    return head + f"\n{' ' * indent}".join(lines)


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


@dataclass(frozen=True)
class FittedTable:
    """The same for a terminal of any width: what must wrap does so between words, names and quantities last."""

    grid: Grid

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Called by rich with the width there is."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        grid = replace(self.grid, rows=[tuple(map(clean, row)) for row in self.grid.rows])
        widths = column_widths(grid, options.max_width)
        for title in grid.minor:
            if widths is None:
                grid = grid.without(title)
                widths = column_widths(grid, options.max_width)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for title, width in zip(grid.columns, widths or [None] * len(grid.columns), strict=True):
            table.add_column(title, width=width)
        for row in grid.rows:
            # Cells are plain text, never markup: they hold names from other machines.
            table.add_row(*[Text(cell, overflow="fold") for cell in row])
        yield table


def rich_table(grid: Grid) -> FittedTable:
    """What rich draws."""
    return FittedTable(grid)


def column_widths(grid: Grid, line: int) -> list[int] | None:
    """The width of each column in lines of `line` characters, of which the gaps take two per column.

    The widest column that can wrap gives way first: long cells and titles between words, then short cells too. None
    when words would have to be cut.
    """
    columns = [(title, *(row[at] for row in grid.rows)) for at, title in enumerate(grid.columns)]
    room = line - 2 * len(columns)
    for kept_whole in (WHOLE_CHARACTERS, 0):
        widths = [max(map(len, column)) for column in columns]
        least = [_least_width(column, kept_whole) for column in columns]
        if sum(least) > room:
            continue
        while sum(widths) > room:
            wide = [at for at, width in enumerate(widths) if width > least[at]]
            widths[max(wide, key=widths.__getitem__)] -= 1
        return widths
    return None


def _least_width(column: Sequence[str], kept_whole: int) -> int:
    title, *cells = column
    pieces = title.split()
    for cell in cells:
        pieces += [cell] if len(cell) <= kept_whole else cell.split()
    return max(map(len, pieces), default=1)


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
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = "\n".join(hanging(line, ERROR_INDENT, width) for line in lines.splitlines())
    if _has_colour(sys.stderr):
        label, _, rest = lines.partition(":")
        lines = f"\x1b[1;31m{label}\x1b[0m:{rest}"
    print_note(lines)


def _has_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
