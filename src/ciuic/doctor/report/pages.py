"""The page of a code: for `ciuic doctor explain`, and for docs/codes."""

from ciuic.doctor.catalogue import CLASSES, codes
from ciuic.doctor.catalogue.code import Code


def page(code: Code) -> str:
    """Markdown."""
    letter = code.code.removeprefix("CIUIC-")[0]
    parts = [
        f"# {code.code}: {code.title}",
        f"Severity: {code.severity.value}. Class {letter}: {CLASSES[letter]}.",
        "## What it means",
        code.meaning.strip(),
        "## How it is detected",
        code.detection.strip(),
        "## How to fix",
        code.fix.strip() if not code.fixes else f"{code.fix.strip()}\n\n{code.fixes.strip()}",
    ]
    if code.example:
        parts += ["## Example", code.example.strip()]
    return "\n\n".join(parts) + "\n"


def index() -> list[tuple[str, str, str]]:
    """Code, severity and title of every entry."""
    return [(code.code, code.severity.value, code.title) for code in codes().values()]
