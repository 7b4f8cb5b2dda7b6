"""What is the same for all findings of one code: its page."""

from dataclasses import dataclass

from ciuic.doctor.finding import Severity


@dataclass(frozen=True, kw_only=True)
class Code:
    """An entry of the catalogue; docs/codes/<code>.md is made from it."""

    code: str
    """CIUIC-A1: the letter is the class."""
    title: str
    """A statement: `gradients are not synchronised: the forward pass goes around the wrapper`."""
    severity: Severity
    meaning: str
    """What it means for the training, a few sentences."""
    detection: str
    """How it is detected: which invariant, from what evidence; what would be a false alarm and why it is not one."""
    fix: str
    """One line: what to change."""
    fixes: str = ""
    """More about the fix: Markdown, with the two spellings of the code where that helps."""
    example: str = ""
    """Markdown: the smallest script, what torch says, what the doctor says."""
    explains: tuple[str, ...] = ()
    """Codes that follow from this one: folded under it."""
    depth: int = 1
    """0: a root cause in the program's text; 1: a cause seen by its mechanism; 2: a symptom without a known cause."""
