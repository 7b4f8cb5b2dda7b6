"""The training program of `ciuic bench resilience`: the model of `ciuic bench sync`, one step per `--pace-s` seconds.

Each process adds lines to the file of its site: when torch was imported, when training began, every step, and what
Ciuic logs in between (event `log`). Times are of the machine's monotonic clock, so those of all sites compare.
"""

import time

_STARTED_S = time.monotonic()

import argparse  # noqa: E402 - the time before the imports counts
import json  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import ciuic  # noqa: E402
from ciuic.bench import sync_task as task  # noqa: E402
from ciuic.lab.switch_enter import set_nice  # noqa: E402


class Timeline(logging.Handler):
    """What Ciuic logs, debug lines included, goes to `tell`."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__(logging.DEBUG)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(event="log", text=f"{record.threadName}: {record.getMessage()}")


def main() -> int:
    """Train until the run ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pace-s", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nice", type=int, default=0)
    options = parser.parse_args()
    imported_s = time.monotonic()
    torch.set_num_threads(1)
    set_nice(options.nice)
    site = os.environ["CIUIC_BENCH_SITE"]
    with (options.folder / f"{site}.jsonl").open("a", buffering=1) as lines:

        def tell(**fields: object) -> None:
            lines.write(json.dumps({"pid": os.getpid(), "at_s": time.monotonic(), **fields}) + "\n")

        tell(event="imported", at_s=imported_s, import_s=round(imported_s - _STARTED_S, 3))
        log = logging.getLogger("ciuic")
        log.setLevel(logging.DEBUG)
        log.addHandler(Timeline(tell))
        run = ciuic.join()
        data = task.load()
        tell(event="log", text="data loaded")
        model = task.make_model(options.seed)
        optimizer = task.make_optimizer(model)
        tell(event="log", text="model made")
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data.train, batch_size=task.BATCH))
        for step, batch in enumerate(loader):
            if step == 0:
                tell(event="begin")
            began = time.monotonic()
            task.set_rate(optimizer, step)
            task.loss_of(model, batch["input_ids"]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), task.CLIP)
            time.sleep(max(0.0, began + options.pace_s - time.monotonic()))
            optimizer.step()
            optimizer.zero_grad()
            tell(event="step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
