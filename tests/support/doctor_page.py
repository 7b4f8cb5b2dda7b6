"""A doctor's folder of a made-up run: two ranks, a frozen module, ghosts, a falling loss scale, several findings."""

import math
from pathlib import Path

from ciuic.doctor.evidence import Evidence
from ciuic.doctor.facts import MOVEMENT, to_byte
from ciuic.doctor.facts_model import MODE, NAMES, UNOWNED
from ciuic.doctor.facts_training import LOSS, RATES, SCALER, SKIPPED
from ciuic.doctor.finding import Blind, Finding, Incident, Severity
from ciuic.doctor.record import Beat, Bye, Hello, Notice, Record

MODULES = ["embed", "blocks.0.attention.query", "blocks.0.mlp", "blocks.1.mlp", "head"]
BEGAN_S = 1_700_000_000.0
STEPS = [1, 2, 3, 4, 10, 20, 30, 40]
MARKUP = "<img src=x onerror=alert(1)>"


def moved(share: float) -> int:
    """The byte of a movement of so much of the parameters' length."""
    return to_byte(math.log10(share), middle=200, steps=16)


def movement(rank: int, step: int, *, modules: list[str] | None, odd: bool = False) -> Notice:
    """embed is frozen, query has no gradient, blocks.1.mlp stands still; head of an odd rank moves ten times as far."""
    lengths = bytes([0, 0, moved(1e-3), 0, moved(1e-1 if odd else 1e-2)])
    facts = {
        "optimizer": 0,
        "step": step,
        "moved": lengths,
        "grads": bytes([0, 0, 100, 110, 120]),
        "flags": bytes([16, 1, 0, 4, 0]),
    }
    if modules is not None:
        facts["modules"] = modules
    return Notice(rank=rank, step=step, kind=MOVEMENT, facts=facts)


def make_folder(folder: Path, *, ahead_s: float = 0.0, module: str = "head") -> Path:
    """With evidence and findings; the clock of rank 1 is `ahead_s` ahead."""
    evidence = Evidence(folder)
    for rank in (0, 1):
        evidence.add(Hello(token="", rank=rank, world=2, host="here", pid=1))
    for at, step in enumerate(STEPS):
        for rank in (0, 1):
            time_s = BEGAN_S + at + rank * ahead_s
            _one_step(evidence, rank, step, time_s)
    names = {"what": UNOWNED, "names": [f"{module}.scale"], "count": 1, "optimizer": 0, "number": 3}
    evidence.add(Notice(rank=0, step=3, kind=NAMES, facts=names))
    evidence.add(Bye(rank=0, step=44, how="end"))
    evidence.add(Bye(rank=1, step=44, how="RuntimeError: connection closed by peer"))
    cause = Finding(
        code="CIUIC-F3",
        cause=f"the input of rank 1 is not finite: see {MARKUP}",
        step=4,
        ranks=(1,),
        modules=(module,),
        evidence={"skipped": 3, "loss_scale": 8192.0},
        found_s=BEGAN_S + 4.5,
    )
    follows = Finding(code="CIUIC-F5", cause="the loss of rank 1 is nan at step 4", step=4, ranks=(1,))
    note = Finding(
        code="CIUIC-C1", cause="embed.weight took no part", step=2, severity=Severity.NOTE, found_s=BEGAN_S + 2
    )
    incidents = [Incident(cause=cause, collateral=(follows,)), Incident(cause=note)]
    evidence.close(incidents, [Blind(what="DDP's own calls", why="no Flight Recorder", ranks=(0,))])
    return folder


def _one_step(evidence: Evidence, rank: int, step: int, time_s: float) -> None:
    evidence.add(movement(rank, step, modules=MODULES if step == 1 else None, odd=rank == 1 and step == 20))
    loss = math.inf if rank == 1 and step >= 10 else 2.0 / step + 0.1 * rank
    facts = {MODE: "ddp", LOSS: loss, RATES: [1e-3 * (1 - step / 50)], SCALER: [65536.0 / step, 0, 0], "cost_s": 0.001}
    evidence.add(Record(rank=rank, optimizer=0, step=step, time_s=time_s, facts=facts))
    phase = ("data", "forward", "backward", "step", "collective", "save", "load", "other")[step % 8]
    evidence.add(Beat(rank=rank, step=step, time_s=time_s, phase=phase, phase_s=0.4, facts={}))
    if step >= 10:
        evidence.add(
            Notice(rank=rank, step=step, kind=SKIPPED, facts={"optimizer": 0, "scale": 65536.0 / step, "in_a_row": 1})
        )
