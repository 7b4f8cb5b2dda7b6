"""Processes that meet at a real hub: forked from the test's own process, which has loaded torch already."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from hub_process import HubProcess

import ciuic.torch  # noqa: F401 - registers ciuic://
from ciuic.node.identity import join, node_folder

_FORK = multiprocessing.get_context("fork")
ANSWER_S = 60.0

Body = Callable[[Connection], None]


class Process:
    """A forked process that runs `body(pipe)`; what it sends is read with `hear`, in order."""

    def __init__(self, body: Body, environment: dict[str, str]) -> None:
        self.pipe, theirs = _FORK.Pipe()
        self.process: BaseProcess = _FORK.Process(target=_run, args=(body, theirs, environment), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """The next thing it says. Raises AssertionError with its traceback when it has failed."""
        assert self.pipe.poll(ANSWER_S), f"process {self.process.pid} says nothing"
        kind, what = self.pipe.recv()
        if kind == "failed":
            raise AssertionError(what)
        return what

    def tell(self, what: Any) -> None:
        self.pipe.send(what)

    def kill(self) -> None:
        """kill -9."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(ANSWER_S)

    def end(self) -> int | None:
        self.process.join(ANSWER_S)
        return self.process.exitcode


def first_of(processes: list[Process]) -> Process:
    """The one that says something first."""
    ready = connection.wait([process.pipe for process in processes], ANSWER_S)
    return next(process for process in processes if process.pipe in ready)


class Talk:
    """The process's side of its pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, what: Any) -> None:
        self._pipe.send(("said", what))

    def wait(self) -> Any:
        """What the test tells next."""
        assert self._pipe.poll(ANSWER_S)
        return self._pipe.recv()


def _run(body: Body, pipe: Connection, environment: dict[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CIUIC_NODE", "CIUIC_RUN_FILE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        body(pipe)
    except BaseException:  # noqa: BLE001 - the test shows it
        pipe.send(("failed", traceback.format_exc()))


def join_node(hub: HubProcess, home: Path, location: str) -> None:
    """What `ciuic node join` leaves on disk."""
    join(node_folder(home, location), url=hub.url, location=location, token=hub.token(), claimed={})
