"""What a run synchronises with: each value given by the job, chosen from measurements, or a default until then."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Literal, Protocol

from ciuic.codec import FragmentShape
from ciuic.ledger.layout import Layout
from ciuic.plan.choice import Choice, choose
from ciuic.plan.facts import Auto, CodecSpeeds, HubLink, NodeFacts, Wishes, gather_facts
from ciuic.plan.frontier import LOSS_PER_LOG_TIME
from ciuic.plan.predict import Round, Setting, predict
from ciuic.plan.words import describe, summary

Source = Literal["given", "default", "measured"]

DEFAULT_CODEC = "1-bit"
DEFAULT_INTERVAL = 8
GRADIENT_CODEC = "int4"
"""The default where gradients are sent, every step."""
WORTH_A_CHANGE = 1.10
"""Settings in force stay until others reach the same loss in a tenth less time."""


class Sync(Protocol):
    """What is read of `job.sync`."""

    @property
    def codec_up(self) -> str: ...
    @property
    def codec_down(self) -> str: ...
    @property
    def interval(self) -> int | Auto: ...
    @property
    def overlap(self) -> bool | Auto: ...
    @property
    def send(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Settings that can be used, and where each comes from."""

    codec_up: str
    codec_down: str
    interval: int
    sources: dict[str, Source]
    """By field: codec_up, codec_down, interval."""
    why: str
    """One line for people; goes into the ledger's settings."""
    choice: Choice | None = None
    """The prediction behind it; None while too little is measured."""

    @property
    def setting(self) -> Setting:
        """The same as one thing, to pass as `current` next time."""
        plain = Setting(codec_up=self.codec_up, codec_down=self.codec_down, interval=self.interval)
        return plain if self.choice is None else self.choice.setting


def wishes_of(sync: Sync) -> Wishes:
    """What a job's [sync] fixes."""
    return Wishes(
        codec_up=sync.codec_up,
        codec_down=sync.codec_down,
        interval=sync.interval,
        overlap=sync.overlap,
        gradients=sync.send == "gradient",
    )


def shape_of(layout: Layout) -> FragmentShape:
    """All fragments of a layout as one: what is exchanged per interval."""
    shapes = [layout.fragment_shape(fragment) for fragment in range(layout.fragment_count)]
    return FragmentShape(
        rows=tuple(row for shape in shapes for row in shape.rows),
        small_count=sum(shape.small_count for shape in shapes),
        buffer_count=sum(shape.buffer_count for shape in shapes),
    )


def default_settings(wishes: Wishes) -> Resolved:
    """Before anything is measured: 1-bit every 8 steps works on every link; gradients are sent with 4 bits."""
    free = _free(wishes)
    codec, interval = (GRADIENT_CODEC, 1) if wishes.gradients else (DEFAULT_CODEC, DEFAULT_INTERVAL)
    return Resolved(
        codec_up=codec if free["codec_up"] else wishes.codec_up,
        codec_down=codec if free["codec_down"] else wishes.codec_down,
        interval=interval if wishes.interval == "auto" else wishes.interval,
        sources={name: "default" if is_free else "given" for name, is_free in free.items()},
        why="defaults until links and steps are measured" if any(free.values()) else "job",
    )


def resolve(
    wishes: Wishes,
    shape: FragmentShape,
    nodes: Sequence[NodeFacts],
    speeds: CodecSpeeds,
    *,
    current: Setting | None = None,
    hub: HubLink | None = None,
) -> Resolved:
    """The settings of a run, at its start and again whenever more is measured.

    `current`: what is in force; it stays unless the change is worth it.
    """
    facts = gather_facts(shape, nodes, speeds, hub)
    if facts is None:
        return default_settings(wishes) if current is None or not wishes.is_free else _kept(wishes, current)
    choice = choose(facts, wishes)
    free = _free(wishes)
    current = None if current is None else replace(current, gradients=wishes.gradients)
    if current is not None and not _is_worth_it(choice, current):
        found = predict(facts, current, wishes.overlap)
        choice = Choice(facts=facts, wishes=wishes, setting=current, round=found)
    return Resolved(
        codec_up=choice.setting.codec_up,
        codec_down=choice.setting.codec_down,
        interval=choice.setting.interval,
        sources={name: "measured" if is_free else "given" for name, is_free in free.items()},
        why=f"measured: {summary(choice)}" if wishes.is_free else "job",
        choice=choice,
    )


def _is_worth_it(choice: Choice, current: Setting) -> bool:
    """Whether a change from `current` reaches the same loss in a tenth less time."""
    wishes = choice.wishes
    fits = (
        wishes.codec_up in ("auto", current.codec_up)
        and wishes.codec_down in ("auto", current.codec_down)
        and wishes.interval in ("auto", current.interval)
    )
    if not fits:
        return True
    return gain_in_time(predict(choice.facts, current, wishes.overlap), choice.round) >= WORTH_A_CHANGE


def gain_in_time(current: Round, other: Round) -> float:
    """How many times as fast `other` reaches the same loss."""
    return exp((current.loss_at_equal_time - other.loss_at_equal_time) / LOSS_PER_LOG_TIME)


def _kept(wishes: Wishes, current: Setting) -> Resolved:
    free = _free(wishes)
    return Resolved(
        codec_up=current.codec_up if free["codec_up"] else wishes.codec_up,
        codec_down=current.codec_down if free["codec_down"] else wishes.codec_down,
        interval=current.interval if wishes.interval == "auto" else wishes.interval,
        sources={name: "default" if is_free else "given" for name, is_free in free.items()},
        why=f"{describe(current)} kept: links and steps are not measured now",
    )


def _free(wishes: Wishes) -> dict[str, bool]:
    return {
        "codec_up": wishes.codec_up == "auto",
        "codec_down": wishes.codec_down == "auto",
        "interval": wishes.interval == "auto",
    }
