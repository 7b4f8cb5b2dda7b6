"""Make sense of a worker's output: bytes into lines, lines into ranks, and which line says why it failed."""

import re
from dataclasses import dataclass

LINE_LIMIT_BYTES = 16 * 1024
LAUNCHER_RANK = -1
"""Rank of lines that no rank wrote: torchrun's own and the agent's."""


class LineSplitter:
    """Bytes of one stream in, whole lines out; of a progress bar (`\\r`) only what a terminal would show at the end."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes. Lines above 16 KiB come in parts."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        shown = [part for line in lines for part in _parts(line)]
        if len(self._rest) > LINE_LIMIT_BYTES:
            _, drawn, latest = self._rest.rpartition(b"\r")
            if drawn and len(latest) <= LINE_LIMIT_BYTES:
                self._rest = latest
            else:
                shown += _parts(self._rest)
                self._rest = b""
        return shown

    def close(self) -> list[str]:
        """What is left when the stream ends."""
        rest, self._rest = self._rest, b""
        return _parts(rest) if rest else []


def _parts(line: bytes) -> list[str]:
    line = line.rstrip(b"\r")
    line = line[line.rfind(b"\r") + 1 :]
    pieces = [line[at : at + LINE_LIMIT_BYTES] for at in range(0, len(line), LINE_LIMIT_BYTES)] or [b""]
    return [piece.decode("utf-8", errors="replace") for piece in pieces]


_RANK_PREFIX = re.compile(r"\[rank(\d{1,6})\]:")


def split_rank(text: str) -> tuple[int, str]:
    """(rank, text) of a line that torchrun passed on; lines of torchrun itself have LAUNCHER_RANK."""
    match = _RANK_PREFIX.match(text)
    return (int(match.group(1)), text[match.end() :]) if match else (LAUNCHER_RANK, text)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a worker failed, as far as its output says."""

    line: str = ""
    """The exception line, or the last words (at most 1000 characters); empty when there were none."""
    rank: int = LAUNCHER_RANK
    """Whose line it is."""
    where: str = ""
    """`file:line in function` of the program's own last frame in the traceback."""
    collateral: tuple[int, ...] = ()
    """The other ranks that failed after it."""


class ExceptionFinder:
    """Finds the one line that says why a worker failed.

    Of several ranks the one that failed first counts: the others usually fail because of it.
    """

    _TRACEBACK = "Traceback (most recent call last):"
    _FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<number>\d+), in (?P<name>.+)')
    _FOREIGN = re.compile(r"site-packages|dist-packages|lib/python3|<frozen |/ciuic/")
    """Frames of libraries: where the program called them says more."""
    _EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?")
    _OUR_ERROR = re.compile(r"(error\[CIUIC-\d{3}\]: .+)|(Fatal Python error: .+)")
    _COLLATERAL = re.compile(r"Connection (closed|reset) by peer|Connection refused|Broken pipe")
    _SIGNAL = re.compile(r".*Signal \d+ \((SIG\w+)\) received by PID.*")

    def __init__(self) -> None:
        self._open: dict[int, str] = {}
        """Ranks in the middle of a traceback, with the program's own last frame so far."""
        self._found: dict[int, str] = {}
        self._where: dict[int, str] = {}
        self._killed_by = ""
        self._last = ""
        self._last_rank = LAUNCHER_RANK

    def see(self, rank: int, stream: str, text: str) -> None:
        """Look at one line of output."""
        if stream == "err" and text.strip() and rank != LAUNCHER_RANK:
            self._last, self._last_rank = text.strip(), rank
        if self._OUR_ERROR.fullmatch(text):
            self._found[rank] = text
        elif text.startswith("cause: ") and self._found.get(rank, "").startswith("error["):
            self._found[rank] += f"; {text}"
        elif text == self._TRACEBACK:
            self._open[rank] = ""
        elif rank in self._open and text:
            self._in_traceback(rank, text)
        elif rank == LAUNCHER_RANK and (match := self._SIGNAL.fullmatch(text)):
            self._killed_by = self._killed_by or f"a rank was killed by {match.group(1)}"

    def _in_traceback(self, rank: int, text: str) -> None:
        if frame := self._FRAME.fullmatch(text):
            if not self._FOREIGN.search(frame["file"]):
                self._open[rank] = f"{frame['file']}:{frame['number']} in {frame['name']}"
        elif not text[0].isspace():
            where = self._open.pop(rank)
            if self._EXCEPTION.fullmatch(text):
                self._found[rank], self._where[rank] = text, where

    def fault(self) -> Fault:
        """What is known by now."""
        ranks = [rank for rank in self._found if rank != LAUNCHER_RANK]
        own = [rank for rank in ranks if not self._COLLATERAL.search(self._found[rank])]  # a peer's death is no cause
        if first := (own or ranks)[:1]:
            rank = first[0]
            others = tuple(sorted(other for other in ranks if other != rank))
            return Fault(
                line=self._found[rank][:1000], rank=rank, where=self._where.get(rank, "")[-300:], collateral=others
            )
        if self._killed_by:
            return Fault(line=self._killed_by)
        if self._last:
            return Fault(line=self._last[:1000], rank=self._last_rank)
        return Fault(line=self._found.get(LAUNCHER_RANK, "")[:1000])
