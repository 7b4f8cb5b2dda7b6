"""The training program of `ciuic bench sync`, the same loop for every mode; runs until it is ended.

A step computes forward and backward, waits until `pace_s` have passed since the step began, and updates. So the cores
are no bottleneck, DDP's all-reduce overlaps with the whole wait, and whatever ciuic does at the step boundary (packing,
merging, waiting) comes on top of the pace.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, Dataset

import ciuic
from ciuic.bench import sync_task as task
from ciuic.errors import TrainingLoopError
from ciuic.lab.switch_enter import set_nice

MODES = ("none", "ours", "ddp-fp32", "ddp-fp16", "ddp-bf16")
WATCHED = "us"
"""The site whose parameters are kept from time to time, to be judged on held-out data after the run."""
_TIMEOUT = timedelta(minutes=10)


def mean_in_bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean gradient, rounded to bf16 on its way: as torch's own hook does, which refuses anything but NCCL."""
    rounded = bucket.buffer().div(dist.get_world_size(group)).to(torch.bfloat16)
    work = dist.all_reduce(rounded, group=group, async_op=True)
    if work is None:
        raise TrainingLoopError("this process is not in the group of the all-reduce")

    def back(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return bucket.buffer().copy_(done.value()[0])

    return work.get_future().then(back)


_HOOKS = {"ddp-fp16": default_hooks.fp16_compress_hook, "ddp-bf16": mean_in_bf16}


class Recorder:
    """What a site did, line by line, and its parameters from time to time. Times: the machine's monotonic clock."""

    def __init__(self, folder: Path, site: str, *, snapshot_s: float) -> None:
        self._lines = (folder / f"{site}.jsonl").open("w", buffering=1)
        self._folder, self._site, self._snapshot_s = folder, site, snapshot_s
        self._next_s = 0.0
        self._tokens = 0
        self._writer: threading.Thread | None = None

    def begin(self) -> None:
        """The first step begins now."""
        now = time.monotonic()
        self._line(event="begin", at_s=now)
        self._next_s = now + self._snapshot_s

    def stepped(self, model: nn.Module, exposed_s: float) -> None:
        """A step is done; `exposed_s` of it came on top of the pace."""
        now = time.monotonic()
        self._tokens += task.TOKENS_PER_STEP
        cpu = {"cpu_s": time.process_time(), "main_cpu_s": time.thread_time()}
        self._line(event="step", at_s=now, tokens=self._tokens, exposed_s=exposed_s, **cpu)
        if self._snapshot_s and now >= self._next_s:
            self._next_s = now + self._snapshot_s
            self._snapshot(now, task.flat_parameters(model))

    def _snapshot(self, now: float, parameters: np.ndarray) -> None:
        """Written on a thread of its own: the copy above is all that training waits for."""

        def write() -> None:
            path = self._folder / f"{self._site}-{now:.3f}.npy"
            np.save(path.with_suffix(".part.npy"), parameters)
            path.with_suffix(".part.npy").rename(path)

        if self._writer is not None:
            self._writer.join()
        self._writer = threading.Thread(target=write, name="snapshot")
        self._writer.start()

    def _line(self, **fields: object) -> None:
        self._lines.write(json.dumps(fields) + "\n")


def arguments() -> argparse.Namespace:
    """What the bench says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--site", default=os.environ.get("CIUIC_BENCH_SITE", ""))
    parser.add_argument("--number", type=int, default=0, help="of this site")
    parser.add_argument("--sites", type=int, default=1)
    parser.add_argument("--address", default="", help="of the first site, for DDP")
    parser.add_argument("--pace-s", type=float, default=0.6)
    parser.add_argument("--slow", default="", help="SITE=FACTOR")
    parser.add_argument("--snapshot-s", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nice", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    """Train until killed (or, in a run of the ledger, until it ends)."""
    options = arguments()
    torch.set_num_threads(1)
    set_nice(options.nice)
    site, _, factor = options.slow.partition("=")
    pace_s = options.pace_s * (float(factor) if site == options.site else 1.0)
    data = task.load()
    model = plain = task.make_model(options.seed)
    optimizer = task.make_optimizer(model)
    if options.mode == "ours":
        run = ciuic.join()
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data.train, batch_size=task.BATCH))
        batches = (batch["input_ids"] for batch in loader)
    else:
        batches = _own_batches(data.train, options.number, options.seed)
    if options.mode.startswith("ddp"):
        model = _join_ddp(model, options)
    snapshot_s = options.snapshot_s if options.site == WATCHED else 0.0
    recorder = Recorder(options.folder, options.site, snapshot_s=snapshot_s)
    for step, batch in enumerate(batches):
        if step == 0:
            recorder.begin()
        began = time.monotonic()
        task.set_rate(optimizer, step)
        task.loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), task.CLIP)
        time.sleep(max(0.0, began + pace_s - time.monotonic()))
        optimizer.step()
        optimizer.zero_grad()
        recorder.stepped(plain, time.monotonic() - began - pace_s)
    return 0


def _own_batches(data: Dataset[dict[str, Tensor]], number: int, seed: int) -> Iterator[Tensor]:
    """Random windows, different ones at each site, for ever."""
    draw = np.random.default_rng([seed, number])
    count = len(data)  # ty: ignore[invalid-argument-type] - TokenSamples has a length
    while True:
        chosen = draw.integers(0, count, task.BATCH)
        yield torch.stack([data[int(index)]["input_ids"] for index in chosen])


def _join_ddp(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{options.address}:29500",
        rank=options.number,
        world_size=options.sites,
        timeout=_TIMEOUT,
    )
    wrapped = nn.parallel.DistributedDataParallel(model)
    if hook := _HOOKS.get(options.mode):
        wrapped.register_comm_hook(None, hook)
    return wrapped


if __name__ == "__main__":
    sys.exit(main())
