"""What all nodes must have in common, and who differs: pure functions of what the nodes said."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ciuic.doctor.preflight.dialing import Link
from ciuic.doctor.preflight.interfaces import is_loopback
from ciuic.doctor.preflight.records import Check, Facts, fail, ok, unknown, warn
from ciuic.doctor.preflight.variables import EQUAL
from ciuic.units import format_count, format_duration

CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 900.0
"""From a quarter of an hour on signed requests to object stores are refused, and certificates soon after."""
MUST = ("torch", "ciuic", "nccl")
"""Their wire formats change between versions; others only change numbers."""
_MOST_NAMES = 6

Groups = dict[str, list[int]]
"""Value to the ranks that have it, the most common first."""


def compare_facts(nodes: Sequence[Facts], nnodes: int) -> list[Check]:
    """All comparisons that need no network. `nodes`: those that came, in the order of their ranks."""
    return [
        compare_launch(nodes, nnodes),
        *compare_versions(nodes),
        *compare_variables(nodes),
        *compare_gpus(nodes),
        *compare_layouts(nodes),
        *compare_addresses(nodes),
    ]


def grouped(values: Mapping[int, str]) -> Groups:
    """Who has what; of equally common values the one of the lowest rank comes first."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted(values):
        found[values[rank]].append(rank)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[1][0])))


def told(groups: Groups) -> str:
    """`2.13.0 on ranks 0, 1; 2.12.1 on rank 2`."""
    return "; ".join(f"{value or 'nothing'} on {ranks_text(ranks)}" for value, ranks in groups.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1` or `ranks 0, 2`; long lists are cut."""
    shown = ", ".join(map(str, ranks[:_MOST_NAMES])) + (", ..." if len(ranks) > _MOST_NAMES else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def odd_rank(groups: Groups) -> int | None:
    """The one node that differs from all others, when there is exactly one."""
    odd = [rank for ranks in list(groups.values())[1:] for rank in ranks]
    return odd[0] if len(odd) == 1 and len(next(iter(groups.values()))) > 1 else None


def compare_launch(nodes: Sequence[Facts], nnodes: int) -> Check:
    """Whether all were started for the same job: number of nodes, processes on each."""
    of_nodes = grouped({node.rank: str(node.nnodes) for node in nodes})
    if len(of_nodes) > 1:
        return fail("launch", f"--nnodes differs: {told(of_nodes)}", next="start all with the same --nnodes")
    each = grouped({node.rank: str(node.nproc) for node in nodes})
    world = sum(node.nproc for node in nodes)
    if len(each) > 1:
        remedy = "torchrun wants the same --nproc-per-node everywhere"
        return warn("launch", f"processes per node differ: {told(each)}", next=remedy, world_size=world)
    if len(nodes) < nnodes:
        return unknown("launch", f"{len(nodes)} of {nnodes} nodes are there")
    detail = f"{nnodes} nodes x {nodes[0].nproc} processes"
    return ok("launch", detail, nnodes=nnodes, world_size=world)


def compare_versions(nodes: Sequence[Facts]) -> list[Check]:
    """One line per package that differs, or one for all."""
    names = list(dict.fromkeys(name for node in nodes for name in node.versions))
    checks = []
    for name in names:
        groups = grouped({node.rank: node.versions.get(name, "") for node in nodes})
        if len(groups) > 1:
            releases = grouped({node.rank: node.versions.get(name, "").partition("+")[0] for node in nodes})
            judge = fail if name in MUST and len(releases) > 1 else warn
            wanted = next(iter(groups)) or "the same version"
            detail = f"{name}: {told(groups)}"
            remedy = f"install {name} {wanted} everywhere"
            checks.append(judge("versions", detail, next=remedy, rank=odd_rank(groups)))
    same = ", ".join(f"{name} {value}" for name, value in nodes[0].versions.items() if value)
    return checks or [ok("versions", f"equal on all: {same}")]


def compare_variables(nodes: Sequence[Facts]) -> list[Check]:
    """One line per variable of torch, gloo or NCCL whose value differs, or one for all."""
    names = sorted({name for node in nodes for name in node.variables})
    checks = []
    for name in names:
        groups = grouped({node.rank: node.variables.get(name, "") for node in nodes})
        if len(groups) > 1:
            judge = fail if name in EQUAL else warn
            detail = f"{name}: {told(groups)}"
            checks.append(judge("equal variables", detail, next=f"set {name} alike everywhere", rank=odd_rank(groups)))
    return checks or [ok("equal variables", f"{len(names)} compared, all equal")]


def compare_gpus(nodes: Sequence[Facts]) -> list[Check]:
    """Number and names of the GPUs."""
    groups = grouped({node.rank: _gpus(node.gpus) for node in nodes})
    if len(groups) == 1:
        return [ok("equal gpus", f"{next(iter(groups))} on all")]
    without = [node.rank for node in nodes if not node.gpus]
    if without and len(without) < len(nodes):
        remedy = "look at nvidia-smi and CUDA_VISIBLE_DEVICES there"
        return [fail("equal gpus", told(groups), next=remedy, rank=odd_rank(groups))]
    remedy = "expect the slowest to set the pace, and results that differ in the last bits"
    return [warn("equal gpus", told(groups), next=remedy, rank=odd_rank(groups))]


def _gpus(names: Sequence[str]) -> str:
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no gpu"


def compare_layouts(nodes: Sequence[Facts]) -> list[Check]:
    """Parameters of the model as each node built it; nothing when nobody was asked to build it."""
    built = {node.rank: node.layout for node in nodes if node.layout is not None}
    if not built:
        return []
    missing = [node.rank for node in nodes if node.rank not in built]
    if missing:
        return [unknown("model", f"{ranks_text(missing)} did not build the model", next="give --count on all nodes")]
    counts = grouped({rank: f"{layout.parameters} parameters" for rank, layout in built.items()})
    trainable = grouped({rank: f"{layout.trainable} trainable parameters" for rank, layout in built.items()})
    digests = grouped({rank: layout.digest[:12] for rank, layout in built.items()})
    remedy = "build the same model from the same configuration everywhere"
    for groups in (counts, trainable):
        if len(groups) > 1:
            return [fail("model", told(groups), next=remedy, rank=odd_rank(groups))]
    if len(digests) > 1:
        detail = f"{next(iter(counts))} on all, but their names, shapes or order differ: layout {told(digests)}"
        return [fail("model", detail, next=remedy, rank=odd_rank(digests))]
    one = next(iter(built.values()))
    detail = f"{format_count(one.parameters)} parameters in {one.tensors} tensors on all, layout {one.digest[:12]}"
    return [ok("model", detail, parameters=one.parameters, trainable=one.trainable, tensors=one.tensors)]


def with_difference(checks: Sequence[Check], first: str) -> list[Check]:
    """The same, with the first tensor that differs in the line about the model."""
    return [
        msgspec.structs.replace(check, detail=f"{check.detail}; {first}")
        if first and check.name == "model" and check.result == "fail"
        else check
        for check in checks
    ]


def first_difference(layouts: Mapping[int, Sequence[str]]) -> str:
    """The first parameter at which two nodes' lists (one text per tensor) differ; empty when none does."""
    ranks = sorted(layouts)
    for other in ranks[1:]:
        mine, theirs = layouts[ranks[0]], layouts[other]
        for at in range(max(len(mine), len(theirs))):
            here, there = (lines[at] if at < len(lines) else "nothing" for lines in (mine, theirs))
            if here != there:
                return f"tensor {at}: rank {ranks[0]} has {here}, rank {other} has {there}"
    return ""


def compare_addresses(nodes: Sequence[Facts]) -> list[Check]:
    """Nodes on different machines must not announce loopback, nor the same address."""
    machines = {node.machine for node in nodes}
    announced = ", ".join(f"{node.address or '?'} (rank {node.rank})" for node in nodes[:_MOST_NAMES])
    if len(machines) > 1:
        hidden = [node for node in nodes if is_loopback(node.address)]
        if hidden:
            ranks = [node.rank for node in hidden]
            detail = f"{ranks_text(ranks)} on {hidden[0].host} announces {hidden[0].address} to other machines"
            remedy = "set GLOO_SOCKET_IFNAME there to the interface between the nodes"
            return [fail("addresses", detail, next=remedy, rank=ranks[0] if len(ranks) == 1 else None)]
        owners = {(node.address, node.machine) for node in nodes}
        if len({address for address, _ in owners}) < len(owners):
            remedy = "set GLOO_SOCKET_IFNAME to the interface between the nodes"
            return [fail("addresses", f"two machines announce the same address: {announced}", next=remedy)]
    where = "all on one machine" if len(machines) == 1 else f"{len(machines)} machines"
    return [ok("addresses", f"{announced}; {where}", machines=len(machines))]


def compare_links(nodes: Sequence[Facts], links: Mapping[int, Sequence[Link]]) -> list[Check]:
    """Who reaches whom, and the clocks. `links`: what each rank found when it dialled the others."""
    return [*_reach(nodes, links), *_clocks(links)]


def _reach(nodes: Sequence[Facts], links: Mapping[int, Sequence[Link]]) -> list[Check]:
    silent = [node.rank for node in nodes if node.rank not in links]
    checks = [unknown("every pair", f"{ranks_text(silent)} did not say whom it reaches")] if silent else []
    broken = [(rank, link) for rank in sorted(links) for link in links[rank] if link.problem]
    checks += [
        fail(
            "every pair",
            f"rank {rank} does not reach rank {link.to} at {link.address}: {link.problem}",
            next="open all ports between the nodes, or set GLOO_SOCKET_IFNAME to an interface that they share",
            rank=rank,
        )
        for rank, link in broken[:_MOST_NAMES]
    ]
    times = [link.rtt_s for found in links.values() for link in found if not link.problem]
    if not checks and times:
        detail = f"{len(times)} ways, round trips {_ms(min(times))} to {_ms(max(times))}"
        checks.append(ok("every pair", detail, ways=len(times), longest_rtt_s=max(times)))
    return checks


def _clocks(links: Mapping[int, Sequence[Link]]) -> list[Check]:
    """Offsets from rank 0's clock."""
    found = {
        rank: link for rank, dialled in links.items() for link in dialled if link.to == 0 and rank and not link.problem
    }
    if not found:
        return [unknown("clocks", "no node reached rank 0 directly")]
    rank, worst = max(found.items(), key=lambda item: abs(item[1].offset_s))
    side = "behind" if worst.offset_s > 0 else "ahead of"
    offset = format_duration(abs(worst.offset_s)) if abs(worst.offset_s) >= 1 else _ms(abs(worst.offset_s))
    detail = f"rank {rank} is {offset} {side} rank 0 (known to {_ms(worst.rtt_s / 2)})"
    judge: Callable[..., Check] = ok
    if abs(worst.offset_s) >= CLOCK_WARN_S:
        judge = fail if abs(worst.offset_s) >= CLOCK_FAIL_S else warn
    remedy = "" if judge is ok else "run an NTP client there; logs and checkpoints carry this clock"
    return [judge("clocks", detail, next=remedy, rank=None if judge is ok else rank, offset_s=worst.offset_s)]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
