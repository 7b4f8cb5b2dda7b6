"""Why a push is refused, before it is stored."""

from ciuic.errors import LayoutMismatchError, NonFiniteError
from ciuic.ledger.aggregate import Aggregator
from ciuic.ledger.entry import Push, RejectReason


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
    try:
        aggregator.check(push)
    except NonFiniteError as error:
        return "not-finite", str(error)
    except LayoutMismatchError as error:
        return "wrong-layout", str(error)
    return None
