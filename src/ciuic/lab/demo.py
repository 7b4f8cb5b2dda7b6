"""`ciuic demo`: three nodes on emulated intercontinental links train one model; one is killed and comes back.

The hub, the agents and the workers are real processes that speak mutual TLS; only the links are emulated, one relay
per node. Everything the demo makes lies in one folder: report.html, report.json, demo.png, logs/ and state/.
"""

import contextlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from msgspec import structs

from ciuic.errors import CheckFailedError, RunFailedError, UsageError
from ciuic.job import Job, parse_job
from ciuic.lab.page import write_page
from ciuic.lab.plots import draw_png
from ciuic.lab.profiles import continents
from ciuic.lab.report import DemoReport, write_json
from ciuic.lab.screen import Scene, Screen, open_screen
from ciuic.lab.stage import Stage
from ciuic.lab.tally import Findings, KillTimes, Seen, make_report
from ciuic.net.client import HubClient
from ciuic.net.messages import Event, NodeInfo, RunInfo, SubmitReply, SubmitRequest, decode
from ciuic.net.probe import usable_cpus
from ciuic.units import format_duration

KILLED = "ap-southeast"
KILL_AT = 0.4
"""Progress of the run at which it is killed, at the latest."""
KILL_AFTER_PUSHES = 2
RETURN_MARGIN = 2.5
"""It is killed earlier where the rest of the run would take less than so many starts of a worker."""
RESTART_AFTER_S = 3.0
POLL_S = 0.5
NO_PROGRESS_S = 180.0
"""A run that does not get on for so long has failed."""
ENDED = ("finished", "stopped", "failed")
_UNTOLD = ("hub.started", "token.created", "run.submitted", "run.waiting", "round.closed", "run.evaluated")
_MARK = "made-by-ciuic-demo"


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """How to run the demo."""

    folder: Path = Path("demo")
    quick: bool = False
    """A shorter run with the same story."""
    seed: int = 0
    """Of the model, the order of samples and the jitter of the links."""


def run_demo(config: DemoConfig) -> int:
    """Run it from the first process to the verdict; 0 when every check holds, else 7.

    Raises UsageError when the folder cannot be used, RunFailedError when the run does not come to its end. Whatever
    happens, also Ctrl-C and SIGTERM, no process stays behind.
    """
    folder = config.folder.resolve()
    prepare_folder(folder)
    with _sigterm_as_interrupt(), open_screen() as screen:
        report = _play(config, folder, screen)
        write_json(report, folder / "report.json")
        draw_png(report, folder / "demo.png")
        write_page(report, folder / "report.html")
    for line in verdict_lines(report, folder):
        screen.say(line)
    return 0 if report.holds else CheckFailedError.exit_code


def make_job(config: DemoConfig) -> Job:
    """What the demo trains."""
    return parse_job(
        {
            "name": "demo",
            "model": {"preset": "deepseek-v3-tiny"},
            "nodes": {"min": 3},
            "sync": {"interval": 10, "compression": "1-bit"},
            "optim": {"lr": 4e-3, "batch_size": 8},
            "train": {
                "samples": int((4_800 if config.quick else 8_000) * work_factor(usable_cpus())),
                "seed": config.seed,
                "evaluate_every": 4,
                "evaluate_samples": 64,
            },
            "fault": {"grace": "4 s"},
        }
    )


def work_factor(cores: int) -> float:
    """More work where the nodes need not share two cores: the killed node must find the run unfinished."""
    return min(2.0, max(1.0, cores / 2))


def own_command() -> str:
    """How this person can type `ciuic`: by name when it is on the path, else by where it was installed."""
    return "ciuic" if shutil.which("ciuic") else str(Path(sys.executable).parent / "ciuic")


def prepare_folder(folder: Path) -> None:
    """Make the folder and remove what an earlier demo left there. Raises UsageError for a folder of something else."""
    mark = folder / _MARK
    if folder.exists() and not mark.exists() and any(folder.iterdir()):
        raise UsageError(
            f"{folder} is not empty and was not made by the demo", next="choose another folder with --folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    for name in ("state", "logs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("report.json", "report.html", "demo.png"):
        (folder / name).unlink(missing_ok=True)


def verdict_lines(report: DemoReport, folder: Path) -> list[str]:
    """What the person is left with."""
    lines = [""]
    lines += [
        f"{'holds' if check.holds else 'FAILS'}  {check.name}: {check.measured} ({check.bar})"
        for check in report.checks
    ]
    lines += ["", report.verdict, f"report   {folder / 'report.html'}", f"picture  {folder / 'demo.png'}"]
    return [*lines, f"numbers  {folder / 'report.json'}", f"took {format_duration(report.demo_s)}"]


def _play(config: DemoConfig, folder: Path, screen: Screen) -> DemoReport:
    """From the first process to the report; no process is left."""
    began = time.monotonic()
    profile = continents()
    screen.say(f"links are emulated (profile {profile.name}: rate, delay and jitter per node); the rest is real")
    with Stage(profile, folder, seed=config.seed) as stage:
        client = stage.set_up()
        screen.say(f"live page while it runs: CIUIC_HOME={stage.hub_home} {own_command()} dash")
        measured = stage.wait_until_measured(client)
        request = SubmitRequest(job=make_job(config).to_dict(), submit_token="demo")
        run_id = client.call("POST", "/v1/runs", request, SubmitReply).run_id
        play = Play(stage, client, run_id, screen, began)
        run = play.watch()
        nodes = client.call("GET", "/v1/nodes", None, list[NodeInfo])
        nodes = [structs.replace(node, measured=measured.get(node.node_id, node.measured)) for node in nodes]
        stage.dismiss_nodes()
        relays = stage.relay_stats()
        stage.dismiss_hub()
    return make_report(
        Findings(
            run=run,
            nodes=nodes,
            seen=play.seen,
            relays={node.node_id: relays[node.location] for node in nodes},
            profile=profile,
            kill=play.kill,
            seed=config.seed,
            quick=config.quick,
            demo_s=time.monotonic() - began,
            own_story=play.story,
        )
    )


class Play:
    """One run from its submission to its end, with the accident in the middle."""

    def __init__(self, stage: Stage, client: HubClient, run_id: str, screen: Screen, began: float) -> None:
        self._stage = stage
        self._client = client
        self._run_id = run_id
        self._screen = screen
        self._began = began
        self._restart_due: float | None = None
        self._moved: tuple[float, int] = (time.monotonic(), -1)
        self.seen = Seen()
        self.story: list[Event] = []
        self.kill: KillTimes | None = None

    def watch(self) -> RunInfo:
        """Until the run has finished. Raises RunFailedError when it ends otherwise or stands still."""
        while True:
            self._stage.check()
            run = self._client.call("GET", f"/v1/runs/{self._run_id}", None, RunInfo)
            self.seen.look(run, time.time())
            self._hear()
            self._screen.show(self._scene(run))
            if run.state in ENDED:
                return self._ended(run)
            self._check_progress(run)
            self._act(run)
            time.sleep(POLL_S)

    def _hear(self) -> None:
        """Take in, and tell, what has happened at the hub."""
        after = self.seen.events[-1].id if self.seen.events else 0
        for line in self._client.stream_lines(f"/v1/events?after={after}"):
            event = decode(line, Event)
            self.seen.events.append(event)
            if event.kind not in _UNTOLD:
                self._screen.say(event.text)

    def _ended(self, run: RunInfo) -> RunInfo:
        if run.state != "finished":
            raise RunFailedError(
                f"the demo's run {'was stopped' if run.state == 'stopped' else 'failed'}",
                cause=run.reason,
                next="read the logs beside the report's folder",
            )
        return run

    def _check_progress(self, run: RunInfo) -> None:
        moved_at, versions = self._moved
        if sum(run.versions) != versions:
            self._moved = (time.monotonic(), sum(run.versions))
        elif time.monotonic() - moved_at > NO_PROGRESS_S:
            raise RunFailedError(
                f"the demo's run has not moved for {format_duration(NO_PROGRESS_S)}",
                cause=run.reason or f"it is {run.state} at {run.progress:.0%}",
                next="read the files in logs/ of the demo's folder",
            )

    # ---- the accident ----

    def _act(self, run: RunInfo) -> None:
        if self.kill is None and self._kill_is_due(run):
            self._kill(run)
        elif self.kill is not None and self._restart_due is not None and time.monotonic() >= self._restart_due:
            self._restart_due = None
            self._restart(self.kill)

    def _kill_is_due(self, run: RunInfo) -> bool:
        """Every node's work counts already, and what is left is long enough for a new worker to start and take part."""
        started = next((event.time for event in self.seen.events if event.kind == "run.training"), None)
        settled = len(run.nodes) > 1 and all(node.pushes_merged >= KILL_AFTER_PUSHES for node in run.nodes)
        if started is None or not settled or run.progress <= 0:
            return False
        start_s, trained_s = started - run.created_at, time.time() - started
        left_s = trained_s * (1 - run.progress) / run.progress
        return run.progress >= KILL_AT or left_s < RETURN_MARGIN * start_s

    def _kill(self, run: RunInfo) -> None:
        nodes = self._client.call("GET", "/v1/nodes", None, list[NodeInfo])
        node_id = next(node.node_id for node in nodes if node.location == KILLED)
        incarnation = next((node.incarnation for node in run.nodes if node.node_id == node_id), 0)
        now = time.time()
        self._stage.kill_node(KILLED)
        self._restart_due = time.monotonic() + RESTART_AFTER_S
        self.kill = KillTimes(node_id=node_id, killed_at=now, restarted_at=now + RESTART_AFTER_S)
        self.seen.killed(node_id, incarnation, now)
        self._tell("demo.killed", node_id, f"kill -9 of {node_id}: its agent and its worker")

    def _restart(self, kill: KillTimes) -> None:
        self._stage.start_node(KILLED)
        self.kill = KillTimes(node_id=kill.node_id, killed_at=kill.killed_at, restarted_at=time.time())
        self._tell("demo.restarted", kill.node_id, f"{kill.node_id} starts again with the identity it had")

    def _tell(self, kind: str, node_id: str, text: str) -> None:
        self.story.append(Event(id=0, time=time.time(), kind=kind, node_id=node_id, text=text))
        self._screen.say(text)

    def _scene(self, run: RunInfo) -> Scene:
        return Scene(
            run=run,
            links={site.location: site.link for site in self._stage.profile.sites},
            killed=self.seen.away,
            wire_bytes=sum(stats.purpose_bytes("updates") for stats in self._stage.relay_stats().values()),
            elapsed_s=time.monotonic() - self._began,
        )


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Generator[None]:
    """SIGTERM stops the demo like Ctrl-C: the `with` blocks end what they started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
