"""What `ciuic plan` shows. Nothing here prints."""

import re
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from ciuic.cli.output import Grid
from ciuic.cli.plan_inputs import GivenJob, ModelShape, PlannedNode
from ciuic.plan.choice import Alternative, alternatives, choose
from ciuic.plan.codec_speed import measure_codec_speeds
from ciuic.plan.expected import Expected, Work, expect
from ciuic.plan.facts import CodecSpeeds, Wishes
from ciuic.plan.predict import Round, Setting, break_even_bits_per_s
from ciuic.plan.settings import WORTH_A_CHANGE, Resolved, gain_in_time, resolve, wishes_of
from ciuic.plan.words import describe, explain
from ciuic.units import format_bytes, format_count, format_duration, format_rate

WIDEST = 96


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is shown."""

    given: GivenJob
    nodes: list[PlannedNode]
    is_what_if: bool
    """The links were given, not measured."""
    model: ModelShape
    speeds: CodecSpeeds
    resolved: Resolved

    @property
    def others(self) -> list[Alternative]:
        """What else could have been chosen."""
        return alternatives(self.resolved.choice) if self.resolved.choice else []

    @property
    def expected(self) -> dict[str, Expected | None]:
        """What each node would do in this run, also one that is not taken."""
        optim, nodes = self.given.job.optim, self.given.job.nodes
        samples = optim.batch_size * optim.gradient_accumulation * nodes.ranks
        work = Work(
            shape=self.model.shape,
            nodes=sum(node.takes_part for node in self.nodes),
            setting=self.resolved.setting,
            overlap=wishes_of(self.given.job.sync).overlap,
            speeds=self.speeds,
            tokens_per_step=samples * self.given.job.data.sequence_length,
        )
        return {node.facts.node: expect(node.facts, work) for node in self.nodes}


def make_plan(given: GivenJob, nodes: list[PlannedNode], model: ModelShape, *, is_what_if: bool) -> Plan:
    """Resolve the job's [sync] with the nodes that take part and the codecs of this machine."""
    speeds = measure_codec_speeds()
    taken = [node.facts for node in nodes if node.takes_part]
    resolved = resolve(wishes_of(given.job.sync), model.shape, taken, speeds)
    return Plan(given=given, nodes=nodes, is_what_if=is_what_if, model=model, speeds=speeds, resolved=resolved)


def values(plan: Plan) -> list[tuple[str, str, str]]:
    """(key, value, source) of every field of the job, in order; the chosen settings in place of `auto`."""
    chosen = {
        "sync.interval": (str(plan.resolved.interval), plan.resolved.sources["interval"]),
        "sync.compression": (plan.resolved.setting.codecs, _compression_source(plan.resolved)),
    }
    rows = []
    for key, value in _flat(plan.given.job.to_dict()):
        text, source = chosen.get(key, (_text(value), "given" if key in plan.given.given else "default"))
        rows.append((key, text, "what if" if plan.is_what_if and source == "measured" else source))
    return rows


def as_text(plan: Plan, width: int) -> list[str | Grid]:
    """The whole answer for a person: lines and tables, from above."""
    parts: list[str | Grid] = [Grid(columns=("setting", "value", "source"), rows=values(plan)), ""]
    parts += [_model_line(plan), "", _nodes_grid(plan), ""]
    if plan.resolved.choice is None:
        return [*parts, *[line for sentence in _unmeasured(plan) for line in _wrapped(sentence, "- ", width)]]
    for sentence in [*explain(plan.resolved.choice), *_left_free(plan)]:
        parts += _wrapped(sentence, "- ", width)
    return [*parts, "", _rounds_grid(plan), "", *_wrapped(_codec_note(plan.speeds), "", width)]


def as_json(plan: Plan) -> dict[str, Any]:
    """The same for programs."""
    choice, resolved = plan.resolved.choice, plan.resolved
    sources = {key: source for key, _, source in values(plan)}
    return {
        "job": plan.given.job.to_dict(),
        "sources": sources,
        "parameters": plan.model.parameters,
        "nodes": [_node_json(plan, node) for node in plan.nodes],
        "sync": {**asdict(resolved.setting), "sources": resolved.sources, "why": resolved.why},
        "round": _round_json(choice.round) if choice else None,
        "explanation": explain(choice) if choice else [],
        "alternatives": [
            {**asdict(other.setting), "round": _round_json(other.round), "why_not": other.why_not}
            for other in plan.others
        ],
        "codec_speeds": {name: asdict(speed) for name, speed in plan.speeds.by_name.items()},
        "break_even_bits_per_s": _break_even(plan),
    }


def _round_json(found: Round) -> dict[str, float]:
    return asdict(found) | {
        "round_s": found.round_s,
        "exposed_share": found.exposed_share,
        "loss_at_equal_time": found.loss_at_equal_time,
    }


def _break_even(plan: Plan) -> dict[str, float | None]:
    """Link rate below which each codec beats fp32 without overlap; None: on every link."""
    count = max(1, sum(node.takes_part for node in plan.nodes))
    rates = {name: break_even_bits_per_s(count, plan.speeds, name) for name in plan.speeds.by_name if name != "none"}
    return {name: None if rate == float("inf") else rate for name, rate in rates.items()}


def _nodes_grid(plan: Plan) -> Grid:
    expected = plan.expected
    rows = [
        (
            node.facts.node,
            "yes" if node.takes_part else "no",
            format_rate(node.facts.up_bits_per_s) if node.facts.up_bits_per_s else "-",
            format_rate(node.facts.down_bits_per_s) if node.facts.down_bits_per_s else "-",
            "-" if node.facts.rtt_s is None else format_duration(node.facts.rtt_s),
            format_duration(node.facts.step_s) if node.facts.step_s else "-",
            *_expected_cells(expected[node.facts.node]),
            node.remark,
        )
        for node in plan.nodes
    ]
    columns = ("node", "taken", "up", "down", "round trip", "step", "communication", "tokens/s", "")
    return Grid(columns=columns, rows=rows, empty="the hub has no nodes yet")


def _expected_cells(expected: Expected | None) -> tuple[str, str]:
    if expected is None:
        return "-", "-"
    return f"{expected.communication_share:.1%}", format_count(expected.tokens_per_s)


def _node_json(plan: Plan, node: PlannedNode) -> dict[str, Any]:
    expected = plan.expected[node.facts.node]
    return {
        **asdict(node.facts),
        "takes_part": node.takes_part,
        "remark": node.remark,
        **(asdict(expected) if expected else {"communication_share": None, "tokens_per_s": None}),
    }


def _rounds_grid(plan: Plan) -> Grid:
    choice = plan.resolved.choice
    rows = [] if choice is None else [_round_row(choice.setting, choice.round, "chosen")]
    rows += [_round_row(other.setting, other.round, other.why_not) for other in plan.others]
    columns = ("codec", "steps", "bytes", "round", "exposed", "loss", "total", "")
    return Grid(columns=columns, rows=rows)


def _round_row(setting: Setting, found: Round, remark: str) -> tuple[str, ...]:
    return (
        setting.codecs,
        str(setting.interval),
        format_bytes(found.up_bytes + found.down_bytes),
        format_duration(found.round_s),
        f"{found.exposed_share:.1%}",
        f"+{found.loss_cost:.3f}",
        f"+{found.loss_at_equal_time:.3f}",
        remark,
    )


def _model_line(plan: Plan) -> str:
    return f"model: {format_count(plan.model.parameters)} parameters ({plan.model.source})"


def _unmeasured(plan: Plan) -> list[str]:
    """What is missing for a choice, and what is used until then."""
    taken = [node.facts for node in plan.nodes if node.takes_part]
    if not taken:
        missing = "no node would take part"
    elif not any(facts.has_link for facts in taken):
        missing = "no link is measured yet"
    else:
        missing = "the time of a step is not known yet: give --step-s, or run the job once"
    return [f"{describe(plan.resolved.setting)} ({plan.resolved.why})", missing]


def _codec_note(speeds: CodecSpeeds) -> str:
    shown = ", ".join(
        f"{name} {speed.encode_bytes_per_s / 1e9:.1f}/{speed.decode_bytes_per_s / 1e9:.1f}"
        for name, speed in speeds.by_name.items()
    )
    return (
        f"loss: above uncompressed data-parallel training after equal tokens; total: with what exposed "
        f"communication costs. GB/s to encode/decode, measured on this machine, assumed on the others: {shown}"
    )


def _left_free(plan: Plan) -> list[str]:
    """What would be chosen if the job fixed nothing, where that is much better."""
    choice = plan.resolved.choice
    if choice is None:
        return []
    free = choose(choice.facts, Wishes(gradients=choice.wishes.gradients))
    gain = gain_in_time(choice.round, free.round)
    if gain < WORTH_A_CHANGE:
        return []
    return [f'with "auto" it would be {describe(free.setting)}: the same loss {gain:.1f} times as fast']


def _wrapped(sentence: str, mark: str, width: int) -> list[str]:
    """Lines of at most `width`, not over WIDEST; a number stays with its unit."""
    glued = re.sub(r"(?<=\d) (?=[A-Za-z])", "\0", sentence)
    lines = wrap(glued, min(width, WIDEST), initial_indent=mark, subsequent_indent=" " * len(mark))
    return [line.replace("\0", " ") for line in lines]


def _compression_source(resolved: Resolved) -> str:
    up, down = resolved.sources["codec_up"], resolved.sources["codec_down"]
    return up if up == down else f"{up} up, {down} down"


def _flat(job: dict[str, Any]) -> list[tuple[str, Any]]:
    flat = [(key, value) for key, value in job.items() if not isinstance(value, dict)]
    for section, table in job.items():
        if isinstance(table, dict):
            flat += [(f"{section}.{key}", value) for key, value in table.items()]
    return flat


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "[]"
    if isinstance(value, dict):
        return ", ".join(f"{key} = {item}" for key, item in value.items()) or "{}"
    return str(value)
