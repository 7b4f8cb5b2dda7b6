"""GPUs as torch sees them, against the driver's list, and NCCL on one of them. Not loaded before the fork."""

from collections.abc import Mapping

import torch

from ciuic.doctor.preflight.records import Check, Facts, fail, ok, unknown, warn
from ciuic.doctor.preflight_probe.trials import alone, judge_alone


def try_devices(_: dict[str, object]) -> dict[str, object]:
    """{"devices": number}, and with at least one {"nccl": what a group of one process says}."""
    count = torch.cuda.device_count()
    answer: dict[str, object] = {"devices": count}
    if count:
        torch.cuda.set_device(0)
        try:
            answer["nccl"] = alone("nccl")
        except RuntimeError as error:
            answer["nccl"] = {"problem": (str(error).strip().splitlines() or ["no message"])[0][:300]}
    return answer


def judge_devices(facts: Facts, visible: str | None, answer: Mapping[str, object]) -> list[Check]:
    """`facts.gpus`: the driver's list; `visible`: CUDA_VISIBLE_DEVICES, None when it is not set."""
    driver, setting = len(facts.gpus), "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible!r}"
    if "problem" in answer:
        detail = f"torch cannot look for devices: {answer['problem']}"
        return [fail("gpus", detail, next="run python -c 'import torch; torch.cuda.init()'")]
    count = int(str(answer.get("devices", 0)))
    built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
    nothing = f"the driver lists {driver}, torch finds {count}{setting}"
    if driver and not count:
        why = built or f"torch {torch.__version__} is built without CUDA"
        remedy = (
            "install a torch build that fits the driver (nvidia-smi)" if visible is None else "correct that variable"
        )
        return [fail("gpus", f"{nothing}; {why}", next=remedy, driver=driver, torch=count)]
    if not count:
        return [ok("gpus", "none, and the driver lists none")]
    checks = []
    if count < facts.nproc:
        remedy = f"start {count} processes per node, or correct CUDA_VISIBLE_DEVICES"
        detail = f"{count} for {facts.nproc} processes: two on one GPU make NCCL fail"
        checks.append(fail("gpus", detail, next=remedy, torch=count, nproc=facts.nproc))
    elif count < driver and visible is None:
        checks.append(warn("gpus", nothing, next="look at nvidia-smi for a GPU that has failed", driver=driver))
    else:
        checks.append(ok("gpus", f"{count} x {facts.gpus[0] if facts.gpus else 'device'}{setting}", torch=count))
    nccl = answer.get("nccl")
    checks.append(judge_alone("nccl", nccl) if isinstance(nccl, dict) else unknown("nccl group", "it did not answer"))
    return checks
