"""`make soak`: tests of what fails in the field again and again, long fuzzing, hours of faults; then a summary.

    python tests/soak.py --repeat 20 --fuzz 1000000 --duration 2h --every 30s --seed 1

Parts: tests (several times), long, fuzz, soak; `--only tests,fuzz` runs some of them.
The part `long` is every test once under the hypothesis profile `soak`: many more examples, programs that are not forked
from warmed processes, a hub that is away for two minutes, a payload of 1 GiB.
Each part writes its own log to the folder; a part that fails does not keep the others from running.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
AGAIN_AND_AGAIN = (
    "processes/test_training_faults.py",
    "processes/test_training_policies.py",
    "processes/test_training_access.py",
    "processes/test_elastic_*.py",
    "processes/test_agent*.py",
    "processes/test_hub_access.py",
    "processes/test_hub_server.py",
    "processes/test_security_*.py",
    "processes/test_net_client.py",
    "processes/test_transfers*.py",
    "processes/test_backup.py",
    "processes/test_two_networks.py",
    "processes/test_lab*.py",
    "unit/hub/test_state*.py",
)
"""Where the tests are that the design of the network asks for: each was a failure of a real system."""
ALONE = ("processes/test_heal_far.py",)
"""Of these tests those that measure: nothing runs beside them."""
TAIL_LINES = 40
PARTS = ("tests", "long", "fuzz", "soak")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command of the soak."""

    name: str
    command: list[str]


def parts(options: argparse.Namespace) -> Iterator[Part]:
    """What is run, in this order."""
    files = [str(path) for pattern in AGAIN_AND_AGAIN for path in sorted(TESTS.glob(pattern))]
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-n", str(options.workers), "-m", "not alone", *files]
    alone = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "alone", *(str(TESTS / name) for name in ALONE)]
    for number in range(1, options.repeat + 1 if "tests" in options.only else 1):
        yield Part(name=f"tests-{number}", command=pytest)
        yield Part(name=f"tests-alone-{number}", command=alone)
    patient = ["-q", "--hypothesis-profile=soak", "--timeout=7200", "-n", str(options.workers), "-m", "not alone"]
    if options.repeat and "long" in options.only:
        yield Part(name="long", command=[sys.executable, "-m", "pytest", *patient, str(TESTS)])
    fuzz = [sys.executable, str(TESTS / "support" / "fuzz_run.py"), "--cases", str(options.fuzz)]
    if options.fuzz and "fuzz" in options.only:
        yield Part(name="fuzz", command=[*fuzz, "--seed", str(options.seed)])
    words = ["--duration", options.duration, "--every", options.every, "--seed", str(options.seed)]
    folder = str(options.folder / "lab")
    if "soak" in options.only:
        yield Part(
            name="soak", command=[sys.executable, "-m", "ciuic.cli.main", "lab", "soak", *words, "--folder", folder]
        )


def run(part: Part, folder: Path) -> tuple[int, float]:
    """Its exit code and how long it took; the log says the rest."""
    log = folder / f"{part.name}.log"
    began = time.monotonic()
    with log.open("wb") as out:
        done = subprocess.run(part.command, stdout=out, stderr=subprocess.STDOUT, check=False, env=environment())
    code = done.returncode
    lines = log.read_text(errors="replace").splitlines()
    if code or part.name == "soak":
        print(*lines[-TAIL_LINES:], sep="\n", flush=True)
    return code, time.monotonic() - began


def environment() -> dict[str, str]:
    """Tests find their helpers, and programs the package, also from a source tree that is not installed."""
    paths = [str(TESTS.parent / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def main() -> int:
    """Exit code 1 when a part has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20, help="how often the tests are run")
    parser.add_argument("--workers", type=int, default=2, help="of pytest-xdist")
    parser.add_argument("--fuzz", type=int, default=1_000_000, help="cases; 0: none")
    parser.add_argument("--duration", default="2h", help="of the faults in `ciuic lab soak`")
    parser.add_argument("--every", default="30s", help="from one fault to the next")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("soak"))
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS, help=",".join(PARTS))
    options = parser.parse_args()
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    options.folder.mkdir(parents=True, exist_ok=True)
    rows, stopped = [], False
    for part in parts(options):
        if stopped and part.name.startswith("tests-"):
            continue
        print(f"{time.strftime('%H:%M:%S')}  {part.name}", flush=True)
        code, wall_s = run(part, options.folder)
        stopped = stopped or (code != 0 and part.name.startswith("tests-"))
        rows.append((part.name, code, wall_s))
    print()
    for name, code, wall_s in rows:
        print(f"{'holds' if code == 0 else 'FAILS'}  {name:14}  {wall_s:8.1f} s  {options.folder / f'{name}.log'}")
    return int(any(code for _, code, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
