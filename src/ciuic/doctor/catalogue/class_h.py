"""Class H: data order, shards, seeds."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

CODES: tuple[Code, ...] = (
    Code(
        code="CIUIC-H1",
        title="every epoch has the same order",
        severity=Severity.WARNING,
        meaning=(
            "The sampler is meant to shuffle, and each epoch it draws the same permutation. Batches always hold the "
            "same samples together; training converges worse, and nothing tells."
        ),
        detection=(
            "A pass over a data set that training uses begins while the epoch number of its DistributedSampler is "
            "what it was in the pass before. For other samplers that shuffle, the digests of the first three batches "
            "are compared. Loaders that do not shuffle, streams, and epochs of a single batch are not meant."
        ),
        fix="call sampler.set_epoch(epoch) before each epoch",
        fixes=(
            "```python\nfor epoch in range(epochs):\n    sampler.set_epoch(epoch)\n    for batch in loader: ...\n"
            "```\n\nTrainer, Lightning and Accelerate do it by themselves for loaders that they have prepared. A "
            "generator that is made or seeded anew for each epoch has the same effect: make it once."
        ),
        example=(
            "```python\nsampler = DistributedSampler(data, shuffle=True)\nfor epoch in range(3):\n    for batch in "
            "loader: ...\n```\n\ntorch says nothing. The doctor, at the first batch of the second epoch: `an epoch "
            "began in the order of the one before: the epoch of DistributedSampler is still 0`."
        ),
        depth=0,
    ),
    Code(
        code="CIUIC-H2",
        title="ranks read the same data",
        severity=Severity.WARNING,
        meaning=(
            "Gradients of equal batches are equal: their mean is what one rank alone would have. The run costs as "
            "many machines as it has and learns as fast as one."
        ),
        detection=(
            "Each rank keeps short digests of its batches and of what its model was given in training. Three equal "
            "ones in a row, and nine of ten in all, are the same data. A program that reads the same batch "
            "everywhere and takes each rank's rows itself gives its models different inputs: not meant. Neither are "
            "ranks that share one copy of the model (tensor, pipeline parallel), independent runs, and validation. "
            "One and the same batch all the time, as in a benchmark, is a note."
        ),
        fix="DataLoader(data, sampler=DistributedSampler(data), ...)",
        fixes=(
            "For streams: `split_dataset_by_node(data, rank, world_size)`, or Accelerate's `prepare(loader)`. A "
            "sampler that is given `rank=0` on all ranks has the same effect: leave `rank` and `num_replicas` away."
        ),
        example=(
            "```python\nloader = DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(0))\n```\n\n"
            "torch says nothing. The doctor, at step 3: `all ranks read the same data: 3 batches in a row were equal "
            "up to step 3`."
        ),
        explains=("CIUIC-H3",),
        depth=0,
    ),
    Code(
        code="CIUIC-H3",
        title="samples are never read: the data are shared out twice",
        severity=Severity.WARNING,
        meaning=(
            "A data set that is one rank's share already is shared out once more. Of n ranks each reads 1/n of its "
            "1/n; the rest is never seen."
        ),
        detection=(
            "The samplers of all ranks say into how many shares they cut and which one they take; the data sets say "
            "what they hold for each sample (indices, file names, tensors of the data set's length), without reading "
            "a sample. If the sets differ between ranks and a sampler cuts them, or if some shares have no reader, "
            "samples are lost. When only floating-point contents differ the data may have been drawn on each rank: a "
            "note."
        ),
        fix=(
            "share the data out once: a plain loader over a rank's own shard, or a DistributedSampler over the whole "
            "data set"
        ),
        fixes=(
            "With Accelerate: give `prepare` the whole data set. With Hugging Face streams: either "
            "`split_dataset_by_node` or Accelerate's shards."
        ),
        example=(
            "```python\nshard = Subset(data, range(rank, len(data), world))\nloader = DataLoader(shard, "
            "sampler=DistributedSampler(shard))\n```\n\ntorch says nothing. The doctor: `the data set is another one "
            "on each rank (indices differ), and the sampler reads 1 sample of 2 of it: the others are never read`."
        ),
        depth=0,
    ),
    Code(
        code="CIUIC-H4",
        title="after a checkpoint, data are read again or left out",
        severity=Severity.WARNING,
        meaning=(
            "The run was saved in the middle of an epoch, and goes on elsewhere in the data: samples are seen twice, "
            "or never in this epoch."
        ),
        detection=(
            "The checkpoint says how many steps were made (the optimizer's own count, or a counter in the file). "
            "With the length of an epoch and the batches of a step this gives the epoch and the batch that come "
            "next; the sampler's epoch and the position of the first batch of training say where the run went on. "
            "Two batches or a tenth of an epoch are allowed: a loss scaler may have skipped steps. A file that "
            "counts epochs and agrees with the sampler is believed: the number of ranks may have changed. For the "
            "same reason a run that goes on in another epoch than expected, and not in the first, is a note. It "
            "needs a sampler with an epoch number; a shuffle without one has no place to come back to."
        ),
        fix="set the sampler's epoch from the checkpoint and skip the batches that were read",
        fixes=(
            "```python\nepoch, skip = divmod(steps, len(loader))\nsampler.set_epoch(epoch)\nfor number, batch in "
            "enumerate(loader):\n    if number < skip: continue\n```\n\nOr torchdata's StatefulDataLoader, or "
            "Accelerate's `skip_first_batches`."
        ),
        example=(
            "A checkpoint of step 14, epochs of 10 batches. The doctor: `the resumed run reads 14 batches again: the "
            "checkpoint has 14 steps of 1 batches, epochs have 10, so the next is batch 5 of epoch 1; it began with "
            "epoch 0, batch 1`."
        ),
        depth=0,
    ),
    Code(
        code="CIUIC-H5",
        title="a data worker died, or shared memory is too small",
        severity=Severity.CRITICAL,
        meaning=(
            "Workers hand batches over in /dev/shm. When it is full they are ended by a bus error; when memory is "
            "short, by the system. The rank fails or stands still, and the others wait for it."
        ),
        detection=(
            "The rank's last words name the worker and the signal. Before that: the size of a batch, times workers, "
            "times prefetch, against what is free in /dev/shm, when training begins: a warning."
        ),
        fix="give /dev/shm more room (docker run --shm-size=8g), or fewer workers",
        fixes=(
            "`torch.multiprocessing.set_sharing_strategy('file_system')` needs fewer open files, not less room. "
            "`num_workers=0` shows an error of the data set itself."
        ),
        example=(
            "torch, on one rank: `DataLoader worker (pid 71) is killed by signal: Bus error`; on the others a "
            "time-out. The doctor: `a data worker of rank 1 died by Bus error`."
        ),
        explains=(
            "CIUIC-J1",
            "CIUIC-J3",
            "CIUIC-J5",
            "CIUIC-J6",
            "CIUIC-J7",
        ),
        depth=0,
    ),
    Code(
        code="CIUIC-H6",
        title="ranks have another number of batches",
        severity=Severity.CRITICAL,
        meaning=(
            "The rank with fewer batches comes to the end of its epoch while the others wait for it in a reduction."
        ),
        detection=(
            "Lengths of the loaders that training uses, and the batches of passes that have ended, differ between "
            "ranks. A note at first: under torch's Join, or in a loop over steps that begins a new pass, it does no "
            "harm. It becomes critical when a rank leaves, or calls differ, at the end of the short pass."
        ),
        fix="drop_last=True in the sampler and in the loader, a sampler that pads, or `with Join([ddp]):`",
        fixes=(
            "For streams count the batches first, or stop all ranks together: reduce a flag with `ReduceOp.MIN` in "
            "each step."
        ),
        example=(
            "torch, after 30 minutes: a time-out without a name. The doctor: `the ranks have another number of "
            "batches in an epoch: 12 on rank 0, 9 on rank 1; rank 1 came to the end while the others went on`."
        ),
        explains=(
            "CIUIC-J1",
            "CIUIC-J2",
            "CIUIC-J3",
            "CIUIC-J5",
            "CIUIC-J6",
            "CIUIC-J7",
        ),
        depth=0,
    ),
    Code(
        code="CIUIC-H8",
        title="the samplers of the ranks are set up differently",
        severity=Severity.WARNING,
        meaning=(
            "Shares fit together only when all ranks cut the same order. With another shuffle, seed, epoch or length "
            "they overlap: some samples are read twice, some never."
        ),
        detection=(
            "What each rank's sampler says of itself, once for each loader that training uses, and its epoch in "
            "sampled steps. Other batch sizes are not meant: ranks may be of different speed."
        ),
        fix="build sampler and loader from the same settings on all ranks",
        fixes="The seed of a DistributedSampler must be the same everywhere; the rank is not part of it.",
        example=(
            "```python\nsampler = DistributedSampler(data, shuffle=(rank == 0))\n```\n\ntorch says nothing. The "
            "doctor: `rank 1 has another shuffling than the others (True on rank 0, False on rank 1)`."
        ),
        explains=(
            "CIUIC-H2",
            "CIUIC-H3",
            "CIUIC-H1",
        ),
        depth=0,
    ),
    Code(
        code="CIUIC-H9",
        title="every data worker reads the whole stream",
        severity=Severity.CRITICAL,
        meaning=(
            "An IterableDataset is copied into each worker of the loader. When it does not share the stream out by "
            "`get_worker_info()`, every batch comes once from each worker: with four workers an epoch is four times as "
            "long and each batch is trained four times in a row."
        ),
        detection=(
            "Digests of the batches that training used, of a loader over a stream with two workers or more: most "
            "batches equal one of the few before them on the same rank, at least three times, and not all batches are "
            "the same one. Streams that shuffle in each worker by another seed are not seen."
        ),
        fix="take every num_workers-th sample by torch.utils.data.get_worker_info() in __iter__",
        fixes=(
            "```python\ndef __iter__(self):\n    info = torch.utils.data.get_worker_info()\n    start, step = (info."
            "id, info.num_workers) if info else (0, 1)\n    yield from itertools.islice(self.stream(), start, None, "
            "step)\n```\n\nWith several ranks: `start + step * rank` and `step * world_size`."
        ),
        example=(
            "torch says nothing. The doctor: `every batch of rank 0 comes 2 times: each of the 2 workers of its loader "
            "reads the whole stream`."
        ),
        explains=("CIUIC-H4",),
        depth=0,
    ),
)
