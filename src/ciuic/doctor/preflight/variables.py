"""Environment variables that torch, gloo and NCCL read once, at import or at the first use."""

import difflib
from collections.abc import Mapping

from ciuic.doctor.preflight.records import Check, fail, ok, warn

RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
}
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "TORCH_SHOW_CPP_STACKTRACES": "every error collects a native stack",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for every collective",
}
KNOWN = (
    "GLOO_SOCKET_IFNAME",
    "GLOO_DEVICE_TRANSPORT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCH_DISTRIBUTED_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)
EQUAL = ("TORCH_DISTRIBUTED_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_BUFFSIZE", "GLOO_DEVICE_TRANSPORT")
"""Collectives hang or fail when nodes differ in these."""
OWN_EACH = ("IFNAME", "_HCA", "_RANK", "HOSTNAME", "_ADDR", "_DEBUG_FILE", "_TOPO_FILE", "_DUMP_FILE")
"""Parts of names that may well differ between nodes."""
DEBUG = "TORCH_DISTRIBUTED_DEBUG"
LEVELS = ("OFF", "INFO", "DETAIL")


def compared_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those whose difference between nodes means something; values are cut at 200 characters."""
    prefixes = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "CUBLAS_", "PYTORCH_")
    return {
        name: value[:200]
        for name, value in sorted(environment.items())
        if name.startswith(prefixes) and not any(part in name for part in OWN_EACH)
    }


def is_level(environment: Mapping[str, str]) -> bool:
    """Whether torch takes the debug level that is set; an empty text is none that it takes."""
    return DEBUG not in environment or environment[DEBUG].upper() in LEVELS


def check_variables(environment: Mapping[str, str]) -> list[Check]:
    """One line per variable that is wrong, old, slow or misspelt; one that says that none is."""
    checks = []
    if not is_level(environment):
        detail = f"{DEBUG}={environment[DEBUG]!r}: torch.distributed cannot be imported with it"
        checks.append(fail("variables", detail, next=f"unset it, or one of: {', '.join(LEVELS)}"))
    for name, new in RENAMED.items():
        if name in environment:
            checks.append(warn("variables", f"{name} is an old name", next=f"set {new} instead"))
    for name, effect in SLOW.items():
        if environment.get(name, "0") not in ("", "0"):
            detail = f"{name}={environment[name]}: {effect}, which is for finding faults"
            checks.append(warn("variables", detail, next=f"unset {name}"))
    checks += [
        warn("variables", f"nothing reads {name}", next=f"did you mean {meant}?")
        for name in sorted(environment)
        if (meant := _misspelt(name))
    ]
    if "WORLD_SIZE" in environment and "TORCHELASTIC_RUN_ID" not in environment:
        detail = f"WORLD_SIZE={environment['WORLD_SIZE']} is left in this environment, and torchrun did not set it"
        checks.append(warn("variables", detail, next="unset RANK WORLD_SIZE LOCAL_RANK"))
    looked = len(compared_variables(environment))
    return checks or [ok("variables", f"{looked} set for torch, gloo and NCCL, none is old, slow or misspelt")]


def _misspelt(name: str) -> str:
    """The variable that a name seems to mean; empty when it is nobody's mistake."""
    if name in KNOWN or not name.startswith(("GLOO", "NCCL_SOCKET", "MASTER", "TORCH_DIST", "OMP_NUM", "CUDA_VIS")):
        return ""
    close = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.8)
    return close[0] if close else ""
