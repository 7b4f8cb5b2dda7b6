"""Class F: clipping, precision, loss scaling."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

_APART = ("CIUIC-A6", "CIUIC-D2", "CIUIC-D4")
"""What replicas that are updated differently look like."""

_F1 = Code(
    code="CIUIC-F1",
    title="gradients are clipped before they are unscaled",
    severity=Severity.CRITICAL,
    meaning=(
        "Under a GradScaler gradients are multiplied by the loss scale, 65536 at first. A norm clipped then is clipped "
        "to a limit that is smaller by that factor: every step is tiny, and grows when the scale falls."
    ),
    detection=(
        "clip_grad_norm_ is called after scaler.scale(loss) and before scaler.unscale_(optimizer) of the optimizer "
        "that "
        "owns these parameters. Calls with an infinite limit only look at the norm and are no finding."
    ),
    fix="scaler.unscale_(optimizer) before clip_grad_norm_",
    fixes=(
        "```python\nscaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
        "clip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer)\nscaler.update()\n```"
    ),
    example=(
        "```python\nscaler.scale(loss).backward()\nclip_grad_norm_(model.parameters(), "
        "1.0)\nscaler.step(optimizer)\n```\n\n"
        "torch says nothing; weights move by 6e-6 instead of 0.34. The doctor: `gradients are clipped while they are "
        "still multiplied by the loss scale 65536: the limit acts as one 65536 times smaller`."
    ),
    explains=("CIUIC-F6", "CIUIC-C3", "CIUIC-B4"),
    depth=0,
)

_F2 = Code(
    code="CIUIC-F2",
    title="ranks clip equal or shared gradients by different norms",
    severity=Severity.CRITICAL,
    meaning=(
        "Clipping must multiply all gradients of a model by one factor. When one rank clips alone, or each takes the "
        "norm "
        "of its own shard, the factors differ: replicas drift apart, slowly and without a message."
    ),
    detection=(
        "A few gradient elements from the backward pass to the step: each rank's are a plain multiple of what they "
        "were, and the multiples differ; or each rank clips its own before a reduction by "
        "hand. Gradients that differ before are another fault (class A) and do not count here."
    ),
    fix="call clip_grad_norm_ on all ranks, with the norm of the whole model",
    fixes=(
        "With FSDP2 `torch.nn.utils.clip_grad_norm_(model.parameters(), limit)` on the sharded parameters takes the "
        "norm "
        "over all shards. A norm made by hand needs the squares summed over ranks: "
        "`dist.all_reduce(square); norm = square.sqrt()`."
    ),
    example=(
        "```python\nif rank == 0:\n    clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()\n```\n\n"
        "torch says nothing. The doctor: `only rank 0 clips the gradients: they are multiplied by 0.31 on rank 0, 1 on "
        "rank 1`."
    ),
    explains=_APART,
    depth=0,
)

_F3 = Code(
    code="CIUIC-F3",
    title="steps are skipped again and again: gradients of a rank are not finite",
    severity=Severity.CRITICAL,
    meaning=(
        "A scaler leaves a step out when a gradient is not finite, and halves its scale. One rank with bad samples "
        "spoils the average of all: every rank skips, for ever, and the scale goes to zero while the loss is still "
        "printed."
    ),
    detection=(
        "Skipped steps in a row, with each rank's own loss before any reduction; after the second skip each rank "
        "looks at "
        "its modules' outputs and at its own gradients for a few steps. The first skips of a new scaler, while the "
        "scale "
        "finds its place, are no finding: they are fewer, and the losses are finite."
    ),
    fix="find the bad samples of the named rank: check its inputs with torch.isfinite",
    fixes=(
        "A module named here gives an infinite output from finite input: compute it in float32 "
        "(`with torch.autocast(device, enabled=False)`)."
    ),
    example=(
        "```python\nx[3] = float('inf')  # a corrupt file, on rank 1 only\nscaler.scale(loss_of(model(x))).backward()\n"
        "scaler.step(optimizer)\nscaler.update()\n```\n\n"
        "torch says nothing; the scale ends at 0. The doctor: `the input of rank 1 is not finite again and again: all "
        "ranks skip, 3 steps in a row, the loss scale is 8192`."
    ),
    explains=("CIUIC-F5", "CIUIC-B4", "CIUIC-B1", "CIUIC-C3"),
    depth=0,
)

_F4 = Code(
    code="CIUIC-F4",
    title="some ranks leave a step out that others take",
    severity=Severity.CRITICAL,
    meaning=(
        "Whether a step is made must be decided once. A rank that skips by its own numbers keeps its old weights: from "
        "then on the replicas differ, and DDP averages gradients of different models."
    ),
    detection=(
        "Steps taken at the same number of attempts, and backward passes at the same number of steps: both are equal "
        "on "
        "all ranks of a data-parallel run. A rank that steps twice, or not at all, breaks one of them."
    ),
    fix="decide on all ranks at once: dist.all_reduce(bad, op=dist.ReduceOp.MAX), then skip everywhere or nowhere",
    fixes=(
        "```python\nbad = (~torch.isfinite(loss)).float()\ndist.all_reduce(bad, op=dist.ReduceOp.MAX)\n"
        "if bad:\n    optimizer.zero_grad()\nelse:\n    optimizer.step()\n```"
    ),
    example=(
        "```python\nif loss < 10:  # my own loss\n    optimizer.step()\n```\n\n"
        "torch says nothing. The doctor: `rank 1 left optimizer steps out: 5 on rank 0, 6 on rank 1 backward passes "
        "for "
        "the same 5 steps`."
    ),
    explains=(*_APART, "CIUIC-G8", "CIUIC-G4", "CIUIC-A5", "CIUIC-J1", "CIUIC-J2", "CIUIC-J7"),
    depth=0,
)

_F5 = Code(
    code="CIUIC-F5",
    title="a loss is not finite",
    severity=Severity.CRITICAL,
    meaning=(
        "One number that is not finite on one rank reaches all gradients by the average, all weights by the step, and "
        "every loss after it. The rank and the step where it began are gone from sight one step later."
    ),
    detection=(
        "Each rank reads its own loss before the backward pass (of every step on a CPU, of sampled steps on a GPU), "
        "and "
        "looks whether the model's input or a parameter is not finite. The rank with the earliest step is named. With "
        "a "
        "loss scaler a single one is skipped and is no finding."
    ),
    fix="look at the input of the named rank and step; skip on all ranks when a loss is not finite",
    fixes="`torch.autograd.set_detect_anomaly(True)` names the operation when the numbers are finite at the input.",
    example=(
        "```python\nloss = cross_entropy(model(x), y)  # x has a nan on rank "
        "1\nloss.backward()\noptimizer.step()\n```\n\n"
        "torch says nothing. The doctor: `the loss of rank 1 is nan at step 7: the model's input 0 is not finite`."
    ),
    explains=("CIUIC-A6", "CIUIC-D2", "CIUIC-D3", "CIUIC-D4", "CIUIC-D5", "CIUIC-C3"),
    depth=1,
)

_F6 = Code(
    code="CIUIC-F6",
    title="every step is clipped by a large factor",
    severity=Severity.WARNING,
    meaning=(
        "When the norm is hundreds of times the limit at every step, clipping is not a safety net: it is the learning "
        "rate. "
        "The limit has a wrong unit, or the gradients have a wrong scale."
    ),
    detection="The norm that clip_grad_norm_ returned was more than 200 times its limit five times in a row.",
    fix="raise the clipping limit to about the usual norm of the gradient, or look for a wrong scale of the loss",
    fixes="Print the norm of some steps without clipping: `clip_grad_norm_(parameters, float('inf'))`.",
    example=(
        "```python\nclip_grad_norm_(model.parameters(), 1e-3)  # 1.0 was meant\n```\n\n"
        "torch says nothing. The doctor: `every step so far is clipped to a norm of 0.001 while the gradient's is "
        "about "
        "1.4: a step is about 1400 times smaller than its gradient`."
    ),
    depth=1,
)

_F7 = Code(
    code="CIUIC-F7",
    title="float16 without a loss scale: small gradients become zero",
    severity=Severity.WARNING,
    meaning=(
        "Float16 has no numbers between 0 and 6e-8. Without a loss scale small gradients round to zero and the layers "
        "that have them do not learn."
    ),
    detection=(
        "Autocast to float16 and no GradScaler, and of some elements of the gradients many are exactly zero while most "
        "others are below float16's smallest normal number, three samples in a row."
    ),
    fix="use torch.amp.GradScaler, or bfloat16",
    fixes="```python\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    loss = model(x)\n```",
    example=(
        "```python\ntorch.manual_seed(0)\nmodel = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))\n"
        "x = torch.randn(256, 64)\n...\nwith torch.autocast('cpu', dtype=torch.float16):\n"
        "    loss = model(x).square().mean() * 1e-4\nloss.backward()\n```\n\ntorch says nothing. The doctor, under "
        "CIUIC-C3: `float16 without a loss scale: 87% of "
        "the gradient elements looked at are zero and 100% of the others are below float16's smallest normal number`."
    ),
    depth=1,
)

_F8 = Code(
    code="CIUIC-F8",
    title="an optimizer steps with gradients that are still multiplied by the loss scale",
    severity=Severity.CRITICAL,
    meaning=(
        "Under a GradScaler each optimizer must step through the scaler, which divides its gradients by the scale and "
        "leaves out steps that are not finite. An optimizer that steps by itself gets gradients that are up to 65536 "
        "times too large: SGD flies away, Adam hides the factor behind its normalisation until an overflow comes."
    ),
    detection=(
        "A backward pass of a scaled loss has written to the gradients of an optimizer, nothing has touched them since "
        "(neither unscale_ nor a division by hand), and the optimizer's own step is called, not scaler.step. At least "
        "two steps; optimizers whose gradients come from a loss that was not scaled are no finding."
    ),
    fix="scaler.step(optimizer) for every optimizer, then scaler.update() once",
    fixes=(
        "```python\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.step(optimizer_of_the_head)\n"
        "scaler.update()\n```"
    ),
    example=(
        "```python\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nhead_optimizer.step()  # gradients times "
        "65536\n"
        "scaler.update()\n```\n\n"
        "torch says nothing. The doctor: `optimizer 1 steps by itself with gradients that are still multiplied by the "
        "loss scale 65536: nobody unscales them, and a step that is not finite is not left out`."
    ),
    explains=("CIUIC-F6", "CIUIC-F5"),
    depth=0,
)

_F9 = Code(
    code="CIUIC-F9",
    title="gradients are clipped before they are complete",
    severity=Severity.WARNING,
    meaning=(
        "With accumulation the gradient of a step is the sum over its micro-batches. Clipped after each of them, the "
        "sum "
        "so far is made small again and again: the last micro-batch counts most, the first hardly at all. Under "
        "no_sync() "
        "each rank also clips by a norm of its own."
    ),
    detection=(
        "clip_grad_norm_ was called, and before the step or zero_grad() another backward pass began with exactly the "
        "clipped gradients; in two samples in a row. Gradients that are cleared in between (per-sample clipping) are "
        "not "
        "meant."
    ),
    fix="clip once, right before optimizer.step()",
    fixes=(
        "```python\nloss.backward()\nif last:\n    clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()\n```"
    ),
    example=(
        "```python\nfor i, (x, y) in enumerate(loader):\n    (criterion(model(x), y) / 4).backward()\n"
        "    clip_grad_norm_(model.parameters(), 1.0)   # at each micro-batch\n    if i % 4 == 3:\n"
        "        optimizer.step()\n```\n\n"
        "torch says nothing. The doctor: `gradients are clipped before they are complete`."
    ),
    explains=("CIUIC-F6", "CIUIC-F2"),
    depth=0,
)

CODES: tuple[Code, ...] = (_F1, _F2, _F3, _F4, _F5, _F6, _F7, _F8, _F9)
