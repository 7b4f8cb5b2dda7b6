"""Class C: the graph is cut, gradients are missing."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

_C1 = Code(
    code="CIUIC-C1",
    title="a trainable parameter never gets a gradient",
    severity=Severity.WARNING,
    meaning=(
        "Its module is called, but on the way from there to the loss the graph is cut: a detach, a no_grad, a"
        " reentrant checkpoint whose input needs no gradient. The parameter keeps its initial value."
    ),
    detection=(
        "At sampled steps the gradient is None on all ranks although the module that owns the parameter was "
        "called in the forward pass. A layer that is not called at all is a note; experts without tokens, "
        "frozen layers, and parameters that only another optimizer's loss reaches are not meant."
    ),
    fix="find the .detach(), .data, .item() or no_grad() between that module and the loss",
    fixes=(
        "With gradient checkpointing over frozen embeddings: `use_reentrant=False`, or "
        "`model.enable_input_require_grads()`."
    ),
    example=(
        "```python\nh = self.adapter(x).detach()   # by mistake\n```\n\n"
        "torch says nothing. The doctor: `adapter.weight never gets a gradient, though its module is called "
        "in every forward pass`."
    ),
    explains=("CIUIC-B4",),
    depth=0,
)

_C2 = Code(
    code="CIUIC-C2",
    title="a collective without gradient cuts the graph",
    severity=Severity.CRITICAL,
    meaning=(
        "dist.all_gather, all_to_all and the like return constants. A loss over the features of all ranks "
        "then sends no gradient, or only part of it, back to the encoders."
    ),
    detection=(
        "A collective gets a tensor that needs a gradient, outside any autograd function; at the backward "
        "pass there is no way from that tensor to the loss, or the loss pairs local rows with constant rows "
        "of all ranks. Metrics, tensors under no_grad or detached, and programs that put their own rows back "
        "are not meant."
    ),
    fix="use the functions of torch.distributed.nn.functional, which carry gradients",
    fixes=(
        "```python\nfrom torch.distributed.nn.functional import all_gather\n"
        "features = torch.cat(all_gather(features))\n```\n\n"
        "With DDP, which averages, its gradient is the world size times larger than that of a local loss."
    ),
    example=(
        "```python\ndist.all_gather(everyone, text)\nlogits = image @ torch.cat(everyone).T\n```\n\n"
        "torch says nothing. The doctor: `dist.all_gather at train.py:31 in loss carries no gradient: there "
        "is no way from the 8x32 tensor it is given to the loss any more`."
    ),
    explains=(
        "CIUIC-C1",
        "CIUIC-C3",
        "CIUIC-C4",
        "CIUIC-A2",
        "CIUIC-A6",
        "CIUIC-B4",
        "CIUIC-D1",
        "CIUIC-D2",
        "CIUIC-D3",
        "CIUIC-D4",
        "CIUIC-D5",
    ),
    depth=0,
)

_C3 = Code(
    code="CIUIC-C3",
    title="gradients are exactly zero or have underflowed",
    severity=Severity.WARNING,
    meaning=(
        "Float16 has no numbers below 6e-8. Without a loss scale small gradients become exactly zero, and the"
        " layers they belong to do not learn."
    ),
    detection=(
        "Under a float16 autocast without a scaler a fifth of the sampled gradient elements is zero and half "
        "of the rest is below the smallest normal number. Zeros of float32 gradients are healthy: experts "
        "without tokens, adapters that begin at zero, dead units."
    ),
    fix="use torch.amp.GradScaler, or bfloat16",
    fixes="```python\nwith torch.autocast(device, dtype=torch.bfloat16):\n    loss = model(x)\n```",
    example=(
        "```python\ntorch.manual_seed(0)\nmodel = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))\n"
        "x = torch.randn(256, 64)\n...\nwith torch.autocast('cpu', dtype=torch.float16):\n"
        "    loss = model(x).square().mean() * 1e-4\nloss.backward()\n"
        "```\n\ntorch says nothing. The doctor: `87% of the gradient's elements are "
        "exactly zero: they were too small for float16, and there is no loss scale`."
    ),
    explains=(
        "CIUIC-F7",
        "CIUIC-B4",
    ),
    depth=0,
)

_C4 = Code(
    code="CIUIC-C4",
    title="a gradient is missing on some ranks only",
    severity=Severity.CRITICAL,
    meaning=(
        "A parameter takes part in the loss of some ranks and not of others. A reduction of what is there "
        "pairs different tensors, or leaves it out where it is missing; the replicas drift apart, or the run "
        "hangs."
    ),
    detection=(
        "The gradient of a parameter is None on some ranks and a tensor on others at the step, in a program "
        "that keeps its ranks equal. Experts on one rank only, which begin different, are not meant."
    ),
    fix="make every rank use it, or reduce zeros where there is no gradient",
    fixes="```python\nif p.grad is None:\n    p.grad = torch.zeros_like(p)\ndist.all_reduce(p.grad)\n```",
    example=(
        "```python\nloss = model(x) + (model.aux(x).mean() if rank == 1 else 0)\n```\n\n"
        "torch says nothing. The doctor: `aux.weight has no gradient on rank 0, but one on the other ranks`."
    ),
    explains=(
        "CIUIC-A5",
        "CIUIC-A6",
        "CIUIC-A2",
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

_C5 = Code(
    code="CIUIC-C5",
    title="gradients of earlier steps are used again",
    severity=Severity.CRITICAL,
    meaning=(
        "Nobody clears the gradients: each step moves along the sum of all gradients so far. Or another "
        "network's backward pass leaves gradients that are still there when this one's begins."
    ),
    detection=(
        "A backward pass adds to a gradient that an optimizer step has used and that nobody has written to "
        "since, and the next step of its optimizer uses the sum. Accumulation over micro-batches and a GAN "
        "whose discriminator is cleared before its own pass are not meant."
    ),
    fix="optimizer.zero_grad() after each step",
    fixes=(
        "In a GAN: clear the discriminator right before its own backward pass, `d_optimizer.zero_grad()`, "
        "because the generator's pass leaves gradients in it."
    ),
    example=(
        "```python\nfor x in loader:\n    model(x).mean().backward()\n    optimizer.step()\n```\n\n"
        "torch says nothing. The doctor: `gradients are not cleared between steps: from step 2 on each step "
        "uses the sum of all gradients before it`."
    ),
    explains=(
        "CIUIC-E1",
        "CIUIC-F5",
        "CIUIC-F6",
        "CIUIC-E3",
        "CIUIC-E4",
    ),
    depth=0,
)

_C6 = Code(
    code="CIUIC-C6",
    title="gradients are cleared before they are used",
    severity=Severity.WARNING,
    meaning=(
        "Several backward passes are made for each step, and zero_grad() comes between them: only the last one reaches "
        "the optimizer. What the others have cost is lost, and the batch is smaller than it is meant to be."
    ),
    detection=(
        "A backward pass wrote to an optimizer's gradients, nobody wrote to them, to the parameters or stepped "
        "afterwards, and they were cleared; the pass that the step uses was made by the same lines of the program. The "
        "same number of such passes in three samples in a row, on all ranks; or nothing is left for the step at all. "
        "Passes for another network, another loss "
        "or another point (GAN, SAM, per-sample gradients) are not meant."
    ),
    fix="call optimizer.zero_grad() once for each step, not for each micro-batch",
    fixes=("```python\nif (i + 1) % accumulate == 0:\n    optimizer.step()\n    optimizer.zero_grad()   # inside\n```"),
    example=(
        "```python\nfor i, (x, y) in enumerate(loader):\n    optimizer.zero_grad()\n"
        "    (criterion(model(x), y) / 4).backward()\n    if (i + 1) % 4 == 0:\n        optimizer.step()\n```\n\n"
        "torch says nothing. The doctor: `3 of 4 backward passes of each step are lost: gradients are cleared in "
        "train.py:12 in main before the optimizer has used them`."
    ),
    explains=("CIUIC-E1", "CIUIC-G2", "CIUIC-C1", "CIUIC-C3", "CIUIC-B4"),
    depth=0,
)

CODES: tuple[Code, ...] = (
    _C1,
    _C2,
    _C3,
    _C4,
    _C5,
    _C6,
)
