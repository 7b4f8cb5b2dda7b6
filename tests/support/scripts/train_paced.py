"""One step per --pace-s seconds on a model of a few MiB; the times of all steps go to a file of the site."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ciuic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--pace-s", type=float, required=True)
    parser.add_argument("--width", type=int, default=1024, help="of the model: 4 width^2 bytes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = ciuic.join()
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(options.width, options.width, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(512, options.width)), batch_size=4)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    place = options.records / f"{os.environ['CIUIC_BENCH_SITE']}.jsonl"
    with place.open("a", buffering=1) as lines:
        for step, (batch,) in enumerate(loader):
            began_s = time.monotonic()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, options.pace_s - (time.monotonic() - began_s)))
            event = "step" if step else "begin"
            lines.write(json.dumps({"event": event, "pid": os.getpid(), "at_s": time.monotonic()}) + "\n")


if __name__ == "__main__":
    main()
