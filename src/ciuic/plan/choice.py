"""Which codec and interval give the least held-out loss per time on these links. Pure.

Candidates are all codecs with intervals of 2 to 500 steps. Two kinds are left out because they cannot win: intervals
too short for the round trip alone, whatever the codec; and intervals in which packing would take over a fifth of the
time. `frontier` is a path through the rest, from the most to the fewest bytes per step, always by the step that costs
the least loss. On it the least `Round.loss_at_equal_time` with overlap is chosen (waiting, where it is allowed and
cheaper, differs by less than noise). Along the path codecs only get smaller and intervals longer, so on a slower link
the choice can only move on: it never sends more per step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log

from ciuic.codec import CODEC_NAMES
from ciuic.plan.facts import Facts, Wishes
from ciuic.plan.frontier import loss_cost
from ciuic.plan.predict import ROOM, Round, Setting, latency_floor_s, predict
from ciuic.plan.wire import payload_bytes

FREE_CODECS = ("none", "bf16", "int8", "int4", "2-bit", "1-bit")
"""What `auto` chooses from, both ways. Top-k is left out: for the same bytes 1-bit at a longer interval loses less."""
GRADIENT_CODECS = ("none", "bf16", "int8", "int4")
"""The same where gradients are sent: fewer bits cost much loss under Adam."""
LADDER = (*range(2, 21), 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 500)
"""Intervals that `auto` chooses from. One step is not better than two (measured), and worse with few bits."""
NOISE = 0.015
"""Differences of loss that experiments with one seed cannot tell apart."""
THREAD_SHARE = 0.2
"""Of the time of the steps, at most for packing and merging."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Something else that could have been chosen."""

    setting: Setting
    round: Round
    why_not: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen, from what, and what is expected of it."""

    facts: Facts
    wishes: Wishes
    setting: Setting
    round: Round

    @property
    def overlap(self) -> bool:
        """Whether training goes on while updates travel."""
        return self.round.is_overlapped


def choose(facts: Facts, wishes: Wishes | None = None) -> Choice:
    """The settings with the least expected loss at equal time that respect the wishes."""
    wishes = wishes or Wishes()
    overlap = True if wishes.overlap == "auto" else wishes.overlap

    def rank(setting: Setting) -> tuple[float, float]:
        return predict(facts, setting, overlap).loss_at_equal_time, bytes_per_step(facts, setting)

    setting = min(frontier(facts, wishes), key=rank)
    return Choice(facts=facts, wishes=wishes, setting=setting, round=predict(facts, setting, wishes.overlap))


def alternatives(choice: Choice) -> list[Alternative]:
    """The best interval of each other codec, and the chosen codec with an interval half and twice as long."""
    facts, wishes, chosen = choice.facts, choice.wishes, choice.setting
    found = {choose(facts, replace(wishes, codec_up=up, codec_down=down)).setting for up, down in _codec_pairs(wishes)}
    if wishes.interval == "auto" and not wishes.gradients:
        lengths = {max(LADDER[0], chosen.interval // 2), min(LADDER[-1], 2 * chosen.interval)}
        found |= {_with_interval(chosen, steps) for steps in lengths}
    rounds = {setting: predict(facts, setting, wishes.overlap) for setting in found - {chosen}}
    listed = [Alternative(setting=s, round=r, why_not=_why_not(choice, s, r)) for s, r in rounds.items()]
    return sorted(listed, key=lambda a: (a.round.loss_at_equal_time, a.setting.interval))


def frontier(facts: Facts, wishes: Wishes) -> list[Setting]:
    """The candidates worth a look, by falling bytes per step. Does not depend on the links' rates."""
    by_interval: dict[int, list[Setting]] = {}
    for setting in _candidates(facts, wishes):
        by_interval.setdefault(setting.interval, []).append(setting)
    at = max(by_interval[min(by_interval)], key=lambda s: (_bytes(facts, s), -_loss(s)))
    path = [at]
    for interval in sorted(by_interval):
        if interval > at.interval and (longer := _with_interval(at, interval)) in by_interval[interval]:
            path.append(at := longer)
        while (smaller := _smaller_codec(facts, at, by_interval)) is not None:
            path.append(at := smaller)
    return path


def _smaller_codec(facts: Facts, at: Setting, by_interval: dict[int, list[Setting]]) -> Setting | None:
    """Fewer bytes at the same interval, where that costs less loss per byte saved than the next longer interval."""

    def price(setting: Setting) -> float:
        return (_loss(setting) - _loss(at)) / log(bytes_per_step(facts, at) / bytes_per_step(facts, setting))

    fewer = [s for s in by_interval[at.interval] if _bytes(facts, s) < _bytes(facts, at)]
    best = min(fewer, key=price, default=None)
    later = [_with_interval(at, interval) for interval in sorted(by_interval) if interval > at.interval]
    longer = next((s for s in later if s in by_interval[s.interval]), None)
    return None if best is None or (longer is not None and price(best) > price(longer)) else best


def bytes_per_step(facts: Facts, setting: Setting) -> float:
    """What a node sends and receives per inner step."""
    return _bytes(facts, setting) / setting.interval


def _bytes(facts: Facts, setting: Setting) -> int:
    return payload_bytes(setting.codec_up, facts.shape) + payload_bytes(setting.codec_down, facts.shape)


def _loss(setting: Setting) -> float:
    return 0.0 if setting.gradients else loss_cost(setting.codec_up, setting.codec_down, setting.interval)


def _candidates(facts: Facts, wishes: Wishes) -> Iterable[Setting]:
    pairs = list(_codec_pairs(wishes))
    if wishes.gradients or wishes.interval != "auto":
        interval = 1 if wishes.interval == "auto" else wishes.interval
        return [
            Setting(codec_up=up, codec_down=down, interval=interval, gradients=wishes.gradients) for up, down in pairs
        ]
    smallest = min(payload_bytes(codec, facts.shape) for pair in pairs for codec in pair)
    share = 1 / ROOM if wishes.overlap is not False else 1 / 9  # waiting: a tenth of the time
    shortest = latency_floor_s(smallest, facts.link.rtt_s) / share / facts.step_s
    return [
        Setting(codec_up=up, codec_down=down, interval=steps)
        for up, down in pairs
        for steps in _at_least(max(shortest, _thread_steps(facts, up, down)))
    ]


def _thread_steps(facts: Facts, up: str, down: str) -> float:
    """Steps of which packing and merging take a fifth."""
    sample = predict(facts, Setting(codec_up=up, codec_down=down, interval=1), overlap=True)
    return sample.on_thread_s / THREAD_SHARE / facts.step_s


def _at_least(steps: float) -> Sequence[int]:
    return [interval for interval in LADDER if interval >= steps] or LADDER[-1:]


def _codec_pairs(wishes: Wishes) -> Iterable[tuple[str, str]]:
    free = [name for name in (GRADIENT_CODECS if wishes.gradients else FREE_CODECS) if name in CODEC_NAMES]
    if wishes.codec_up == wishes.codec_down == "auto":
        return [(name, name) for name in free]
    ups = free if wishes.codec_up == "auto" else [wishes.codec_up]
    downs = free if wishes.codec_down == "auto" else [wishes.codec_down]
    return [(up, down) for up in ups for down in downs]


def _with_interval(setting: Setting, interval: int) -> Setting:
    return replace(setting, interval=interval)


def _why_not(choice: Choice, setting: Setting, found: Round) -> str:
    """The main reason against a setting, in a few words."""
    chosen, present = choice.round, choice.setting
    if found.loss_at_equal_time < chosen.loss_at_equal_time + NOISE:
        ratio = bytes_per_step(choice.facts, setting) / bytes_per_step(choice.facts, present)
        return f"as good, {ratio:.2g}x the bytes"
    if found.exposed_share > chosen.exposed_share + 0.02:
        packing = found.on_thread_s > found.exposed_s / 2
        return f"{'packing' if packing else 'waiting'} costs {found.exposed_share:.0%}"
    if setting.interval > present.interval:
        more = _bytes(choice.facts, setting) > _bytes(choice.facts, present)
        return "needs longer rounds" if more else "longer than needed"
    if _loss(setting) > _loss(present):
        return "fewer bits than needed"
    return "entries come later"
