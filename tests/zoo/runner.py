"""`run_case`: one program with one fault or one clean variant, on ranks forked from a warmed process."""

import contextlib
import functools
import json
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zoo.catalogue import FAULTS, PROGRAMS
from zoo.cluster_runner import run_cluster_case
from zoo.fault import Fault, Program
from zoo.hookup import Desk
from zoo.outcome import TAIL, Outcome, RankOutcome

PATIENCE_S = 12.0
"""Time-out of the programs' collectives."""
SETTLE_S = 2.0
"""From the doctor's first word about a hang to the end of the case: it may correct itself."""


def run_case(
    program: str,
    case: str,
    *,
    steps: int = 24,
    world: int = 2,
    doctor: bool = True,
    timeout_s: float = 60.0,
    folder: Path,
) -> Outcome:
    """Run a fault (an id of FAULTS) or a clean variant (any other name) of a program.

    `folder` is made; it has the ranks' logs and losses, and `doctor-0/` with what the doctor wrote. A program with two
    generations is started twice in the same folder, and the doctor's second folder is `doctor-1/`. A hang is ended
    when the doctor has found something, for then there is nothing more to see.
    Raises KeyError for a program or a case that the catalogue does not know.
    """
    known = PROGRAMS[program]
    if case not in known.faults and case not in known.variants:
        raise KeyError(f"{program} has no case {case!r}")
    fault = FAULTS[case] if case in known.faults else None
    folder.mkdir(parents=True, exist_ok=True)
    if known.runner == "cluster":
        return run_cluster_case(known, case, steps=steps, doctor=doctor, timeout_s=timeout_s, folder=folder)
    began, began_s = time.monotonic(), time.time()
    ends: list[dict[str, Any]] = []
    findings: list[dict[str, Any]] = []
    for generation in range(known.generations):
        limits = {"steps": steps, "world": world, "patience_s": PATIENCE_S, "timeout_s": timeout_s}
        request = _request(known, fault, case, folder) | limits | {"generation": generation}
        if doctor:
            end, found = _with_doctor(request, is_hang=fault is not None and fault.kind == "hang")
            findings += found
        else:
            end = _zygote().ask(request)
        ends.append(end)
    return Outcome(
        program=program,
        case=case,
        ranks=tuple(_rank(rank, ends, folder) for rank in range(world)),
        findings=findings,
        began_s=began_s,
        last_step_s=max((log.stat().st_mtime for log in folder.glob("losses-*.txt")), default=0.0),
        seconds=time.monotonic() - began,
    )


def run_plain(program: str, fault: str, *, steps: int, patience_s: float, folder: Path) -> Outcome:
    """A fault on two ranks without the doctor, as torch's own tools see it.

    Collectives time out after `patience_s`. Of a hang, torch's Flight Recorder is dumped into `folder/recorder/rank_N`
    by each rank that still lives shortly before that. Raises KeyError as `run_case` does.
    """
    known, kind = PROGRAMS[program], FAULTS[fault].kind
    recorder = folder / "recorder"
    recorder.mkdir(parents=True, exist_ok=True)
    began, began_s = time.monotonic(), time.time()
    ends = []
    for generation in range(known.generations):
        limits = {"steps": steps, "world": 2, "patience_s": patience_s, "timeout_s": patience_s + 20.0}
        request = _request(known, FAULTS[fault], fault, folder) | limits | {"generation": generation}
        ends.append(_zygote().ask(request | {"recorder": str(recorder) if kind == "hang" else "", "grace_s": 2.0}))
    return Outcome(
        program=program,
        case=fault,
        ranks=tuple(_rank(rank, ends, folder) for rank in range(2)),
        began_s=began_s,
        seconds=time.monotonic() - began,
    )


def _request(known: Program, fault: Fault | None, case: str, folder: Path) -> dict[str, Any]:
    return {
        "program": known.name,
        "needs": list(known.needs),
        "fault": case if fault else "",
        "variant": "" if fault else case,
        "folder": str(folder),
        "doctor": None,
        **_circumstances(fault),
    }


def _with_doctor(request: dict[str, Any], *, is_hang: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How the ranks ended, and what the doctor found until then; the end of a hang is not its finding."""
    desk = Desk(Path(request["folder"]) / f"doctor-{request['generation']}")
    found: list[dict[str, Any]] = []
    try:
        request["doctor"] = desk.for_ranks()
        enough = desk.found if is_hang else None
        end = _zygote().ask(request, enough=enough, before_end=lambda: found.extend(desk.incidents()))
    finally:
        last = desk.close()
    return end, found or last


def _circumstances(fault: Fault | None) -> dict[str, Any]:
    return {
        "env": dict(fault.env) if fault else {},
        "clock_offset_s": fault.clock_offset_s if fault else 0.0,
        "port": _free_port(),
    }


def _free_port() -> int:
    """Below the range from which the system hands out ports, so that nobody gets it by chance meanwhile."""
    for _ in range(100):
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 15000 and 32000")


def _rank(rank: int, ends: list[dict[str, Any]], folder: Path) -> RankOutcome:
    losses: list[str] = []
    said = ""
    for generation in range(len(ends)):
        record = folder / f"losses-{generation}-{rank}.txt"
        losses += record.read_text().split() if record.exists() else []
        log = folder / f"rank-{generation}-{rank}.log"
        said += log.read_text(errors="replace") if log.exists() else ""
    codes = [end["ranks"][rank]["exit"] for end in ends]
    return RankOutcome(
        exit_code=next((code for code in codes if code != 0), 0),
        wall_s=sum(end["ranks"][rank]["wall_s"] for end in ends),
        cpu_s=sum(end["ranks"][rank]["cpu_s"] for end in ends),
        losses=tuple(losses),
        error=said[-TAIL:],
    )


class Zygote:
    """The warmed process, as its user sees it. It ends with this process, because its socket does."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        tests = Path(__file__).parent.parent
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent / "src"), os.environ.get("PYTHONPATH", "")]),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "zoo.zygote", str(there.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment, stdin=subprocess.DEVNULL)
        there.close()
        self._socket = here
        self._answers = here.makefile("r", encoding="utf-8")
        self._lock = threading.Lock()

    def ask(
        self,
        request: dict[str, Any],
        *,
        enough: threading.Event | None = None,
        before_end: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Run one case. Raises RuntimeError when the warmed process is gone.

        SETTLE_S after `enough` is set the case is ended, if it runs still; `before_end` is called just before.
        """
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            while enough is not None and not select.select([self._socket], [], [], 0.1)[0]:
                if enough.is_set() and not select.select([self._socket], [], [], SETTLE_S)[0]:
                    before_end()
                    self._socket.sendall(b"\n")
                    break
            line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the zoo's warmed process ended with code {self._process.wait()}")
        return json.loads(line)


@functools.cache
def _zygote() -> Zygote:
    return Zygote()
