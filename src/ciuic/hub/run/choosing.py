"""Settings of runs whose job says "auto": chosen once links and steps are measured, and again when they change."""

from collections.abc import Callable, Mapping, Sequence

from ciuic.job import Job
from ciuic.ledger.layout import Layout
from ciuic.ledger.settings import Settings
from ciuic.net.messages import NodeInRun
from ciuic.plan.codec_speed import measure_codec_speeds
from ciuic.plan.facts import CodecSpeeds, NodeFacts
from ciuic.plan.predict import Setting
from ciuic.plan.settings import default_settings, resolve, shape_of, wishes_of

EVERY_S = 5.0
"""Between two looks at the measurements of a run."""
STEPS = 5
"""A node's step time counts from so many steps on: the first ones load and compile."""
AT_WORK = ("warming", "training")
Measured = Mapping[str, Mapping[str, float]]


class Chooser:
    """Remembers when it looked at each run; decides nothing for settings that a person gave."""

    def __init__(self, speeds: Callable[[], CodecSpeeds] = measure_codec_speeds) -> None:
        self._speeds = speeds
        self._looked_s: dict[str, float] = {}

    def is_due(self, run_id: str, now_s: float) -> bool:
        """Whether to look at this run now."""
        if now_s - self._looked_s.get(run_id, -EVERY_S) < EVERY_S:
            return False
        self._looked_s[run_id] = now_s
        return True

    def choose(
        self, job: Job, layout: Layout, settings: Settings, nodes: Sequence[NodeInRun], measured: Measured
    ) -> Settings | None:
        """Better settings than the present ones, None to keep these. `measured`: the registry's facts by node."""
        wishes = wishes_of(job.sync)
        present = [node for node in nodes if node.state in AT_WORK]
        if not wishes.is_free or settings.by_hand or not present or min(node.step for node in present) < STEPS:
            return None
        facts = [_facts(node, measured.get(node.node_id, {})) for node in present]
        current = Setting(
            codec_up=settings.codec_up, codec_down=settings.codec_down, interval=settings.interval,
            gradients=wishes.gradients,
        )  # fmt: skip
        found = resolve(wishes, shape_of(layout), facts, self._speeds(), current=current)
        if found.choice is None:
            return None  # links or steps are not measured yet
        wanted = Settings(
            policy=settings.policy,
            interval=found.interval,
            codec_up=found.codec_up,
            codec_down=found.codec_down,
            why=found.why,
        )
        first = settings.why == default_settings(wishes).why
        return wanted if first or _plain(wanted) != _plain(settings) else None


def _plain(settings: Settings) -> tuple[str, str, int]:
    return settings.codec_up, settings.codec_down, settings.interval


def _facts(node: NodeInRun, measured: Mapping[str, float]) -> NodeFacts:
    return NodeFacts(
        node=node.node_id,
        up_bits_per_s=measured.get("up_bits_per_s"),
        down_bits_per_s=measured.get("down_bits_per_s"),
        rtt_s=measured.get("rtt_s"),
        step_s=node.step_s or None,
    )
