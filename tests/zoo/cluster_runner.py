"""One case of the ledger's program: a hub, agents and workers as they are, and the doctor on both of its sides.

The hub's findings are asked for again and again, for they say what is wrong now; each worker is looked into as a run
of one rank. What is found on either side comes together as if one had said it.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.fault import Program
from zoo.hookup import Desk
from zoo.outcome import Outcome, RankOutcome
from zoo.programs.ledger_job import NODES, SOON_OVER, job

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
TAIL = 2_000


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
    play = _Play(case, case in program.faults, steps=steps, folder=folder, until_s=began + timeout_s)
    with ExitStack() as stack:
        desks = [Desk(folder / f"doctor-{name}") for name in NODES] if doctor else []
        for desk in desks:
            stack.callback(desk.close)
        cluster = stack.enter_context(Cluster(folder))
        play.begin(cluster, desks)
        asking = _Asking(cluster, play.run) if doctor else None
        if asking is not None:
            stack.callback(asking.close)
        with suppress(LateError):
            play.to_the_end(cluster, lambda: _has_found(desks, asking))
        ranks = play.ranks(cluster, time.monotonic() - began)
        findings = _together([desk.close() for desk in desks], asking.close() if asking is not None else [])
    return Outcome(
        program=program.name,
        case=case,
        ranks=ranks,
        findings=findings,
        began_s=began_s,
        seconds=time.monotonic() - began,
    )


class _Play:
    """What happens in a case, and in which order."""

    def __init__(self, case: str, is_fault: bool, *, steps: int, folder: Path, until_s: float) -> None:
        self.case, self.is_fault, self.steps, self.folder, self.until_s = case, is_fault, steps, folder, until_s
        self.run = ""

    def begin(self, cluster: "Cluster", desks: list[Desk]) -> None:
        file = self.folder / "case.json"
        about = {
            "fault": self.case if self.is_fault else "",
            "variant": "" if self.is_fault else self.case,
            "steps": self.steps,
            "world": FIRST,
            "folder": str(self.folder),
            "doctor": [desk.for_ranks() for desk in desks],
        }
        file.write_text(json.dumps(about))
        cluster.add_nodes(*NODES[:FIRST])
        self.run = cluster.submit(job(self.case, steps=self.steps, case_file=file))

    def to_the_end(self, cluster: "Cluster", has_found: Callable[[], bool]) -> None:
        """Until the run is over. Raises LateError."""
        if self.case == "elastic_join":
            self._await(lambda: cluster.version(self.run) >= 3)
            cluster.add_nodes(NODES[2])
            self._await(lambda: cluster.member(self.run, NODES[2]).pushes_merged > 2)
        elif self.case == "kill_and_return":
            self._await(lambda: cluster.member(self.run, NODES[1]).pushes_merged > 2)
            cluster.nodes[NODES[1]].kill_everything()
            self._await(lambda: bool(cluster.events("node.dead")))
            cluster.nodes[NODES[1]].start()
            self._await(lambda: cluster.member(self.run, NODES[1]).incarnation == 2)
            merged = cluster.member(self.run, NODES[1]).pushes_merged
            self._await(lambda: cluster.member(self.run, NODES[1]).pushes_merged > merged + 2)
        if self.is_fault:
            self._look_until(has_found)
        elif self.case not in SOON_OVER:
            self._await(self._all_made)
            self._stop(cluster)
        self._await(lambda: cluster.info(self.run).state in ("finished", "stopped", "failed"))
        self._await(lambda: all(cluster.node_state(name) in ("idle", "left", "dead") for name in cluster.nodes))

    def _look_until(self, has_found: Callable[[], bool]) -> None:
        pass

    def _await(self, what: Callable[[], bool]) -> None:
        while not what():
            if time.monotonic() > self.until_s:
                raise LateError(self.case)
            time.sleep(0.05)
