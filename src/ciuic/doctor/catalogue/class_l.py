"""Class L: stragglers and slow links."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

CODES: tuple[Code, ...] = (
    Code(
        code="CIUIC-L1",
        title="one rank is slower than the others in its own work",
        severity=Severity.WARNING,
        meaning="A step takes as long as the slowest rank. The others wait for it in their collectives, so all "
        "ranks show the same time for a step, and the slow one cannot be seen in it.",
        detection="Each rank measures its own time by phase: forward, backward up to its last gradient (DDP's own "
        "timers tell the wait after it), optimizer, own code. A rank is slow when even the fastest step "
        "since the last record takes 1.5 times what the others usually take, 5 ms and 15 % of a step "
        "more, in two records in a row, and the time shows in the sum of its work. On a machine that is "
        "too busy only some steps take long; the first three steps are not counted.",
        fix="look at this rank's machine (other processes, clock, temperature, threads) or at what it computes "
        "more than the others",
        fixes="Compare `nvidia-smi` or `top` with another node. On processors: `OMP_NUM_THREADS` must not exceed "
        "the cores that a rank has for itself. Balance the work when batches differ in length.",
        example="`rank 1 is slow in its backward pass: 33.1 ms a step, 2.4 ms on the others, which wait 31.0 ms a "
        "step`.",
    ),
    Code(
        code="CIUIC-L2",
        title="training waits for data",
        severity=Severity.WARNING,
        meaning="The loop waits for its next batch: on one rank, and then the others wait for that rank, or on "
        "all of them.",
        detection="The time in the data loader's `next`, as in CIUIC-L1. For all ranks it must be more than 60 % "
        "of a step and 50 ms, in three records in a row.",
        fix="more num_workers, a larger prefetch_factor, or data that lie nearer",
        fixes="`DataLoader(..., num_workers=4, persistent_workers=True, prefetch_factor=4)`; decode and resize "
        "beforehand; copy the data to a local disk.",
        example="`rank 1 is slow in its data loading: 35.0 ms a step, 0.4 ms on the others, which wait 34.1 ms a "
        "step`.",
    ),
    Code(
        code="CIUIC-L3",
        title="communication is slow on all ranks",
        severity=Severity.WARNING,
        meaning="Even the rank that comes last to a collective waits long in it: no rank is late, the exchange "
        "itself is slow.",
        detection="The wait of the rank that waits least, lower quartile over the steps (own collectives, and "
        "DDP's reductions after the last gradient), less the time in which threads of a rank could run "
        "and got no processor: more than a third of a step and 15 ms, in two records in a row. A rank "
        "that is late does not wait itself.",
        fix="check the interface and its speed (`iperf3` between the nodes), reduce less often or compress",
        fixes="Gradient accumulation under `no_sync()`, `bf16` compression hooks, or Ciuic's own modes for slow "
        "links; larger buckets when there are many small reductions.",
        example="`communication takes 61.0 of 64.2 ms a step even on rank 0, which waits least: the link is slow, "
        "no rank is late`.",
        depth=2,
    ),
    Code(
        code="CIUIC-L4",
        title="saves stop the training loop",
        severity=Severity.WARNING,
        meaning="One rank (or all) writes a checkpoint while everybody waits. It is slow, not dead; the run goes on.",
        detection="A rank is seen in torch.save, or in a function that saves, for more than a second and 20 "
        "steps, while the others wait in a call, save as well, or do not exist. Below 5 % of the run's "
        "time it is a note.",
        fix="save less often or asynchronously",
        fixes="Copy the state to the processor's memory and write it in a thread, or use "
        "`torch.distributed.checkpoint.async_save`; do not put a barrier after a save that only one rank "
        "makes.",
        example="`rank 0 saves for 2.0 s, as long as 190 steps, at saving.py:8 in save; the other rank waits`.",
        explains=("CIUIC-J3", "CIUIC-J6"),
    ),
)
