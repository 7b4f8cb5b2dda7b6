"""`ciuic.doctor.watch`: the doctor in a program that was not started by `ciuic doctor run`."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

from ciuic.doctor.environment import EVERY, EVERY_DEFAULT, TOKEN
from ciuic.doctor.evidence import read_findings
from ciuic.doctor.finding import Incident
from ciuic.doctor.probe.attach import Attached, attach
from ciuic.doctor.probe.discover import model_of
from ciuic.doctor.probe.here import attached
from ciuic.doctor.probe.probe import ranks_here
from ciuic.errors import NotFoundError, UnreachableError, UsageError

KEY = "ciuic/doctor/collector"
WAIT_S = 20.0
"""How long a rank waits for rank 0 to say where the collector is."""


class Watch:
    """What `watch` gives: close it at the end, or use it as a context manager; else the program's end does."""

    def __init__(self, at: Attached | None, folder: Path | None, collector: subprocess.Popen[str] | None) -> None:
        """`at`: what this one has begun; None: somebody else looks already, and ends it."""
        self._at, self._folder, self._collector = at, folder, collector

    def close(self) -> list[Incident]:
        """Look no longer; on rank 0, when `watch` started the collector: what was found, the likeliest first."""
        if self._at is not None:
            self._at.close()
        if self._collector is None or self._folder is None:
            return []
        if self._collector.stdin is not None:
            self._collector.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # another rank is at work: it ends with the last one
            self._collector.wait(WAIT_S)
        try:
            return read_findings(self._folder)[0]
        except NotFoundError:
            return []

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def watch(
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    *,
    folder: str | Path = "",
    every: int = 0,
) -> Watch:
    """Look into this training run from now on; call it on every rank, after the model is wrapped, before the loop.

    `model` and `optimizer` name what is trained; without them they are found at the first step. `scheduler` and
    `scaler` need not be given either: what they do is seen. Under `ciuic doctor run` this only names the model. Rank 0
    starts a collector process beside itself; `folder` (default doctor/DATE-TIME) gets what it finds, `every` is the
    number of steps from one sample to the next.

    Raises UsageError when `model` is no module or `optimizer` no optimizer, UnreachableError when rank 0 says nothing.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(f"{type(model).__name__} is not a torch module", next="watch(model, optimizer)")
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner is not None and not isinstance(inner, Optimizer):
        raise UsageError(f"{type(optimizer).__name__} is not a torch optimizer", next="watch(model, optimizer)")
    at, where, collector = attached(), None, None
    mine = at is None
    if at is None:
        at, where, collector = _attach(Path(folder) if folder else None, every or EVERY_DEFAULT)
    if model is not None and at.probe.model_of(model) is None:
        at.probe.found(model_of(model, len(at.probe.models)))
    if inner is not None:
        at.probe.index_of(inner)
    return Watch(at if mine else None, where, collector)


def _attach(folder: Path | None, every: int) -> tuple[Attached, Path | None, subprocess.Popen[str] | None]:
    rank, world = ranks_here()
    key = _key(rank) if world > 1 else KEY
    if rank != 0:
        address, token = _from_rank_0(key)
        return attach(address, token, rank=rank, world=world, every=every), None, None
    where = folder or Path("doctor") / time.strftime("%Y-%m-%d-%H%M%S")
    token = secrets.token_hex(16)
    collector, address = _start(where, token, _host() if world > 1 else "127.0.0.1", every)
    if world > 1:
        host, port = address
        distributed_c10d._get_default_store().set(key, f"{host}:{port}:{token}")
    return attach(address, token, rank=rank, world=world, every=every), where, collector


def _key(rank: int) -> str:
    """One for each time that the ranks begin to watch, so that nobody reads of a collector that is gone."""
    return f"{KEY}/{distributed_c10d._get_default_store().add(f'{KEY}/made/{rank}', 1)}"


def _from_rank_0(key: str) -> tuple[tuple[str, int], str]:
    store = distributed_c10d._get_default_store()
    try:
        store.wait([key], timedelta(seconds=WAIT_S))
    except (RuntimeError, dist.DistStoreError) as error:
        raise UnreachableError(
            "rank 0 has not said where the doctor is", cause=str(error).splitlines()[0], next="call watch on every rank"
        ) from error
    host, port, token = store.get(key).decode().rsplit(":", 2)
    return (host, int(port)), token


def _start(folder: Path, token: str, host: str, every: int) -> tuple[subprocess.Popen[str], tuple[str, int]]:
    command = [sys.executable, "-m", "ciuic.doctor.collect", str(folder), host]
    env = {**os.environ, TOKEN: token, EVERY: str(every)}
    collector = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    line = collector.stdout.readline().strip() if collector.stdout else ""
    host, _, port = line.rpartition(":")
    if not port.isdecimal():
        raise UnreachableError(
            "the doctor's collector did not start", cause=f"exit code {collector.poll()}, see stderr"
        )
    return collector, (host, int(port))


def _host() -> str:
    """The address by which the ranks of this group reach this machine."""
    master = os.environ.get("MASTER_ADDR", "")
    try:
        address = socket.gethostbyname(master or socket.gethostname())
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:  # the name of the master is not an address of this machine, or it has no name
        return "127.0.0.1"
    return address
