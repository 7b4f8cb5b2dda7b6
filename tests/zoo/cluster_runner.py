"""One case of the ledger's program: a hub, agents and workers as they are, and the doctor on both of its sides.

The hub's findings are asked for again and again, for they say what is wrong now. Each worker is looked into as a run of
one rank. What is found on either side comes together as if one had said it.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.fault import Program
from zoo.hookup import Desk
from zoo.outcome import TAIL, Outcome, RankOutcome
from zoo.programs.ledger_job import NODES, job

if TYPE_CHECKING:
    from cluster import Cluster

SUPPORT = Path(__file__).parents[1] / "support"
FIRST = 2
"""Nodes that begin together; a third one may come."""
ASK_S = 0.2
SETTLE_S = 1.5
"""From the doctor's first word to the end of the case: it may correct itself."""
LOOK_S = 20.0
"""So long a fault is looked for once all steps are made."""
COMMAND_S = 60.0
STATUS = "status.txt"
"""File of a case with a fault: what `ciuic status` says when the doctor has looked long enough."""
OVER = ("finished", "stopped", "failed")


class LateError(Exception):
    """The case's time is over."""


def run_cluster_case(
    program: Program, case: str, *, steps: int, doctor: bool, timeout_s: float, folder: Path
) -> Outcome:
    """See `zoo.runner.run_case`. A case with a fault is ended when the doctor has found something."""
    if str(SUPPORT) not in sys.path:
        sys.path.append(str(SUPPORT))
    from cluster import Cluster

    began, began_s = time.monotonic(), time.time()
    with ExitStack() as stack:
        desks = [Desk(folder / f"doctor-{name}") for name in NODES] if doctor else []
        for desk in desks:
            stack.callback(desk.close)
        cluster = stack.enter_context(Cluster(folder))
        play = _Play(cluster, desks, case, case in program.faults, steps=steps, until_s=began + timeout_s)
        with suppress(LateError):
            play.begin()
            play.go_on()
        ranks = play.ranks(time.monotonic() - began)
    return Outcome(
        program=program.name,
        case=case,
        ranks=ranks,
        findings=together([desk.close() for desk in desks][: len(ranks)], play.told.values()),
        began_s=began_s,
        seconds=time.monotonic() - began,
    )


class _Play:
    """What happens in a case, and in which order."""

    def __init__(
        self, cluster: "Cluster", desks: list[Desk], case: str, is_fault: bool, *, steps: int, until_s: float
    ) -> None:
        self.cluster, self.folder, self.desks = cluster, cluster.folder, desks
        self.case, self.is_fault, self.steps, self.until_s = case, is_fault, steps, until_s
        self.run = ""
        self.told: dict[tuple[str, ...], dict[str, Any]] = {}
        """What the hub has found so far, as findings, by code and nodes."""
        self._asked_s = 0.0

    def begin(self) -> None:
        """Hub and nodes are there, and the run is submitted."""
        file = self.folder / "case.json"
        about = {
            "fault": self.case if self.is_fault else "",
            "variant": "" if self.is_fault else self.case,
            "steps": self.steps,
            "world": FIRST,
            "folder": str(self.folder),
            "doctor": [desk.for_ranks() for desk in self.desks],
        }
        file.write_text(json.dumps(about))
        self.cluster.add_nodes(*NODES[:FIRST])
        self.run = self.cluster.submit(job(self.case, self.is_fault, steps=self.steps, case_file=file))

    def go_on(self) -> None:
        """Until the run is over and its nodes are free. Raises LateError."""
        if self.case == "elastic_join":
            self._another_joins()
        elif self.case == "kill_and_return":
            self._one_dies_and_returns()
        self._await(self._all_steps_made)
        if self.is_fault:
            self._look()
            self._keep_status()
            self.cluster.operator.call("POST", f"/v1/runs/{self.run}/stop", None, dict)
        (self.folder / "hurry").touch()
        self._await(lambda: self.cluster.info(self.run).state in OVER)
        self._await(lambda: all(self.cluster.node_state(name) == "idle" for name in self.cluster.nodes))

    def _another_joins(self) -> None:
        self._await(lambda: self.cluster.version(self.run) >= 3)
        from cluster import Node

        self.cluster.nodes[NODES[2]] = Node(self.cluster, NODES[2]).start()  # it is never idle: it is wanted at once
        self._await(lambda: self._merged(NODES[2]) > 2)

    def _one_dies_and_returns(self) -> None:
        name = NODES[1]
        self._await(lambda: self._merged(name) > 2)
        self.cluster.nodes[name].kill_everything()
        self._await(lambda: bool(self.cluster.events("node.dead")))
        self.cluster.nodes[name].start()
        self._await(lambda: self.cluster.member(self.run, name).incarnation == 2)
        merged = self._merged(name)
        self._await(lambda: self._merged(name) > merged + 2)

    def _look(self) -> None:
        """Until something was found, or for as long as it may take."""
        until_s = time.monotonic() + LOOK_S
        self._await(lambda: self._has_found() or time.monotonic() > until_s)
        settled_s = time.monotonic() + SETTLE_S
        self._await(lambda: time.monotonic() > settled_s)

    def _keep_status(self) -> None:
        """What a person sees who asks now."""
        command = [sys.executable, "-m", "ciuic.cli.main", "status", self.run]
        environment = self.cluster.environment(CIUIC_HOME=str(self.cluster.home))
        with (self.folder / STATUS).open("w") as file:
            subprocess.run(command, env=environment, stdout=file, check=True, timeout=COMMAND_S)

    def _has_found(self) -> bool:
        is_told = any(finding["severity"] != "note" for finding in self.told.values())
        return is_told or any(desk.found.is_set() for desk in self.desks)

    def _merged(self, name: str) -> int:
        return self.cluster.member(self.run, name).pushes_merged

    def _all_steps_made(self) -> bool:
        made = [len(losses_of(self.folder, rank)) for rank in range(FIRST)]
        return (made[0] if self.case == "always_behind" else min(made)) >= self.steps

    def _await(self, what: Callable[[], bool]) -> None:
        """Asks the hub for its findings meanwhile."""
        while not what():
            if time.monotonic() > self.until_s:
                raise LateError(self.case)
            if self.desks and time.monotonic() - self._asked_s > ASK_S:
                self._asked_s = time.monotonic()
                self._ask()
            time.sleep(0.05)

    def _ask(self) -> None:
        for finding in self.cluster.info(self.run).findings:
            key = (finding.code, *finding.nodes)
            found_s = self.told[key]["found_s"] if key in self.told else time.time()
            self.told[key] = {
                "code": finding.code,
                "severity": finding.severity,
                "cause": finding.cause,
                "fix": finding.fix,
                "step": finding.version,
                "ranks": [NODES.index(name) for name in finding.nodes],
                "modules": finding.nodes,
                "found_s": found_s,
            }

    def ranks(self, wall_s: float) -> tuple[RankOutcome, ...]:
        """How each node ended; one that never spoke has an exit code too."""
        return tuple(self._rank(rank, wall_s) for rank in range(len(self.cluster.nodes)))

    def _rank(self, rank: int, wall_s: float) -> RankOutcome:
        end = self.folder / f"end-{rank}.json"
        is_over = bool(self.run) and self.cluster.info(self.run).state in OVER
        node = self.cluster.nodes[NODES[rank]]
        return RankOutcome(
            exit_code=0 if end.exists() else 1 if is_over else None,
            wall_s=wall_s,
            cpu_s=json.loads(end.read_text())["cpu_s"] if end.exists() else 0.0,
            losses=tuple(losses_of(self.folder, rank)),
            error=(node.run_log(self.run) if self.run else node.said())[-TAIL:],
        )


def losses_of(folder: Path, rank: int) -> list[str]:
    """What a node's workers have logged."""
    record = folder / f"losses-0-{rank}.txt"
    return record.read_text().split() if record.exists() else []


def together(workers: list[list[dict[str, Any]]], hub: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Incidents of all nodes' workers and of the hub as one list; what all nodes have alike has no rank."""
    import msgspec

    from ciuic.doctor.finding import Finding, Incident
    from ciuic.doctor.incidents import fold

    found: dict[Any, Finding] = {}
    ranks: dict[Any, list[int]] = {}
    for rank, incidents in enumerate(workers):
        for incident in msgspec.convert(incidents, list[Incident]):
            for finding in (incident.cause, *incident.collateral):
                found.setdefault(finding.key, finding)
                ranks.setdefault(finding.key, []).append(rank)
    findings = [
        msgspec.structs.replace(finding, ranks=_unless_all(ranks[key], len(workers))) for key, finding in found.items()
    ]
    findings += msgspec.convert(list(hub), list[Finding])
    return [msgspec.to_builtins(incident) for incident in fold(findings)]


def _unless_all(ranks: Iterable[int], count: int) -> tuple[int, ...]:
    found = tuple(sorted(set(ranks)))
    return () if len(found) == count else found
