"""TrainCheck and TraceML on the scripts of examples/doctor, where they are installed.

TrainCheck learns invariants from a run that is right and checks another one by them; so each script has its twin with
the documented fix, and the twin is checked as well: what it violates is no sign of the fault. TraceML looks at one run
and gives one verdict, about time and memory.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RANKS = 2
TIMEOUT_S = 600.0
FIXES: dict[str, tuple[str, str]] = {
    "around_the_wrapper": ("ddp.module(x)", "ddp(x)"),
    "reduced_twice": ("        for parameter in ddp.parameters():\n            dist.all_reduce(parameter.grad)\n", ""),
    "inf_on_one_rank": ('x[0, 3] = float("inf")', "pass"),
    "loaded_after_the_wrap": ("    if dist.get_rank() == 0:  # ", "    if True:  # "),
    "unequal_labels": ("labels[:, 2:] = PADDING", "pass"),
    "clipped_too_early": ("        nn.utils.clip", "        scaler.unscale_(optimizer)\n        nn.utils.clip"),
    "accelerate_scheduler": ("T_max=STEPS)", "T_max=STEPS * accelerator.num_processes)"),
}
"""By script: what is replaced by what. resumed_without_moments shows itself at a second start only."""
_VIOLATED = re.compile(r"Total failed invariants: (\d+)/(\d+)")
_VERDICT = re.compile(r"Verdict: ([^|]+?) *\|")
INSTALL = {"traincheck": "pip install traincheck", "traceml": "pip install traceml-ai"}


def tools(examples: Path, folder: Path, path: str) -> dict[str, Any]:
    """By tool: rows, one for each script, or why there are none. `path`: where the tools are looked for first."""
    where = os.pathsep.join(each for each in (path, os.environ.get("PATH", "")) if each)
    found: dict[str, Any] = {}
    for name, program, look in (
        ("traincheck", "traincheck-collect", _traincheck),
        ("traceml", "traceml", _traceml),
    ):
        if shutil.which(program, path=where) is None:
            found[name] = {"problem": f"not installed ({INSTALL[name]})"}
            continue
        rows = [look(examples, script, folder / name / script, where) for script in FIXES]
        told = [row["tells"] for row in rows]
        found[name] = {"scripts": len(rows), "tells": sum(told), "rows": rows}
    return found


def fixed(examples: Path, script: str) -> str:
    """A script's text with its fix."""
    old, new = FIXES[script]
    return (examples / f"{script}.py").read_text().replace(old, new)


def _traincheck(examples: Path, script: str, folder: Path, path: str) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "faulty.py").write_text((examples / f"{script}.py").read_text())
    (folder / "right.py").write_text(fixed(examples, script))
    try:
        _collect(folder, "right", "learnt", path)
        _run(["traincheck-infer", "-f", "learnt", "-o", "invariants.json"], folder, path)
        violated = {}
        for twin in ("right", "faulty"):
            _collect(folder, twin, f"checked-{twin}", path, "-i", "invariants.json")
            said = _run(["traincheck-check", "-f", f"checked-{twin}", "-i", "invariants.json"], folder, path)
            found = _VIOLATED.search(said)
            if found is None:
                raise subprocess.SubprocessError(_last(said))
            violated[twin] = int(found[1])
            invariants = int(found[2])
    except (subprocess.SubprocessError, OSError) as error:
        return {"script": script, "tells": False, "problem": str(error)[:300]}
    tells = violated["faulty"] > violated["right"]
    return {"script": script, "tells": tells, "invariants": invariants, "violated": violated}


def _collect(folder: Path, twin: str, to: str, path: str, *more: str) -> None:
    """Run a script on two ranks with all that TrainCheck adds to it."""
    (folder / f"{twin}.sh").write_text(f"torchrun --nproc-per-node {RANKS} {twin}.py\n")
    model = "model" if "Accelerator" in (folder / f"{twin}.py").read_text() else "ddp"
    command = ["traincheck-collect", "-p", f"{twin}.py", "-s", f"{twin}.sh", "--models-to-track", model]
    said = _run([*command, "--output-dir", to, *more], folder, path)
    if not list((folder / to).glob("trace_*")):
        raise subprocess.SubprocessError(f"traincheck-collect wrote no trace: {_last(said)}")


def _traceml(examples: Path, script: str, folder: Path, path: str) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    command = ["traceml", "run", "--nproc-per-node", str(RANKS), "--logs-dir", "logs", "--run-name", script]
    try:
        said = _run([*command, str((examples / f"{script}.py").absolute())], folder, path)
    except (subprocess.SubprocessError, OSError) as error:
        return {"script": script, "tells": False, "problem": str(error)[:300]}
    found = _VERDICT.search(said)
    verdict = found[1].strip() if found else ""
    return {
        "script": script,
        "tells": bool(verdict) and not verdict.startswith(("INSUFFICIENT", "NORMAL")),
        "verdict": verdict,
    }


def _run(command: Sequence[str], folder: Path, path: str) -> str:
    """All that it prints. Raises SubprocessError when it does not end."""
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    program = shutil.which(command[0], path=path) or command[0]
    done = subprocess.run(
        [program, *command[1:]],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.stdout


def _last(text: str) -> str:
    return text.strip().splitlines()[-1][:200] if text.strip() else "it printed nothing"
