"""Names of facts about calls, waits and times: the probe's watchdog and timers write them, the rules read them."""

from ciuic.doctor import facts

CALLS = "calls"
"""Of a beat: by group, [number, digest] of its calls so far, at the newest number and at the newest multiples of
powers of two: two ranks that were read at different moments still have a number in common."""
OPEN = "open"
"""Of a beat: the call in which the training thread is, as in `CALL_FIELDS`."""
STILL = "still"
"""Of a beat: the training thread's stack, the program's nearest frame first, when it has done the same for a while."""
CPU = "cpu"
"""Of a beat: share of the time since the last beat that the training thread ran."""
WAITS = "waits"
"""Of a beat: the training thread waits inside a call of torch's."""
SAVES = "saves"
"""Of a beat: its stack has a function that saves."""
PENDING = "pending"
"""Of a beat: by group, [started, done] of torch's Flight Recorder when they differ (DDP's own reductions count)."""
UNEVEN = facts.UNEVEN
LATE = "late"
"""Of a beat: the probe came after the first calls: numbers of different ranks cannot be compared."""
STEP_USUAL = "step_s"
"""Of a beat: median time of a step, in seconds."""
WINDOW = "times"
"""Of a record: [steps, microseconds of each of `TIMES`: the lower quartile over the steps since the last record, then
of each the least]. A step that was disturbed does not count in either."""
TIMES = ("step", "data", "forward", "backward", "update", "other", "save", "waits", "work")
"""step: wall time. backward: without the wait for reductions. update: the optimizer. waits: collectives and DDP's
reductions. work: data, forward, backward, update and other together. The others: wall time in that phase."""
QUEUED = "queued"
"""Of a record with long waits: microseconds a step for which threads of the process could run and got no processor."""
NEW_CALL = "new_call"
"""Notice: a call of a kind that this rank has not made before, sent before it is made. Facts as in `CALL_FIELDS`."""
CALL_FIELDS = ("group", "number", "name", "detail", "site", "step", "ranks")
"""detail: shapes, types and operation where all ranks must agree on them. ranks: of the group; empty: all."""
HISTORY = "call_history"
"""Question {group}: {"calls": [[number, name, detail, site, step], ...], the last ones of this rank, oldest first,
"recorder": [[number, name, sizes], ...] of the Flight Recorder}."""
DDP_BUFFERS, DDP_GRADIENTS = "ddp_buffers", "ddp_gradients"
"""Names of the calls that DDP makes by itself in a forward and in a backward pass."""
