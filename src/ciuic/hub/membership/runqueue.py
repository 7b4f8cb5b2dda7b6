"""Which node works for which run: the queue of runs, in order of submission.

Pure: every method gets the moment and an `Effects` to fill. A waiting run starts when at least `min_nodes` eligible
nodes are free; while it waits they are kept for it, so that a small run cannot starve a large one submitted earlier. A
running run takes every further eligible node up to `max_nodes`; it goes on with the nodes it has when some die, and
hub/vacancies says who gets their places. Where more nodes are eligible than there are places, hub/selection says which
are better.
"""

from collections.abc import Iterable

import msgspec

from ciuic.errors import ConflictError, NotFoundError
from ciuic.hub.membership.records import (
    ACTIVE_WORKER,
    Announce,
    CloseRun,
    Effects,
    Moment,
    Node,
    NodeGone,
    OpenRun,
    Pulse,
    Run,
    Wake,
    WorkerEnded,
)
from ciuic.hub.membership.selection import best_first, mismatch, setting_of
from ciuic.hub.membership.vacancies import Vacancies, room
from ciuic.hub.membership.waiting import gist, waiting_text
from ciuic.net.messages import WorkerFault, WorkerReport
from ciuic.plan.predict import Setting

STOP_PATIENCE_S = 60.0
"""How long workers may take to end after their run was stopped or has finished."""
ENDED_PATIENCE_S = 30.0
"""How long a run may stay incomplete after all its workers ended without an error."""
DETAIL_CHARACTERS = 500
MOST_RANKS = 64


class RunQueue:
    """Runs and their nodes. `nodes` and `pulses` belong to the membership and are shared with it."""

    def __init__(self, nodes: dict[str, Node], pulses: dict[str, Pulse], runs: Iterable[Run]) -> None:
        self._nodes = nodes
        self._pulses = pulses
        self.runs = {run.run_id: run for run in sorted(runs, key=lambda run: run.number)}
        self._patience_s: dict[str, float] = {}
        self._all_ended_s: dict[str, float] = {}
        self._vacancies = Vacancies()
        self._settings: dict[str, Setting] = {}
        """By run: with what nodes are compared."""
        self._members: dict[str, tuple[list[Node], frozenset[str]]] = {}
        """By run: its nodes and their names, until one comes or goes."""

    # ---- questions -------------------------------------------------------------------------------------------------

    def get(self, run_id: str) -> Run:
        """Raises NotFoundError."""
        run = self.runs.get(run_id)
        if run is None:
            raise NotFoundError(f"there is no run {run_id[:80]!r}", next="list the runs with: ciuic ps")
        return run

    def members(self, run_id: str) -> list[Node]:
        """The nodes assigned to a run, in order of joining."""
        return list(self._look(run_id)[0])

    def names(self, run_id: str) -> frozenset[str]:
        """The names of the nodes assigned to a run."""
        return self._look(run_id)[1]

    def _look(self, run_id: str) -> tuple[list[Node], frozenset[str]]:
        found = self._members.get(run_id)
        if found is None:
            members = [node for node in self._nodes.values() if node.run_id == run_id]
            found = self._members[run_id] = members, frozenset(node.node_id for node in members)
        return found

    def forget_members(self) -> None:
        """A node has come or is gone: look again."""
        self._members.clear()

    def wants_stop(self, node: Node) -> bool:
        """The worker that the node reports must end."""
        run = self.runs.get(node.run_id)
        if node.draining or (run is not None and run.state not in ("waiting", "running", "finished")):
            return True
        worker = self._pulses[node.node_id].worker
        return worker.state in ACTIVE_WORKER and worker.run_id != node.run_id

    def refusal(self, node: Node, run: Run) -> str:
        """Why the node cannot be taken for the run now; empty when it can."""
        worker = self._pulses[node.node_id].worker
        if node.presence != "here":
            return node.presence
        if self._pulses[node.node_id].beat_s is None:
            return "not heard yet"
        if node.draining:
            return "draining"
        if node.run_id:
            return f"busy with {node.run_id}"
        if why := mismatch(node, run):
            return why
        if node.node_id in run.failed:
            return f"its worker failed in this run: {run.failed[node.node_id]}"
        if worker.state in ACTIVE_WORKER and worker.run_id != run.run_id:
            return f"its worker for {worker.run_id} has not ended yet"
        return ""

    # ---- what people ask for ---------------------------------------------------------------------------------------

    def submit(self, now: Moment, run: Run, out: Effects) -> None:
        """Queue a new run."""
        self.runs[run.run_id] = run
        out.save_run(run)
        out.add(Announce(kind="run.submitted", run_id=run.run_id, text=f"{run.run_id} was submitted"))
        self.schedule(now, out)

    def stop(self, now: Moment, run_id: str, out: Effects) -> None:
        """Let the workers of a run finish their step and end. Raises NotFoundError, ConflictError."""
        run = self.get(run_id)
        if run.state in ("stopping", "stopped"):
            return
        if run.state not in ("waiting", "running"):
            cause = f"it has {run.state} already"
            raise ConflictError(f"{run_id} cannot be stopped", cause=cause, next="see `ciuic ps`")
        run.state = "stopping"
        run.reason = "stopped by an operator"
        self._patience_s[run_id] = now.mono_s + STOP_PATIENCE_S
        out.save_run(run)
        members = self.members(run_id)
        if members:
            names = ", ".join(node.node_id for node in members)
            text = f"{run_id} is asked to stop; waiting for the workers of {names}"
            out.add(Announce(kind="run.stopping", run_id=run_id, text=text))
        for node in members:
            self._touch(node, out)
        self._settle(now, run, out)
        self.schedule(now, out)

    def resume(self, now: Moment, run_id: str, out: Effects) -> None:
        """Queue a stopped or failed run again. Raises NotFoundError, ConflictError."""
        run = self.get(run_id)
        if run.state not in ("stopped", "failed"):
            cause = "its workers have not ended yet" if run.state == "stopping" else f"it is {run.state}"
            next_step = "wait a moment" if run.state == "stopping" else "`ciuic run` starts a new one"
            raise ConflictError(f"{run_id} cannot be resumed", cause=cause, next=next_step)
        run.state, run.attempt = "waiting", run.attempt + 1
        run.failed, run.faults, run.restarts, run.reason, run.ended_at = {}, {}, {}, "", None
        self._vacancies.forget(run)
        out.save_run(run)
        out.add(Announce(kind="run.resumed", run_id=run_id, text=f"{run_id} was resumed"))
        self.schedule(now, out)

    def has_begun(self, run_id: str, out: Effects) -> None:
        """Enough workers have come and training has begun: from now on the run goes on with fewer nodes, too."""
        run = self.runs.get(run_id)
        if run is not None and not run.has_trained:
            run.has_trained = True
            out.save_run(run)

    def finish(self, now: Moment, run_id: str, story: Announce, out: Effects) -> None:
        """Every sample is committed. Workers may still evaluate: their nodes stay until they report an end."""
        run = self.get(run_id)
        if run.state not in ("running", "stopping"):
            return
        run.state, run.reason, run.ended_at = "finished", "", now.wall_s
        self._patience_s[run_id] = now.mono_s + STOP_PATIENCE_S
        out.save_run(run)
        out.add(story)
        for node in self.members(run_id):
            if self._pulses[node.node_id].worker.state not in ACTIVE_WORKER:
                self.release(node, out)
        self._settle(now, run, out)
        self.schedule(now, out)

    def fail(self, now: Moment, run_id: str, reason: str, out: Effects) -> None:
        """Give the run up; its nodes become free."""
        run = self.get(run_id)
        if run.state not in ("waiting", "running", "stopping"):
            return
        run.state, run.reason, run.ended_at = "failed", reason, now.wall_s
        out.save_run(run)
        out.add(Announce(kind="run.failed", run_id=run_id, text=f"{run_id} failed: {reason}"))
        for node in self.members(run_id):
            self.release(node, out)
        self._settle(now, run, out)
        self.schedule(now, out)

    # ---- what nodes tell -------------------------------------------------------------------------------------------

    def heed(self, now: Moment, node: Node, report: WorkerReport, known_revision: int, out: Effects) -> None:
        """What the agent says of its worker; a report about an earlier attempt of the same run says nothing."""
        pulse = self._pulses[node.node_id]
        run = self.runs.get(node.run_id)
        if run is not None and report.run_id == run.run_id and _is_past(node, run, report, known_revision):
            report = WorkerReport()
        if report.detail:
            report = msgspec.structs.replace(report, detail=one_line(report.detail))
        was, pulse.worker = pulse.worker, report
        if run is not None and report.run_id == run.run_id and report.restarts:
            self._worker_restarted(node, run, report, out)
        if run is None or report.state in ACTIVE_WORKER:
            return
        if report.run_id == run.run_id and report.state == "failed":
            self._worker_failed(now, node, run, report, out)
        elif (run.state != "running" or node.draining) and known_revision >= node.revision:
            self.release(node, out)
            self._settle(now, run, out)
        elif report.state != "none" and was.state != report.state:
            out.add(WorkerEnded(run_id=run.run_id, node_id=node.node_id))

    def release(self, node: Node, out: Effects, line: Announce | None = None) -> None:
        """Take the node out of its run, if it has one; `line` is told in any case."""
        if not node.run_id:
            if line is not None:
                out.add(line)
            return
        out.add(NodeGone(run_id=node.run_id, node_id=node.node_id, line=line))
        run = self.runs.get(node.run_id)
        node.run_id = ""
        self.forget_members()
        if run is not None:
            self._vacancies.lose(run, node, out)
        self._touch(node, out)

    def left_by(self, now: Moment, run_id: str, out: Effects) -> None:
        """After nodes were released for their own reasons: does the run end now?"""
        run = self.runs.get(run_id)
        if run is not None:
            self._settle(now, run, out)

    # ---- time ------------------------------------------------------------------------------------------------------

    def restart(self, now: Moment) -> None:
        """After a start of the hub, workers get their full patience again."""
        for run in self.runs.values():
            if run.state == "stopping" or (run.state == "finished" and self.names(run.run_id)):
                self._patience_s[run.run_id] = now.mono_s + STOP_PATIENCE_S

    def tick(self, now: Moment, out: Effects) -> None:
        """Runs whose workers take too long, and runs whose workers ended without completing them."""
        for run_id in [run_id for run_id, until in self._patience_s.items() if now.mono_s >= until]:
            del self._patience_s[run_id]
            for node in self.members(run_id):
                self.release(node, out)
            self.left_by(now, run_id, out)
        for run in [run for run in self.runs.values() if run.state == "running"]:
            self._tick_running(now, run, out)

    def schedule(self, now: Moment, out: Effects) -> None:
        """Start what can start and give free nodes to what runs, in order of submission."""
        kept: dict[str, str] = {}
        for run in self.runs.values():
            if run.state not in ("waiting", "running"):
                continue
            takers, refused = self._candidates(run, kept)
            if run.state == "waiting" and len(takers) < run.min_nodes:
                kept.update((node.node_id, run.run_id) for node in takers)
                self._say_waiting(run, waiting_text(run, takers, refused), out)
                continue
            if run.state == "waiting":
                self._start(now, run, takers, out)
            else:
                self._grow(now, run, takers, out)
                self._vacancies.say_open(run, refused, out)
            self._say_waiting(run, self._lack(run, refused), out)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _candidates(self, run: Run, kept: dict[str, str]) -> tuple[list[Node], list[str]]:
        takers: list[Node] = []
        refused: list[str] = []
        members = len(self.names(run.run_id))
        places = room(run, members)
        if places == 0 and not run.away and members >= run.min_nodes:
            return [], []  # complete: nobody has to be looked at
        for node in self._nodes.values():
            if node.run_id == run.run_id:
                continue
            holder = kept.get(node.node_id)
            why = f"kept for {holder}, which was submitted earlier" if holder else self.refusal(node, run)
            if not why:
                takers.append(node)
            elif node.presence not in ("left", "evicted"):
                refused.append(f"{node.node_id}: {why}")
        takers.sort(key=lambda node: self._pulses[node.node_id].worker.run_id != run.run_id)
        back = [node for node in takers if node.node_id in run.away]
        others = [node for node in takers if node.node_id not in run.away]
        if places is not None and len(others) > places > 0:
            others = self._best(run, others)
        return [*back, *others[:places]], refused

    def _best(self, run: Run, nodes: list[Node]) -> list[Node]:
        """Nodes that still have a worker of this run first, then by what communication is expected to cost."""
        if run.run_id not in self._settings:
            self._settings[run.run_id] = setting_of(run.job)
        here = [node for node in nodes if self._pulses[node.node_id].worker.run_id == run.run_id]
        rest = [node for node in nodes if self._pulses[node.node_id].worker.run_id != run.run_id]
        return [*here, *best_first(rest, [node.measured for node in rest], self._settings[run.run_id])]

    def _start(self, now: Moment, run: Run, takers: list[Node], out: Effects) -> None:
        run.state, run.reason = "running", ""
        run.started_at = run.started_at if run.started_at is not None else now.wall_s
        out.save_run(run)
        out.add(OpenRun(run_id=run.run_id))
        names = ", ".join(node.node_id for node in takers)
        verb = "started" if run.attempt == 1 else "goes on"
        out.add(Announce(kind="run.started", run_id=run.run_id, text=f"{run.run_id} {verb} with {names}"))
        for node in takers:
            self._assign(now, node, run, out)

    def _grow(self, now: Moment, run: Run, takers: list[Node], out: Effects) -> None:
        for node in takers:
            text = self._vacancies.take(run, node, out)
            out.add(Announce(kind="run.node_added", run_id=run.run_id, node_id=node.node_id, text=text))
            self._assign(now, node, run, out)

    def _assign(self, now: Moment, node: Node, run: Run, out: Effects) -> None:
        node.run_id = run.run_id
        self.forget_members()
        self._touch(node, out)
        node.assigned_revision = node.revision
        pulse = self._pulses[node.node_id]
        pulse.worker = WorkerReport()
        pulse.heard_s = now.mono_s  # the grace of this run may be shorter than the silence so far: it counts from here

    def _touch(self, node: Node, out: Effects) -> None:
        node.revision += 1
        out.save_node(node)
        out.add(Wake(node_id=node.node_id))

    def _worker_restarted(self, node: Node, run: Run, report: WorkerReport, out: Effects) -> None:
        times = "once" if report.restarts == 1 else f"{report.restarts} times"
        text = f"{times}, last for: {report.detail or f'exit code {report.exit_code}'}"
        if run.restarts.get(node.node_id) == text:
            return
        run.restarts[node.node_id] = text
        out.save_run(run)
        told = f"the worker of {node.node_id} failed and is started again: {text}"
        out.add(Announce(kind="worker.restarted", run_id=run.run_id, node_id=node.node_id, text=told))

    def _worker_failed(self, now: Moment, node: Node, run: Run, report: WorkerReport, out: Effects) -> None:
        detail = report.detail or f"exit code {report.exit_code}"
        run.failed[node.node_id] = detail
        if report.fault is not None:
            run.faults[node.node_id] = tidy(report.fault)
        out.save_run(run)
        text = f"the worker of {node.node_id} failed after {report.restarts} restarts: {detail}"
        line = Announce(kind="worker.failed", run_id=run.run_id, node_id=node.node_id, text=text)
        self.release(node, out, line)
        if run.state == "running" and not self.names(run.run_id):
            first, why = next(iter(run.failed.items()))
            self.fail(now, run.run_id, f"the workers of all its nodes failed; first {first}: {why}", out)
        else:
            self._settle(now, run, out)

    def _settle(self, now: Moment, run: Run, out: Effects) -> None:
        """The last node is out of a run that is to end."""
        if run.state in ("waiting", "running") or self.names(run.run_id):
            return
        self._patience_s.pop(run.run_id, None)
        self._all_ended_s.pop(run.run_id, None)
        if run.state == "stopping":
            run.state, run.ended_at = "stopped", now.wall_s
            out.save_run(run)
            text = f"{run.run_id} was stopped; go on with: ciuic resume {run.run_id}"
            out.add(Announce(kind="run.stopped", run_id=run.run_id, text=text))
        out.add(CloseRun(run_id=run.run_id))

    def _tick_running(self, now: Moment, run: Run, out: Effects) -> None:
        self._vacancies.tick(now, run, out)
        members = self._look(run.run_id)[0]
        if not members or any(
            self._pulses[node.node_id].worker.state not in ("finished", "stopped") for node in members
        ):
            self._all_ended_s.pop(run.run_id, None)
            return
        since = self._all_ended_s.setdefault(run.run_id, now.mono_s)
        if now.mono_s - since >= ENDED_PATIENCE_S:
            self.fail(now, run.run_id, "every worker ended without an error before all samples were trained", out)

    def _lack(self, run: Run, refused: list[str]) -> str:
        """What a running run waits for: it may have lost nodes before or while it trained."""
        members = self._look(run.run_id)[0]
        if not members:
            return "all its nodes are gone; it goes on when one is back"
        if not run.has_trained and len(members) < run.min_nodes:
            return waiting_text(run, members, refused)
        return ""

    def _say_waiting(self, run: Run, reason: str, out: Effects) -> None:
        if run.reason == reason:
            return
        is_news = gist(run.reason) != gist(reason)
        run.reason = reason
        out.save_run(run)
        if reason and is_news:
            out.add(Announce(kind="run.waiting", run_id=run.run_id, text=f"{run.run_id} waits: {reason}"))


def one_line(text: str) -> str:
    """What a worker said, fit for a terminal: short, without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:DETAIL_CHARACTERS]).strip()


def tidy(fault: WorkerFault) -> WorkerFault:
    """The same, fit for a terminal and of bounded size."""
    return msgspec.structs.replace(
        fault, where=one_line(fault.where), log=one_line(fault.log), collateral=fault.collateral[:MOST_RANKS]
    )


def _is_past(node: Node, run: Run, report: WorkerReport, known_revision: int) -> bool:
    if report.attempt:
        return report.attempt != run.attempt
    return known_revision < node.assigned_revision
