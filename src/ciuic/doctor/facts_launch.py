"""Names of facts about how ranks were started: the probe's part writes them, the rule reads them."""

HOST = "host"
"""Notice {versions: {name: version}, gloo, nccl}: the last two say why the interface in the environment would fail, or
are empty."""
LAYOUT = "layout"
"""Notice, just before DistributedDataParallel is built {number, ranks, tensors, elements, digest, parts}. parts: path
and [tensors, elements] of the modules two levels down, at most PARTS_MAX. ranks: of the group; empty: all."""
PARTS_MAX = 64
