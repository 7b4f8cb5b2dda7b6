"""When a fragment's snapshot is renewed: the same on the hub and in the copies that nodes keep.

So a node that began with the same snapshot writes the next one at the same version, with the same bytes, and others can
take it from there.
"""

SNAPSHOT_SHARE = 0.5
"""A snapshot is written when the entries since the last one exceed this share of the base: a joiner's download and a
restart's replay stay bounded."""


def is_snapshot_due(entry_bytes: int, element_count: int) -> bool:
    """`entry_bytes`: of the frames of all entries since the last snapshot."""
    return entry_bytes > SNAPSHOT_SHARE * 4 * element_count
