"""Has torch.compile been used? What it has traced runs without the probe's hooks."""

import sys


def has_compiled() -> bool:
    """Whether torch.compile has made a graph in this process. Dynamo is not imported for the question."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", {})
    return "stats" in counters and bool(counters["stats"].get("unique_graphs"))
