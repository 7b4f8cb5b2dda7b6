"""What failures cost the others: a node killed, silent, rejoining; a hub that is away for two minutes.

Three sites train through a real hub over real kernel TCP (root), as in `ciuic bench sync`; one of them is site `ap`, to
which things happen. The others are the survivors.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from ciuic.bench import Table
from ciuic.bench.resilience_events import EVENTS, Limits, Trial, run_trial
from ciuic.bench.resilience_plot import draw
from ciuic.bench.work import work_folder
from ciuic.errors import UsageError
from ciuic.lab.namespaces import refuse, why_not_here
from ciuic.lab.profiles import evenly_far
from ciuic.lab.switch_sites import Sites

NICE = -10
"""What else the machine does should not decide the result."""
TORCHFT = {
    "kill_survivor_stall_s": 2.0,
    "kill_survivor_lost_steps": 1,
    "stop_survivor_stall_s": 10.2,
    "heal_survivor_slowdown": 2.7,
    "hub_restart": "all replicas exit",
}
"""torchft 0.2.0 with torch 2.13 on gloo, three replicas, each case made by hand on one machine: heartbeat time-out 2 s,
collective time-out 10 s; healing of 14.5 MB at 80 Mbit/s; lighthouse killed and restarted with default retries."""
LIMITS = {
    "kill_survivor_stall_steps": 1.5,
    "kill_survivor_lost_steps": 0,
    "hub_outage_exits": 0,
    "hub_outage_lost_pushes": 0,
    "heal_survivor_slowdown": 1.05,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its own options."""
    parser.add_argument("--rate", type=float, default=80.0, help="Mbit/s of each access link")
    parser.add_argument("--outage", type=float, default=120.0, help="seconds for which the hub is away")
    parser.add_argument("--stop", type=float, default=20.0, help="seconds for which a node is silent (SIGSTOP)")
    parser.add_argument("--pace", type=float, default=0.6, help="seconds per step")
    parser.add_argument("--deadline", type=float, default=5.0, help="[sync] deadline, seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=EVENTS, default="", help="one event, with what it needs; without: all")
    parser.add_argument("--rejoins", type=int, default=1, help="how often the node comes back; the worst time counts")
    parser.add_argument("--quick", action="store_true", help="the hub is away for 15 s, the node silent for 8 s")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the trial. Raises UsageError without root, RunFailedError when something ends that should not."""
    if reason := why_not_here():
        raise refuse(reason)
    trial = _trial(options)
    with work_folder(options.folder / "resilience.work") as folder:
        profile = evenly_far(bits_per_s=trial.bits_per_s)
        with Sites(profile, hub_bits_per_s=trial.bits_per_s, seed=trial.seed, nice=trial.nice) as sites:
            found = run_trial(sites, trial, folder, lambda text: sys.stderr.write(f"{text}\n"))
    limits = LIMITS | {
        "stop_survivor_stall_s": trial.deadline_s + 1.0,
        "rejoin_s": found.get("rejoin_limit_s", 0.0),
        "hub_outage_stall_s": Limits.outage_stall_steps * found["usual_step_s"],
    }
    limits = {name: limit for name, limit in limits.items() if name in found}
    holds = {name: found[name] <= limit for name, limit in limits.items()}
    return found | {"limits": limits, "holds": holds, "all_hold": all(holds.values()), "torchft": TORCHFT}


def _trial(options: argparse.Namespace) -> Trial:
    outage_s, stop_s = (15.0, 8.0) if options.quick else (options.outage, options.stop)
    for name, value in (("--outage", outage_s), ("--stop", stop_s), ("--pace", options.pace), ("--rate", options.rate)):
        if value <= 0:
            raise UsageError(f"{name} {value:g} is not more than 0")
    return Trial(
        bits_per_s=options.rate * 1e6,
        outage_s=outage_s,
        stop_s=stop_s,
        pace_s=options.pace,
        deadline_s=options.deadline,
        seed=options.seed,
        nice=NICE,
        only=options.only,
        rejoins=max(1, options.rejoins),
    )


def tables(result: dict[str, Any]) -> list[Table]:
    """Each number, its limit, and torchft's."""
    rows: list[tuple[str, ...]] = [
        (name, f"{result[name]:.2f}", f"{limit:.2f}", "yes" if result["holds"][name] else "NO")
        for name, limit in result["limits"].items()
    ]
    title = f"three sites at {result['mbit_per_s']:g} Mbit/s, a step per {result['usual_step_s']:.2f} s"
    note = (
        f"stalls: by how much the longest step of a survivor exceeds the usual one; the hub was away for "
        f"{result['outage_s']:g} s, the silent node for {result['stop_s']:g} s"
    )
    ours = Table(title=title, columns=("number", "found", "limit", "holds"), rows=rows, note=note)
    theirs = Table(
        title="torchft 0.2.0, as measured by hand",
        columns=("number", "found"),
        rows=[(name, f"{value}") for name, value in result["torchft"].items()],
        note=TORCHFT_NOTE,
    )
    return [ours, theirs]


TORCHFT_NOTE = "heartbeat time-out 2 s, collective time-out 10 s, healing of 14.5 MB at 80 Mbit/s; another day's run"


def picture(result: dict[str, Any], folder: Path) -> Path:
    """resilience.png: the steps of all sites over time, with what happened."""
    return draw(result, folder / "resilience.png")
