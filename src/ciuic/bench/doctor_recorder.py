"""torch's analyser of Flight Recorder dumps (`torchfrtrace`), on what ranks that hang have dumped."""

import io
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

MODULE = "torch.distributed.flight_recorder.fr_trace"
PREFIX = "rank_"
TIMEOUT_S = 60.0
_TYPE = re.compile(r"Error type: ([A-Z_]+)")
_CULPRIT = re.compile(r"Culprit rank (\d+)")
_MISSING = re.compile(r"missing (?:ranks:|dump files from ranks) \{([\d, ]+)\}", re.IGNORECASE)
"""Of a call, or of the dumps: the analyser then ends with an error that names the rank, which counts as naming it."""


def analyse(folder: Path, ranks: int, guilty: int | None) -> dict[str, Any]:
    """{named: types of error that it tells, rank_right, problem: why it told nothing}.

    Dumps of gloo name the default group nowhere, which ends the analyser with a KeyError: the name is put in first.
    """
    dumps = sorted(folder.glob(f"{PREFIX}*"))
    for dump in dumps:
        dump.write_bytes(_with_group(dump.read_bytes(), ranks))
    if not dumps:
        return {"named": [], "rank_right": None if guilty is None else False, "problem": "no rank lived to dump"}
    command = [sys.executable, "-m", MODULE, str(folder), "-p", PREFIX]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"named": [], "rank_right": None if guilty is None else False, "problem": "it did not end"}
    return read_verdict(done.stdout + done.stderr, done.returncode, guilty)


def read_verdict(said: str, exit_code: int, guilty: int | None) -> dict[str, Any]:
    """From what the analyser has printed."""
    missing = _MISSING.search(said)
    named = _TYPE.findall(said) + (["MISSING_RANKS"] if missing else [])
    ranks = {int(rank) for rank in _CULPRIT.findall(said)}
    ranks |= {int(rank) for rank in missing.group(1).split(",")} if missing else set()
    problem = said.strip().splitlines()[-1][:200] if exit_code and said.strip() else ""
    return {"named": named, "rank_right": None if guilty is None else ranks == {guilty}, "problem": problem}


class _Plain(pickle.Unpickler):
    """Of a dump: containers, numbers and texts only."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Raises UnpicklingError: a dump has no objects."""
        raise pickle.UnpicklingError(f"a dump must not name {module_name}.{global_name}")


def _with_group(data: bytes, ranks: int) -> bytes:
    found = _Plain(io.BytesIO(data)).load()
    members = str(list(range(ranks)))
    found["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": members}} | {
        name: group for name, group in found.get("pg_config", {}).items() if name
    }
    return pickle.dumps(found)
