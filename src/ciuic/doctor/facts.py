"""Names of facts that more than one module knows: the probe's parts write them, the rules read them."""

PARAMETERS, GRADIENTS, BUFFERS = "params", "grads", "buffers"
"""Facts of a record: root digests. Parameters before the step; gradients as the optimizer gets them; buffers at the
first forward pass of the step, right after DDP's broadcast."""
KINDS = (PARAMETERS, GRADIENTS, BUFFERS)
UNEVEN = "uneven"
"""Fact of a record: torch's Join has let this rank wait for others that had more inputs, so steps of one number are not
the same step on all ranks. Fact of a beat: the program uses Join, so ranks may make different calls."""
LEFT_IN = "left_in"
"""Fact of a bye: the phase in which the program ended."""
CHILDREN = "children"
"""Question {of: one of KINDS, optimizer, step, path}: digest by full path, of the level below the path."""
MOVEMENT = "movement"
"""Notice of a sampled step: how the parameters of each module moved (at most 256 modules; of ranks 0 to 7). Facts:
`optimizer`; `step`; `modules`: their paths, in the first notice of an optimizer and after a change only; `moved`,
`grads` and `flags`: one byte for each module. A byte b of `moved` stands for log10(length of the movement / length of
the parameters) = (b - 200) / 16, one of `grads` for log10(length of the gradient) = (b - 128) / 12; 0: nothing (no
movement, no gradient, not known). Lengths are estimated from at most 1024 elements of each parameter. Flags: see
MOVED_FLAGS."""
MOVED_FLAGS = {
    1: "gradient is None",
    2: "gradient is zero",
    4: "did not move",
    8: "learning rate 0",
    16: "frozen",
    32: "no optimizer",
}
"""Bits of a module's flag, of any of its parameters."""
MODULES_MAX = 256


def to_byte(log10: float, *, middle: int, steps: int) -> int:
    """A logarithm as one byte of a movement notice; 0 is kept for nothing."""
    return max(1, min(255, round(middle + steps * log10)))
