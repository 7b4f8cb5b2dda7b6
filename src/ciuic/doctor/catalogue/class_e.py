"""Class E: the scale of gradients or loss is wrong."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

_E1 = Code(
    code="CIUIC-E1",
    title="the loss of the micro-batches is not divided by their number, or divided twice",
    severity=Severity.WARNING,
    meaning=(
        "Gradients of several backward passes add up in .grad. When each loss is a mean and is not divided by the "
        "number "
        "of passes, a step of k micro-batches has k times the gradient of one large batch; divided twice it has 1/k "
        "of it. "
        "With SGD the learning rate is wrong by that factor, with Adam the clipping and the weight decay are out of "
        "proportion, and the run depends on a number that should not matter."
    ),
    detection=(
        "The doctor counts the backward passes of one call site between two steps, as far as each has a forward pass "
        "and "
        "a batch of its own, and reads the constant factors between the loss's reduction and its root from the graph. "
        "A "
        "few gradient elements are followed from the backward pass to the step, so a division of the gradients by hand "
        "counts too. No finding: losses that are sums, losses whose graph cannot be read, several losses of one batch, "
        "and backward passes from different lines (the two halves of a GAN's discriminator)."
    ),
    fix="loss = loss / accumulation_steps, once",
    fixes=(
        "```python\nloss = criterion(model(x), y) / accumulation_steps\nloss.backward()\n```\n\n"
        "`accelerator.backward(loss)` and Lightning divide by themselves when they were told the number of steps: "
        "leave "
        "your own division out there. A Trainer's `compute_loss_func` should divide a sum by `num_items_in_batch`."
    ),
    example=(
        "```python\nfor i, (x, y) in enumerate(loader):\n    criterion(model(x), y).backward()  # a mean, and nobody "
        "divides\n"
        "    if i % 4 == 3:\n        optimizer.step()\n        optimizer.zero_grad()\n```\n\n"
        "torch says nothing. The doctor: `4 micro-batches make one step and their loss is never divided by 4: "
        "gradients "
        "are 4 times those of one large batch`."
    ),
    depth=0,
)

_E2 = Code(
    code="CIUIC-E2",
    title="ranks have unequal numbers of labels and each takes a mean over its own",
    severity=Severity.WARNING,
    meaning=(
        "DDP averages the ranks' gradients as if each had seen the same amount. When a rank has few labels that count "
        "(padding and ignored tokens do not), each of its labels weighs more: the gradient is not that of the whole "
        "batch. With 60 tokens on one rank and 4 on another it is wrong by twice its length."
    ),
    detection=(
        "The weight of one label in a rank's gradient is the constant factor of its loss divided by the number of "
        "labels "
        "that are not ignored; both are read from the loss's graph. The invariant: this weight is the same on all "
        "ranks. "
        "A finding needs at least five samples in which one rank has half as many labels as another on average, and "
        "its most labels are fewer by a fifth than the least of the others (after ten samples: fewer at all), so "
        "lengths that vary by chance are no finding; a sum divided by the global count is right."
    ),
    fix="loss = sum of the token losses * world_size / number of labels on all ranks",
    fixes=(
        "```python\ncount = (labels != -100).sum()\ntorch.distributed.all_reduce(count)\n"
        "loss = cross_entropy(logits, labels, reduction='sum') * world_size / count\n```\n\n"
        "Transformers: `average_tokens_across_devices=True`. Or give every rank batches with about as many tokens."
    ),
    example=(
        "```python\nloss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)  # mean over my "
        "own\n"
        "loss.backward()\n```\n\n"
        "torch says nothing. The doctor: `rank 1 has fewer labels that count than the others (60 on rank 0, 4 on rank "
        "1), "
        "and each rank's loss is a mean over its own: one of its labels weighs 15 times as much in the gradient`."
    ),
    depth=0,
)

_E3 = Code(
    code="CIUIC-E3",
    title="gradients that DDP has averaged are reduced once more",
    severity=Severity.CRITICAL,
    meaning=(
        "DDP averages gradients in the backward pass. A second sum over the ranks, from a loop that was written before "
        "DDP came, multiplies them by the number of ranks: the learning rate is too large by that factor, and all "
        "gradients are sent twice."
    ),
    detection=(
        "A few gradient elements are followed: right after the backward pass they are equal on all ranks (DDP has "
        "averaged), and the optimizer gets the number of ranks times as much, beyond what clipping and unscaling "
        "explain. "
        "The program's own calls on gradients name the line. Reductions under no_sync and communication hooks are no "
        "finding; a second average that changes nothing is a note."
    ),
    fix="remove the all_reduce: DDP has averaged already",
    fixes="Or keep your own reduction, run the backward pass under `model.no_sync()` and divide by the world size.",
    example=(
        "```python\nloss.backward()  # DDP averages here\nfor p in model.parameters():\n    dist.all_reduce(p.grad)\n"
        "optimizer.step()\n```\n\n"
        "torch says nothing. The doctor: `gradients that DDP has averaged over 2 ranks are reduced once more by 10 "
        "calls "
        "in train.py:31 in main: they are 2 times too large`. Inside a Ciuic run this loop is refused "
        "(`CIUIC-E4` is the case without DDP)."
    ),
    explains=("CIUIC-F6",),
    depth=0,
)

_E4 = Code(
    code="CIUIC-E4",
    title="gradients are summed over the ranks and never divided",
    severity=Severity.CRITICAL,
    meaning=(
        "all_reduce sums. A mean loss on each rank needs the mean of the gradients; the sum is larger by the number of "
        "ranks, so the run behaves otherwise on every number of machines."
    ),
    detection=(
        "A few gradient elements of every rank right after the backward pass, and what the optimizer gets: the ratio "
        "to "
        "their mean is the number of ranks, or (as a warning) another number that stays the same: a wrong divisor. It "
        "does not matter how they were reduced (one by one, flat, asynchronous). "
        "No finding for a loss that is a sum, or that was divided by the number of ranks before."
    ),
    fix="p.grad /= world_size after the all_reduce",
    fixes="With NCCL: `dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)`. Or wrap the model in DDP and remove the loop.",
    example=(
        "```python\nfor p in model.parameters():\n    dist.all_reduce(p.grad)  # a sum\noptimizer.step()\n```\n\n"
        "torch says nothing. The doctor: `gradients are summed over 2 ranks in train.py:20 in sync and never divided: "
        "they are 2 times the mean`."
    ),
    explains=("CIUIC-F6",),
    depth=0,
)

_E5 = Code(
    code="CIUIC-E5",
    title="ranks make their loss in different ways",
    severity=Severity.WARNING,
    meaning=(
        "The loss of one rank is a sum where the others take a mean, or is multiplied by another factor. Its samples "
        "weigh more or less in the common gradient than those of the others; with the factor 0 they count for nothing."
    ),
    detection=(
        "The reduction and the constant factors between it and the root are read from each rank's graph. They must be "
        "equal, or make up for another number of labels, and a difference must stay the same over three samples: "
        "factors that are computed from the batch change from sample to sample and are left alone."
    ),
    fix="compute the loss by the same line, with the same factor, on all ranks",
    fixes="A weight per source of data belongs to the samples (`reduction='none'`, then weigh), not to the rank.",
    example=(
        "```python\nloss = criterion(model(x), y)\nif rank == 1:\n    loss = 0.1 * loss\n```\n\ntorch says nothing. "
        "The doctor: `rank 1 makes its loss in another way than the others: a mean times 0.1 on rank 1, a mean times 1 "
        "on rank 0`."
    ),
    explains=("CIUIC-E2", "CIUIC-E6"),
    depth=0,
)

_E6 = Code(
    code="CIUIC-E6",
    title="the loss of a rank stays far from the others'",
    severity=Severity.WARNING,
    meaning=(
        "With equal parameters and data of one kind the losses of the ranks are alike up to chance. One that is always "
        "higher or lower has other data (wrong labels, another preprocessing, one source only) or computes something "
        "else."
    ),
    detection=(
        "The losses of the sampled steps. The same rank must be the farthest from the middle of the others in eight "
        "samples in a row, always on the same side, and by a factor of three on average; at half as much it is a note. "
        "Losses that are not positive are not compared; one that is exactly zero in four samples in a row, and is not "
        "on the other ranks, is a finding of its own."
    ),
    fix="look at this rank's data: decode a batch, compare its labels with those of another rank",
    fixes=(
        "`ciuic doctor loss -- torchrun ...` gives all ranks one batch: when their losses are equal then, the data are "
        "the cause. Data that are meant to differ (one domain per rank) are better mixed before they are shared out."
    ),
    example=(
        "The labels of rank 1 are shifted by one. torch says nothing. The doctor: `the loss of rank 1 stays far from "
        "the others': 2.31 where they have 0.42, in 8 samples in a row`."
    ),
    depth=2,
)

CODES: tuple[Code, ...] = (_E1, _E2, _E3, _E4, _E5, _E6)
