"""Jobs for whole runs in a Cluster, and what their programs have written down about themselves."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster import SCRIPTS, Cluster

from ciuic.ledger.entry import Entry, entry_from_frame
from ciuic.ledger.frame import split_frames
from ciuic.ledger.layout import Layout, layout_from_dict


def script_job(
    records: Path,
    *options: object,
    nodes: int,
    samples: int,
    ranks: int = 1,
    program: str = "train_tiny.py",
    **sections: dict[str, Any],
) -> dict[str, Any]:
    """A job that runs one of our programs; sections are added to the defaults of this function."""
    command = ["python", str(SCRIPTS / program), "--records", str(records), *map(str, options)]
    defaults: dict[str, dict[str, Any]] = {
        "model": {"command": command},
        "nodes": {"min": nodes, "ranks": ranks},
        "sync": {"interval": 5},
        "train": {"samples": samples, "evaluate_every": 10},
        "fault": {"grace": "3 s"},
    }
    for name, section in sections.items():
        defaults[name] = {**defaults.get(name, {}), **section}
    return {"name": "tiny", **defaults}


def hurry(records: Path) -> None:
    """What the test wanted to see has happened: programs that took their time (--step-s) stop doing so."""
    (records / "hurry").touch()


def trained(records: Path, node: str = "*") -> Counter[int]:
    """How often each sample was trained, by all processes of a node (or of all nodes) together."""
    found: Counter[int] = Counter()
    for file in records.glob(f"{node}.*.trained"):
        found.update(int(number) for number in file.read_text().split())
    return found


def each_once(records: Path, total: int) -> bool:
    """Whether exactly `total` different samples were trained, each one once."""
    found = trained(records)
    return len(found) == total and set(found.values()) == {1}


def ends(records: Path) -> list[dict[str, Any]]:
    """The last words of every program that has ended by itself: node, rank, steps, digest of its model."""
    return [json.loads(file.read_text()) for file in sorted(records.glob("*.end"))]


def entries(cluster: Cluster, run_id: str) -> list[Entry]:
    """Every entry of the run, from the hub's own log."""
    log = cluster.home / "hub" / "runs" / run_id / "fragment-0" / "log.bin"
    return [entry_from_frame(bytes(frame)) for frame in split_frames(log.read_bytes(), "entry")]


def layout(cluster: Cluster, run_id: str) -> Layout:
    """The parameters of the run's model, as the hub knows them."""
    return layout_from_dict(json.loads((cluster.home / "hub" / "runs" / run_id / "layout.json").read_bytes()))


def sequences(found: Iterable[Entry]) -> dict[tuple[str, int], list[int]]:
    """Numbers of the merged pushes by (node, incarnation), in the order in which they were merged."""
    numbers: dict[tuple[str, int], list[int]] = {}
    for entry in found:
        for contributor in entry.header.contributors:
            numbers.setdefault((contributor.node, contributor.incarnation), []).append(contributor.sequence)
    return numbers


def without_gaps(found: Iterable[Entry]) -> bool:
    """Whether every push that was made is merged, once and in its order."""
    return all(numbers == list(range(1, len(numbers) + 1)) for numbers in sequences(found).values())
