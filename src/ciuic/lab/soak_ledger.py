"""A run's entries counted again from the hub's own files, without believing what the hub says of them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from ciuic.errors import CheckFailedError
from ciuic.ledger.entry import EntryHeader, entry_from_frame
from ciuic.ledger.frame import split_frames


@dataclass(frozen=True, kw_only=True)
class LedgerCount:
    """What the entries of all fragments say together."""

    versions: list[int]
    """By fragment."""
    digests: list[str]
    pushes: int
    """Merged ones."""
    distinct_samples: int
    duplicated_samples: int
    """Trained again by somebody after a lease had gone back."""
    doubles_by: list[str]
    """Nodes that trained a sample which another push had too."""


def count_ledger(run_folder: Path, total: int) -> LedgerCount:
    """Read every entry. Raises CheckFailedError naming the first thing that cannot be: a gap in the versions, a broken
    chain of digests, a push that is merged twice, a sample outside of the run.
    """
    folders = sorted(run_folder.glob("fragment-*"), key=lambda path: int(path.name.removeprefix("fragment-")))
    headers = [_headers(folder / "log.bin") for folder in folders]
    for fragment, found in enumerate(headers):
        _check_chain(fragment, found)
    times = np.zeros(total, np.int32)
    for contributor in (c for found in headers for header in found for c in header.contributors):
        for start, stop in contributor.ranges:
            if not 0 <= start < stop <= total:
                raise CheckFailedError("samples lie within the run", cause=f"{contributor.node}: [{start}, {stop})")
            times[start:stop] += 1
    doubles = np.flatnonzero(times > 1)
    return LedgerCount(
        versions=[found[-1].version if found else 0 for found in headers],
        digests=[found[-1].digest if found else "" for found in headers],
        pushes=sum(len(header.contributors) for found in headers for header in found),
        distinct_samples=int(np.count_nonzero(times)),
        duplicated_samples=int((times[doubles] - 1).sum()),
        doubles_by=_who(doubles, (header for found in headers for header in found)),
    )


def _headers(log: Path) -> list[EntryHeader]:
    return [entry_from_frame(bytes(frame)).header for frame in split_frames(log.read_bytes(), "entry")]


def _check_chain(fragment: int, headers: list[EntryHeader]) -> None:
    numbers = [header.version for header in headers]
    if numbers != list(range(1, len(numbers) + 1)):
        raise CheckFailedError("versions are without gaps", cause=f"fragment {fragment} has {numbers[:20]} ...")
    for before, after in pairwise(headers):
        if after.previous_digest != before.digest:
            raise CheckFailedError(
                "each entry follows from the one before", cause=f"fragment {fragment}, version {after.version}"
            )
    merged = Counter((c.node, c.incarnation, c.sequence) for header in headers for c in header.contributors)
    twice = [key for key, times in merged.items() if times > 1]
    if twice:
        raise CheckFailedError("no push is merged twice", cause=f"fragment {fragment}: {twice[:5]}")


def _who(doubles: np.ndarray, headers: Iterable[EntryHeader]) -> list[str]:
    if not len(doubles):
        return []
    found = set()
    for contributor in (c for header in headers for c in header.contributors):
        for start, stop in contributor.ranges:
            at = int(np.searchsorted(doubles, start))
            if at < len(doubles) and doubles[at] < stop:
                found.add(contributor.node)
    return sorted(found)
