"""What long-running programs (the hub, an agent) show while they run: one line per event on stderr."""

import logging
import time
from collections.abc import MutableMapping
from typing import Any

import structlog

from ciuic.cli.output import clean


def log_to_stderr() -> None:
    """Send everything that is logged, by logging or by structlog, to stderr: time, weight unless usual, text."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Line())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    structlog.configure(
        processors=[structlog.processors.format_exc_info, _as_text],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        weight = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = "\n".join(clean(line) for line in record.getMessage().splitlines())
        line = f"{clock} {weight}{text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _as_text(logger: object, method: str, event: MutableMapping[str, Any]) -> str:
    """A structlog event as `text key=value ...`, its exception on lines of its own."""
    text, exception = event.pop("event", ""), event.pop("exception", "")
    line = " ".join([str(text), *[f"{key}={value}" for key, value in event.items()]])
    return f"{line}\n{exception}" if exception else line
