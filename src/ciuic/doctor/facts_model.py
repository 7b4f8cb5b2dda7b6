"""Names of facts about gradients, optimizers and replicas: the probe's parts write them, the rules read them."""

MODE = "mode"
"""How the optimizer's parameters are kept equal: ddp, plain (nobody that torch knows), sharded, ledger, local."""
FLOW = "flow"
"""Since this optimizer's last step: [backward passes, forward passes of its models, through their wrapper, of those
with
a reduction after them, 1 when the last one had that, times that no_sync was entered]."""
EXCHANGE = "exchange"
"""Of the program's own collectives: [1 when gradients were exchanged in this step, 1 when a backward pass came after
that,
exchanges of parameters so far, 1 when one came since the last step]."""
AFTER_STEP = "after_step"
"""[Elements of gradients that the program exchanged after the step before this one, where]."""
ALONE = "alone"
"""Of a wrapper whose group holds this rank only: collectives of several ranks so far, of any size but metrics'."""
THROWN = "thrown"
"""[Backward passes since the last step whose gradients were cleared before anybody used them, made by the same lines as
the pass that the step uses; where they were cleared; 1: the step uses none]."""
FROZEN = "frozen"
"""Parameters that need no gradient, and were moved by this step all the same; names by notice."""
OWNED = "owned"
"""[Trainable parameters of the optimizer, of those without a gradient, of those whose gradient is zero, trainable
parameters with a gradient that no optimizer owns, parameters of the optimizer that no model has and that get none,
parameters that are there twice]."""
NONE_SET = "none_set"
"""Digest of the names of the optimizer's parameters whose gradient is None."""
OPTIMIZER_STATE, OPTIMIZER_NUMBERS = "state", "numbers"
"""Digest of a sample of the optimizer's state; of its hyperparameters by group."""
OUTSIDE = "outside"
"""Times since the last record that parameters were written to between two steps."""
STILL = "still"
"""Parameters with a gradient that did not move: [because of learning rate 0, because the update rounds to nothing, for
another reason]."""
CUT = "cut"
"""[Parameters without a gradient although their module was called, of those inside a reentrant checkpoint, without a
gradient and not called]. Absent when calls of modules were not watched."""
STALE = "stale"
"""[Optimizer steps since the last record whose gradients still held those of an earlier step, of those steps the ones
where another optimizer stepped in between, number of that optimizer]."""
AVERAGES = "averages"
"""Digest of copies of a model that are kept beside it; also a kind for CHILDREN."""
MANNER = "manner"
"""Of a record of the first optimizer: for each model that ran [index, digest of paths and classes of its modules,
digest of their modes and settings], MANNER_BYTES each. As a question {model}: [settings, mode] by path under
`modules`, and `context`, what is around the model (autocast)."""
MANNER_BYTES = 4
LEFT_IN_EVALUATION = "left_in_evaluation"
"""Of a record of the first optimizer: dropout and normalisation modules that train in evaluation mode now, as the whole
model does, and were in training mode when it trained before."""
TRAINING, EVALUATION = "training", "evaluation"
"""Modes."""

# ---- notices -----------------------------------------------------------------------------------------------

NAMES = "names"
"""Notice {what: one of the keys below, names: at most NAMES_MAX, count, optimizer, step}: when it is new or has "
"changed."""
NAMES_MAX = 12
WITHOUT_GRADIENT = "without_gradient"
CUT_NAMES, REENTRANT_NAMES, IDLE_NAMES = "cut_names", "reentrant_names", "idle_names"
ZERO_GRADIENT = "zero_gradient"
UNOWNED = "unowned"
STRANGERS = "strangers"
"""Parameters of the optimizer that no model has; `names` are the model's parameters of the same shape, if any."""
SHARED = "shared"
"""Names are parameters that another optimizer owns as well; `other` is its number, `same` 1 when both used one "
"gradient."""
UNREGISTERED = "unregistered"
"""Trainable parameters that DDP does not reduce; `how`: unfrozen, added, ignored, hooks lost."""
UNTOUCHED = "untouched"
"""Parameters with a gradient to which the last backward pass of the step added nothing."""
WRITTEN = "written"
"""Parameters that were written to between two steps; `by` is `load_state_dict` when that was it."""
STILL_RATE, STILL_ROUNDING, STILL_OTHER = "still_rate", "still_rounding", "still_other"
"""Parameters that did not move; `update` and `spacing`: sizes of the wanted update and of the numbers' grid there."""
STALE_NAMES = "stale_names"
MODEL = "model"
"""Notice {index, name, kind, wrapper options}: a model was found."""
EVALUATED = "evaluated"
"""Notice {model, count, buffers}: an evaluation begins, with the digest of buffers; also a kind for CHILDREN."""
CUT_CALL = "cut_call"
"""Notice {call, site, shape, module, how}: a collective without gradient took a tensor that needs one."""

# ---- questions ---------------------------------------------------------------------------------------------

SKETCH = "sketch"
"""Question {of, optimizer, step, names}: by name [length, elements, SIGNS float32 as bytes, digests of BLOCKS "
"blocks]."""
SIGNS = 32
BLOCKS = 32
