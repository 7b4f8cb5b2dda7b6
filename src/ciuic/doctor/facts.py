"""Names of facts that more than one module knows: the probe's parts write them, the rules read them."""

PARAMETERS, GRADIENTS, BUFFERS = "params", "grads", "buffers"
"""Facts of a record: root digests. Parameters before the step; gradients as the optimizer gets them; buffers at the
first forward pass of the step, right after DDP's broadcast."""
KINDS = (PARAMETERS, GRADIENTS, BUFFERS)
CHILDREN = "children"
"""Question {of: one of KINDS, optimizer, step, path}: digest by full path, of the level below the path."""
