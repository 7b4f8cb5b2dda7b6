"""Class D: replicas or buffers diverge."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

_D1 = Code(
    code="CIUIC-D1",
    title="the ranks begin with different parameters",
    severity=Severity.CRITICAL,
    meaning=(
        "Equal gradients keep replicas as far apart as they began. Weights were drawn from another seed or "
        "loaded on one rank only, and nothing made them equal again."
    ),
    detection=(
        "Digests of the parameters before the first step, in a program that makes gradients equal. "
        "Independent models, and experts that each rank has for itself, are not meant."
    ),
    fix="load and draw weights on all ranks before the wrap, or broadcast them from rank 0",
    fixes=(
        "```python\nfor tensor in model.state_dict().values():\n    dist.broadcast(tensor, src=0)\n```\n\n"
        "DDP broadcasts once, when it is built: load before that."
    ),
    example=(
        "```python\nddp = DistributedDataParallel(model)\nif rank == 0:\n"
        "    model.load_state_dict(torch.load('model.pt'))\n```\n\n"
        "torch says nothing. The doctor: `the ranks began with different parameters: body.0.weight, "
        "body.0.bias and 6 more differ before step 1`."
    ),
    explains=(
        "CIUIC-D2",
        "CIUIC-D3",
        "CIUIC-D4",
        "CIUIC-A6",
        "CIUIC-I3",
        "CIUIC-E6",
    ),
    depth=0,
)

_D2 = Code(
    code="CIUIC-D2",
    title="parameters diverge although gradients are equal",
    severity=Severity.CRITICAL,
    meaning=(
        "The optimizers of the ranks do not do the same: another number of steps, other hyperparameters, other moments."
    ),
    detection=(
        "Digests of gradients are equal, those of parameters are not; the optimizer's numbers, its count of "
        "steps and a sample of its state are compared to say why. A sharded optimizer's state differs and its"
        " parameters do not: not meant. A relative distance below 2e-6 is a note: other processors round "
        "otherwise."
    ),
    fix="build and restore the optimizer on all ranks alike",
    fixes="Restore a checkpoint on every rank, with `map_location`; call `step()` equally often everywhere.",
    example=(
        "```python\nif rank == 0:\n    optimizer.load_state_dict(saved['optimizer'])\n```\n\n"
        "torch says nothing. The doctor: `the optimizer's state of rank 1 is another one at step 1: equal "
        "gradients move its parameters elsewhere`."
    ),
    explains=(
        "CIUIC-A6",
        "CIUIC-D3",
        "CIUIC-D4",
        "CIUIC-E6",
    ),
    depth=1,
)

_D3 = Code(
    code="CIUIC-D3",
    title="buffers differ between ranks",
    severity=Severity.WARNING,
    meaning=(
        "Running statistics, a router's balance or an average of the weights are each rank's own. What the "
        "model gives, and each metric, then depends on the rank."
    ),
    detection=(
        "Digests of buffers in training forward passes (right after DDP's broadcast; without one only buffers"
        " that training uses) and of all buffers when an evaluation begins on all ranks and DDP was told not "
        "to broadcast. BatchNorm's statistics differ between two broadcasts: not meant."
    ),
    fix=(
        "make them equal before they are used: SyncBatchNorm, broadcast_buffers=True, or all_reduce them "
        "before an evaluation"
    ),
    fixes="```python\nfor buffer in model.buffers():\n    dist.broadcast(buffer, src=0)\n```",
    example=(
        "```python\nddp = DistributedDataParallel(model, broadcast_buffers=False)\nddp.eval()\n```\n\n"
        "torch says nothing. The doctor: `body.1.running_mean, body.1.running_var differ between ranks when "
        "an evaluation began`."
    ),
    depth=1,
)

_D4 = Code(
    code="CIUIC-D4",
    title="a parameter was changed outside the optimizer",
    severity=Severity.CRITICAL,
    meaning=(
        "Something wrote to a parameter between two steps, on some ranks only or with another value on each: "
        "a load, a clamp, a re-initialisation, a copy."
    ),
    detection=(
        "torch counts writes to a tensor; the count at the end of a step is compared with the one before the "
        "next, and after sampled steps some values as well. It is a finding only when the ranks' parameters "
        "differ afterwards: averaging, weight clipping and swapping averages in and out are not meant."
    ),
    fix="do it on all ranks alike, or broadcast afterwards",
    fixes=(
        "```python\nwith torch.no_grad():\n    model.head.weight.mul_(0.99)          # on every rank\n"
        "    dist.broadcast(model.head.weight, 0)  # or so\n```"
    ),
    example=(
        "```python\nif rank == 1:\n    with torch.no_grad():\n        model.head.weight.mul_(0.99)\n```\n\n"
        "torch says nothing. The doctor: `head.weight was written to outside the optimizer before step 8, on "
        "rank 1 only`."
    ),
    explains=(
        "CIUIC-D2",
        "CIUIC-D3",
        "CIUIC-A6",
        "CIUIC-E6",
    ),
    depth=1,
)

_D5 = Code(
    code="CIUIC-D5",
    title="a collective gave ranks different results",
    severity=Severity.CRITICAL,
    meaning=(
        "An all-reduce must leave the same bytes on all ranks. Here it did not: a faulty link or memory, a "
        "broken communication hook, peer-to-peer transfers that lose data."
    ),
    detection=(
        "Gradients that were reduced differ in a few blocks of one or two tensors only, or the result of a "
        "collective of the program differs between ranks. A missing reduction makes whole tensors differ."
    ),
    fix=(
        "try without the communication hook; with NCCL: NCCL_P2P_DISABLE=1; then test the link and the memory"
        " of the rank named"
    ),
    fixes="A rank that is always the one that differs has the fault; check its machine with a memory test.",
    example=(
        "A hook that changes one element on rank 1:\n\n```python\nddp.register_comm_hook(None, hook)\n```\n\n"
        "torch says nothing. The doctor: `a reduction gave rank 1 another result: body.0.weight differs in 3%"
        " of its blocks only`."
    ),
    explains=(
        "CIUIC-A6",
        "CIUIC-D1",
        "CIUIC-D2",
        "CIUIC-D4",
    ),
    depth=1,
)

_D6 = Code(
    code="CIUIC-D6",
    title="ranks compute the same model in different ways",
    severity=Severity.CRITICAL,
    meaning=(
        "Parameters may be equal everywhere, and still the ranks do not compute one function: a rank is left in "
        "evaluation mode, has another dropout or epsilon, or runs without the autocast of the others. The averaged "
        "gradient is that of no model."
    ),
    detection=(
        "In sampled training passes each rank digests the mode of every module, the settings of torch's own modules "
        "and the autocast around them. Ranks whose modules have the same paths and classes are compared, in data "
        "parallel runs only; stages of a pipeline have other modules and are left alone. A difference must be seen in "
        "two samples in a row. Evaluation without gradients is not looked at, so a rank that evaluates alone is no "
        "finding as long as it goes back to training mode."
    ),
    fix="build and switch the model alike on all ranks: the same config, `model.train()` after every evaluation",
    fixes=(
        "```python\nif rank == 0:\n    evaluate(model)  # calls model.eval()\nmodel.train()  # outside of the branch\n"
        "```\n\nRead settings on rank 0 and broadcast them, when they come from a file or a tuner."
    ),
    example=(
        "Rank 0 evaluates and does not return to training mode. torch says nothing. The doctor: `rank 0 computes the "
        "model in another way than rank 1: the whole model is in evaluation mode, not in training mode`."
    ),
    explains=("CIUIC-D3", "CIUIC-E6", "CIUIC-L1"),
    depth=0,
)

_D7 = Code(
    code="CIUIC-D7",
    title="training goes on in evaluation mode",
    severity=Severity.WARNING,
    meaning=(
        "After an evaluation nobody called model.train(): dropout is off, and normalisation uses running statistics "
        "and no longer updates them. The loss looks better than before, and the model is regularised no more."
    ),
    detection=(
        "In sampled training passes (with gradients) the whole model is in evaluation mode on all ranks, in two "
        "samples in "
        "a row, was in training mode at an earlier one, and has dropout or normalisation modules that changed with "
        "it. A "
        "model that is in evaluation mode from the beginning, or freezes some of its modules, is no finding."
    ),
    fix="call model.train() after every evaluation",
    fixes="```python\nmodel.eval()\nevaluate(model)\nmodel.train()\n```",
    example=(
        "torch says nothing. The doctor: `the model trained in training mode before, and trains in evaluation mode "
        "since "
        "step 120 at the latest: 24 dropout and normalisation modules do nothing of what they do in training`."
    ),
    explains=("CIUIC-D3",),
    depth=0,
)

CODES: tuple[Code, ...] = (
    _D1,
    _D2,
    _D3,
    _D4,
    _D5,
    _D6,
    _D7,
)
