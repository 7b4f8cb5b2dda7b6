"""The doctor on the fault zoo: what it finds, whether the cause is right, false alarms, what it costs."""

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ciuic.bench import Table
from ciuic.bench.doctor_baselines import Said, by_tool, torch_says
from ciuic.bench.doctor_cost import measure_cost
from ciuic.bench.doctor_score import Row, alarms, row_of, shares
from ciuic.bench.doctor_tools import tools
from ciuic.bench.doctor_zoo import default_tests, load_zoo
from ciuic.errors import UsageError

CLEAN_STEPS = 200
TOOL_COLUMNS = ("faults", "detected", "with_time_outs", "cause_top1", "rank_right", "module_right")
TIMEOUT_S = 60.0
CLEAN_TIMEOUT_S = 240.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which cases, and how."""
    parser.add_argument("--tests", type=Path, default=default_tests(), help="folder that has the zoo")
    parser.add_argument("--programs", default="", help="only these, with commas")
    parser.add_argument("--faults", default="", help="only these faults, with commas; `none`: only clean programs")
    parser.add_argument("--letters", default="", help="only faults of these classes, as in ABC")
    parser.add_argument("--no-clean", action="store_true", help="leave out the clean programs")
    parser.add_argument("--no-baselines", action="store_true", help="leave out what torch itself says of the faults")
    parser.add_argument("--tools", action="store_true", help="TrainCheck and TraceML on examples/doctor: half an hour")
    parser.add_argument("--tools-path", default="", help="folder of these tools, when they are not on the PATH")
    parser.add_argument("--no-cost", action="store_true", help="leave out what looking costs")
    parser.add_argument("--clean-steps", type=int, default=CLEAN_STEPS)
    parser.add_argument("--at-once", type=int, default=2, help="cases side by side")
    parser.add_argument("--keep", type=Path, default=None, help="keep each case's folder here")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the cases. Raises UsageError for names that are not in the zoo."""
    zoo = load_zoo(options.tests)
    programs = _chosen(options.programs, zoo.programs)
    faults = _chosen("" if options.faults == "none" else options.faults, zoo.faults)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        bad = [
            (program, fault)
            for program in programs
            for fault in zoo.programs[program].faults
            if fault in faults
            and options.faults != "none"
            and (not options.letters or zoo.faults[fault].letter in options.letters)
        ]
        clean = [(p, v) for p in programs for v in zoo.programs[p].variants if not options.no_clean]
        with ThreadPoolExecutor(max(1, options.at_once)) as pool:
            rows = list(pool.map(lambda case: _fault(zoo, *case, folder), bad))
            quiet = list(pool.map(lambda case: _clean(zoo, *case, folder, options.clean_steps), clean))
        said = [] if options.no_baselines else _without_doctor(zoo, bad, folder / "plain")
        examples = options.tests.parent / "examples" / "doctor"
        others = tools(examples, folder / "tools", options.tools_path) if options.tools else {}
        cost = {} if options.no_cost else measure_cost(zoo, folder / "cost")
    false = [each for each in quiet if each["alarms"]]
    found = shares(rows)
    return {
        **found,
        "faults": len(rows),
        "clean": len(quiet),
        "false_alarms": len(false),
        "clean_failed": [each["case"] for each in quiet if not each["finished"]],
        **cost,
        "tools": by_tool(said, {**found, "faults": len(rows)}) if said else [],
        "other_tools": others,
        "rows": [row.to_dict() for row in rows],
        "without_doctor": [each.to_dict() for each in said],
        "clean_rows": quiet,
        "reported": {"cases": len(zoo.reported), "skipped": zoo.skipped},
    }


def _chosen(text: str, known: dict[str, Any]) -> list[str]:
    wanted = [name for name in text.split(",") if name] or list(known)
    for name in wanted:
        if name not in known:
            raise UsageError(f"the zoo has no {name}", next=f"one of {', '.join(known)}")
    return wanted


def _fault(zoo: Any, program: str, fault: str, folder: Path) -> Row:
    known = zoo.faults[fault]
    outcome = zoo.run_case(program, fault, steps=known.steps, timeout_s=TIMEOUT_S, folder=folder / f"{program}-{fault}")
    return row_of(known, zoo.programs[program], outcome, patience_s=zoo.patience_s)


def _without_doctor(zoo: Any, cases: list[tuple[str, str]], folder: Path) -> list[Said]:
    """What torch says of the same faults; the ledger's are not torch's."""
    ours = [case for case in cases if zoo.programs[case[0]].runner == "ranks"]
    return [
        torch_says(zoo, program, fault, folder / f"{program}-{fault}", steps=zoo.faults[fault].steps)
        for program, fault in ours
    ]


def _clean(zoo: Any, program: str, variant: str, folder: Path, steps: int) -> dict[str, Any]:
    where = folder / f"{program}-clean-{variant}"
    outcome = zoo.run_case(program, variant, steps=steps, timeout_s=CLEAN_TIMEOUT_S, folder=where)
    found = alarms(outcome.findings)
    return {
        "case": f"{program}/{variant}",
        "finished": outcome.is_finished,
        "alarms": [f"{each['cause']['code']}: {each['cause']['cause']}" for each in found],
        "seconds": outcome.seconds,
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """Shares, misses, false alarms, cost."""
    names = ("detected", "cause_top1", "cause_top3", "rank_right", "module_right")
    cost = [name for name in ("overhead", "bytes_per_check", "bitwise_equal") if name in result]
    numbers: list[tuple[str, ...]] = [(name, f"{result[name]:.3f}") for name in names if name in result]
    numbers += [("false_alarms", f"{result['false_alarms']} of {result['clean']}")]
    numbers += [(name, f"{result[name]}") for name in cost]
    wrong: list[tuple[str, ...]] = [
        (row["program"], row["fault"], ",".join(row["named"]) or "-", ",".join(row["expected"]), _lacks(row))
        for row in result["rows"]
        if _lacks(row)
    ]
    alarmed = (row for row in result["clean_rows"] if row["alarms"])
    false: list[tuple[str, ...]] = [(row["case"], "; ".join(row["alarms"])) for row in alarmed]
    by_name: list[tuple[str, ...]] = [
        (each["tool"], *(_number(each.get(name)) for name in TOOL_COLUMNS)) for each in result["tools"]
    ]
    others: list[tuple[str, ...]] = [
        (name, f"{found['tells']} of {found['scripts']}" if "rows" in found else found["problem"])
        for name, found in result["other_tools"].items()
    ]
    return [
        Table(title="the scripts of examples/doctor, by tool", columns=("tool", "tells"), rows=others),
        Table(title="the same faults, by tool", columns=("tool", *TOOL_COLUMNS), rows=by_name),
        Table(title=f"the doctor on {result['faults']} faults", columns=("what", "value"), rows=numbers),
        Table(title="not right", columns=("program", "fault", "named", "expected", "lacks"), rows=wrong),
        Table(title="false alarms", columns=("program", "said"), rows=false),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else f"{value}"


def _lacks(row: dict[str, Any]) -> str:
    lacking = [name for name in ("detected", "top1", "top3") if not row[name]]
    lacking += [name for name in ("rank_right", "module_right") if row[name] is False]
    return ",".join(lacking)
