"""Watching a run to its end: a live table in a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NoReturn

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ciuic.cli import views
from ciuic.cli.output import print_json, print_line, print_note, rich_table
from ciuic.cli.runs import run_path
from ciuic.errors import RunFailedError, UnreachableError
from ciuic.net.messages import RunInfo

if TYPE_CHECKING:
    from ciuic.net.client import HubClient

POLL_S = 1.0
LINE_EVERY_S = 5.0

Show = Callable[[RunInfo | None, str], None]
"""Gets the run (None while the hub is away) and a remark."""


def watch(client: "HubClient", run_id: str, *, as_json: bool) -> int:
    """Follow a run until it ends; the exit code. Ctrl-C detaches (KeyboardInterrupt goes on to the caller).

    A hub that goes away is waited for: runs go on without it. Unless the run finished, raises RunFailedError; with
    `as_json` the run's last state is the only document, and tells.
    """
    try:
        with _screen(as_json=as_json) as show:
            run = _follow(client, run_id, show)
    except KeyboardInterrupt:
        if not as_json:
            print_note(f"stopped watching; the run goes on: `ciuic status {run_id}`, `ciuic stop {run_id}`")
        raise
    if as_json:
        print_json(run)
        return 0 if run.state == "finished" else RunFailedError.exit_code
    if run.state != "finished":
        _raise_ended(run)
    return 0


def _raise_ended(run: RunInfo) -> NoReturn:
    run_id, reason = run.run_id, run.reason or "no reason was recorded"
    verdict = run.verdict
    if run.state == "failed" and verdict is not None:
        facts = [f"{name} {text}" for name, text in views.verdict_facts(run) if name not in ("verdict", "next")]
        raise RunFailedError(
            f"{run_id} failed: {views.verdict_line(verdict)}", cause="; ".join(facts) or reason, next=verdict.next
        )
    raise RunFailedError(
        f"{run_id} {'was stopped' if run.state == 'stopped' else 'failed'}",
        cause=reason,
        next=f"`ciuic logs {run_id}` and `ciuic events --run {run_id}` say more; `ciuic resume {run_id}` goes on",
    )


def _follow(client: "HubClient", run_id: str, show: Show) -> RunInfo:
    while True:
        try:
            run = client.call("GET", run_path(run_id), None, RunInfo)
        except UnreachableError as error:
            show(None, f"{error.message}; still trying")
        else:
            show(run, "")
            if run.state in views.ENDED:
                return run
        time.sleep(POLL_S)


def _screen(*, as_json: bool) -> contextlib.AbstractContextManager[Show]:
    if as_json:
        return contextlib.nullcontext(lambda run, remark: None)
    if sys.stdout.isatty():
        return _live()
    return contextlib.nullcontext(_PlainLines(time.monotonic))


@contextlib.contextmanager
def _live() -> Generator[Show]:
    latest: list[RenderableType] = [Text("waiting for the hub")]
    with Live(latest[0], auto_refresh=False) as live:

        def show(run: RunInfo | None, remark: str) -> None:
            if run is not None:
                latest[0] = run_picture(run)
            live.update(Group(latest[0], Text(remark, style="yellow")) if remark else latest[0], refresh=True)

        yield show


def run_picture(run: RunInfo) -> RenderableType:
    """A run as a terminal shows it."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, value in views.run_facts(run, time.time()):
        facts.add_row(Text(name), Text(value, overflow="fold"))
    return Group(facts, rich_table(views.run_nodes_grid(run)))


class _PlainLines:
    """One line when the state changes or a node comes or goes, and every few seconds while versions grow."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said_at = float("-inf")
        self._state: object = None
        self._line = ""

    def __call__(self, run: RunInfo | None, remark: str) -> None:
        state = remark if run is None else (run.state, [(node.node_id, node.state) for node in run.nodes])
        line = remark if run is None else views.progress_line(run)
        is_due = line != self._line and self._clock() - self._said_at >= LINE_EVERY_S
        if state != self._state or is_due:
            print_line(line)
            self._state, self._line, self._said_at = state, line, self._clock()
