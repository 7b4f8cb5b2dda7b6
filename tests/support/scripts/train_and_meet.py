"""Trains a little through the ledger; then the programs of all nodes meet directly: gloo through ciuic://."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import tiny_task
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import ciuic


def main(records: Path, nodes: int) -> None:
    torch.set_num_threads(1)
    run = ciuic.join()
    training, _ = tiny_task.make_data()
    model = tiny_task.TinyModel(run.job.train.seed)
    optimizer = tiny_task.make_optimizer(model, 4e-3)
    dist.init_process_group("gloo", init_method=f"ciuic://met?nodes={nodes}", timeout=timedelta(seconds=120))
    met = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(met)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(training, batch_size=16))
    for batch in loader:
        tiny_task.loss_of(model, batch["context"], batch["target"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    records.mkdir(exist_ok=True)
    file = records / f"{run.node_id}.new"
    file.write_text(json.dumps({"sum": met.item(), "size": dist.get_world_size()}))
    file.rename(file.with_suffix(".met"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
