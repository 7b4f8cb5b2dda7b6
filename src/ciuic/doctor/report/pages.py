"""The page of a code: for `ciuic doctor explain`, and for docs/codes.

`python -m ciuic.doctor.report.pages docs/codes` writes the pages of all codes and the list of them in index.md there.
"""

import sys
from pathlib import Path

from ciuic.doctor.catalogue import CLASSES, codes
from ciuic.doctor.catalogue.code import Code
from ciuic.errors import NotFoundError

LIST_BEGINS, LIST_ENDS = "<!-- the doctor's codes -->", "<!-- end of the doctor's codes -->"
"""Lines of index.md between which the list stands."""


def page(code: Code, *, links: bool = False) -> str:
    """Markdown. With `links` other codes are links to their pages beside this one."""
    letter = code.code.removeprefix("CIUIC-")[0]
    parts = [
        f"# {code.code}: {code.title}",
        f"Severity: {code.severity.value}. Class {letter}: {CLASSES[letter]}.",
        "## What it means",
        code.meaning.strip(),
        "## How it is detected",
        code.detection.strip(),
        "## How to fix",
        f"**{code.fix.strip()}**" if links else code.fix.strip(),
    ]
    if code.fixes:
        parts.append(code.fixes.strip())
    if code.example:
        parts += ["## Example", code.example.strip()]
    if code.explains:
        parts += ["## What follows from it", _follows(code, links=links)]
    return "\n\n".join(parts) + "\n"


def _follows(code: Code, *, links: bool) -> str:
    known = codes()
    found = [known[other] for other in sorted(code.explains) if other in known]
    lines = [f"- {_link(other.code) if links else other.code}: {other.title}" for other in found]
    return "Found as well, these are folded under it:\n\n" + "\n".join(lines)


def _link(code: str) -> str:
    return f"[{code}]({code}.md)"


def index() -> list[tuple[str, str, str]]:
    """Code, severity and title of every entry."""
    return [(code.code, code.severity.value, code.title) for code in codes().values()]


def index_lines() -> str:
    """The list of index.md: a heading for each class, a line for each code."""
    lines = []
    for letter, title in CLASSES.items():
        lines += [f"### {letter}: {title}", ""]
        mine = [code for code in codes().values() if code.code.removeprefix("CIUIC-").startswith(letter)]
        lines += [f"- {_link(code.code)}: {code.title} ({code.severity.value})" for code in mine]
        lines.append("")
    return "\n".join(lines).strip()


def with_list(text: str) -> str:
    """The text of index.md with the present list in it. Raises NotFoundError when it has no place for the list."""
    head, begins, rest = text.partition(LIST_BEGINS)
    _, ends, tail = rest.partition(LIST_ENDS)
    if not begins or not ends:
        raise NotFoundError(
            "index.md has no place for the doctor's codes", cause=f"{LIST_BEGINS} and {LIST_ENDS} are not in it"
        )
    return f"{head}{LIST_BEGINS}\n\n{index_lines()}\n\n{LIST_ENDS}{tail}"


def write(folder: Path) -> list[Path]:
    """Write what is not there as it should be; the files that have changed."""
    wanted = {folder / f"{code.code}.md": page(code, links=True) for code in codes().values()}
    wanted[folder / "index.md"] = with_list((folder / "index.md").read_text())
    changed = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    for path in changed:
        path.write_text(wanted[path])
    return changed


if __name__ == "__main__":
    for written in write(Path(sys.argv[1])):
        sys.stdout.write(f"{written}\n")
