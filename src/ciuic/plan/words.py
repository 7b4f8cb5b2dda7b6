"""A choice in plain sentences."""

from math import inf

from ciuic.plan.choice import Choice, bytes_per_step
from ciuic.plan.frontier import LONGEST_MEASURED
from ciuic.plan.predict import Setting, break_even_bits_per_s, predict
from ciuic.units import format_bytes, format_duration, format_rate


def explain(choice: Choice) -> list[str]:
    """Why these settings: what a round is, what the link is, what it costs, what else there was."""
    return [_what(choice), _round(choice), _beside(choice), _time(choice), _loss(choice)]


def summary(choice: Choice) -> str:
    """The facts behind a choice in a few words: `20 Mbit/s up, 50 Mbit/s down, 220 ms round trip, 0.6 s steps`."""
    link = choice.facts.link
    return (
        f"{format_rate(link.up_bits_per_s)} up, {format_rate(link.down_bits_per_s)} down, "
        f"{_short(link.rtt_s)} round trip, {format_duration(choice.facts.step_s)} steps"
    )


def describe(setting: Setting) -> str:
    """`1-bit every 5 steps`."""
    what = f"{setting.codecs} gradients" if setting.gradients else setting.codecs
    return f"{what} every {_steps(setting.interval)}"


def _what(choice: Choice) -> str:
    how = "training goes on while updates travel" if choice.overlap else "each push waits for its entry"
    slowest = f" ({choice.facts.link.slowest} is the slowest)" if choice.facts.link.slowest else ""
    return f"{describe(choice.setting)}, {how}: {summary(choice)}{slowest}"


def _round(choice: Choice) -> str:
    found = choice.round
    moved = format_bytes(found.up_bytes) + " each way"
    if found.up_bytes != found.down_bytes:
        moved = f"{format_bytes(found.up_bytes)} up and {format_bytes(found.down_bytes)} down"
    steps = "1 step" if choice.setting.interval == 1 else f"{choice.setting.interval} steps"
    return (
        f"a round of {steps} ({format_duration(found.compute_s)}) moves {moved} in "
        f"{format_duration(found.transfer_s)}, with {format_duration(found.latency_s)} of latency and "
        f"{format_duration(found.codec_s)} of encoding and decoding"
    )


def _beside(choice: Choice) -> str:
    """Against sending uncompressed, and where compression would stop paying."""
    setting = choice.setting
    if setting.codec_up in ("none", "bf16") and setting.codec_down in ("none", "bf16"):
        return "the link is fast enough for full numbers: fewer bits would cost loss and save no time"
    plain = Setting(codec_up="bf16", codec_down="bf16", interval=setting.interval)
    other = predict(choice.facts, plain, overlap=True)
    text = f"bf16 would need {format_duration(other.transfer_s + other.latency_s)}"
    rate = break_even_bits_per_s(choice.facts.nodes, choice.facts.speeds, setting.codec_up, "bf16")
    if rate == inf:
        text += "; packing costs no more time than copying"
    elif rate > 0:
        text += f"; compression makes rounds shorter on links below {format_rate(rate)}"
    return text


def _time(choice: Choice) -> str:
    found = choice.round
    sent = format_bytes(bytes_per_step(choice.facts, choice.setting))
    return f"{1 - found.exposed_share:.0%} of the time goes into steps; {sent} per step and node, both ways"


def _loss(choice: Choice) -> str:
    if choice.setting.gradients:
        return "expected held-out loss: that of uncompressed data-parallel training (4-bit measured on small models)"
    note = ", extrapolated" if choice.setting.interval > LONGEST_MEASURED else ""
    return (
        f"expected held-out loss: {choice.round.loss_cost:.2f} above uncompressed data-parallel training after equal "
        f"tokens (measured on small models{note})"
    )


def _short(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 0.001 else "under 1 ms"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
