"""What the parts of the preflight tell each other: between processes as JSON, between nodes through a store."""

from typing import Literal

import msgspec

Result = Literal["ok", "warn", "fail", "could-not-look"]
ORDER: tuple[Result, ...] = ("fail", "warn", "could-not-look", "ok")
"""The worst first."""
Number = int | float | str


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    name: str
    result: Result
    detail: str
    """What was found, with numbers."""
    next: str = ""
    """The remedy; empty when there is nothing to do."""
    rank: int | None = None
    """The node it is about; None: all of them, or the comparison between them."""
    values: dict[str, Number] = {}
    """The same numbers for machines, units in the names."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for."""

    nnodes: int = 1
    node_rank: int = 0
    nproc: int = 1
    """Training processes on each node."""
    host: str = ""
    """The master's address; empty: none was given."""
    port: int = 0
    wait_s: float = 60.0
    """How long to wait for the other nodes."""
    count: str = ""
    """FILE.py:FUNCTION or module:function that builds the model."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it was built on one node."""

    parameters: int
    trainable: int
    tensors: int
    buffers: int
    digest: str
    """Of names, shapes, kinds and order of all parameters and buffers."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One node, for comparison with the others."""

    rank: int
    host: str = ""
    machine: str = ""
    """Equal for processes of one running kernel."""
    address: str = ""
    """Where gloo would listen."""
    port: int = 0
    """Where this node's preflight listens at that address; 0: it does not."""
    token: str = ""
    """What it says there, so that nobody mistakes another program for it."""
    nnodes: int = 1
    nproc: int = 1
    versions: dict[str, str] = {}
    variables: dict[str, str] = {}
    gpus: tuple[str, ...] = ()
    layout: Layout | None = None
    checks: tuple[Check, ...] = ()


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """What the process with torch is asked."""

    settings: Settings
    facts: Facts


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was looked at."""

    checks: tuple[Check, ...]
    nnodes: int = 1
    met: int = 1
    """How many nodes took part."""

    @property
    def result(self) -> Result:
        """The worst of all."""
        found = {check.result for check in self.checks}
        return next((result for result in ORDER if result in found), "could-not-look")


def ok(name: str, detail: str, *, next: str = "", rank: int | None = None, **values: Number) -> Check:
    """Nothing to worry about."""
    return Check(name=name, result="ok", detail=detail, next=next, rank=rank, values=values)


def warn(name: str, detail: str, *, next: str, rank: int | None = None, **values: Number) -> Check:
    """A run may work, slower or with a trap."""
    return Check(name=name, result="warn", detail=detail, next=next, rank=rank, values=values)


def fail(name: str, detail: str, *, next: str, rank: int | None = None, **values: Number) -> Check:
    """A run cannot work like this."""
    return Check(name=name, result="fail", detail=detail, next=next, rank=rank, values=values)


def unknown(name: str, detail: str, *, next: str = "", rank: int | None = None) -> Check:
    """It could not be looked at, which is not the same as healthy."""
    return Check(name=name, result="could-not-look", detail=detail, next=next, rank=rank)
