"""What went wrong in a run, first things first: one cause, what fell with it, what the others did. Pure.

The first worker that failed for good is the cause, unless its words are those of somebody who lost a peer and another
node's are not. Failures with the same words on several nodes are one failure.
"""

import re
from collections.abc import Iterable, Mapping

from ciuic.net.messages import NodeInRun, Verdict, WorkerFault

_LOST_PEER = re.compile(r"Connection (closed|reset)|Connection refused|Broken pipe|CIUIC-300")
_ERROR_CODE = re.compile(r"error\[(CIUIC-\d{3})\]")
_VARYING = re.compile(r"0x[0-9a-f]+|\d+")
"""What differs between two nodes with the same trouble: addresses, ports, counts."""
_HINTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"killed by SIGKILL|out of memory|OutOfMemory|Cannot allocate memory", re.IGNORECASE),
        "give the node more memory or lower optim.batch_size; `dmesg` on the node names what the system killed",
    ),
    (
        re.compile(r"ModuleNotFoundError|ImportError"),
        "install what is missing into the environment that runs ciuic on that node",
    ),
    (re.compile(r"FileNotFoundError|CIUIC-103"), "make the data readable at that path on every node"),
    (re.compile(r"No space left|CIUIC-500"), "make room on that node's disk"),
    (re.compile(r"CIUIC-204"), "join that node with --allow-code if you trust whoever submits jobs"),
)


def judge(
    run_id: str,
    failed: Mapping[str, str],
    faults: Mapping[str, WorkerFault],
    nodes: Iterable[NodeInRun],
    *,
    goes_on: bool = False,
) -> Verdict | None:
    """The verdict on a run some of whose workers failed; None when none did.

    `failed`: exception line by node, in the order in which they failed for good. `nodes`: what the ledger knows.
    `goes_on`: other nodes train on.
    """
    if not failed:
        return None
    in_run = {node.node_id: node for node in nodes}
    culprit = next((node for node, line in failed.items() if not _LOST_PEER.search(line)), next(iter(failed)))
    line, fault = failed[culprit], faults.get(culprit, WorkerFault())
    same = [node for node, other in failed.items() if node != culprit and _likeness(other) == _likeness(line)]
    step = in_run[culprit].step if culprit in in_run else 0
    return Verdict(
        node_id=culprit,
        rank=fault.rank,
        step=step,
        line=line,
        where=fault.where,
        log=fault.log,
        collateral=_collateral(culprit, fault, failed, same),
        others=[_doing(node) for name, node in in_run.items() if name not in failed],
        next=_next(run_id, culprit, fault, line, goes_on=goes_on),
    )


def _likeness(line: str) -> str:
    return _VARYING.sub("", line)


def _collateral(culprit: str, fault: WorkerFault, failed: Mapping[str, str], same: list[str]) -> list[str]:
    found = []
    if same:
        found.append(f"the same on {', '.join(same)}")
    if fault.collateral:
        ranks = ", ".join(str(rank) for rank in fault.collateral)
        found.append(f"rank{'s' if len(fault.collateral) > 1 else ''} {ranks} of {culprit} fell with it")
    return found + [f"{node}: {line}" for node, line in failed.items() if node != culprit and node not in same]


def _doing(node: NodeInRun) -> str:
    words = {
        "training": f"trains at step {node.step}",
        "idle": f"waits for samples at step {node.step}",
        "warming": "was catching up",
        "starting": "was starting",
        "done": f"had finished at step {node.step}",
        "gone": f"had gone at step {node.step}",
    }
    return f"{node.node_id} {words[node.state]}"


def _next(run_id: str, node: str, fault: WorkerFault, line: str, *, goes_on: bool) -> str:
    logs = f"`ciuic logs {run_id} --node {node}" + (f" --rank {fault.rank}`" if fault.rank >= 0 else "`")
    for pattern, hint in _HINTS:
        if pattern.search(line):
            return f"{hint}; {logs} shows its output"
    code = _ERROR_CODE.search(line)
    known = f"read docs/codes/{code.group(1)}.md; " if code else ""
    if goes_on:
        back = f"`ciuic stop {run_id}`, then `ciuic resume {run_id}` take it back"
        return f"{known}{logs} shows its output; the others go on; {back}"
    return f"{known}{logs} shows its output; then `ciuic resume {run_id}`"
