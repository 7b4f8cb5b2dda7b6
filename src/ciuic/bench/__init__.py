"""Benchmarks: each prints ratios to a reference that is measured in the same run. `ciuic bench NAME` starts one.

One module per benchmark, named in `ciuic.bench.names.NAMES`, with three functions:

    add_options(parser)              its own options, on an argparse parser
    measure(options) -> dict         what was found, JSON-able; the numbers a person looks for at the top level
    tables(result) -> list[Table]    the same for a terminal

and, where a picture says more, `picture(result, folder) -> Path`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of results, as text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""
    """What the numbers mean, in a sentence."""

    def lines(self) -> list[str]:
        """Aligned columns."""
        widths = [max(len(row[i]) for row in (self.columns, *self.rows)) for i in range(len(self.columns))]
        rows = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in self.rows]
        head = "  ".join(name.ljust(w) for name, w in zip(self.columns, widths, strict=True)).rstrip()
        return [self.title, "", head, "-" * len(head), *rows, *([self.note] if self.note else []), ""]
