"""Where a run's settings come from: its job, then its operator."""

from typing import get_args

from ciuic.codec import CODEC_NAMES
from ciuic.errors import UsageError
from ciuic.job import LARGEST_COUNT, EntryCodecWish, Job, SyncSection
from ciuic.ledger.settings import Settings
from ciuic.net.messages import SyncRequest
from ciuic.plan.settings import default_settings, wishes_of

ENTRY_CODECS = tuple(name for name in get_args(EntryCodecWish) if name != "auto")


def settings_of(job: Job) -> Settings:
    """The settings that a run starts with, before anything was measured."""
    sync = job.sync
    found = default_settings(wishes_of(sync))
    return Settings(
        policy=sync.policy,
        interval=found.interval,
        codec_up=found.codec_up,
        codec_down=found.codec_down,
        why=found.why,
    )


def changed(settings: Settings, request: SyncRequest, by: str, job: Job) -> Settings:
    """The settings after an operator's change. Raises UsageError for what this job's run cannot do."""
    wanted = Settings(
        policy=request.policy or settings.policy,
        interval=request.interval or settings.interval,
        codec_up=request.codec_up or settings.codec_up,
        codec_down=request.codec_down or settings.codec_down,
        why=f"changed by {by}",
        by_hand=True,
    )
    _check_codec(wanted.codec_up, CODEC_NAMES)
    _check_codec(wanted.codec_down, ENTRY_CODECS)
    if not 1 <= wanted.interval <= LARGEST_COUNT:
        raise UsageError(f"an interval of {wanted.interval} steps cannot be", next="give 1 or more")
    if job.sync.send == "gradient":
        _check_gradients(wanted)
    return wanted


def _check_gradients(wanted: Settings) -> None:
    """The same as a job that sends gradients may say."""
    sync = {
        "send": "gradient",
        "policy": wanted.policy,
        "interval": wanted.interval,
        "compression": {"up": wanted.codec_up, "down": wanted.codec_down},
    }
    for _, sentence in SyncSection.conflicts(sync):
        raise UsageError("this run sends gradients and cannot change so", cause=sentence)


def _check_codec(name: str, allowed: tuple[str, ...]) -> None:
    if name not in allowed:
        raise UsageError(
            f"{name!r} is not a codec for this direction", cause=f"there are {', '.join(allowed)}", next="choose one"
        )
