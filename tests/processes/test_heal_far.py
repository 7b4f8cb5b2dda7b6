"""A node that comes back over 80 Mbit/s and 150 ms: the others' steps take as long as before. Needs root."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import SCRIPTS

from ciuic.bench.resilience_lines import Window, read_site, usual_step_s
from ciuic.bench.sync_far import FarNetwork
from ciuic.lab.namespaces import why_not_here
from ciuic.lab.profiles import evenly_far, with_sites
from ciuic.lab.switch_sites import HUB, Sites
from ciuic.net.messages import NodeInRun

REASON = why_not_here()
pytestmark = [
    pytest.mark.lab,
    pytest.mark.alone,
    pytest.mark.skipif(bool(REASON), reason=f"the lab needs namespaces: {REASON}"),
]
RATE_BITS_PER_S = 80e6
PACE_S = 0.25
USUAL_S = 4.0
SLOWER = 1.1
"""torchft's survivors take 2.7 times as long in this place."""
STAYS, LEAVES = "us", "eu"


@pytest.fixture
def network(tmp_path: Path) -> Iterator[FarNetwork]:
    with (
        Sites(with_sites(evenly_far(bits_per_s=RATE_BITS_PER_S), 2), hub_bits_per_s=RATE_BITS_PER_S) as sites,
        FarNetwork(sites, tmp_path) as made,
        sites.inside(HUB),
    ):
        yield made


def until(what: Callable[[], object], network: FarNetwork, *, within_s: float = 120.0) -> None:
    end_s = time.monotonic() + within_s
    while not what():
        network.check()
        assert time.monotonic() < end_s
        time.sleep(0.1)


def test_a_joiner_heals_over_80_mbit_s_and_the_others_steps_take_as_long_as_before(
    network: FarNetwork, tmp_path: Path
) -> None:
    program = ["python", str(SCRIPTS / "train_paced.py"), "--records", str(tmp_path), "--pace-s", f"{PACE_S}"]
    sync = {"interval": 4, "compression": {"up": "int8", "down": "int8"}, "deadline": "5 s"}
    job = {"model": {"command": program}, "nodes": {"min": 2}, "sync": sync, "train": {"samples": 1_000_000}}
    run_id = network.submit(job)

    def node(name: str) -> NodeInRun:
        return next(x for x in network.info(run_id).nodes if x.node_id == name)

    def usual_s(since_s: float) -> float:
        return usual_step_s([read_site(tmp_path / f"{STAYS}.jsonl")], Window(start_s=since_s, stop_s=time.monotonic()))

    until(lambda: len(network.info(run_id).nodes) == 2 and node(LEAVES).pushes_merged >= 2, network)
    before_s = time.monotonic()
    time.sleep(USUAL_S)
    usual = usual_s(before_s)

    network.kill(LEAVES)
    earlier, since_s = node(LEAVES), time.monotonic()
    network.start_node(LEAVES)
    until(lambda: node(LEAVES).incarnation > earlier.incarnation, network)
    until(lambda: node(LEAVES).pushes_merged > earlier.pushes_merged, network)
    assert usual_s(since_s) < SLOWER * usual
    assert node(STAYS).pushes_rejected == 0
    assert node(STAYS).incarnation == 1, "nobody else began again"
    network.stop(run_id)
