"""How the nodes of a run synchronise at the moment: what the job gave, what was chosen, what an operator changed."""

import msgspec

from ciuic.ledger.inbox import PolicyKind


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Hold from one round boundary to the next change; durable in the journal."""

    policy: PolicyKind = "sync"
    interval: int = 8
    """Inner steps per push of a node of average speed."""
    codec_up: str = "1-bit"
    codec_down: str = "1-bit"
    why: str = ""
    """Where they come from, for people: the job, measured facts, an operator."""
    by_hand: bool = False
    """An operator gave them: nothing is chosen over them."""

    def describe(self) -> str:
        """One line."""
        codecs = self.codec_up if self.codec_up == self.codec_down else f"{self.codec_up} up, {self.codec_down} down"
        often = "every step" if self.interval == 1 else f"every {self.interval} steps"
        return f"{self.policy}, {codecs}, {often}" + (f" ({self.why})" if self.why else "")
