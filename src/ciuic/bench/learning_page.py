"""The tables of a page of the documentation, from what the command measured: no number is typed by hand."""

from collections.abc import Sequence
from pathlib import Path

from ciuic.bench import Table
from ciuic.errors import UsageError

BEGIN, END = "<!-- tables of `ciuic bench learning` -->", "<!-- end of tables -->"


def write_page(page: Path, tables: Sequence[Table], facts: str) -> None:
    """Replace what lies between the two marks of a Markdown page. Raises UsageError when the page has no such marks."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{page} cannot be read", cause=(error.strerror or str(error)).lower()) from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"{page} has no place for the tables", next=f"add the lines {BEGIN} and {END}")
    body = "\n\n".join([facts, *(_markdown(table) for table in tables)])
    page.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", encoding="utf-8")


def _markdown(table: Table) -> str:
    head = "| " + " | ".join(table.columns) + " |"
    line = "|" + "---|" * len(table.columns)
    rows = ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join([f"**{table.title}**", "", head, line, *rows, "", *table.note.splitlines()])
