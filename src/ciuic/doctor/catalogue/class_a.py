"""Class A: gradients are not synchronised."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

_A1 = Code(
    code="CIUIC-A1",
    title="gradients are not synchronised: the forward pass goes around the wrapper",
    severity=Severity.CRITICAL,
    meaning=(
        "DistributedDataParallel reduces gradients only for a backward pass that belongs to its own forward "
        "pass. When the program calls the wrapped module itself, each rank trains a model of its own on its "
        "share of the data, and the loss still falls."
    ),
    detection=(
        "Forward passes of the wrapper and of its module are counted. A step whose gradients differ between "
        "ranks (digests) while no pass, or only some, went through the wrapper has this code. A program that "
        "goes around the wrapper and reduces by hand has equal gradients and is not meant; neither is an "
        "evaluation."
    ),
    fix="call the wrapper, not its .module: loss = ddp(x)",
    fixes=(
        "Methods other than `forward` go around the wrapper too. Give the module one `forward` that does what"
        " the loss needs.\n\n```python\nlogits = ddp.module(x)   # wrong: nothing is reduced\n"
        "logits = ddp(x)          # right\n```"
    ),
    example=(
        "```python\nddp = DistributedDataParallel(model)\nloss = ddp.module(x).mean()\nloss.backward()\n"
        "optimizer.step()\n```\n\n"
        "torch says nothing. The doctor: `1 forward pass went to the wrapped module itself, none through "
        "DistributedDataParallel, so nothing was reduced: the gradients of step 1 differ between ranks`."
    ),
    explains=(
        "CIUIC-A2",
        "CIUIC-A3",
        "CIUIC-A4",
        "CIUIC-A5",
        "CIUIC-A6",
        "CIUIC-C1",
        "CIUIC-C4",
        "CIUIC-F2",
        "CIUIC-H3",
        "CIUIC-D1",
        "CIUIC-D2",
        "CIUIC-D3",
        "CIUIC-D4",
        "CIUIC-D5",
    ),
    depth=0,
)

_A2 = Code(
    code="CIUIC-A2",
    title="some gradients are not reduced",
    severity=Severity.CRITICAL,
    meaning=(
        "DDP reduces gradients in buckets. A bucket is sent only when every parameter in it has its gradient;"
        " one parameter that takes no part in the loss, that is ignored, or whose hook is gone leaves a whole"
        " bucket as it is on each rank."
    ),
    detection=(
        "Gradients differ between ranks although the forward pass went through the wrapper, and parameters "
        "that DDP registered have no gradient, were left out of the reduction, or have lost DDP's hook. A "
        "layer that is frozen, or unused with find_unused_parameters=True, leaves all gradients equal and is "
        "not meant."
    ),
    fix="find_unused_parameters=True, or do not train what the loss does not use",
    fixes=(
        "torch raises `Expected to have finished reduction in the prior iteration` at the next forward pass, "
        "after one wrong update. Convert and move a model before it is wrapped: `model.double()` takes DDP's "
        "hooks away without a word."
    ),
    example=(
        "```python\nclass Net(nn.Module):\n    def forward(self, x):\n"
        "        return self.head(self.body(x))  # self.aux is never used\n"
        "ddp = DistributedDataParallel(Net())\n```\n\n"
        "torch says nothing at step 1. The doctor: `aux.weight, aux.bias took no part in the loss of step 1, "
        "so buckets were never complete and the gradients in them were not reduced`."
    ),
    explains=(
        "CIUIC-A4",
        "CIUIC-A5",
        "CIUIC-A6",
        "CIUIC-C1",
        "CIUIC-F2",
        "CIUIC-J1",
        "CIUIC-J2",
        "CIUIC-J3",
        "CIUIC-D1",
        "CIUIC-D2",
        "CIUIC-D3",
        "CIUIC-D4",
        "CIUIC-D5",
    ),
    depth=0,
)

_A3 = Code(
    code="CIUIC-A3",
    title="what is trained is not what DDP registered",
    severity=Severity.CRITICAL,
    meaning=(
        "DDP looks once, when the model is wrapped, at what needs a gradient. Layers that are unfrozen, "
        "replaced or injected later (adapters, a new head) are trained by each rank alone."
    ),
    detection=(
        "The set of trainable parameters is compared with the one at the wrap; the gradients of those that "
        "are new differ between ranks. A program that reduces them itself is not meant: they are equal."
    ),
    fix="wrap the model after everything that is to be trained is there and requires a gradient",
    fixes=(
        "For gradual unfreezing: wrap again after each change, or wrap once with all parameters trainable, "
        "`find_unused_parameters=True`, and freeze by learning rate 0."
    ),
    example=(
        "```python\nmodel.body.requires_grad_(False)\nddp = DistributedDataParallel(model)\n"
        "model.body.requires_grad_(True)\n```\n\n"
        "torch says nothing. The doctor: `body.0.weight, body.0.bias: unfrozen after DistributedDataParallel "
        "had registered what is trainable; their gradients are not reduced and differ`."
    ),
    explains=(
        "CIUIC-A2",
        "CIUIC-A4",
        "CIUIC-A5",
        "CIUIC-A6",
        "CIUIC-F2",
        "CIUIC-D1",
        "CIUIC-D2",
        "CIUIC-D3",
        "CIUIC-D4",
        "CIUIC-D5",
    ),
    depth=0,
)

_A4 = Code(
    code="CIUIC-A4",
    title="accumulation misses the reduction",
    severity=Severity.CRITICAL,
    meaning=(
        "Under no_sync() gradients stay on their rank until a later pass reduces them. When the last "
        "micro-batch before the step is under no_sync() as well, the optimizer gets gradients that are each "
        "rank's own."
    ),
    detection=(
        "Gradients differ at the step, and the last forward pass through the wrapper was under no_sync(), or "
        "the parameters that differ got nothing in the last micro-batch. Programs that stay under no_sync() "
        "and average parameters now and then (local SGD) are not meant."
    ),
    fix="leave the last micro-batch of each step outside no_sync()",
    fixes=(
        "```python\nlast = (i + 1) % accumulate == 0\n"
        "with contextlib.nullcontext() if last else ddp.no_sync():\n"
        "    (ddp(x).mean() / accumulate).backward()\nif last:\n    optimizer.step()\n```\n\n"
        "With layers that only some micro-batches use: `find_unused_parameters` looks at the last one only; "
        "let the reduction happen in each."
    ),
    example=(
        "```python\nwith nullcontext() if i % 4 == 0 else ddp.no_sync():   # the first of four, not the last\n"
        "    ddp(x).mean().backward()\n```\n\n"
        "torch says nothing. The doctor: `the last micro-batch of step 1 ran under no_sync(): 1 of 4 passes "
        "were reduced`."
    ),
    explains=(
        "CIUIC-A2",
        "CIUIC-A5",
        "CIUIC-A6",
        "CIUIC-F2",
        "CIUIC-D1",
        "CIUIC-D2",
        "CIUIC-D3",
        "CIUIC-D4",
        "CIUIC-D5",
    ),
    depth=0,
)

_A5 = Code(
    code="CIUIC-A5",
    title="the program's own reduction is missing or leaves something out",
    severity=Severity.CRITICAL,
    meaning=(
        "Without a wrapper the program itself must make gradients (or parameters, now and then) equal. What "
        "it leaves out is trained by each rank alone."
    ),
    detection=(
        "What the program exchanges between the backward pass and the step, or after the step, says what it "
        "means. Some gradients equal and others not, equal in some steps only, reduced before the last "
        "backward pass, reduced after the step, or nothing exchanged at all although the ranks began equal "
        "(a process group of one rank is nothing, too). Models that began "
        "different and never exchange anything are independent runs; local SGD is compared right after an "
        "average."
    ),
    fix="reduce every gradient once, after the last backward pass: dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)",
    fixes="Or wrap the model: DDP overlaps the reduction with the backward pass.",
    example=(
        "```python\nfor name, p in model.named_parameters():\n    if 'head' not in name:\n"
        "        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)\n```\n\n"
        "torch says nothing. The doctor: `the program's reduction leaves out head.weight, head.bias: these "
        "gradients differ between ranks at step 1, 4 others are equal`."
    ),
    explains=(
        "CIUIC-A6",
        "CIUIC-F2",
        "CIUIC-D1",
        "CIUIC-D2",
        "CIUIC-D3",
        "CIUIC-D4",
        "CIUIC-D5",
    ),
    depth=0,
)

_A6 = Code(
    code="CIUIC-A6",
    title="gradients differ between ranks after the reduction",
    severity=Severity.CRITICAL,
    meaning=(
        "Each rank's optimizer gets other gradients although the reduction took place as it should. From this"
        " step on the replicas are different models."
    ),
    detection=(
        "Digests of the gradients that the optimizer gets differ, and no cause of class A applies. The "
        "evidence says how far they are apart; a difference of a factor is scaling or clipping on some ranks "
        "only. A relative distance below 1e-6 is a note."
    ),
    fix="look at what writes to .grad between the backward pass and the step on the ranks named",
    fixes=(
        "Hooks on parameters, clipping by a rank's own norm and conditional code (`if rank == 0`) are the usual ones."
    ),
    example=(
        "```python\nif rank == 1:\n    model.head.weight.grad.zero_()\noptimizer.step()\n```\n\n"
        "torch says nothing. The doctor: `the gradient of head.weight is exactly zero on rank 1 only`."
    ),
    explains=(
        "CIUIC-D1",
        "CIUIC-D2",
        "CIUIC-D3",
        "CIUIC-D4",
    ),
    depth=2,
)

_A7 = Code(
    code="CIUIC-A7",
    title="every micro-batch is synchronised although no_sync was meant",
    severity=Severity.WARNING,
    meaning=(
        "DDP reads no_sync() in the forward pass. Around the backward pass alone it does nothing, and each "
        "micro-batch pays for a reduction: the result is right, the run is slower."
    ),
    detection=(
        "no_sync() was entered in each step, and all forward passes through the wrapper were followed by a "
        "reduction. Accumulation without no_sync() is slow as well but does what it says, and is not reported."
    ),
    fix="put the forward pass inside no_sync() as well",
    fixes="```python\nwith ddp.no_sync():\n    loss = ddp(x).mean()   # inside, too\n    loss.backward()\n```",
    example=(
        "```python\nloss = ddp(x).mean()\nwith ddp.no_sync():\n    loss.backward()\n```\n\n"
        "torch says nothing. The doctor: `no_sync() was entered 3 times a step, but all 4 micro-batches were "
        "reduced`."
    ),
    explains=(
        "CIUIC-L2",
        "CIUIC-L3",
    ),
    depth=0,
)

_A8 = Code(
    code="CIUIC-A8",
    title="the gradient of a rank does not count",
    severity=Severity.CRITICAL,
    meaning=(
        "All ranks step with equal gradients, but these are not the mean of what the ranks have computed: what one or "
        "several of them contributed is lost. They work for nothing, and their data are not trained on."
    ),
    detection=(
        "A few projections of each rank's gradient before the reduction and of what all ranks use after it. The result "
        "is a multiple of one rank's gradient alone, or of the sum of all ranks but one, in three samples in a row, "
        "while the gradients of the others are there and point elsewhere. Compression that only adds noise is no "
        "finding."
    ),
    fix="reduce, do not broadcast, and look at what is done to the gradients of the ranks named before",
    fixes="```python\ndist.all_reduce(p.grad, op=dist.ReduceOp.AVG)   # not dist.broadcast(p.grad, 0)\n```",
    example=(
        "```python\nfor p in model.parameters():\n    dist.broadcast(p.grad, 0)\n```\n\n"
        "torch says nothing. The doctor: `the gradients that all ranks use are those of rank 0 alone: what rank 1 "
        "computed is lost`."
    ),
    explains=("CIUIC-E4", "CIUIC-E6"),
    depth=0,
)

CODES: tuple[Code, ...] = (
    _A1,
    _A2,
    _A3,
    _A4,
    _A5,
    _A6,
    _A7,
    _A8,
)
