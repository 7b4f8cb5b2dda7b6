"""`ciuic doctor run`: start a collector, then the program with the probe in it; say what was found."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ciuic.doctor import environment
from ciuic.doctor.case import Rule
from ciuic.doctor.collector import Collector, Options
from ciuic.doctor.finding import Blind, Incident, Severity
from ciuic.doctor.incidents import severity_of
from ciuic.errors import RunFailedError, UsageError

SITE = Path(__file__).parent / "site"
GRACE_S = 10.0
"""From SIGTERM to SIGKILL for a program that is stopped because of a finding."""
POLL_S = 0.1
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which batch systems ask a program to save or to end; the program gets them as if it ran alone."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to run, and how to look at it."""

    command: Sequence[str]
    folder: Path
    host: str = "127.0.0.1"
    port: int = 0
    collector: str = ""
    """host:port of a collector on another machine; empty: one is started here."""
    token: str = ""
    every: int = environment.EVERY_DEFAULT
    adapt: bool = True
    stop_on: Severity | None = None
    """End the program when a finding is at least this severe."""
    stdout_is_taken: bool = False
    """The program's own output goes to stderr."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How it ended."""

    exit_code: int
    """Of the program."""
    incidents: list[Incident]
    blind: list[Blind]
    stopped_for: Incident | None
    """The finding for which the program was ended."""
    ranks: int
    """That were heard."""
    looked: int = 0
    """Steps that were looked at closely."""
    steps: int = 0
    """That were made."""


def launch(options: Launch, *, told: Callable[[Incident], None], begun: Callable[[str, str], None]) -> Outcome:
    """Run the program to its end. `begun` gets the collector's address and token when other machines may use them.

    Raises UsageError when there is no such program, UnreachableError when the collector cannot listen.
    """
    worst: list[Incident] = []

    def hear(incident: Incident) -> None:
        told(incident)
        if options.stop_on is not None and _at_least(incident, options.stop_on):
            worst.append(incident)
            collector.case.is_ended = True

    if options.collector:
        code = _wait(_start(options, options.collector, options.token), lambda: bool(worst))
        return Outcome(exit_code=code, incidents=[], blind=[], stopped_for=None, ranks=0)
    collector = Collector(
        Options(
            folder=options.folder,
            host=options.host,
            port=options.port,
            token=options.token,
            every=options.every,
            adapt=options.adapt,
        ),
        told=hear,
    )

    def ended() -> None:
        collector.case.is_ended = True

    host, port = collector.start()
    try:
        begun(f"{host}:{port}", collector.token)
        code = _wait(_start(options, f"{host}:{port}", collector.token), lambda: bool(worst), ended=ended)
        collector.case.exit_code = code
    finally:
        incidents = collector.close()
    return Outcome(
        exit_code=code,
        incidents=incidents,
        blind=collector.case.blind,
        stopped_for=worst[0] if worst else None,
        ranks=len(collector.case.hellos),
        looked=collector.case.looked,
        steps=max(collector.case.looked, collector.case.steps),
    )


def run_until(
    options: Launch,
    rule: Rule,
    *,
    until: Callable[[], bool],
    environ: Mapping[str, str],
    begun: Callable[[str, str], None],
) -> tuple[int, int]:
    """Run the program until something holds, with one rule that looks: (exit code, ranks that were heard).

    Raises UsageError when there is no such program, UnreachableError when the collector cannot listen.
    """
    if options.collector:
        return _wait(_start(options, options.collector, options.token, environ), until), 0
    collector = Collector(
        Options(folder=options.folder, host=options.host, port=options.port, token=options.token, rules=[rule])
    )
    host, port = collector.start()
    since_s: list[float] = []

    def enough() -> bool:
        if until() and not since_s:
            since_s.append(time.monotonic())
        return bool(since_s) and time.monotonic() - since_s[0] > GRACE_S  # its ranks end by themselves

    try:
        begun(f"{host}:{port}", collector.token)
        code = _wait(_start(options, f"{host}:{port}", collector.token, environ), enough)
    finally:
        collector.close()
    return code, len(collector.case.hellos)


def _at_least(incident: Incident, limit: Severity) -> bool:
    order = list(Severity)
    return order.index(severity_of(incident.cause)) >= order.index(limit)


def _start(
    options: Launch, address: str, token: str, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    paths = [str(SITE), os.environ.get("PYTHONPATH", "")]
    added = {
        environment.ADDRESS: address,
        environment.TOKEN: token,
        environment.EVERY: str(options.every),
        environment.FOLDER: str(options.folder.absolute()) if not options.collector else "",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    env = {environment.RECORDER: environment.RECORDER_ENTRIES, **os.environ, **added, **(environ or {})}
    try:
        return subprocess.Popen(list(options.command), env=env, stdout=sys.stderr if options.stdout_is_taken else None)
    except OSError as error:
        raise UsageError(
            f"{options.command[0]} cannot be started",
            cause=error.strerror or str(error),
            next="everything after -- is the program and its arguments, as you would type it without the doctor",
        ) from error


def _wait(
    process: subprocess.Popen[bytes], enough: Callable[[], bool], ended: Callable[[], None] = lambda: None
) -> int:
    """Its exit code; ctrl-c reaches the program by itself, so it is only waited for. `ended` is called when a signal
    ends it."""
    with _signals_passed_on(process, ended):
        return _wait_for(process, enough, ended)


@contextlib.contextmanager
def _signals_passed_on(process: subprocess.Popen[bytes], ended: Callable[[], None]) -> Iterator[None]:
    def pass_on(number: int, frame: object) -> None:
        if number in (signal.SIGTERM, signal.SIGHUP):
            ended()
        process.send_signal(number)  # nothing happens when it has ended

    try:
        before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    except ValueError:  # not in the main thread: then signals are somebody else's
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for(process: subprocess.Popen[bytes], enough: Callable[[], bool], ended: Callable[[], None]) -> int:
    while True:
        try:
            code = process.wait(POLL_S)
            break
        except subprocess.TimeoutExpired:
            if enough():
                code = _end(process)
                break
        except KeyboardInterrupt:
            ended()
    return 128 - code if code < 0 else code


def _end(process: subprocess.Popen[bytes]) -> int:
    """The program and all that it started."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return process.wait()
    process.send_signal(signal.SIGTERM)
    until_s = time.monotonic() + GRACE_S
    while process.poll() is None and time.monotonic() < until_s:
        time.sleep(POLL_S)
    _, alive = psutil.wait_procs(family[1:], timeout=max(0.0, until_s - time.monotonic()))
    for each in alive:
        with_kill(each)
    if process.poll() is None:
        process.kill()
    return process.wait()


def with_kill(each: psutil.Process) -> None:
    """SIGKILL for a process that may have ended meanwhile."""
    try:
        each.kill()
    except psutil.NoSuchProcess:
        return


def check(outcome: Outcome) -> None:
    """Raises RunFailedError when the program was ended for a finding, or said that it succeeded and something critical
    was found."""
    if outcome.stopped_for is not None:
        found = outcome.stopped_for.cause
        raise RunFailedError(
            f"the program was ended because of {found.code}",
            cause=found.cause,
            next=f"`ciuic doctor explain {found.code}`",
        )
    worst = [incident for incident in outcome.incidents if severity_of(incident.cause) is Severity.CRITICAL]
    if worst and outcome.exit_code == 0:
        raise RunFailedError(
            f"the doctor found {len(worst)} critical incident{'s' if len(worst) > 1 else ''}",
            cause=worst[0].cause.cause,
            next=f"`ciuic doctor explain {worst[0].cause.code}`",
        )
