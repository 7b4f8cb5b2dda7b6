"""A stand-in for the training worker: a real process that does what the job's name says."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

IGNORES_SIGTERM = (
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('grandchild', flush=True); time.sleep(600)"
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-file", type=Path, required=True)
    run_file: Path = parser.parse_args().run_file
    run = json.loads(run_file.read_text())
    with (run_file.parent / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    print(f"{run['run_id']} attempt {run['attempt']} rank {os.environ.get('RANK', '0')} ready", flush=True)
    kind = run["job"]["name"]
    if kind == "finish":
        return 0
    if kind == "fail":
        raise ValueError("no such luck")
    if kind == "fail-rank-1" and os.environ["RANK"] == "1":
        raise ValueError("no such luck on rank 1")
    if kind == "fail-once" and not (run_file.parent / "failed").exists():
        (run_file.parent / "failed").touch()
        raise ValueError("only this time")
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "flood":
        flood()
    if kind in ("stubborn", "family"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: drain())
    if kind == "family":
        child = subprocess.Popen([sys.executable, "-c", IGNORES_SIGTERM], start_new_session=True)
        with (run_file.parent / "pids").open("a") as file:
            file.write(f"{child.pid}\n")
    print("armed", flush=True)
    while kind == "busy":
        sum(range(10**8))  # one call that takes seconds and lets no other thread of this process run
    time.sleep(600)
    return 1


def drain() -> None:
    print("drained", flush=True)
    sys.exit(0)


def flood() -> None:
    for number in range(50_000):
        print(f"line {number} " + "x" * 100)
    print("flood is over", flush=True)


if __name__ == "__main__":
    sys.exit(main())
