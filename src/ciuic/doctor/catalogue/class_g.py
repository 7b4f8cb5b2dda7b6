"""Class G: learning rate and time step."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

_APART = ("CIUIC-A6", "CIUIC-D2", "CIUIC-D4")
"""What replicas that are updated differently look like."""

_G1 = Code(
    code="CIUIC-G1",
    title="the scheduler steps several times at each step of the optimizer",
    severity=Severity.CRITICAL,
    meaning=(
        "A prepared scheduler of Accelerate steps once per process, because it expects a schedule for the steps of one "
        "process. A schedule made for the steps that are really taken ends N times too early: a cosine is at zero "
        "after "
        "1/N of the run, and may be back at the maximum at its end."
    ),
    detection=(
        "Steps of the scheduler right after each other, without a backward pass between, at each step of the "
        "optimizer; "
        "and the schedule has ended (its planned steps are over, or the rate has been at its lowest for a tenth of the "
        "run) while training goes on. Without the second it is a note: a schedule of N times as many steps is right."
    ),
    fix="give the schedule num_processes times as many steps, or do not prepare the scheduler",
    fixes=(
        "```python\nscheduler = CosineAnnealingLR(optimizer, T_max=steps * accelerator.num_processes)\n```\n\n"
        "or `Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))`, or "
        "`step_scheduler_with_optimizer=False` and your own `scheduler.step()`."
    ),
    example=(
        "```python\nscheduler = CosineAnnealingLR(optimizer, T_max=20)\n"
        "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)\n"
        "for step in range(20):\n    ...\n    optimizer.step()\n    scheduler.step()\n```\n\n"
        "torch says nothing; the rate is 0 at step 10 and at its maximum at step 20. The doctor: `CosineAnnealingLR "
        "steps "
        "2 times at each step of the optimizer: it has ended after 20 of its steps while training goes on`."
    ),
    explains=("CIUIC-G6", "CIUIC-G7", "CIUIC-B4"),
    depth=0,
)

_G2 = Code(
    code="CIUIC-G2",
    title="the scheduler steps at every micro-batch",
    severity=Severity.WARNING,
    meaning=(
        "With gradient accumulation one optimizer step takes k micro-batches. A scheduler that steps at each of them "
        "runs "
        "k times too fast: the warm-up is too short, and the rate is at its end after 1/k of the run."
    ),
    detection=(
        "Steps of the scheduler with backward passes but no optimizer step between them, as often as there are "
        "micro-batches. Schedulers that step once per epoch or evaluation do not."
    ),
    fix="call scheduler.step() only where optimizer.step() is called",
    fixes="```python\nif (i + 1) % accumulation_steps == 0:\n    optimizer.step()\n    scheduler.step()\n```",
    example=(
        "```python\nfor i, (x, y) in enumerate(loader):\n    (loss_of(x, y) / 4).backward()\n    if i % 4 == 3:\n"
        "        optimizer.step()\n    scheduler.step()\n```\n\n"
        "torch warns only when the very first call comes first. The doctor: `LambdaLR steps at every micro-batch, 16 "
        "times "
        "in 4 steps of the optimizer: the schedule runs 4 times too fast`."
    ),
    explains=("CIUIC-G6", "CIUIC-G7", "CIUIC-G1", "CIUIC-B4"),
    depth=0,
)

_G3 = Code(
    code="CIUIC-G3",
    title="the first step has a learning rate far above the warm-up's",
    severity=Severity.WARNING,
    meaning=(
        "One step at full rate before the warm-up can undo an initialisation or a checkpoint; Adam's first step has "
        "length 1."
    ),
    detection=(
        "The rate of the first step is at least twice that of the second, and from there it rises. Cyclic schedules "
        "and a "
        "warm-up from 0 are no finding."
    ),
    fix="set the first rate before the first optimizer.step(): build the scheduler before the loop",
    fixes="A rate that is set by hand belongs before the step: `group['lr'] = rate(step)` and then `optimizer.step()`.",
    example=(
        "```python\nfor step in range(steps):\n    ...\n    optimizer.step()\n"
        "    for group in optimizer.param_groups:\n        group['lr'] = warm_up(step)\n```\n\n"
        "torch says nothing. The doctor: `the first step is made with a learning rate of 0.01, the second with "
        "0.0005, and "
        "then it rises: the warm-up begins one step too late`."
    ),
    depth=1,
)

_G4 = Code(
    code="CIUIC-G4",
    title="learning rate or other settings of the optimizer differ between ranks",
    severity=Severity.CRITICAL,
    meaning=(
        "Equal gradients and unequal settings give unequal weights: the replicas drift apart from the first step. The "
        "usual causes are a rate that depends on the rank's own data or rank number, and a scheduler that looks at the "
        "rank's own validation loss."
    ),
    detection=(
        "The rate and a checksum of all other numbers of the optimizer's groups, on all ranks that hold one model."
    ),
    fix="compute settings on one rank and broadcast them, or from numbers that are equal on all",
    fixes="ReduceLROnPlateau needs one metric: `dist.all_reduce(metric); scheduler.step(metric / world_size)`.",
    example=(
        "```python\noptimizer = SGD(model.parameters(), lr=0.01 * (1 + rank))\n```\n\n"
        "torch says nothing. The doctor: `rank 1 has another learning rate than the others: 0.01 on rank 0, 0.02 on "
        "rank 1`."
    ),
    explains=_APART,
    depth=0,
)

_G5 = Code(
    code="CIUIC-G5",
    title="a scheduler turns the rate of an optimizer that is not used, or is never stepped",
    severity=Severity.WARNING,
    meaning="The schedule has no effect: the rate in use stays what it was, and printed rates may say otherwise.",
    detection=(
        "A scheduler has stepped three times while its optimizer has never stepped and another one has; two "
        "schedulers of "
        "one kind turn one optimizer while another has none; or a scheduler has made no step in three epochs. "
        "Schedulers "
        "that step once per epoch and the parts of a SequentialLR are no finding."
    ),
    fix="build the scheduler from the optimizer that steps, after it was built for the last time",
    fixes="After `optimizer = AdamW(...)` is called again, build the scheduler again too.",
    example=(
        "```python\nscheduler = StepLR(optimizer, 10)\noptimizer = AdamW(model.parameters())  # another one\n```\n\n"
        "torch says nothing. The doctor: `StepLR has made 3 steps on a AdamW that never steps: the learning rate in "
        "use "
        "stays as it is`."
    ),
    explains=("CIUIC-B4",),
    depth=0,
)

_G6 = Code(
    code="CIUIC-G6",
    title="the learning rate rises again after its minimum",
    severity=Severity.WARNING,
    meaning=(
        "A cosine goes up again after T_max steps. The end of the run then trains with a high rate and undoes what "
        "the low "
        "one has reached."
    ),
    detection=(
        "A scheduler that is not cyclic by intention has made more steps than it was made for, and the rate has risen "
        "by a "
        "twentieth of its range since its minimum. CosineAnnealingWarmRestarts, CyclicLR and OneCycleLR are no finding."
    ),
    fix="make the schedule as long as the run: T_max = number of optimizer steps",
    fixes="For restarts on purpose use `CosineAnnealingWarmRestarts`: it says what is meant.",
    example=(
        "```python\nscheduler = CosineAnnealingLR(optimizer, T_max=1000)  # and 1500 steps are made\n```\n\n"
        "torch says nothing. The doctor: `the learning rate rises again, from 0 at step 1001 to 0.0014 now: "
        "CosineAnnealingLR was made for 1000 steps and has made 1250`."
    ),
    depth=1,
)

_G7 = Code(
    code="CIUIC-G7",
    title="the scheduler steps before the optimizer's first step",
    severity=Severity.WARNING,
    meaning="The first value of the schedule is never used, and everything is one step early.",
    detection=(
        "One step of the scheduler after the first forward pass and before the optimizer's first step. Steps before "
        "any "
        "forward pass wind a resumed schedule forward and are no finding; so is a first step that a loss scaler skips."
    ),
    fix="call scheduler.step() after optimizer.step()",
    fixes="",
    example=(
        "```python\nscheduler.step()\noptimizer.step()\n```\n\n"
        "torch warns once: `Detected call of lr_scheduler.step() before optimizer.step()`. The doctor: "
        "`LambdaLR steps before the optimizer's first step: the first value of the schedule is never used`."
    ),
    depth=1,
)

_G8 = Code(
    code="CIUIC-G8",
    title="step counters of the schedule differ between ranks",
    severity=Severity.CRITICAL,
    meaning=(
        "The ranks are at different places of one schedule: their rates differ now or will, and the replicas drift "
        "apart."
    ),
    detection="The number of steps that the scheduler has made, at the same step of the optimizer, on all ranks.",
    fix="call scheduler.step() on all ranks, under a condition that is the same on all",
    fixes="`if rank == 0: scheduler.step()` belongs to logging, not to training.",
    example=(
        "```python\nif rank == 0:\n    scheduler.step()\n```\n\n"
        "torch says nothing. The doctor: `the scheduler has made another number of steps on rank 1 (3 on rank 0, 0 on "
        "rank "
        "1) at the same 4 steps of the optimizer`."
    ),
    explains=("CIUIC-G4", *_APART),
    depth=0,
)

CODES: tuple[Code, ...] = (_G1, _G2, _G3, _G4, _G5, _G6, _G7, _G8)
