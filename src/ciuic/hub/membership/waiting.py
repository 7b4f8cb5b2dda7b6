"""What a run waits for, said to people. Pure."""

import re

from ciuic.hub.membership.records import Node, Run

REFUSED_SHOWN = 8


def waiting_text(run: Run, ready: list[Node], refused: list[str]) -> str:
    """How many nodes are missing, who is ready, from where nobody is, and what keeps each other node out."""
    missing = run.min_nodes - len(ready)
    text = f"{missing} more node{'s' if missing > 1 else ''} of {run.min_nodes} needed"
    if ready:
        text += f"; ready: {', '.join(node.node_id for node in ready)}"
    absent = [place for place in run.locations if all(node.location != place for node in ready)]
    if absent:
        text += f"; nobody ready from {', '.join(absent)}"
    if refused:
        text += f"; not taken: {'; '.join(refused[:REFUSED_SHOWN])}"
    return text


def gist(reason: str) -> str:
    """The reason without measured values, which change all the time."""
    return re.sub(r"measured [-+.e\d]+", "measured", reason)
