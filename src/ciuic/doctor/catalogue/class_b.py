"""Class B: the optimizer does not own the model."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

_B1 = Code(
    code="CIUIC-B1",
    title="parameters that get gradients belong to no optimizer",
    severity=Severity.CRITICAL,
    meaning=(
        "They are part of the model and the loss depends on them, but nobody ever moves them. The rest of the"
        " model trains around what they were at the start."
    ),
    detection=(
        "The parameters of the trained models that require a gradient and have one are compared with those of"
        " every optimizer the interpreter holds, at two sampled steps. Frozen parameters and those of a "
        "second optimizer (GAN) are not meant."
    ),
    fix=(
        "build the optimizer from the model's parameters, after the model is complete; or freeze them: "
        "p.requires_grad_(False)"
    ),
    fixes=(
        "```python\nmodel.head = nn.Linear(32, 4)\noptimizer = AdamW(model.parameters())   # after the last change\n```"
    ),
    example=(
        "```python\noptimizer = AdamW(model.body.parameters())\nmodel(x).mean().backward()\n```\n\n"
        "torch says nothing. The doctor: `head.weight, head.bias get gradients, but no optimizer owns them: "
        "they never move`."
    ),
    explains=(
        "CIUIC-B4",
        "CIUIC-I3",
    ),
    depth=0,
)

_B2 = Code(
    code="CIUIC-B2",
    title="the optimizer holds tensors that are not the model's",
    severity=Severity.CRITICAL,
    meaning=(
        "The optimizer was built from a copy, or before the model was converted, wrapped or changed. Its "
        "steps move tensors that no forward pass reads: the loss stays where it is."
    ),
    detection=(
        "Parameters of the optimizer that get no gradient, while parameters of a trained model that no "
        "optimizer owns get some, at two sampled steps. Names are the model's. An average of the weights that"
        " is not trained (EMA) is not meant."
    ),
    fix="build the optimizer after the model is final: after .to(), deepcopy, fully_shard, replaced layers",
    fixes="```python\nmodel = fully_shard(model)\noptimizer = AdamW(model.parameters())   # not before\n```",
    example=(
        "```python\noptimizer = AdamW(copy.deepcopy(model).parameters())\n```\n\n"
        "torch says nothing. The doctor: `the optimizer holds tensors that the trained model does not use "
        "(all of its parameters get no gradient)`."
    ),
    explains=(
        "CIUIC-B1",
        "CIUIC-B4",
        "CIUIC-C1",
        "CIUIC-A2",
        "CIUIC-G1",
        "CIUIC-G2",
        "CIUIC-I1",
        "CIUIC-I3",
        "CIUIC-F5",
    ),
    depth=0,
)

_B3 = Code(
    code="CIUIC-B3",
    title="parameters are owned twice",
    severity=Severity.WARNING,
    meaning=(
        "Two optimizers, or two groups, move the same parameters: the step is about twice as large, weight "
        "decay counts twice, and moments are of mixed gradients."
    ),
    detection=(
        "Identities of parameters in the optimizers that step in turn. Two optimizers with parameters of "
        "their own (GAN), an optimizer inside another one, and one that replaced another are not meant."
    ),
    fix="give each parameter to one optimizer",
    fixes=(
        "```python\nd = AdamW(discriminator.parameters())\n"
        "g = AdamW(generator.parameters())   # not chain(generator, discriminator)\n```"
    ),
    example=(
        "```python\na = AdamW(model.parameters())\nb = SGD(model.parameters(), lr=0.1)\na.step(); b.step()\n"
        "```\n\n"
        "torch says nothing. The doctor: `head.weight belongs to optimizers 0 and 1: both step with the same "
        "gradients`."
    ),
    explains=("CIUIC-C5",),
    depth=0,
)

_B4 = Code(
    code="CIUIC-B4",
    title="gradients arrive, but the parameter does not move",
    severity=Severity.WARNING,
    meaning=(
        "A ghost gradient: the backward pass works for a parameter that stays what it is. Either its learning"
        " rate is 0, or the update is smaller than the distance between two numbers of its type, or something"
        " undoes the step."
    ),
    detection=(
        "At most 1024 elements of each parameter are compared before and after sampled steps. Learning rate 0"
        " for everything (the first step of a warm-up), skipped steps, and gradients that are rounding noise "
        "(a bias before BatchNorm) are not meant. bfloat16 weights are named as such, with the sizes of "
        "update and spacing."
    ),
    fix="give its group a learning rate, keep float32 weights, or freeze it",
    fixes=(
        "Around 0.05 two bfloat16 numbers are 2e-4 apart: updates of 1e-5 round to nothing. Keep float32 "
        "weights and let autocast compute in bfloat16."
    ),
    example=(
        "```python\nmodel = model.to(torch.bfloat16)\noptimizer = AdamW(model.parameters(), lr=1e-6)\n```\n\n"
        "torch says nothing. The doctor: `body.0.weight and 11 more: gradients come and nothing moves: updates"
        " of about 1.0e-06 are smaller than half the distance between two bfloat16 numbers there`."
    ),
    depth=1,
)

_B5 = Code(
    code="CIUIC-B5",
    title="a frozen parameter still moves",
    severity=Severity.WARNING,
    meaning=(
        "requires_grad_(False) keeps new gradients away; it does not tell the optimizer. A gradient that is still "
        "there, or zeros in its place, lets weight decay, momentum and Adam's moments go on moving the parameter."
    ),
    detection=(
        "A parameter of an optimizer that needs no gradient and has one, and whose values are others after the step "
        "than before."
    ),
    fix="clear the gradient as well: p.requires_grad_(False); p.grad = None",
    fixes="Or build the optimizer anew from what is still trained: `filter(lambda p: p.requires_grad, ...)`.",
    example=(
        "```python\nfor p in model.stem.parameters():\n    p.requires_grad_(False)\n"
        "optimizer.zero_grad(set_to_none=False)\n```\n\n"
        "torch says nothing. The doctor: `stem.weight, stem.bias need no gradient, but optimizer 0 still moves them`."
    ),
    explains=(),
    depth=0,
)

CODES: tuple[Code, ...] = (
    _B1,
    _B2,
    _B3,
    _B4,
    _B5,
)
