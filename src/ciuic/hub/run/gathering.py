"""Before the first round: who uploads version 0, and whether enough nodes are there to start together. Pure."""

ARRIVAL_S = 10.0
"""A worker that waits asks again within this time, else it is not counted."""
UPLOAD_S = 60.0
"""An initializer that has not asked or finished for this long is replaced."""


class Gathering:
    """Workers that ask to attach before the run has started."""

    def __init__(self) -> None:
        self._arrived: dict[str, float] = {}
        self.initializer = ""
        self._chosen_s = 0.0
        self._chosen: set[str] = set()

    def arrive(self, node: str, now_s: float) -> None:
        """A worker of this node asks."""
        self._arrived[node] = now_s

    def leave(self, node: str) -> None:
        """The node is gone."""
        self._arrived.pop(node, None)
        if self.initializer == node:
            self.initializer = ""

    def should_initialize(self, node: str, now_s: float) -> bool:
        """Whether this node uploads version 0; the first one that asks, another one when it does not come back."""
        if self.initializer not in ("", node) and now_s - self._chosen_s <= UPLOAD_S:
            return False
        self.initializer, self._chosen_s = node, now_s
        self._chosen.add(node)
        return True

    def uploaders(self) -> list[str]:
        """The nodes that were told to: a slow upload still counts, the first one that is whole wins."""
        return sorted(self._chosen)

    def present(self, now_s: float) -> list[str]:
        """Nodes whose workers wait for the start."""
        return sorted(node for node, at_s in self._arrived.items() if now_s - at_s <= ARRIVAL_S)
