"""Names of facts about loss, gradients, clipping and learning rate: the probe's parts write, the rules read."""

TAKEN = "taken"
"""Steps that this optimizer really made so far."""
PASSES = "passes"
"""Backward passes of the program so far."""
LOSS = "loss"
"""Mean of the rank's own losses in this step."""
FORM = "form"
"""How the loss of this step is made: [micro-batches, product of the constant factors between the reduction and the
root, reduction (mean, sum or empty), labels that count, how often it was divided by the number of micro-batches,
smallest and largest number of labels by which a loss was divided since the last sample]. The labels are of all
micro-batches together, 0 when they are not known; the divisions are -1 when they are not known."""
WITNESS = "witness"
"""A few gradient elements followed from the backward pass to the step: [number of the parameter, four float32
projections right after the last backward pass, the same when the optimizer gets them, the factor that clipping and
unscaling explain, kind of the model]."""
PROJECTIONS = 4
REDUCED = "reduced"
"""Collectives of the program on gradients: [calls, operation, name of the first, call site, 1 when DDP had averaged
it already, ranks of the group]."""
CLIP = "clip"
"""Clipping by norm: [calls since the last sample, the last norm (-1: not known), its limit, calls in a row whose
norm was far above the limit]."""
PARTIAL_CLIP = "partial_clip"
"""Times since the last record that gradients were clipped and a further backward pass added to them before the step."""
EARLY_CLIP = "early_clip"
"""[Times so far that scaled gradients were clipped, the loss scale at the last]."""
SCALED_STEP = "scaled_step"
"""[Steps so far of this optimizer, made by no scaler, whose gradients were those of a scaled loss and had not been
touched since the backward pass; the loss scale at the last]."""
SCALER = "scaler"
"""[Loss scale, steps skipped so far, skipped in a row]."""
HALF = "half"
"""Gradients of a float16 autocast without loss scale: [share of elements that are zero, share of the others below the
smallest normal float16]."""
RATES = "rates"
"""Learning rate of each group, the first four."""
HYPER = "hyper"
"""Checksum of the other numbers of all groups; as a question {optimizer, step}: these numbers by name."""
LOW = "low"
"""[The lowest learning rate of the first group so far, the attempt that had it first, the highest before it]."""
SCHEDULE = "schedule"
"""The scheduler of the optimizer: [class, its steps, last_epoch, planned steps (0: not known), steps between two
micro-batches, steps right after another one, steps before the optimizer's first that came after a forward pass, 1 when
Accelerate steps it]."""
STRAY = "stray"
"""[Class, steps, optimizer's class, what] of a scheduler that turns nothing: what is `stranger` (its optimizer never
steps), `left` (its optimizer has not stepped for that many of its steps, another one has taken its parameters over),
`idle` (it never steps, after that many epochs) or `twin` (two on one optimizer, none on another)."""

LOSS_NOT_FINITE = "loss_not_finite"
"""Notice {value, input, parameter, module}: the rank's own loss is not finite; the others say where it came from, empty
when not known."""
GRADIENT_NOT_FINITE = "gradient_not_finite"
"""Notice {parameter, value}: the rank's own gradient, before any reduction."""
SKIPPED = "step_skipped"
"""Notice {optimizer, scale, in_a_row, finite_loss}: a scaler has skipped a step."""
WEIGHTS_REDUCED = "weights_reduced"
"""Notice {number, before, after, parameter, site, ranks}: the program has reduced a parameter itself, for the
number-th time; projections of it before the call and at the next forward pass or step."""
