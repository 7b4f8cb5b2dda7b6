"""`python -m ciuic.doctor.preflight_probe`: an Errand as JSON on stdin, a Report as JSON on stdout.

Whatever libraries and the model's own code print goes to stderr.
"""

import os
import platform
import sys
from typing import Any

import msgspec
import torch

from ciuic.doctor.preflight.records import Check, Errand, Facts, Layout, Report, Settings, fail, unknown
from ciuic.doctor.preflight.variables import DEBUG
from ciuic.doctor.preflight_probe import layout, trials
from ciuic.doctor.preflight_probe.devices import judge_devices, try_devices
from ciuic.doctor.preflight_probe.forked import Child
from ciuic.doctor.preflight_probe.meeting import Meeting


def run(errand: Errand) -> Report:
    """Fork what may crash, look, meet the others."""
    settings, level = errand.settings, os.environ.get(DEBUG, "").upper()
    gloo = Child(lambda _: trials.alone("gloo"))
    devices = Child(try_devices)
    debug = Child(trials.wrapped) if level == "DETAIL" else None
    model = Child(lambda _: layout.build_layout(settings.count)) if settings.count else None
    group = Child(trials.together, waits=True) if settings.nnodes > 1 else None

    facts = errand.facts
    checks = [*facts.checks, _gloo(facts, gloo.answer(trials.LIMIT_S))]
    checks += judge_devices(facts, os.environ.get("CUDA_VISIBLE_DEVICES"), devices.answer(trials.LIMIT_S))
    if debug is not None:
        checks.append(trials.judge_wrapped(level, debug.answer(trials.LIMIT_S)))
    built, lines = None, []
    if model is not None:
        check, built, lines = _built(settings, model.answer(layout.LIMIT_S))
        checks.append(check)
    facts = msgspec.structs.replace(
        facts, checks=tuple(checks), layout=built, versions={**torch_versions(), **facts.versions}
    )
    if group is None:
        return Report(checks=facts.checks)
    with Meeting(settings, group) as meeting:
        found, met = meeting.hold(facts, lines)
    return Report(checks=tuple(found), nnodes=settings.nnodes, met=met)


def _gloo(facts: Facts, answer: dict[str, object]) -> Check:
    """What a group of one says, unless the interface's own line says it already."""
    if any(check.name == "gloo interface" and check.result == "fail" for check in facts.checks):
        return unknown("gloo group", "it needs an interface")
    return trials.judge_alone("gloo", answer)


def torch_versions() -> dict[str, str]:
    """Of torch and what it brings; empty texts for what this build does not have."""
    nccl: object = getattr(getattr(torch.cuda, "nccl", None), "version", lambda: ())
    try:
        numbers = nccl() if callable(nccl) else ()
    except (AttributeError, RuntimeError):
        numbers = ()
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, numbers)) if isinstance(numbers, tuple) else str(numbers),
        "glibc": platform.libc_ver()[1],
    }


def _built(settings: Settings, answer: dict[str, object]) -> tuple[Check, Layout | None, list[str]]:
    """The line about the model of this node, its layout, one text per tensor."""
    if "problem" in answer:
        remedy = f"call the function of --count {settings.count} in Python: it has to work without parameters"
        return fail("model", f"it cannot be built: {answer['problem']}", next=remedy), None, []
    built = msgspec.convert(answer["layout"], Layout)
    detail = f"{built.parameters} parameters, {built.trainable} of them trainable, in {built.tensors} tensors"
    values: dict[str, Any] = {"parameters": built.parameters, "trainable": built.trainable}
    check = Check(name="model here", result="ok", detail=detail, values=values)
    if not built.trainable:
        remedy = "set requires_grad on what is to be trained"
        check = fail("model here", f"{detail}: DDP refuses such a model", next=remedy, **values)
    return check, built, msgspec.convert(answer["lines"], list[str])


def main() -> None:
    """Answer one errand."""
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    errand = msgspec.json.decode(sys.stdin.buffer.read(), type=Errand)
    torch.set_num_threads(1)
    report = run(errand)
    with os.fdopen(answer_fd, "wb") as stream:
        stream.write(msgspec.json.encode(report))


if __name__ == "__main__":
    main()
