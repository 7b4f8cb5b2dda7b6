"""Three nodes learn what one process learns from the same tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from scripts import tiny_task
from training_jobs import each_once, ends, script_job, trained

NODES = 3
BATCH = 16
INTERVAL = 5
LR = 0.048
"""For both sides. Tried on both, three seeds each: 0.016 to 0.096. The reference is best at 0.048 to 0.064, and the
nodes are close to their best there."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def one_process(seed: int, total: int) -> float:
    """Held-out loss of the textbook loop: the same model, optimizer and samples, batches as large as all nodes'."""
    training, held_out = tiny_task.make_data()
    model = tiny_task.TinyModel(seed)
    optimizer = tiny_task.make_optimizer(model, LR)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))[:total]
    for start in range(0, total, NODES * BATCH):
        chosen = order[start : start + NODES * BATCH]
        tiny_task.set_rate(optimizer, LR, start / total)
        tiny_task.loss_of(model, training.contexts[chosen], training.targets[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return tiny_task.held_out_loss(model, held_out)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [1])
def test_three_nodes_learn_as_much_as_one_process_from_the_same_tokens(tmp_path: Path, seed: int) -> None:
    total, records = tiny_task.TRAIN_SAMPLES, tmp_path / "records"
    alone = one_process(seed, total)
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("us-west", "eu-central", "ap-southeast")
        job = script_job(
            records,
            *("--batch", BATCH, "--lr", LR),
            nodes=NODES,
            samples=total,
            sync={"interval": INTERVAL, "compression": "1-bit", "overlap": False},
            train={"seed": seed},
        )
        info = cluster.finished(cluster.submit(job))
        together = next(point.loss for point in info.evaluations if point.final)
        first = next(point.loss for point in info.evaluations if point.version == 0)
        print(
            f"held-out loss after {total:,} samples (seed {seed}, from {first:.3f}): one process {alone:.3f}, "
            f"{NODES} nodes with 1-bit updates every {INTERVAL} steps {together:.3f} ({together - alone:+.3f}); "
            f"{info.push_bytes + info.entry_bytes:,} bytes of updates in {info.versions[0]} versions"
        )
        assert alone < 0.3 * first
        assert together <= alone + 0.1
        assert info.loss_consistent is True
        assert each_once(records, total)
        assert len({end["digest"] for end in ends(records)}) == 1
        assert all(sum(trained(records, node.node_id).values()) == node.samples for node in info.nodes)
        assert min(node.samples for node in info.nodes) > total / NODES / 3
