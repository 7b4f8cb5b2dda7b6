"""Fuzz everything that comes in from outside, for as long as asked; prints what was accepted and refused.

    python tests/support/fuzz_run.py --cases 1000000 [--seed 1] [--json]

Exit code 1 with the first fault: another exception than a CiuicError, a changed frame that was accepted, a case that
took more than `SLOWEST_S` of processor time, or memory that grew.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from fuzz_targets import Targets

SLOWEST_S = 2.0
WARM_SHARE = 0.2
"""Memory is compared from here on: caches are full then."""
MOST_GROWTH_BYTES = 32 << 20


@dataclass(kw_only=True)
class Report:
    """What came of a run."""

    cases: int = 0
    seed: int = 0
    valid: Counter[str] = field(default_factory=Counter)
    """Cases that are something valid after all, by target."""
    refused: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""
    cpu_s: float = 0.0
    memory_growth_bytes: int = 0
    """Resident, from the fifth of the way to the end."""


def fuzz(cases: int, seed: int, folder: Path) -> Report:
    """Run so many cases, or until the first fault."""
    targets, report = Targets(folder, seed), Report(seed=seed)
    process = psutil.Process()
    resident = process.memory_info().rss
    began_s = time.process_time()
    for number, name in zip(range(cases), targets.names(), strict=False):
        if number == int(cases * WARM_SHARE):
            resident = process.memory_info().rss
        before_s = time.thread_time()
        try:
            outcome = targets.case(name)
        except Exception as error:  # noqa: BLE001 - finding them is what this is for
            report.faults.append(f"case {number} of {name}: {type(error).__name__}: {str(error)[:500]}")
            break
        took_s = time.thread_time() - before_s
        (report.valid if outcome == "valid" else report.refused)[name] += 1
        report.cases += 1
        if took_s > report.slowest_s:
            report.slowest_s, report.slowest = took_s, name
    report.cpu_s = time.process_time() - began_s
    report.memory_growth_bytes = process.memory_info().rss - resident
    if report.slowest_s > SLOWEST_S:
        report.faults.append(f"a case of {report.slowest} took {report.slowest_s:.1f} s")
    if report.memory_growth_bytes > MOST_GROWTH_BYTES:
        report.faults.append(f"memory grew by {report.memory_growth_bytes} bytes")
    return report


def memory_folder() -> str | None:
    """A folder in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        report = fuzz(given.cases, given.seed, Path(folder))
    if given.json:
        print(json.dumps(vars(report)))
    else:
        print(f"{report.cases:,} cases of seed {report.seed} in {report.cpu_s:.0f} s of processor time")
        for name in sorted(report.valid | report.refused):
            print(f"  {name:14} {report.refused[name]:9,} refused  {report.valid[name]:9,} valid")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"memory grew by {report.memory_growth_bytes / 1e6:.1f} MB; peak {peak / 1e3:.0f} MB")
        print(f"slowest case: {report.slowest} {report.slowest_s * 1000:.0f} ms")
        print("\n".join(report.faults) or "no fault")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
