"""What torch itself says about the faults of the zoo: nothing, an error, or a time-out; and its Flight Recorder."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ciuic.bench.doctor_recorder import analyse

PATIENCE_S = 5.0
"""Time-out of the collectives: short, so that hangs end soon."""
SHARES = ("detected", "cause_top1", "rank_right", "module_right")
How = Literal["silent", "error", "time-out"]
_SPEAKER = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Warning|Interrupt)\b.*$", re.MULTILINE)
_WAITING = re.compile(r"timed? ?out|connection (?:closed|reset|refused)|broken pipe|aborted", re.IGNORECASE)
NOISE = ("FutureWarning", "DeprecationWarning", "UserWarning: The PyTorch API of nested")
"""Lines that every run of a library prints."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """What came of one fault without the doctor."""

    program: str
    fault: str
    letter: str
    kind: str
    how: How
    line: str
    """The first error or warning that is about this run; empty: none."""
    rank_named: bool | None
    """Generous: a line names the guilty rank, or that rank alone fails by an error of its own. None: nobody is."""
    module_named: bool | None
    """Generous: the guilty module's name is anywhere in what was printed. None: no module is guilty."""
    recorder: dict[str, Any] | None = None
    """Of a hang: what torch's analyser made of the recorders' dumps."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def torch_says(zoo: Any, program: str, fault: str, folder: Path, *, steps: int) -> Said:
    """Run a fault without the doctor, and read what was printed."""
    known = zoo.faults[fault]
    outcome = zoo.run_plain(program, fault, steps=steps, patience_s=PATIENCE_S, folder=folder)
    texts = [_printed(folder, rank) for rank in range(len(outcome.ranks))]
    lines = [first_line(text) for text in texts]
    first = next((line for line in lines if line and not _WAITING.search(line)), next(filter(None, lines), ""))
    module = zoo.programs[program].module_of(known) if known.letter in "ABCD" else None
    recorder = analyse(folder / "recorder", len(outcome.ranks), known.rank) if known.kind == "hang" else None
    return Said(
        program=program,
        fault=fault,
        letter=known.letter,
        kind=known.kind,
        how=_how(outcome, first),
        line=first[:300],
        rank_named=None if known.rank is None else _names_rank(outcome, lines, known.rank),
        module_named=None if module is None else any(module in text for text in texts),
        recorder=recorder,
    )


def _printed(folder: Path, rank: int) -> str:
    """All that a rank has printed, without torch's mark of who speaks."""
    logs = sorted(folder.glob(f"rank-*-{rank}.log"))
    return _SPEAKER.sub("", "\n".join(log.read_text(errors="replace") for log in logs))


def first_line(text: str) -> str:
    """The first error or warning that is about this run; empty: none."""
    found = (match.group(0) for match in _ERROR.finditer(text))
    return next((line for line in found if not any(word in line for word in NOISE)), "")


def _how(outcome: Any, first: str) -> How:
    """A collective that waited in vain is a time-out, whatever it says then; a rank that lives on waits as well."""
    ends = [rank.wall_s for rank in outcome.ranks if rank.exit_code not in (0, None)]
    if any(rank.exit_code is None for rank in outcome.ranks) and not ends:
        return "time-out"
    if ends and min(ends) >= PATIENCE_S and _WAITING.search(first):
        return "time-out"
    return "error" if ends or first else "silent"


def _names_rank(outcome: Any, lines: list[str], rank: int) -> bool:
    if any(re.search(rf"\brank[ :=]*{rank}\b", line, re.IGNORECASE) for line in lines):
        return True
    own = [at for at, line in enumerate(lines) if line and not _WAITING.search(line)]
    return own == [rank] and outcome.ranks[rank].exit_code not in (0, None)


def by_tool(said: list[Said], doctor: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each tool: shares of the faults to which they apply."""
    hangs = [each.recorder for each in said if each.recorder is not None]
    return [
        {"tool": "ciuic doctor", "faults": doctor["faults"], **{name: doctor[name] for name in SHARES}},
        {
            "tool": "torch alone",
            "faults": len(said),
            "detected": _share([each.how == "error" for each in said]),
            "with_time_outs": _share([each.how != "silent" for each in said]),
            "rank_right": _share([each.rank_named for each in said if each.rank_named is not None]),
            "module_right": _share([each.module_named for each in said if each.module_named is not None]),
        },
        {
            "tool": "Flight Recorder and torch's analyser",
            "faults": len(hangs),
            "detected": _share([bool(each["named"]) for each in hangs]),
            "rank_right": _share([each["rank_right"] for each in hangs if each["rank_right"] is not None]),
        },
    ]


def _share(values: list[bool]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
