"""Why a push or the first parameters are refused, before they are stored."""

from collections.abc import Collection

import psutil

from ciuic.errors import LayoutMismatchError, ModelError, NonFiniteError, ProtocolError
from ciuic.job import SyncSection
from ciuic.ledger.aggregate import Aggregator
from ciuic.ledger.entry import Push, RejectReason, Snapshot, base_digest
from ciuic.ledger.layout import Layout
from ciuic.units import format_bytes

PLAIN_BYTES, MOMENTUM_BYTES, DELAYED_BYTES, STEP_BYTES, FEEDBACK_BYTES = 26, 8, 4, 16, 4
"""Per element while a round is aggregated (measured): base, residual, mean and their successors; outer momentum; its
delay; in `gradient` mode the moments of the step; and the residual where that has feedback."""
SHARE_OF_MEMORY = 0.9


def bytes_per_element(layout: Layout, sync: SyncSection) -> int:
    """Of the hub's memory, at the peak of a round."""
    needed = PLAIN_BYTES
    if sync.outer_momentum:
        needed += MOMENTUM_BYTES + (DELAYED_BYTES if sync.outer_delay > 1 else 0)
    if layout.step is not None:
        needed += STEP_BYTES + (FEEDBACK_BYTES if layout.step.feedback else 0)
    return needed


def check_memory(layout: Layout, sync: SyncSection, elsewhere: Collection[int] = ()) -> None:
    """Refuse a model that this machine cannot aggregate, before anything is allocated. Raises ModelError.

    `elsewhere`: the fragments that are served by others.
    """
    each = bytes_per_element(layout, sync)
    needed = each * sum(t.element_count for t in layout.tensors if t.fragment not in elsewhere)
    free = psutil.virtual_memory().available
    if needed > SHARE_OF_MEMORY * free:
        raise ModelError(
            f"the model needs {format_bytes(needed)} of memory on the hub, {format_bytes(free)} are free",
            cause=f"{layout.parameter_count:,} parameters, {each} bytes each while a round is aggregated",
            next="run the hub on a machine with more memory, or train a smaller model",
        )


def refusal(
    aggregator: Aggregator, push: Push, *, max_staleness: int, total_samples: int
) -> tuple[RejectReason, str] | None:
    """(reason, detail), or None when the push may wait for its round. Raises FrameError for a wrong payload size."""
    version, base = aggregator.version, push.header.base_version
    behind = f"its base is version {base}, the hub has {version}"
    if base > version:
        return "ahead", behind
    if version - base > max_staleness:
        return "stale", behind
    if any(stop > total_samples for _, stop in push.header.ranges):
        return "wrong-layout", f"it reports samples past the end of the run ({total_samples})"
    if push.header.phase != aggregator.phase:
        return "stale", f"it is of phase {push.header.phase}, the run is in {aggregator.phase} now"
    try:
        aggregator.check(push)
    except NonFiniteError as error:
        return "not-finite", str(error)
    except LayoutMismatchError as error:
        return "wrong-layout", str(error)
    return None


def check_version_0(aggregator: Aggregator, snapshot: Snapshot) -> None:
    """Raises ProtocolError when these parameters cannot be where a run starts."""
    header = snapshot.header
    if (header.layout_digest, header.parts) != (aggregator.layout.digest, ("base",)):
        raise LayoutMismatchError("the uploaded parameters are for another layout")
    aggregator.check_counters(header.counters, "the upload")
    aggregator.check_finite(snapshot.vectors["base"], "the upload")
    if base_digest(snapshot.vectors["base"], header.counters) != header.digest:
        raise ProtocolError("the uploaded parameters have another digest than their header says")
