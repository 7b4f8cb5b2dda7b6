"""Nodes that a ledger counts on although they are not in the run: after a crash, or with a late word. Pure."""

from collections.abc import Collection, Iterable

STRAY_S = 5.0
"""A stray is gone after this long: the errand that tells a death is faster as a rule."""


class Strays:
    """Remembers since when each has been one."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, str], float] = {}
        """(run, node) -> time."""

    def gone(
        self, run_id: str, present: Iterable[str], members: Collection[str], *, now_s: float, after_s: float = 0.0
    ) -> list[str]:
        """Nodes whose workers the ledger must not count on any more: those that have been strays for `after_s`.

        `present`: on whom the ledger counts; `members`: who is in the run.
        """
        strays = [node for node in present if node not in members]
        if not strays and not self._since_s:
            return []
        now = {(run_id, node) for node in strays}
        known = {key: since_s for key, since_s in self._since_s.items() if key[0] != run_id or key in now}
        self._since_s = dict.fromkeys(now, now_s) | known
        return sorted(node for node in strays if now_s - self._since_s[run_id, node] >= after_s)
