"""A training program with the schedule's two lines; writes which rate each optimizer step had at which progress."""

import argparse
import os
import time
from pathlib import Path

import tiny_task
import torch
from torch.utils.data import DataLoader

import ciuic
from ciuic.torch import DistributedCosineLR, muon_adamw


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.0, help="least time of a step until RECORDS/hurry exists")
    parser.add_argument("--wrong", action="store_true", help="give the schedule a value that cannot work")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = ciuic.join()
    training, _ = tiny_task.make_data()
    model = tiny_task.TinyModel(run.job.train.seed)
    optimizer = muon_adamw(model, lr=4e-3)
    scheduler = DistributedCosineLR(optimizer, warmup_epochs=5, total_epochs=100, **{"x": 1} if options.wrong else {})
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(training, batch_size=8))
    options.records.mkdir(parents=True, exist_ok=True)
    with (options.records / f"{run.node_id}.{os.getpid()}.rates").open("w", buffering=1) as file:

        def tell(used: torch.optim.Optimizer, *_: object) -> None:
            file.write(f"{run.progress!r} {used.param_groups[-1]['lr']!r}\n")

        optimizer.register_step_pre_hook(tell)
        for batch in loader:
            loss = tiny_task.loss_of(model, batch["context"], batch["target"])
            loss.backward()
            run.record(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if options.step_s and not (options.records / "hurry").exists():
                time.sleep(options.step_s)


if __name__ == "__main__":
    main()
