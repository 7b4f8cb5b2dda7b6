"""A training program as a user would write it, with switches for what tests want to go wrong."""

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path

import tiny_task
import torch
from torch.utils.data import DataLoader

import ciuic


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=Path, required=True, help="where each process writes what it has trained")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--step-s", type=float, default=0.0, help="least time of a step until RECORDS/hurry exists")
    parser.add_argument("--hold", action="store_true", help="steps of a second from half of the run on, until then")
    parser.add_argument("--slow", default="", help="NODE:FACTOR, a node whose steps last longer")
    parser.add_argument("--workers", type=int, default=0, help="of the DataLoader")
    parser.add_argument("--width", type=int, default=96, help="of the model: 3300 make it a snapshot of 4 MiB")
    parser.add_argument("--batch-norm", action="store_true")
    parser.add_argument("--nan", default="", help="NODE:STEP at which the loss is not a number, once")
    parser.add_argument("--noise", default="", help="NODE whose targets are drawn by lot")
    parser.add_argument("--bit", default="", help="NODE:STEP at which a number of the base changes in memory, once")
    parser.add_argument("--crash-at", type=int, default=0, help="step at which every process raises")
    return parser.parse_args()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.set_num_threads(1)
    options = arguments()
    run = ciuic.join()
    training, held_out = tiny_task.make_data()
    model = plain = tiny_task.TinyModel(run.job.train.seed, batch_norm=options.batch_norm, width=options.width)
    optimizer = tiny_task.make_optimizer(model, options.lr)
    loader = DataLoader(training, batch_size=options.batch, num_workers=options.workers)
    run.on_evaluate(lambda: (tiny_task.held_out_loss(plain, held_out), len(held_out)))
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    name = f"{run.node_id}.{run.rank}.{os.getpid()}"
    record = tiny_task.Record(options.records, name)
    bit_node, _, bit_step = options.bit.partition(":")
    nan_node, _, nan_step = options.nan.partition(":")
    slow_node, _, factor = options.slow.partition(":")
    step_s = options.step_s * (float(factor) if run.node_id == slow_node else 1.0)
    step = 0
    for step, batch in enumerate(loader, start=1):
        began = time.monotonic()
        tiny_task.set_rate(optimizer, options.lr, run.progress)
        if run.node_id == options.noise:
            batch["target"] = torch.randint(0, tiny_task.VOCABULARY, batch["target"].shape)
        loss = tiny_task.loss_of(model, batch["context"], batch["target"])
        if run.node_id == bit_node and step == int(bit_step) and not (options.records / "bit").exists():
            (options.records / "bit").touch()
            run._engine.machine.replicas[0].base[0] += 0.5
        if run.node_id == nan_node and step == int(nan_step):
            loss = loss * float("nan")
        if step == options.crash_at:
            raise ValueError(f"no such luck at step {step}")
        loss.backward()
        run.record(loss)
        record.trained(batch["number"])
        if step_s and not (options.records / "hurry").exists():
            least_s = max(step_s, 1.0) if options.hold and run.progress > 0.5 else step_s
            time.sleep(max(0.0, least_s - (time.monotonic() - began)))
        optimizer.step()
        optimizer.zero_grad()
    end = {"node": run.node_id, "rank": run.rank, "steps": step, "digest": tiny_task.digest(plain)}
    end["end"] = "complete" if run.progress == 1.0 else "drained"
    (options.records / f"{name}.end").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
