"""What each node is expected to do in a run: its share of communication and its tokens per second."""

from dataclasses import dataclass

from ciuic.codec import FragmentShape
from ciuic.plan.facts import Auto, CodecSpeeds, Facts, Link, NodeFacts
from ciuic.plan.predict import Setting, predict


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all nodes of a run have in common."""

    shape: FragmentShape
    nodes: int
    """How many take part."""
    setting: Setting
    overlap: bool | Auto
    speeds: CodecSpeeds
    tokens_per_step: int
    """Of one node."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One node, predicted."""

    communication_share: float
    """Of its time, in which it does not train because of communication; it waits for no other node here."""
    tokens_per_s: float


def expect(node: NodeFacts, work: Work) -> Expected | None:
    """None while its link or its step time is not known."""
    if not node.has_link or not node.step_s:
        return None
    link = Link(
        up_bits_per_s=node.up_bits_per_s or 0.0, down_bits_per_s=node.down_bits_per_s or 0.0, rtt_s=node.rtt_s or 0.0
    )
    facts = Facts(shape=work.shape, nodes=max(1, work.nodes), link=link, step_s=node.step_s, speeds=work.speeds)
    found = predict(facts, work.setting, work.overlap)
    tokens_per_s = work.setting.interval * work.tokens_per_step / found.round_s
    return Expected(communication_share=found.exposed_share, tokens_per_s=tokens_per_s)
