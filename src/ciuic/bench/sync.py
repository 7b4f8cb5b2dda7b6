"""Training over emulated continents, beside the same sites without communication and plain DDP, in the same run.

Three sites train one model of 4.6 M parameters, one step per `--pace` seconds, over real kernel TCP (root). Modes run
one after the other on the same network: `none` (no communication: the upper bound), `ours` (the real hub, agents and
workers), and DistributedDataParallel over gloo with gradients in fp32, fp16 or bf16.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ciuic.bench import Table
from ciuic.bench import sync_results as results
from ciuic.bench import sync_task as task
from ciuic.bench.sync_modes import OURS, Plan, Watched, watch_mode
from ciuic.bench.sync_plots import draw
from ciuic.bench.sync_program import MODES
from ciuic.bench.work import work_folder
from ciuic.errors import RunFailedError, UsageError
from ciuic.lab.namespaces import refuse, why_not_here
from ciuic.lab.profiles import evenly_far
from ciuic.lab.switch_sites import DATACENTRE_BITS_PER_S, Sites

LINKS = {"continents": evenly_far}
FIRST_MINUTE_S = 60.0
NICE = -10
"""What else the machine does should not decide the result."""
ALL_MODES = ("none", *OURS, *(mode for mode in MODES if mode.startswith("ddp")))
EVEN = "ours-even"
"""With `--slow`: ours with no slow site, to compare the loss at equal tokens."""
Points = list[tuple[float, float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its own options."""
    parser.add_argument("--links", choices=sorted(LINKS), default="continents", help="where the sites are")
    parser.add_argument("--rates", default="100,20", help="Mbit/s of each access link, one or several")
    parser.add_argument("--modes", default="none,ours,ddp-fp32,ddp-fp16", help=f"all, or of {', '.join(ALL_MODES)}")
    parser.add_argument("--duration", type=float, default=90.0, help="seconds per mode and rate")
    parser.add_argument("--warm", type=float, default=15.0, help="of these not counted in rates")
    parser.add_argument("--pace", type=float, default=0.6, help="seconds per step")
    parser.add_argument("--hub", choices=("site", "datacentre"), default="site", help="rate of the hub's own link")
    parser.add_argument("--interval", default="", help="[sync] interval, empty: the job's default")
    parser.add_argument("--compression", default="", help="[sync] compression, empty: the job's default")
    parser.add_argument("--overlap", choices=("", "auto", "true", "false"), default="", help="[sync] overlap")
    parser.add_argument("--slow", default="", metavar="SITE=FACTOR", help="one site is slower, like us=4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="20 s per mode, 100 Mbit/s only")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run every mode at every rate. Raises UsageError without root, RunFailedError when a process dies."""
    if reason := why_not_here():
        raise refuse(reason)
    plan, rates, modes = _plan(options), _rates(options), _modes(options)
    bench = _Bench(options, plan)
    with work_folder(options.folder / "sync.work") as folder:
        for rate in rates:
            bench.run_rate(rate, modes, folder)
    found = {"links": options.links, "hub": options.hub, "pace_s": plan.pace_s, "duration_s": plan.duration_s}
    found |= {"parameters": sum(p.numel() for p in bench.model.parameters()), "tokens_per_step": task.TOKENS_PER_STEP}
    return found | bench.headline() | {"rates": bench.found}


class _Bench:
    """Collects what is found over rates and modes."""

    def __init__(self, options: argparse.Namespace, plan: Plan) -> None:
        torch.set_num_threads(1)
        self._options, self._plan = options, plan
        self.model = task.make_model(plan.seed)
        self._initial = task.flat_parameters(self.model)
        held_out = task.load().held_out
        if held_out is None:
            raise RunFailedError("no part of the data is held out")
        self._held_out = torch.stack([held_out[i]["input_ids"] for i in range(task.HELD_OUT_SAMPLES)])
        self.found: dict[str, dict[str, dict[str, Any]]] = {}

    def run_rate(self, mbit_per_s: float, modes: list[str], folder: Path) -> None:
        """All modes on one network."""
        bits_per_s = mbit_per_s * 1e6
        hub = DATACENTRE_BITS_PER_S if self._options.hub == "datacentre" else bits_per_s
        profile = LINKS[self._options.links](bits_per_s=bits_per_s)
        name = f"{mbit_per_s:g}mbit"
        self.found[name] = {}
        with Sites(profile, hub_bits_per_s=hub, seed=self._plan.seed, nice=NICE) as sites:
            for mode in modes:
                self._run_mode(sites, name, mode, folder / name / mode)

    def _run_mode(self, sites: Sites, rate: str, mode: str, folder: Path) -> None:
        began = time.monotonic()
        plan = self._plan
        if mode == EVEN:
            plan = _plan(argparse.Namespace(**{**vars(self._options), "slow": ""}))
        seen = watch_mode(sites, "ours" if mode == EVEN else mode, plan, folder)
        names = sites.profile.locations
        numbers = results.mode_numbers(seen, names)
        points = results.losses(seen, self._judge, self._initial)
        numbers["loss_over_s"] = points
        numbers["loss_at_s"] = {f"{at:g}": results.loss_at(points, at) for at in results.grid(plan.duration_s)}
        numbers["total_tokens_at_s"] = _token_line(seen, names)
        none = None if mode == EVEN else self.found[rate].get("none")  # other sites
        numbers["utilisation"] = round(numbers["tokens_per_s"] / none["tokens_per_s"], 4) if none else None
        self.found[rate][mode] = numbers
        sys.stderr.write(f"{rate} {mode}: {numbers['tokens_per_s']:.0f} tokens/s in {time.monotonic() - began:.0f} s\n")

    def _judge(self, parameters: Any) -> float:
        return task.held_out_loss(self.model, parameters, self._held_out)

    def headline(self) -> dict[str, Any]:
        """The numbers a person looks for."""
        found: dict[str, Any] = {}
        for rate, modes in self.found.items():
            for mode, numbers in modes.items():
                label = "" if mode == "ours" else f"{mode.replace('-', '_')}_"
                if mode != "none" and numbers["utilisation"] is not None:
                    found[f"{label}utilisation_{rate}"] = numbers["utilisation"]
        by_rate = self.found.items()
        for key in ("loss_at_s", "comm_cpu_s", "wire_bytes_per_token"):
            found[key] = {rate: {mode: numbers[key] for mode, numbers in modes.items()} for rate, modes in by_rate}
        found["loss_below_ddp_from_s"] = {rate: self._below_from_s(modes) for rate, modes in by_rate}
        found["loss_below_ddp_from_first_minute"] = {
            rate: since is not None and since <= FIRST_MINUTE_S
            for rate, since in found["loss_below_ddp_from_s"].items()
            if any(mode.startswith("ddp") for mode in self.found[rate])
        }
        return found | (self._slow_headline() if self._options.slow else {})

    def _below_from_s(self, modes: dict[str, dict[str, Any]]) -> float | None:
        others = [numbers["loss_over_s"] for mode, numbers in modes.items() if mode.startswith("ddp")]
        if "ours" not in modes or not others:
            return None
        return results.below_from_s(modes["ours"]["loss_over_s"], others, self._plan.duration_s)

    def _slow_headline(self) -> dict[str, Any]:
        modes = next(iter(self.found.values()))
        slow, even = modes["ours"], modes[EVEN]
        tokens = min(slow["total_tokens_at_s"][-1][1], even["total_tokens_at_s"][-1][1])
        at_tokens = [_loss_at_tokens(numbers, tokens) for numbers in (slow, even)]
        pushes = slow["pushes"].get(self._options.slow.partition("=")[0], {})
        flying = pushes.get("accepted", 0) - pushes.get("merged", 0)
        return {
            "slow_node_share": slow["utilisation"],
            "slow_node_pushes": pushes,
            "slow_node_pushes_all_counted": bool(pushes) and pushes["rejected"] == 0 and flying <= 1,
            "slow_node_loss": at_tokens[0],
            "even_loss_at_equal_tokens": at_tokens[1],
            "equal_tokens": round(tokens),
        }


def _token_line(seen: Watched, names: tuple[str, ...]) -> Points:
    times = [0.0, *results.grid(seen.plan.duration_s)]
    if times[-1] < seen.plan.duration_s:
        times.append(seen.plan.duration_s)
    return [(at, round(results.total_tokens_at(seen, names, at))) for at in times]


def _loss_at_tokens(numbers: dict[str, Any], tokens: float) -> float:
    """Held-out loss when all sites together had trained on so many tokens."""
    line = numbers["total_tokens_at_s"]
    at_s = results.loss_at([(count, at) for at, count in line], tokens)  # the same interpolation, axes exchanged
    return results.loss_at(numbers["loss_over_s"], at_s)


def _plan(options: argparse.Namespace) -> Plan:
    sync: dict[str, Any] = {}
    if options.interval:
        sync["interval"] = int(options.interval) if options.interval.isdigit() else options.interval
    if options.compression:
        sync["compression"] = options.compression
    if options.overlap:
        sync["overlap"] = {"true": True, "false": False}.get(options.overlap, options.overlap)
    duration_s, warm_s = (20.0, 6.0) if options.quick else (options.duration, options.warm)
    if not 0 <= warm_s < duration_s:
        raise UsageError(f"--warm {warm_s:g} leaves nothing of --duration {duration_s:g}")
    return Plan(
        duration_s=duration_s,
        warm_s=warm_s,
        pace_s=options.pace,
        snapshot_s=min(5.0, duration_s / 4),
        slow=options.slow,
        sync=sync,
        seed=options.seed,
        nice=NICE,
    )


def _rates(options: argparse.Namespace) -> list[float]:
    try:
        rates = [float(rate) for rate in options.rates.split(",")]
    except ValueError:
        raise UsageError(
            f"--rates {options.rates} is not a list of Mbit/s", next="for example --rates 100,20"
        ) from None
    return rates[:1] if options.quick or options.slow else rates


def _modes(options: argparse.Namespace) -> list[str]:
    if options.slow:
        return ["none", "ours", EVEN]
    modes = ALL_MODES if options.modes == "all" else tuple(options.modes.split(","))
    for mode in modes:
        if mode not in ALL_MODES:
            raise UsageError(f"there is no mode {mode}", next=f"one of {', '.join(ALL_MODES)}, or all")
    return list(modes)


def tables(result: dict[str, Any]) -> list[Table]:
    """One per rate."""
    return [_table(rate, modes) for rate, modes in result["rates"].items()]


def _table(rate: str, modes: dict[str, dict[str, Any]]) -> Table:
    times = list(next(iter(modes.values()))["loss_at_s"])
    rows: list[tuple[str, ...]] = [
        (
            mode,
            f"{numbers['tokens_per_s']:.0f}",
            f"{numbers['utilisation']:.3f}" if numbers["utilisation"] is not None else "-",
            f"{numbers['wire_bytes_per_token']:.0f}",
            f"{numbers['longest_step_s']:.2f}",
            f"{numbers['comm_cpu_s']:.2f}",
            *(f"{numbers['loss_at_s'][at]:.3f}" for at in times),
        )
        for mode, numbers in modes.items()
    ]
    columns = ("mode", "tokens/s", "utilisation", "wire bytes/token", "longest step s", "comm CPU s")
    return Table(
        title=f"three sites at {rate}/s",
        columns=(*columns, *(f"loss {at} s" for at in times)),
        rows=rows,
        note="utilisation: tokens/s over those without communication; loss: held out, of site us at that second",
    )


def picture(result: dict[str, Any], folder: Path) -> Path:
    """sync.png."""
    return draw(result, folder / "sync.png")
